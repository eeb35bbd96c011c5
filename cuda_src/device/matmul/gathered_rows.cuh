// The rows of all ranks on their way into a matmul (sm_90 and newer): who has sent which, and the order of the tiles.
//
//   scratch: the signal pad, whose row 0 holds the call that each rank has entered
//            next_unit[32]           of this rank's rows, to be sent, by the parity of the call
//            flags[N - 1][stride]    by source, the next rank first: of each unit of its rows
//            slots[N - 1][capacity]  by source: its rows, each padded to whole packs; then the scales of its rows
//
// A unit is as many rows as have at most `unit_packs` packs, or one row. A slot has the scales of e4m3 row by row.
//
// (21) A warp takes a unit, stores it to every peer, and sets its flag there to a value that names the call.
//     - Visibility. After a barrier of the warp the release store of the flag publishes the stores of its threads. A
//       warp of the peer acquires the flags of a tile's rows, and after a barrier arrives at an mbarrier. The producer
//       waits for that, and fences before the copy engine reads the rows (5). A rank's own rows were written before the
//       kernel began, so one fence at the start is enough for their tiles.
//     - Scales. A unit's scales are stored before its flag is set, by the same warp. A consumer loads a tile's scales
//       after it has waited for the tile's first place, which is filled after the producer has waited for the rows.
//       They are stored and loaded by threads, so no fence stands between them.
//     - Reuse. Flags are compared with the value of the call, so nothing resets them. Before its first store a warp
//       waits until all ranks have entered the call: by (13) they have read the rows of the call before.
//     - Progress. Senders wait for ranks to enter the call and for nothing else, and block 0 enters before all else.
//       Units are dealt as warps come for them, so one block of room on a GPU sends all of its rows, and grids may
//       differ between ranks: what (18) asks for.
//     - Block 0 clears `next_unit` of the next call, which by (1) nobody uses.
#pragma once
#include "device/matmul/scaled_products.cuh"
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

constexpr u32 unit_packs = 1024;  // GATHERED_UNIT_PACKS in graphar/plan/scratch.py

template <class T, int N, class Scales = Unscaled>
class GatheredRows {
 public:
  static constexpr int ranks = N;
  static constexpr bool scaled = is_scaled<Scales>;
  const typename Scales::Arguments& m;
  const Arguments& a;
  const u32 row_packs, unit_rows;

  __device__ GatheredRows(const typename Scales::Arguments& m, const Arguments& a)
      : m(m), a(a), row_packs((m.k + of_pack - 1) / of_pack), unit_rows(max(unit_packs / row_packs, 1u)) {}

  __device__ Pack* slot(int to, int from) const {
    return after_signal_pad(a, to) + (counts + (N - 1) * stride()) / 4 + u64(hops(to, from) - 1) * a.capacity;
  }

  // The arguments of products of the rows of a rank, with their scales.
  DEVICE typename Scales::Arguments of_rows(int from) const {
    typename Scales::Arguments of_owner = m;
    of_owner.m = a.count[from];
    if (from != a.rank) {
      of_owner.a_scale = scales(a.rank, from);
      of_owner.a_scale_row = Scales::of_row(m.k);
      of_owner.a_scale_block = 1;
    }
    return of_owner;
  }

  // By a warp of block 0, before it enters.
  __device__ void clear_next_call(const Call& call) const {
    if (threadIdx.x % 32 == 0) store_relaxed_gpu(next_unit(call.epoch + 1), 0);
  }

  // By a warp that has waited until all ranks have entered: sends units of rows until none is left.
  __device__ void send(const Call& call) const {
    const u32 lane = threadIdx.x % 32, units = units_of(a.rank);
    while (true) {
      const u32 unit = __shfl_sync(0xffffffff, lane == 0 ? add_relaxed_gpu(next_unit(call.epoch), 1) : 0, 0);
      if (unit >= units) return;
      send_unit(unit);
      if constexpr (scaled) send_scales(unit);
      __syncwarp();
      if (lane < N && lane != a.rank) store_release_sys(flag(lane, a.rank, unit), flag_value(call));
    }
  }

