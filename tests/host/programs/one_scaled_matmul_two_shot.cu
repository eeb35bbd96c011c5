#include "device/ptx/codec.cuh"
#include "matmul/matmul_two_shot.cu"
#include "one_scaled_skinny.hpp"

template <class T, int N, class Tile, class Scales>
void one_scaled_matmul_two_shot(Arguments a) {
  one_scaled_skinny<Tile>(matmul_two_shot<T, N, Tile, by_rows, Scales>, a);
}
