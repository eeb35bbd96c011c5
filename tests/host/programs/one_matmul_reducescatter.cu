#include "matmul/matmul_reducescatter.cu"
#include "one_matmul_tiles.hpp"

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Travel = AsElements<T>>
void one_matmul_reducescatter(Arguments a) {
  one_matmul_tiles<Tile, W>(matmul_reducescatter<T, N, Tile, W, Expression, Travel>, a, 0);
}