  // By a warp: waits until the rows [row, row + rows) of `from` have come. False if one did not come in time.
  __device__ bool wait(const Call& call, u32 from, u32 row, u32 rows) const {
    const u32 beyond = min(row + rows, u32(a.count[from]));
    bool failed = false;
    for (u32 unit = row / unit_rows + threadIdx.x % 32; unit * unit_rows < beyond && !failed; unit += 32)
      failed = !wait_for_unit(call, from, unit);
    __syncwarp();
    return !__any_sync(0xffffffff, failed);
  }

  // By all `warps` of the grid that gather: copies the peers' rows to the output. False if one did not come in time.
  __device__ bool gather(const Call& call, u32 warp, u32 warps) const {
    u32 most = 0;
#pragma unroll
    for (int hop = 1; hop < N; ++hop) most = max(most, units_of((a.rank + hop) % N));
    for (u32 i = warp; i < most * (N - 1); i += warps) {
      const u32 from = (a.rank + 1 + i % (N - 1)) % N, unit = i / (N - 1);
      if (unit >= units_of(from)) continue;
      if (!wait(call, from, unit * unit_rows, unit_rows)) return false;
      const u32 first = unit * unit_rows * row_packs;
      copy<1>(rows_of(from, unit) * row_packs, slot(a.rank, from) + first, [&](int) { return gathered(from) + first; });
      if constexpr (scaled) gather_scales(from, unit);
    }
    return true;
  }

 private:
  static constexpr u32 counts = 32;  // a line; two of its words are used
  static constexpr u32 of_pack = sizeof(Pack) / sizeof(typename T::Storage);

  // 0 is a flag that was never set.
  __device__ static u32 flag_value(const Call& call) { return call.epoch + 1 != 0 ? call.epoch + 1 : 1u << 31; }
  __device__ static u32 hops(int to, int from) { return (from - to + N) % N; }
  __device__ u32 stride() const { return (a.capacity / (unit_packs / 2) + 32) / 32 * 32; }  // more than units
  __device__ u32* flag(int to, int from, u32 unit) const {
    return reinterpret_cast<u32*>(after_signal_pad(a, to)) + counts + (hops(to, from) - 1) * stride() + unit;
  }
  __device__ u32* next_unit(u32 epoch) const {
    return reinterpret_cast<u32*>(after_signal_pad(a, a.rank)) + epoch % 2;
  }
  __device__ u32 units_of(u32 rank) const { return (u32(a.count[rank]) + unit_rows - 1) / unit_rows; }
  __device__ u32 rows_of(u32 rank, u32 unit) const { return min(unit_rows, u32(a.count[rank]) - unit * unit_rows); }
  __device__ float* scales(int to, int from) const {
    return reinterpret_cast<float*>(slot(to, from) + a.count[from] * row_packs);
  }
  __device__ Pack* gathered(u32 rank) const { return static_cast<Pack*>(a.output) + a.begin[rank] * row_packs; }

  __device__ void send_unit(u32 unit) const {
    const u32 packs = rows_of(a.rank, unit) * row_packs;
    const u64 first = u64(unit) * unit_rows * row_packs;
    const Pack* const from = static_cast<const Pack*>(a.input) + first;
    if (a.output == nullptr)
      copy<N - 1>(packs, from, [&](int i) { return slot((a.rank + 1 + i) % N, a.rank) + first; });
    else
      copy<N>(packs, from, [&](int i) {
        return first + (i == N - 1 ? gathered(a.rank) : slot((a.rank + 1 + i) % N, a.rank));
      });
  }

  __device__ float* gathered_scales(u32 rank) const { return m.gathered_scales + a.begin[rank] * Scales::of_row(m.k); }

