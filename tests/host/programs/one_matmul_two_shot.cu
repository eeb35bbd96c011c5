#include "device/ptx/codec.cuh"
#include "matmul/matmul_two_shot.cu"
#include "products.hpp"

template <class T, int N, class Tile, OperandLayout W, class Scales>
void one_matmul_two_shot(Arguments a) {
  run_skinny<Tile, W, Scales>(matmul_two_shot<T, N, Tile, W, Scales>, a);
}
