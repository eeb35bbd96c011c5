// matmul_two_shot: what matmul_one_shot does, in two hops. Of the packs of a block, those of every N-th row are this
// rank's to sum:
//
//   warpgroup            packs -> scratch[p].scatter[parity][this rank]   on the rank p that sums them
//   then all threads     scratch[this rank].scatter[parity][0 .. N-1] -> sum, + bias -> output
//                        sum -> scratch[p].gather                         on every peer p
//                        scratch[this rank].gather -> output              the sums of every peer
//
// Sends 2 / N of what matmul_one_shot does, and wins from 256 KB or so. Where a pack lies in a slot, and whose it is,
// goes by its place in the result: ranks may differ in tiles and grids. Nobody waits for himself: packs are sent before
// any wait for a peer, and all of a block's sums before its first wait for a peer's sum. Ordering between ranks: (3) and
// (4) in sentinel.cuh. One gather slot is enough: a sum needs a pack of each rank, sent when the call before, with its
// arming stores, had ended there.
#include "device/matmul_tokens.cuh"
#include "device/sentinel.cuh"

template <class T, int N, class Tile, Layout W>
__global__ void __launch_bounds__(512, 1)
    matmul_two_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ MatmulArguments m, const __grid_constant__ Arguments a) {
  const auto send = [&](u32 parity, const TokenPack& at, const Pack& p) {
    push(a, (at.owner<N>() + N - a.rank) % N, (parity * N + a.rank) * a.capacity + at.in_result(m), p);
  };
  const Call& call = multiply_tokens<T, Tile, W>(w_map, a_map, m, a, send);
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 scatter = (call.epoch & 1) * N * a.capacity, gather = 2 * N * a.capacity;
  const auto sum_and_send = [&](const TokenPack& at) {
    if (at.owner<N>() != a.rank) return true;
    const TokenBias<T> bias(m, at.column);
    Pack part[N];
    if (!receive(a, call, 0, scatter + at.in_result(m), part)) return false;
    const Pack sum = sum_in_rank_order<T, N>(part, bias);
#pragma unroll
    for (int peer = 1; peer < N; ++peer) push(a, peer, gather + at.in_result(m), sum);
    output.store(at.in_result(m), sum);
    return true;
  };
  const auto take_sum = [&](const TokenPack& at) {
    if (at.owner<N>() == a.rank) return true;
    Pack sum[1];
    if (!receive(a, call, at.owner<N>(), gather + at.in_result(m), sum)) return false;
    output.store(at.in_result(m), sum[0]);
    return true;
  };
  if (!call.aborted && visit_tokens<Tile>(m, sum_and_send)) visit_tokens<Tile>(m, take_sum);
  end_call(a, call);
}
