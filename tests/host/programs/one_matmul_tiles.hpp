// A matmul and the sum of its result over ranks, with operands that lie in one tensor: as in one_matmul.cu, and each
// rank's rows.
#pragma once

inline u64 up_to_8(u64 n) { return (n + 7) / 8 * 8; }

// Runs `kernel`, which writes its rank's rows to the output's from `first_row` on.
template <class Tile, OperandLayout W, class Kernel>
void one_matmul_tiles(Kernel kernel, Arguments& a, u64 first_row) {
  a.epilogue.first_row = first_row;
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  const u64 w_rows = W == by_rows ? n : k, w_columns = W == by_rows ? k : n;
  const u64 w_box_rows = (W == by_rows ? Tile::columns : tile_depth) / Tile::cluster;
  u16* const first = static_cast<u16*>(const_cast<void*>(a.input)) + 6 * sizeof(u64) / sizeof(u16);
  u16* const second = first + m * up_to_8(k);
  const u64 a_box_rows = min(u64(Tile::rows), up_to_8(m));
  const TensorMap a_map{first, k, m, up_to_8(k), a_box_rows}, w_map{second, w_columns, w_rows, up_to_8(w_columns), w_box_rows};
  u16* const rows = static_cast<u16*>(a.output) + first_row * up_to_8(n);
  const TensorMap output_map{rows, n, a.count[a.rank], up_to_8(n), 64};
  const void* bias = sizes[5] ? second + w_rows * up_to_8(w_columns) : nullptr;
  const MatmulArguments m_arguments{bias, u32(m), u32(n), u32(k), 0, u32(sizes[4]), nullptr};
  kernel(a_map, w_map, output_map, m_arguments, a);
}
