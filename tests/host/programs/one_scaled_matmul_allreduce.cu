#include "device/ptx/codec.cuh"
#include "matmul/matmul_allreduce.cu"
#include "one_scaled_matmul_tiles.hpp"

template <class T, int N, class Tile, class Scales, class Expression = Identity>
void one_scaled_matmul_allreduce(Arguments a) {
  one_scaled_matmul_tiles<Tile>(matmul_allreduce<T, N, Tile, by_rows, Expression, AsElements<T>, Scales>, a, a.begin[a.rank]);
}
