// When which warp of a kernel did what: written where a tile is `recorded`, and read by perf/fused/timeline.py.
// graphar/timelines.py mirrors what is written.
#pragma once
#include "arguments.cuh"

// Consumers multiply, add and stage, senders send, and all but consumers gather in the end.
enum Phase : u32 {
  multiplying = 1,  // a tile's products; waits for what is loaded, and for the other consumer's turn, count
  waiting,          // for other warps, or for what other ranks send
  adding,           // all ranks' parts of a strip, and the bias or the epilogue
  staging,          // a strip for its sender, rounded, in shared memory
  sending,          // a strip's boxes as they are staged, until each is wherever it goes
  gathering,        // what another rank has finished, into the output
};

struct Event {
  u64 begin_ns;  // of the device's global timer
  u32 duration_ns;
  u32 phase;  // 0: no event
};

// Of a block: two for consumers, and the four warps of the first warpgroup: the senders, one for each consumer, the warp
// that loads, which tells only what it does afterwards, and those that only gather.
constexpr u32 tracks = 6;
constexpr u32 track_events = 256;  // later ones are not kept

// What the first thread of some warps does, one thing after another. Where nothing is recorded, nothing is left of it.
template <bool recorded>
struct Track {
  __device__ Track(const MatmulArguments&, u32, bool) {}
  __device__ void mark(Phase) {}
};

template <>
struct Track<true> {
  Event* event;
  Event* const end;  // before `event` in the other threads
  u64 since = global_time_ns();

  __device__ Track(const MatmulArguments& a, u32 track, bool first)
      : event(static_cast<Event*>(a.timeline) + (blockIdx.x * tracks + track) * track_events),
        end(first ? event + track_events : nullptr) {}

  // What it did since the last mark.
  __device__ void mark(Phase phase) {
    const u64 now = global_time_ns();
    if (event < end && now > since) *event++ = {since, u32(now - since), phase};
    since = now;
  }
};
