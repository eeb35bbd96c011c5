// A skinny matmul of e4m3 operands and the sum of its result over ranks, with operands that lie in one tensor: its
// sizes, A, W, the bias, the scales of A and of W. The fourth and the fifth size are as in one_matmul_skinny.hpp.
#pragma once

inline u64 up_to(u64 unit, u64 n) { return (n + unit - 1) / unit * unit; }

template <class Tile, class Kernel>
void one_scaled_skinny(Kernel kernel, const Arguments& a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  const auto map_of = [&](char* base, u64 rows, u64 box_rows) {
    return TensorMap{reinterpret_cast<u16*>(base), (k + 1) / 2, rows, up_to(16, k) / 2, box_rows, 1, k % 2 == 1};
  };
  char* const first = static_cast<char*>(const_cast<void*>(a.input)) + 12 * sizeof(u64);
  char* const second = first + m * up_to(16, k);
  char* const held = reinterpret_cast<char*>(const_cast<u64*>(sizes + 12)) + m * up_to(16, k);
  const TensorMap a_map = map_of(first, m, (m + 8 * Tile::cluster - 1) / (8 * Tile::cluster) * 8);
  const TensorMap w_map = map_of(sizes[4] ? held : second, n, 64);
  char* const bias = second + n * up_to(16, k);
  const float* const a_scale = reinterpret_cast<const float*>(bias + up_to(8, n) * sizeof(u16));
  ScaledMatmulArguments m_arguments{
      {sizes[5] ? bias : nullptr, u32(m), u32(n), u32(k), 0, 0, nullptr, u32(sizes[3])},
      a_scale,
      a_scale + sizes[6],
      sizes[7],
      sizes[8],
      sizes[9],
      sizes[10]};
  kernel(w_map, a_map, m_arguments, a);
}
