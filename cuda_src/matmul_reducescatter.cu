// matmul_reducescatter: this rank's rows of the sum over all ranks of A * W^T, plus a bias; operands as in matmul.cu.
//
//   a block computes tiles as in matmul.cu, the rows of the next rank first, its own rank's last; for each consumer:
//     rows of peer p   sums --round--> boxes in shared memory --TMA--> scratch[p].boxes[this rank], then the flag
//     own rows         sums, rounded, + scratch[this rank].boxes[p] of all p, in fp32 and in rank order, + bias
//                           --round--> boxes in shared memory --TMA--> output
//
// No SM is spent on the links: a warp beside the consumers sends a tile while they compute the next, for which shared
// memory has room for a whole tile, and it waits for the peers' parts while the consumers still compute theirs. The bits
// are those of a matmul whose result is then reduce-scattered, and the bias added, or an epilogue applied, before the sum
// is rounded. With a codec, parts are codes (strips_as_codes.cuh). Ordering between ranks: (10) in strips.cuh.
#include "device/matmul_strips.cuh"
#include "device/strips_as_codes.cuh"

template <class T, int N, class Tile, Layout W, class Expression = Identity, class Travel = AsElements<T>>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_reducescatter(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                         const __grid_constant__ TensorMap output_map, const __grid_constant__ MatmulArguments m,
                         const __grid_constant__ Arguments a) {
  multiply_and_sum<T, N, Tile, W, scattered, Expression, Travel>(a_map, w_map, output_map, m, a);
}
