#include "matmul/matmul_one_shot.cu"
#include "one_matmul_skinny.hpp"

template <class T, int N, class Tile, OperandLayout W>
void one_matmul_one_shot(Arguments a) {
  one_matmul_skinny<Tile, W>(matmul_one_shot<T, N, Tile, W>, a);
}
