// reducescatter_rmsnorm: reducescatter_push by rows, residual and RMS norm in one kernel. Each rank norms its own rows.
//
//   rank r: rows of p of the input -> scratch[p].slot[parity][r]   on every rank p     (N - 1) / N x nbytes sent
//           scratch[r].slot[parity][0 .. N-1] -> sums of r's rows, + residual -> summed -> norm -> output
//
// Team b has the rows b, b + teams, ... of each part (rms_norm.cuh). In one step it sends row k + 1 of every part and
// norms its own row k. One hop and no barrier (sentinel.cuh). Parts may differ in their rows; large ones take several
// launches. An empty part counts as one pack, for the reason in (3): it is sent as zeros, and not normed.
#include "device/rms_norm.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, int C, NormOutput O, class Order = RankOrder, class Out = T>
struct RowsOfParts {
  static constexpr int in_flight = N > 4 ? 2 : 4;  // packs that a thread loads before it sends them
  const NormArguments& a;
  const Call& call;
  using Norm = RmsNorm<Out, C, O, T>;
  Norm norm{a, call.aborted != 0, a.count[a.rank], a.skipped};
  const u32 packs = Norm::sums * norm.packs;  // of sums in a row
  const u32 slots_of_call = (call.epoch & 1) * N * a.capacity;

  // Of the part of a rank. A launch has fewer than 2^32 elements.
  DEVICE u32 packs_of_part(int rank) const { return max(u32(a.count[rank]) / elements_per_pack<T>, 1u); }

  DEVICE u32 rows_of_largest_part() const {
    u32 most = 0;
    for (int rank = 0; rank < N; ++rank) most = max(most, packs_of_part(rank));
    return (most + packs - 1) / packs;
  }

  // Calls `visit` with pack u of a row of all parts: the distance to its owner, and its index in the part. 32 packs of
  // one part, of a warp's lanes, are followed by 32 of the next. The parts of this rank's next peers come first.
  template <class Visit>
  DEVICE void visit_pack(u32 row, u32 u, Visit visit) const {
    const u32 hop = u / 32 % N + 1, i = u / (32 * N) * 32 + u % 32, at = row * packs + i;
    if (i < packs && at < packs_of_part((a.rank + hop) % N)) visit(hop % N, at);
  }

  DEVICE void send(u32 row) const {
    const u32 end = (packs + 31) / 32 * 32 * N;
    for (u32 first = norm.thread; norm.comes && first < end; first += in_flight * norm.threads) {
      Pack mine[in_flight] = {};
      for (int k = 0; k < in_flight; ++k)
        visit_pack(row, first + k * norm.threads,
                   [&](u32 hop, u32 at) { mine[k] = part_of<T>(a.input, a, (a.rank + hop) % N).load(at); });
      for (int k = 0; k < in_flight; ++k)
        visit_pack(row, first + k * norm.threads,
                   [&](u32 hop, u32 at) { push(a, hop, slots_of_call + a.rank * a.capacity + at, mine[k]); });
    }
  }

  DEVICE void take(u32 row) {
    Pack zeros[1];
    if (row < norm.rows)
      norm.take(row, [&](u32 i, Pack(&total)[Norm::together]) {
        return receive_sums<T, N, Order>(a, call, slots_of_call + row * packs + i, total);
      });
    else if (norm.rows == 0 && row == 0 && norm.thread == 0 && norm.comes)
      receive_sums<T, N, Order>(a, call, slots_of_call, zeros);  // of an empty part
  }
};

template <class T, int N, int C, NormOutput O, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(C > 1 ? 1024 / C : 512, 2)
    reducescatter_rmsnorm(const __grid_constant__ NormArguments a) {
  wait_for_previous_kernel(a);
  if constexpr (C == 1) release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  RowsOfParts<T, N, C, O, Order, Out> parts{a, call};
  const u32 rows = parts.rows_of_largest_part();
  for (u32 row = parts.norm.team; row < rows + parts.norm.teams; row += parts.norm.teams) {
    parts.send(row);
    if (row >= parts.norm.teams) {
      parts.take(row - parts.norm.teams);
    } else {
      advance_epoch(a, call);
      parts.norm.start();
    }
  }
  end_call(a, call);
}
