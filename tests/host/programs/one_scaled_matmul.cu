// A matmul of e4m3 operands that lie in one tensor: its sizes, A, W, the bias, the scales of A and of W. Rows of A and W
// are aligned as tensor maps demand it, those of the bias and of C to 16 bytes.
#include "device/ptx/codec.cuh"
#include "matmul/matmul.cu"

inline u64 up_to(u64 unit, u64 n) { return (n + unit - 1) / unit * unit; }

template <class Tile, class Result, class Scales>
void one_scaled_matmul(Arguments a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  char* const first = static_cast<char*>(const_cast<void*>(a.input)) + 12 * sizeof(u64);
  char* const second = first + m * up_to(16, k);
  const auto map_of = [&](char* base, u64 rows, u64 box_rows) {
    return TensorMap{reinterpret_cast<u16*>(base), (k + 1) / 2, rows, up_to(16, k) / 2, box_rows, 1, k % 2 == 1};
  };
  const TensorMap a_map = map_of(first, m, min(up_to(8, m), u64(Tile::rows)));
  const TensorMap w_map = map_of(second, n, Tile::columns / Tile::cluster);
  const u64 wide = sizeof(typename Result::Storage) / sizeof(u16);
  const TensorMap c_map{static_cast<u16*>(a.output), wide * n, m, wide * up_to(8, n), 64, 2 * wide};
  char* const bias = second + n * up_to(16, k);
  const float* const a_scale = reinterpret_cast<const float*>(bias + up_to(8, n) * sizeof(u16));
  ScaledMatmulArguments arguments{
      {sizes[5] ? bias : nullptr, u32(m), u32(n), u32(k), u32(sizes[3]), u32(sizes[4])},
      a_scale,
      a_scale + sizes[6],
      sizes[7],
      sizes[8],
      sizes[9],
      sizes[10]};
  matmul<e4m3, Tile, by_rows, Result, Scales>(a_map, w_map, c_map, arguments);
}
