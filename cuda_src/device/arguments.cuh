// What every collective kernel is given. graphar/kernels.py mirrors these structs and checks every field.
#pragma once
#include "ptx.cuh"

constexpr int max_ranks = 8;
constexpr int max_blocks = 256;

// Host-visible: why a kernel gave up. `kind` is written last.
struct Record {
  u32 kind;  // 0 nothing; else timed_out or overlapped (call.cuh)
  u32 algorithm;
  u32 sequence;  // how many calls of this algorithm came before
  u32 rank;
  u32 peer;
  u32 block;
  u32 expected;
  u32 seen;
};

// Device memory of one rank, for one algorithm of one communicator.
struct Counters {
  u32 epoch[max_blocks];  // calls made; equal in all entries between kernels
  u32 steps[max_blocks];  // steps this block has signalled; the same on every rank
  u32 busy[max_blocks];   // 1 while a block of this index runs
};

struct Arguments {
  const void* input;
  void* output;
  u64 numel;
  u64 timeout_ns;
  u32 capacity;  // packs in one slot of the scratch
  u32 chunk;     // packs one block sends one owner in one step; two_shot_pipelined only
  char* scratch[max_ranks];           // this algorithm's scratch on every rank
  const char* peer_input[max_ranks];  // where the input lies on every rank: direct kernels that read it there
  char* peer_output[max_ranks];       // likewise the output: direct kernels that write it there
  Counters* counters;
  u32* abort;  // this rank: set once a wait has expired, so that what is queued behind ends at once
  Record* record;
  u32 rank;
  u32 algorithm;
};

// Template argument of the kernels that also come without scratch between a rank's tensor and its peers.
constexpr bool direct = true;
