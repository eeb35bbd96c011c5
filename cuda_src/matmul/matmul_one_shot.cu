// matmul_one_shot: the sum over all ranks of A * W^T, plus a bias, on every rank, for at most 64 rows of A.
//
//   loader, one thread   W, A --TMA--> ring[i % stages]
//   warpgroup            ring[i % stages] --wgmma--> fp32 sums --round--> packs of 8 columns of a row
//                        packs ---> scratch[p].slot[parity][this rank]   on every rank p
//   then all threads     scratch[this rank].slot[parity][0 .. N-1] -> sum, + bias -> output
//
// One hop, as in one_shot_push.cu. Gives the bits of a matmul and an all-reduce. Wins for the smallest results.
#include "device/matmul/skinny.cuh"

template <class T, int N, class Tile, OperandLayout W, class Scales = Unscaled>
__global__ void __launch_bounds__(512, 1)
    matmul_one_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ typename Scales::Arguments m, const __grid_constant__ Arguments a) {
  const auto send = [&](u32 parity, const ResultPack<Tile::pack_columns>& at, const Pack& p) {
    push_to_all<N>(a, (parity * N + a.rank) * a.capacity + at.in_result(m), p);
  };
  using Operand = typename Scales::template Operand<T>;
  const Call& call = multiply_skinny<Operand, Tile, W, T, Scales>(w_map, a_map, m, a, send);
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  const auto sum = [&](const ResultPack<8>& at) {
    Pack total;
    if (!receive_sum<T, N, Tile>(m, a, call, slots, at, total)) return false;
    output.store(at.in_result(m), total);
    return true;
  };
  if (!call.aborted) visit_packs<Tile>(m, sum);
  end_call(a, call);
}
