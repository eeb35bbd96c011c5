// The timeline of a fused matmul: which warp did what, and when. A kernel whose tile is `recorded` writes it.
// timelines.py of the package mirrors its layout, and perf/timeline.py draws it.
#pragma once
#include "device/arguments.cuh"

// Consumers multiply, add and stage. Senders send. All warps of the first warpgroup gather in the end.
enum TimelinePhase : u32 {
  multiplying = 1,  // a tile's products, with the waits for operands and for the other consumer
  waiting,          // for other warps, or for other ranks
  adding,           // the partial tiles of all ranks, and the bias or the epilogue
  staging,          // a rounded warpgroup tile for its sender, in shared memory
  sending,          // the boxes of a warpgroup tile, until each has arrived everywhere
  gathering,        // a finished tile of another rank, into the output
};

struct Event {
  u64 begin_ns;  // of the device's global timer
  u32 duration_ns;
  u32 phase;  // 0: no event
};

// Of a block: two for consumers, and four for the warps of the first warpgroup: senders, the producer, which records
// only its gathering, and warps that only gather.
constexpr u32 tracks = 6;
constexpr u32 track_events = 256;  // later events are dropped

// Records the phases of one thread of a warp. Compiles to nothing where `recorded` is false.
template <bool recorded>
struct Track {
  __device__ Track(const MatmulArguments&, u32, bool) {}
  __device__ void mark(TimelinePhase) {}
};

template <>
struct Track<true> {
  Event* event;
  Event* const end;  // null in threads that record nothing
  u64 since = global_time_ns();

  __device__ Track(const MatmulArguments& a, u32 track, bool first)
      : event(static_cast<Event*>(a.timeline) + (blockIdx.x * tracks + track) * track_events),
        end(first ? event + track_events : nullptr) {}

  // Records the phase that lasted since the last mark.
  __device__ void mark(TimelinePhase phase) {
    const u64 now = global_time_ns();
    if (event < end && now > since) *event++ = {since, u32(now - since), phase};
    since = now;
  }
};
