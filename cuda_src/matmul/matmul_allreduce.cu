// matmul_allreduce: the sum over all ranks of A * W^T, plus a bias, on every rank; operands as in matmul.cu.
//
//   a block computes tiles as in matmul.cu, the next rank's rows first, its own rank's last; each warpgroup tile:
//     rows of peer p   sums --round--> boxes in shared memory --TMA--> partial tiles on rank p, then the flag
//     own rows         sums, rounded, + partial tiles of all ranks, in fp32 and in rank order, + bias or epilogue
//                           --round--> boxes in shared memory --TMA--> output
//                                                             --TMA--> finished tiles on every peer, then their flags
//   other warps        finished tiles of every peer -> output
//
// matmul_reducescatter and an all-gather in one: while own rows are computed the links carry finished tiles. Gives the
// bits of a matmul followed by an all-reduce. Ordering between ranks: (10) in warpgroup_tile.cuh.
#include "device/matmul/fused_tiles.cuh"
#include "device/matmul/tile_as_codes.cuh"

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Travel = AsElements<T>,
          class Scales = Unscaled>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_allreduce(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                     const __grid_constant__ TensorMap output_map, const __grid_constant__ typename Scales::Arguments m,
                     const __grid_constant__ Arguments a) {
  multiply_and_sum<T, N, Tile, W, all_reduce, Expression, Travel, Scales>(a_map, w_map, output_map, m, a);
}
