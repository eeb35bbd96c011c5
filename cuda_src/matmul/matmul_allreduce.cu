// matmul_allreduce: matmul_reducescatter.cu and an all-gather in one. All rows of the sum are on every rank.
//
//     own rows         ... boxes in shared memory, finished --TMA--> output
//                                                           --TMA--> finished tiles on every peer, then their flags
//     other warps      finished tiles of every peer -> output
//
// While own rows are computed the links carry finished tiles. Gives the bits of a matmul followed by an all-reduce.
#include "device/matmul/fused_tiles.cuh"

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Travel = AsElements<T>,
          class Scales = Unscaled>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_allreduce(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                     const __grid_constant__ TensorMap output_map, const __grid_constant__ typename Scales::Arguments m,
                     const __grid_constant__ Arguments a) {
  multiply_and_sum<T, N, Tile, W, all_reduce, Expression, Travel, Scales>(a_map, w_map, output_map, m, a);
}
