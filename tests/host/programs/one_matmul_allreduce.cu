#include "device/ptx/codec.cuh"
#include "matmul/matmul_allreduce.cu"
#include "products.hpp"

template <class T, int N, class Tile, OperandLayout W, class Scales, class Expression = Identity, class Travel = AsElements<T>>
void one_matmul_allreduce(Arguments a) {
  run_tiles<Tile, W, Scales>(matmul_allreduce<T, N, Tile, W, Expression, Travel, Scales>, a, a.begin[a.rank]);
}
