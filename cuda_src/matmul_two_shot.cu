// matmul_two_shot: what matmul_one_shot does, in two hops. A block, for 64 columns of the result at a time, has of its
// packs those of every N-th row to sum, and sends:
//
//   warpgroup            packs -> scratch[p].scatter[parity][this rank]   on the rank p that sums them
//   then all threads     scratch[this rank].scatter[parity][0 .. N-1] -> sum, + bias -> output
//                        sum -> scratch[p].gather[parity]                 on every peer p
//                        scratch[this rank].gather[parity] -> output      the sums of every peer
//
// A pack lies at its place in the result in every slot, and so does who sums it: ranks may differ in tiles and grids.
// Wins from 256 KB or so, for it sends 2 / N as much. No wait hangs on itself: the loads and products of a block wait
// for no peer, its sums for products alone, and it has sent all of its sums before it waits for another's. Ordering
// between ranks: (3) and (4) in sentinel.cuh, in both hops.
#include "device/matmul_tokens.cuh"
#include "device/sentinel.cuh"

template <class T, int N, class Tile, Layout W>
__global__ void __launch_bounds__(512, 1)
    matmul_two_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ MatmulArguments m, const __grid_constant__ Arguments a) {
  const Call& call = multiply_tokens<T, Tile, W>(w_map, a_map, m, a, [&](u32 parity, const TokenPack& at, const Pack& p) {
    push(a, (at.owner<N>() + N - a.rank) % N, (parity * N + a.rank) * a.capacity + at.in_result(m), p);
  });
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 scatter = (call.epoch & 1) * N * a.capacity, gather = (2 * N + (call.epoch & 1)) * a.capacity;
  const bool summed = !call.aborted && visit_tokens<Tile>(m, [&](const TokenPack& at) {
    if (at.owner<N>() != a.rank) return true;
    const TokenBias<T> bias(m, at.column);
    Pack part[N];
    if (!receive(a, call, 0, scatter + at.in_result(m), part)) return false;
    const Pack sum = sum_in_rank_order<T, N>(part, bias);
#pragma unroll
    for (int peer = 1; peer < N; ++peer) push(a, peer, gather + at.in_result(m), sum);
    output.store(at.in_result(m), sum);
    return true;
  });
  if (summed)
    visit_tokens<Tile>(m, [&](const TokenPack& at) {
      if (at.owner<N>() == a.rank) return true;
      Pack sum[1];
      if (!receive(a, call, at.owner<N>(), gather + at.in_result(m), sum)) return false;
      output.store(at.in_result(m), sum[0]);
      return true;
    });
  end_call(a, call);
}
