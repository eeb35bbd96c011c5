// allgather_rmsnorm: parts of a sum, one on each rank and whole rows, gathered, with residual and norm as in
// allreduce_rmsnorm_two_shot.cu, whose second half this is: for sums that matmul_reducescatter has left.
//
//   rank r: input, its rows -> scratch[p].slot[parity][r]   on every peer p
//           sums, of its input or from scratch[r].slot[parity][p], + residual -> summed -> norm -> output
//
// Team b has the rows b, b + teams, ... of every part: a group is one of each. While a group travels, the one before is
// normed. A part may have fewer rows than others; one without rows is sent as a pack all the same, as (3) demands.
#include "device/rms_norm.cuh"
#include "device/sentinel.cuh"

template <class T, int N>
struct Parts {
  const Arguments& a;
  const Call& call;
  RmsNorm<T, 1, like_input> norm;
  const Tensor<T> input;
  const u32 packs, slots;

  __device__ Parts(const Arguments& arguments, const Call& this_call)
      : a(arguments),
        call(this_call),
        norm(a, call),
        input(a.input, a.count[a.rank]),
        packs(norm.packs),
        slots((call.epoch & 1) * N * a.capacity) {}

  __device__ u32 rows(int rank) const { return a.count[rank] / norm.columns; }
  __device__ u32 first(int rank) const { return a.begin[rank] / norm.columns; }
  __device__ u32 row_in_part(u32 g) const { return norm.team + g * norm.teams; }

  __device__ u32 groups() const {
    u32 most = 0;
    for (int rank = 0; rank < N; ++rank) most = max(most, rows(rank));
    return (most - norm.team + norm.teams - 1) / norm.teams;
  }

  __device__ __forceinline__ void push_to_peers(u32 place, const Pack& p) const {
#pragma unroll
    for (int hop = 1; hop < N; ++hop) push(a, hop, slots + a.rank * a.capacity + place, p);
  }

  __device__ __forceinline__ void send(u32 g) const {
    const u32 row = row_in_part(g), mine = rows(a.rank);
    if (!norm.comes) return;
    if (row < mine)
      for (u32 i = norm.thread; i < packs; i += norm.threads) push_to_peers(row * packs + i, input.load(row * packs + i));
    else if (mine == 0 && row == 0 && norm.thread == 0)
      push_to_peers(0, Pack{});
  }

  __device__ __forceinline__ void norm_own(u32 g) {
    const u32 row = row_in_part(g);
    if (row >= rows(a.rank)) return;
    norm.take(first(a.rank) + row, [&](u32 i, Pack& sum) {
      sum = input.load(row * packs + i);
      return true;
    });
  }

  __device__ __forceinline__ void collect(u32 g) {
    const u32 row = row_in_part(g);
#pragma unroll 1
    for (int hop = 1; hop < N; ++hop) {
      const u32 owner = (a.rank + hop) % N, there = rows(owner), slot = slots + owner * a.capacity;
      const auto take = [&](u32 i, Pack& sum) {
        Pack received[1];
        if (!receive(a, call, owner, slot + row * packs + i, received)) return false;
        sum = received[0];
        return true;
      };
      Pack nothing;
      if (row < there)
        norm.take(first(owner) + row, take);
      else if (there == 0 && row == 0 && norm.thread == 0)
        norm.comes = norm.comes && take(0, nothing);
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(1024, 1) allgather_rmsnorm(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  call.aborted |= load_relaxed_gpu(a.abort);  // the kernel that made the sums may have given up: they go nowhere then
  Parts<T, N> parts(a, call);
  parts.send(0);
  advance_epoch(a, call);
  parts.norm.begin();
  const u32 groups = parts.groups();
  for (u32 g = 0; g < groups; ++g) {
    parts.send(g + 1);
    parts.norm_own(g);
    parts.collect(g);
  }
  end_call(a, call);
}