  __device__ void send_scales(u32 unit) const {
    const u32 of_row = Scales::of_row(m.k), row = unit * unit_rows, count = rows_of(a.rank, unit) * of_row;
    const u32 first = row * of_row;  // a slot has fewer than 2^32 scales
    for (u32 i = threadIdx.x % 32; i < count; i += 32) {
      const float scale = m.a_scale[(row + i / of_row) * m.a_scale_row + i % of_row * m.a_scale_block];
#pragma unroll
      for (int hop = 1; hop < N; ++hop) scales((a.rank + hop) % N, a.rank)[first + i] = scale;
      if (a.output != nullptr) gathered_scales(a.rank)[first + i] = scale;
    }
  }
  __device__ void gather_scales(u32 from, u32 unit) const {
    const u32 of_row = Scales::of_row(m.k), first = unit * unit_rows * of_row,
              end = first + rows_of(from, unit) * of_row;
    for (u32 i = first + threadIdx.x % 32; i < end; i += 32) gathered_scales(from)[i] = scales(a.rank, from)[i];
  }

  template <int Copies, class To>
  DEVICE void copy(u32 packs, const Pack* from, const To& to) const {
    constexpr u32 ahead = 4;  // packs that a thread loads before it stores the first
    for (u32 at = threadIdx.x % 32; at < packs; at += 32 * ahead) {
      Pack p[ahead];
#pragma unroll
      for (u32 i = 0; i < ahead; ++i)
        if (at + 32 * i < packs) p[i] = from[at + 32 * i];
      const auto store = [&](int c) {
        Pack* const there = to(c) + at;
#pragma unroll
        for (u32 i = 0; i < ahead; ++i)
          if (at + 32 * i < packs) there[32 * i] = p[i];
      };
      if constexpr (scaled) {  // then the consumers take more of the block's registers
#pragma unroll 1
        for (int c = 0; c < Copies; ++c) store(c);
      } else {
#pragma unroll
        for (int c = 0; c < Copies; ++c) store(c);
      }
    }
  }

  __device__ bool wait_for_unit(const Call& call, u32 from, u32 unit) const {
    const u32* const there = flag(a.rank, from, unit);
    Deadline deadline;
    for (u32 seen = load_acquire_sys(there); seen != flag_value(call); seen = load_acquire_sys(there)) {
      // More patience than the wait for ranks to enter: its record names the rank that did not come.
      const Deadline::State state = deadline.check(a, call, 5);
      if (state == Deadline::waiting) continue;
      if (state == Deadline::expired) report(a, timed_out, call.epoch, from, flag_value(call), seen);
      return false;
    }
    return true;
  }
};

// A tile of the product of all ranks' rows. The row is counted from its owner's first.
struct GatheredTile {
  u32 owner, row, column;
};

// The tiles of a block: this rank's own rows first, then a row of tiles of each peer in turn, as they arrive.
template <class Tile, int N>
class GatheredWalk {
 public:
  __device__ GatheredWalk(const MatmulArguments& m, const Arguments& a)
      : a_(a), own_(tiles_of(a.rank)), walk_{m, own_ + (N - 1) * most_of_peers(), own_} {}

  // Whether a tile is left; if so, it is the next one.
  __device__ bool next(GatheredTile& tile) {
    for (; walk_.more(); walk_.next()) {
      u32 row;
      walk_.locate(row, tile.column);
      const u32 number = row / height;
      const bool own = number < own_;
      tile.owner = own ? a_.rank : (a_.rank + 1 + (number - own_) % (N - 1)) % N;
      const u32 first = (own ? number : (number - own_) / (N - 1)) * height;
      if (first >= a_.count[tile.owner]) continue;  // its owner has fewer rows than another
      tile.row = first + row % height;
      walk_.next();
      return true;
    }
    return false;
  }

 private:
  static constexpr u32 height = Walk<Tile>::height;

  __device__ u32 tiles_of(u32 rank) const { return (u32(a_.count[rank]) + height - 1) / height; }
  __device__ u32 most_of_peers() const {
    u32 most = 0;
#pragma unroll
    for (int hop = 1; hop < N; ++hop) most = max(most, tiles_of((a_.rank + hop) % N));
    return most;
  }

  const Arguments& a_;
  const u32 own_;  // rows of tiles in this rank's rows
  Walk<Tile> walk_;
};
