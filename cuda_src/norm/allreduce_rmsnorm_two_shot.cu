// allreduce_rmsnorm_two_shot: two_shot_push by rows, residual and RMS norm in one kernel. Every rank norms every row.
//
//   rank r: rows of p of the input -> scratch[p].scatter[parity][r]   on every rank p
//           scratch[r].scatter[parity][0 .. N-1] -> sums of r's rows  -> scratch[p].gather[parity][r] on every peer p
//           sums, its own or from scratch[r].gather[parity][p], + residual -> summed -> norm -> output
//
// Only sums are sent: sending normed rows as well would take twice the bytes, or one and a half times in e4m3. Added as
// a tree, sums are fp32. Their owner then adds the residual, and sends `summed` in Out. Ranks have one residual. Team b
// has the rows b, b + teams, .... N neighbouring rows have different owners. N consecutive rows of a team, a group,
// also have different owners: `teams` is a multiple of N, or no team has two rows. In one step a team sends group
// g + 1, sums group g, and norms the sums of group g - 1. Wins for more rows, as in prefill. Its scratch is 4 x nbytes.
#include "device/rms_norm.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, int C, NormOutput O, class Order = RankOrder, class Out = T>
struct Rows {
  const NormArguments& a;
  const Call& call;
  using Norm = RmsNorm<Out, C, O, T>;
  static constexpr int sums = Norm::sums;
  Norm norm;
  const WholePacks<T> input{a.input};
  const u32 packs = norm.packs, scatter = (call.epoch & 1) * N * a.capacity;

  DEVICE u32 gather() const { return scatter + 2 * N * a.capacity; }

  // The offset of pack i of a row in its owner's part of a slot: of what is gathered, or with `sums` packs for each.
  template <int Count = 1>
  DEVICE u32 offset(u32 row, u32 i) const {
    return row / N * (Count * packs) + i;
  }

  // The three steps of a row whose owner is `hop` ranks after this one. `sum` is its owner's, `collect` the others'.
  DEVICE void send(u32 row, u32 hop) {
    for (u32 i = norm.thread; norm.comes && i < sums * packs; i += norm.threads)
      push(a, hop, scatter + a.rank * a.capacity + offset<sums>(row, i), input.load(u64(row) * (sums * packs) + i));
  }

  DEVICE void sum(u32 row) {
    const auto push_to_peers = [&](u32 i, const Pack& pack) {
      for (int peer = 1; peer < N; ++peer) push(a, peer, gather() + a.rank * a.capacity + offset(row, i), pack);
    };
    if constexpr (are_same<Order, TreeOrder>)
      norm.take(
          row,
          [&](u32 i, Pack(&total)[Norm::together]) {
            return receive_sums<T, N, Order>(a, call, scatter + offset<sums>(row, i), total);
          },
          push_to_peers);
    else
      norm.take(row, [&](u32 i, Pack(&total)[1]) {
        Pack part[N];
        if (!receive(a, call, 0, scatter + offset(row, i), part)) return false;
        push_to_peers(i, total[0] = sum_in_rank_order<T, N>(part));
        return true;
      });
  }

  DEVICE void collect(u32 row, u32 hop) {
    const u32 owner = (a.rank + hop) % N;
    norm.template take<are_same<Order, TreeOrder>>(row, [&](u32 i, Pack(&total)[1]) {
      Pack received[1];
      if (!receive(a, call, owner, gather() + owner * a.capacity + offset(row, i), received)) return false;
      total[0] = received[0];
      return true;
    });
  }

  // Calls `visit` with each row of group g and the distance to its owner.
  template <class Visit>
  DEVICE void visit_group(u32 g, Visit visit) {
#pragma unroll 1
    for (u32 k = g * N; k < (g + 1) * N; ++k) {
      const u32 row = norm.team + k * norm.teams;
      if (row < norm.rows) visit(row, (row + k + N - a.rank) % N);
    }
  }

  // By the threads of a block that is a team.
  DEVICE void send_group(u32 g) {
    visit_group(g, [&](u32 row, u32 hop) { send(row, hop); });
  }

  DEVICE void finish_groups() {
    for (u32 g = 0; g == 0 || norm.team + (g - 1) * N * norm.teams < norm.rows; ++g) {
      send_group(g + 1);
      visit_group(g, [&](u32 row, u32 hop) {
        if (hop == 0) sum(row);
      });
      if (g == 0) continue;
      visit_group(g - 1, [&](u32 row, u32 hop) {
        if (hop != 0) collect(row, hop);
      });
    }
  }
};

template <class T, int N, int C, NormOutput O, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(C > 1 ? 1024 / C : 512, 2)
    allreduce_rmsnorm_two_shot(const __grid_constant__ NormArguments a) {
  using OfRows = Rows<T, N, C, O, Order, Out>;
  using Norm = typename OfRows::Norm;
  if constexpr (C == 1) {
    wait_for_previous_kernel(a);
    release_next_kernel();
    Call call = begin_call(a);
    read_epoch(a, call);
    OfRows rows{a, call, Norm(a, call.aborted != 0, a.numel)};
    rows.send_group(0);
    advance_epoch(a, call);
    rows.norm.start();
    rows.finish_groups();
    end_call(a, call);
  } else {  // the cluster has one row
    Norm norm(a, false, a.numel);
    u32 row = norm.team, hop = (row + N - a.rank) % N;
    const u32 packs = OfRows::sums * norm.packs, first = row * packs;
    const bool whole = row < norm.rows && WholePacks<T>(a.input).aligned();
    Outgoing<1, 1> outgoing(a.input, first + norm.thread, whole ? first + packs : 0, norm.threads);
    outgoing.to[0] = slot(a, hop, a.rank * a.capacity + row / N * packs + norm.thread);

    HeldCall call = begin_call(a, row, hop, outgoing);
    outgoing.load();
    read_epoch(a, call);
    norm.comes = !call.aborted && row < norm.rows;
    OfRows rows{a, call, norm};
    if (norm.comes && whole) outgoing.push_all(rows.scatter);
    if (!whole) rows.send(row, hop);
    advance_epoch(a, call);
    rows.norm.start();
    if (row < norm.rows) hop == 0 ? rows.sum(row) : rows.collect(row, hop);
    end_call(a, call);
  }
}
