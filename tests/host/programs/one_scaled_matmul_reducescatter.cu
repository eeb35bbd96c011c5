#include "device/ptx/codec.cuh"
#include "matmul/matmul_reducescatter.cu"
#include "one_scaled_matmul_tiles.hpp"

template <class T, int N, class Tile, class Scales, class Expression = Identity>
void one_scaled_matmul_reducescatter(Arguments a) {
  one_scaled_matmul_tiles<Tile>(matmul_reducescatter<T, N, Tile, by_rows, Expression, AsElements<T>, Scales>, a, 0);
}
