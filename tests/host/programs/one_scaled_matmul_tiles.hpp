// A matmul of e4m3 operands and the sum of its result over ranks, with operands that lie in one tensor: as in
// one_scaled_matmul.cu, and each rank's rows as in one_matmul_tiles.hpp.
#pragma once

inline u64 up_to(u64 unit, u64 n) { return (n + unit - 1) / unit * unit; }

// Runs `kernel`, which writes its rank's rows to the output's from `first_row` on.
template <class Tile, class Kernel>
void one_scaled_matmul_tiles(Kernel kernel, Arguments& a, u64 first_row) {
  a.epilogue.first_row = first_row;
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  char* const first = static_cast<char*>(const_cast<void*>(a.input)) + 12 * sizeof(u64);
  char* const second = first + m * up_to(16, k);
  const auto map_of = [&](char* base, u64 rows, u64 box_rows) {
    return TensorMap{reinterpret_cast<u16*>(base), (k + 1) / 2, rows, up_to(16, k) / 2, box_rows, 1, k % 2 == 1};
  };
  const TensorMap a_map = map_of(first, m, min(up_to(8, m), u64(Tile::rows)));
  const TensorMap w_map = map_of(second, n, Tile::columns / Tile::cluster);
  u16* const rows = static_cast<u16*>(a.output) + first_row * up_to(8, n);
  const TensorMap output_map{rows, n, a.count[a.rank], up_to(8, n), 64};
  char* const bias = second + n * up_to(16, k);
  const float* const a_scale = reinterpret_cast<const float*>(bias + up_to(8, n) * sizeof(u16));
  const ScaledMatmulArguments arguments{
      {sizes[5] ? bias : nullptr, u32(m), u32(n), u32(k), 0, u32(sizes[4])},
      a_scale,
      a_scale + sizes[6],
      sizes[7],
      sizes[8],
      sizes[9],
      sizes[10]};
  kernel(a_map, w_map, output_map, arguments, a);
}
