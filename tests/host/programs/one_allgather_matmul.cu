// With this rank's rows alone. The gathered rows follow the result, and then their scales, if the sizes ask for them.
#include "device/ptx/codec.cuh"
#include "matmul/allgather_matmul.cu"
#include "products.hpp"

template <class T, int N, class Tile, OperandLayout W, class Scales, class Expression = Identity>
void one_allgather_matmul(Arguments a) {
  const Operands<Tile, W, Scales> given(a, a.count[a.rank]);
  const u64 m = given.sizes.m, n = given.sizes.n, k = given.sizes.k;
  u16* const c = static_cast<u16*>(a.output);
  char* const gathered = static_cast<char*>(a.output) + m * n * sizeof(u16);
  auto arguments = given.arguments();
  if constexpr (is_scaled<Scales>) {
    char* const scales = gathered + m * given.row_nbytes(k);
    arguments.gathered_scales = given.sizes.wants_rows ? reinterpret_cast<float*>(scales) : nullptr;
  }
  using Rows = GatheredRows<typename Scales::template Operand<T>, N, Scales>;
  RowsOfRanks<N> a_maps, c_maps;
  for (int rank = 0; rank < N; ++rank) {
    if (a.count[rank] == 0) continue;  // as in fused.py of the package
    void* const rows = rank == a.rank ? given.a : static_cast<void*>(Rows(arguments, a).slot(a.rank, rank));
    a_maps.of[rank] = given.a_tile_map(rows, a.count[rank]);
    c_maps.of[rank] = given.result_map(c + a.begin[rank] * n, a.count[rank]);
  }
  a.input = given.a;
  a.output = given.sizes.wants_rows ? gathered : nullptr;
  allgather_matmul<T, N, Tile, W, Expression, Scales>(a_maps, given.w_tile_map(), c_maps, arguments, a);
}
