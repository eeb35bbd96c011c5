// matmul_allreduce: the sum over all ranks of A * W^T, plus a bias, on every rank; operands as in matmul.cu.
//
//   a block computes tiles as in matmul.cu, the rows of the next rank first, its own rank's last; for each consumer:
//     rows of peer p   sums --round--> boxes in shared memory --TMA--> scratch[p].parts[this rank], then the flag
//     own rows         sums, rounded, + scratch[this rank].parts[p] of all p, in fp32 and in rank order, + bias
//                           --round--> boxes in shared memory --TMA--> output
//                                                             --TMA--> scratch[p].finished[this rank] of all p, then
//                                                                      their flags
//   and warps that have nothing else to do, or not any more:
//     rows of peer p   scratch[this rank].finished[p] --> output
//
// matmul_reducescatter and an all-gather in one: while own rows are computed the links carry those that are finished.
// Where K is small two consumers alternate, so that one multiplies while the other adds and sends. The bits are those of a
// matmul whose result is then all-reduced, and the bias added, or an epilogue applied, before the sum is rounded. With a
// codec, parts and finished boxes are codes (strips_as_codes.cuh), and the consumer itself writes what those of its sums
// stand for into the output. Ordering between ranks: (10) in strips.cuh.
#include "device/matmul_strips.cuh"
#include "device/strips_as_codes.cuh"

template <class T, int N, class Tile, Layout W, class Expression = Identity, class Travel = AsElements<T>>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_allreduce(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                     const __grid_constant__ TensorMap output_map, const __grid_constant__ MatmulArguments m,
                     const __grid_constant__ Arguments a) {
  multiply_and_sum<T, N, Tile, W, gathered, Expression, Travel>(a_map, w_map, output_map, m, a);
}
