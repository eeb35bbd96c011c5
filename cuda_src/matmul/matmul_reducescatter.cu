// matmul_reducescatter: this rank's rows of the sum over all ranks of A * W^T, plus a bias; operands as in matmul.cu.
//
//   a block computes tiles as in matmul.cu, the next rank's rows first, its own rank's last; each warpgroup tile:
//     rows of peer p   sums --round--> boxes in shared memory --TMA--> partial tiles on rank p, then the flag
//     own rows         sums, rounded, + partial tiles of all ranks, in fp32 and in rank order, + bias or epilogue
//                           --round--> boxes in shared memory --TMA--> output
//
// No SM is spent on the links: a warp beside the consumers sends a tile while they compute the next. Gives the bits of
// a matmul and a reduce-scatter. With a codec, tiles travel as codes. Partial tiles may travel unrounded, of K in
// leaves, to be added as a tree (tile_travel.cuh). Ordering: (10) in warpgroup_tile.cuh.
#include "device/matmul/fused_tiles.cuh"

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Travel = AsElements<T>,
          class Scales = Unscaled>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_reducescatter(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                         const __grid_constant__ TensorMap output_map,
                         const __grid_constant__ typename Scales::Arguments m, const __grid_constant__ Arguments a) {
  multiply_and_sum<T, N, Tile, W, reduce_scatter, Expression, Travel, Scales>(a_map, w_map, output_map, m, a);
}
