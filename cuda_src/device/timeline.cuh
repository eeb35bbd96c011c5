// When which warp of a kernel did what: written where a tile is `recorded`, and drawn by perf/fused/timeline.py.
#pragma once
#include "arguments.cuh"

enum Phase : u32 { multiplying = 1, waiting, adding, staging, sending, gathering };

// graphar/matmul_parts.py mirrors it.
struct Event {
  u64 begin_ns;
  u32 duration_ns;
  u32 phase;  // 0: no event
};
constexpr u32 tracks = 6;          // of a block: two consumers, and the four warps of the first warpgroup
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
