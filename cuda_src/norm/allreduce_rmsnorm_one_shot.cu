// allreduce_rmsnorm_one_shot: one_shot_push, residual and RMS norm in one kernel. Every rank norms every row.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every rank p
//           scratch[r].slot[parity][0 .. N-1] -> sum, + residual -> summed -> norm -> output
//
// Team b has the rows b, b + teams, .... Wins for a few rows, as in decoding.
#include "device/rms_norm.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, int C, NormOutput O, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(C > 1 ? 1024 / C : 512, 2)
    allreduce_rmsnorm_one_shot(const __grid_constant__ NormArguments a) {
  using Norm = RmsNorm<Out, C, O, T>;
  Norm norm(a, false, a.numel);
  u32 packs = Norm::sums * norm.packs;
  const WholePacks<T> input(a.input);
  const u32 first = norm.team * packs;  // of the team's first row
  u32 beyond = norm.team < norm.rows && input.aligned() ? first + packs : 0;
  Outgoing<N> outgoing(a.input, first + norm.thread, beyond, norm.threads);
  for (int hop = 0; hop < N; ++hop)
    outgoing.to[(hop + N - 1) % N] = slot(a, hop, a.rank * a.capacity + first + norm.thread);

  HeldCall call = begin_call(a, packs, beyond, outgoing);
  if constexpr (C == 1) release_next_kernel();
  outgoing.load();
  read_epoch(a, call);
  norm.comes = !call.aborted;
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  if (norm.comes) outgoing.push_all(slots);
  for (u32 row = norm.team + (beyond != 0 ? norm.teams : 0); row < norm.rows && norm.comes; row += norm.teams)
    for (u32 i = norm.thread; i < packs; i += norm.threads)
      push_to_all<N>(a, slots + a.rank * a.capacity + row * packs + i, input.load(u64(row) * packs + i));
  advance_epoch(a, call);
  norm.start();
  for (u32 row = norm.team; row < norm.rows; row += norm.teams)
    norm.take(row, [&](u32 i, Pack(&sum)[Norm::together]) {
      return receive_sums<T, N, Order>(a, call, slots + row * packs + i, sum);
    });
  end_call(a, call);
}
