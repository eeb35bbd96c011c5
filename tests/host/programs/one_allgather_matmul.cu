// An all-gather and a matmul, with operands that lie in one tensor: as in one_matmul.cu, with this rank's rows alone. The
// gathered rows follow the result, if the fourth size asks for them.
#include "matmul/allgather_matmul.cu"

inline u64 up_to_8(u64 n) { return (n + 7) / 8 * 8; }

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity>
void one_allgather_matmul(Arguments a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2], own = a.count[a.rank];
  const u64 w_rows = W == by_rows ? n : k, w_columns = W == by_rows ? k : n;
  const u64 w_box_rows = (W == by_rows ? Tile::columns : tile_depth) / Tile::cluster;
  u16* const first = static_cast<u16*>(const_cast<void*>(a.input)) + 6 * sizeof(u64) / sizeof(u16);
  u16* const second = first + own * up_to_8(k);
  u16* const c = static_cast<u16*>(a.output);
  const TensorMap w_map{second, w_columns, w_rows, up_to_8(w_columns), w_box_rows};
  const void* bias = sizes[5] ? second + w_rows * up_to_8(w_columns) : nullptr;
  const MatmulArguments arguments{bias, u32(m), u32(n), u32(k), 0, u32(sizes[4]), nullptr};
  RowsOfRanks<N> a_maps, c_maps;
  for (int rank = 0; rank < N; ++rank) {
    if (a.count[rank] == 0) continue;  // as in tile_launches.py of the package
    u16* const rows =
        rank == a.rank ? first : reinterpret_cast<u16*>(GatheredRows<T, N>(arguments, a).slot(a.rank, rank));
    a_maps.of[rank] = {rows, k, a.count[rank], up_to_8(k), min(u64(Tile::rows), up_to_8(a.count[rank]))};
    c_maps.of[rank] = {c + a.begin[rank] * n, n, a.count[rank], n, 64};
  }
  a.input = first;
  a.output = sizes[3] ? c + m * n : nullptr;
  allgather_matmul<T, N, Tile, W, Expression>(a_maps, w_map, c_maps, arguments, a);
}
