#include "matmul/matmul_allreduce.cu"
#include "one_matmul_tiles.hpp"

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Travel = AsElements<T>>
void one_matmul_allreduce(Arguments a) {
  one_matmul_tiles<Tile, W>(matmul_allreduce<T, N, Tile, W, Expression, Travel>, a, a.begin[a.rank]);
}
