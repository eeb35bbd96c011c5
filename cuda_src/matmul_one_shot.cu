// matmul_one_shot: the sum over all ranks of A * W^T, plus a bias, on every rank, for few rows of A; operands as in
// matmul.cu. A block, for 64 columns of the result at a time:
//
//   loader, one thread   W, A --TMA--> ring[i % stages]
//   warpgroup            ring[i % stages] --wgmma--> fp32 sums --round--> packs of 8 columns of a row
//                        packs -> scratch[p].slot[parity][this rank]   on every rank p
//   then all threads     scratch[this rank].slot[parity][0 .. N-1] -> sum, + bias -> output
//
// Weights come from memory as fast as it gives them, and one hop follows, as in one_shot_push.cu, whose packs these
// are. All that a block owes its peers it sends before it waits for any. The bits are those of a matmul whose result is
// then all-reduced, and the bias added before the sum is rounded. Ordering between ranks: (3) and (4) in sentinel.cuh.
#include "device/matmul_tokens.cuh"
#include "device/sentinel.cuh"

template <class T, int N, class Tile, Layout W>
__global__ void __launch_bounds__(512, 1)
    matmul_one_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ MatmulArguments m, const __grid_constant__ Arguments a) {
  const auto send = [&](u32 parity, const TokenPack& at, const Pack& p) {
    push_to_all<N>(a, (parity * N + a.rank) * a.capacity + at.in_result(m), p);
  };
  const Call& call = multiply_tokens<T, Tile, W>(w_map, a_map, m, a, send);
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  const auto sum = [&](const TokenPack& at) {
    const TokenBias<T> bias(m, at.column);
    Pack part[N];
    if (!receive(a, call, 0, slots + at.in_result(m), part)) return false;
    output.store(at.in_result(m), sum_in_rank_order<T, N>(part, bias));
    return true;
  };
  if (!call.aborted) visit_tokens<Tile>(m, sum);
  end_call(a, call);
}
