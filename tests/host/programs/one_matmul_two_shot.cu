#include "matmul/matmul_two_shot.cu"
#include "one_matmul_skinny.hpp"

template <class T, int N, class Tile, OperandLayout W>
void one_matmul_two_shot(Arguments a) {
  one_matmul_skinny<Tile, W>(matmul_two_shot<T, N, Tile, W>, a);
}
