// A matmul whose operands lie in one tensor: its sizes, A, W, the bias, aligned as tensor maps demand it.
#include "matmul/matmul.cu"

inline u64 up_to_8(u64 n) { return (n + 7) / 8 * 8; }

template <class T, class Tile, OperandLayout W, class Result>
void one_matmul(Arguments a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  const u64 w_rows = W == by_rows ? n : k, w_columns = W == by_rows ? k : n;
  const u64 w_box_rows = (W == by_rows ? Tile::columns : tile_depth) / Tile::cluster;
  u16* const first = static_cast<u16*>(const_cast<void*>(a.input)) + 8 * sizeof(u64) / sizeof(u16);
  u16* const second = first + m * up_to_8(k);
  const u64 a_box_rows = up_to_8(m) < Tile::rows ? up_to_8(m) : Tile::rows;
  const TensorMap a_map{first, k, m, up_to_8(k), a_box_rows}, w_map{second, w_columns, w_rows, up_to_8(w_columns), w_box_rows};
  const u64 wide = sizeof(typename Result::Storage) / sizeof(u16);
  const TensorMap c_map{static_cast<u16*>(a.output), wide * n, m, wide * up_to_8(n), 64, 2 * wide};
  const void* bias = sizes[5] ? second + w_rows * up_to_8(w_columns) : nullptr;
  MatmulArguments arguments{bias, u32(m), u32(n), u32(k), u32(sizes[3]), u32(sizes[4])};
  if (Tile::split > 1) {
    arguments.c = a.output;
    arguments.c_leading = up_to_8(n);
  }
  arguments.first_tile = sizes[6];
  arguments.end_tile = sizes[7];
  matmul<T, Tile, W, Result>(a_map, w_map, c_map, arguments);
}
