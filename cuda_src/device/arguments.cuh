// What kernels are given. graphar/kernels.py mirrors these structs and checks every field.
#pragma once
#include "ptx.cuh"

constexpr int max_ranks = 8;
constexpr int max_blocks = 256;
constexpr int max_operands = 4;

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

// What a block reads before it sends anything, in one load.
struct Turn {
  u32 epoch;    // calls made; equal in all entries between kernels
  u32 aborted;  // 1 once a call has given up waiting
};

// Device memory of one rank, for one algorithm of one communicator.
struct Counters {
  Turn turn[max_blocks];
  u32 steps[max_blocks];  // steps this block has signalled; the same on every rank
  u32 busy[max_blocks];   // 1 while a block of this index runs
};

// What an epilogue is given, where there is one (epilogue.cuh).
struct EpilogueArguments {
  const void* tensor[max_operands];
  float scalar[max_operands];
  u64 columns;  // of the tensor, which is seen as rows of its last dimension
  u64 skipped;  // elements of this rank's part that other launches have
  u64 first_row, first_col;  // where the tensor lies in the one whose places are meant; 0 where that is itself
  u64 pitch;                 // columns of that one
};

// What every collective kernel is given.
struct Arguments {
  const void* input;
  void* output;
  u64 numel;
  u64 timeout_ns;
  u64 seed;                           // of stochastic rounding, where a codec rounds so
  u32 capacity;                       // packs, or boxes, in one slot of the scratch
  u32 chunk;                          // packs one block sends one peer in one step, where it goes in chunks
  char* scratch[max_ranks];           // this algorithm's scratch on every rank
  char* ring[max_ranks];              // the same by distance: ring[hop] is that of rank (rank + hop) % N
  char* multicast;                    // one address of the scratch on all ranks; multimem kernels only, else null
  const char* peer_input[max_ranks];  // where the input lies on every rank: direct kernels that read it there
  char* peer_output[max_ranks];       // likewise the output: direct kernels that write it there
  Counters* counters;
  u64 begin[max_ranks];  // where each rank's part begins in the whole tensor, if the op has parts: in elements, or rows
  u64 count[max_ranks];  // how many elements, or rows, of each part this launch handles
  u32* abort;            // this rank: set once a wait has expired, so that what is queued behind ends at once
  Record* record;
  u32 rank;
  u32 algorithm;
  const char* prefetch;  // what to bring into L2 meanwhile (prefetch.cuh); aligned to 16 bytes
  u32 prefetch_nbytes;   // a multiple of 16; 0: nothing
  EpilogueArguments epilogue;
};

// What matmul is given beside the tensor maps of A [m, k], of W and of C [m, n].
struct MatmulArguments {
  const void* bias;  // n elements of C's type, or null
  u32 m, n, k;
  u32 first_row;   // which row of tiles comes first; less than there are
  u32 group_rows;  // rows of tiles that are walked together, column by column
  void* timeline = nullptr;  // where a tile that is `recorded` tells what takes how long (timeline.cuh); else null
};

// Template argument of the kernels that also come without scratch between a rank's tensor and its peers.
constexpr bool direct = true;
