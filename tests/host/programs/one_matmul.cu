#include "device/ptx/codec.cuh"
#include "matmul/matmul.cu"
#include "products.hpp"

template <class T, class Tile, OperandLayout W, class Scales, class Result>
void one_matmul(Arguments a) {
  const Operands<Tile, W, Scales> given(a, static_cast<const Sizes*>(simulator::launched().given)->m);
  auto arguments = given.arguments();
  if (Tile::split > 1) {
    arguments.c = a.output;
    arguments.c_leading = up_to(8, given.sizes.n);
  }
  const TensorMap c_map = given.result_map(a.output, given.sizes.m, sizeof(typename Result::Storage));
  using Operand = typename Scales::template Operand<T>;
  matmul<Operand, Tile, W, Result, Scales>(
      given.a_tile_map(given.a, given.sizes.m), given.w_tile_map(), c_map, arguments);
}
