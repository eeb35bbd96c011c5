#include "device/ptx/codec.cuh"
#include "matmul/matmul_one_shot.cu"
#include "products.hpp"

template <class T, int N, class Tile, OperandLayout W, class Scales>
void one_matmul_one_shot(Arguments a) {
  run_skinny<Tile, W, Scales>(matmul_one_shot<T, N, Tile, W, Scales>, a);
}
