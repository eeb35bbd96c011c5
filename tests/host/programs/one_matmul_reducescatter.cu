#include "device/ptx/codec.cuh"
#include "matmul/matmul_reducescatter.cu"
#include "products.hpp"

template <class T, int N, class Tile, OperandLayout W, class Scales, class Expression = Identity, class Travel = AsElements<T>>
void one_matmul_reducescatter(Arguments a) {
  run_tiles<Tile, W, Scales>(matmul_reducescatter<T, N, Tile, W, Expression, Travel, Scales>, a, 0);
}
