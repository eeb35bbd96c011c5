// An all-gather and a matmul of e4m3 operands that lie in one tensor: as in one_scaled_matmul.cu, with this rank's rows
// alone. The gathered rows and their scales follow the result, if the last size asks for them.
#include "device/ptx/codec.cuh"
#include "matmul/allgather_matmul.cu"

inline u64 up_to(u64 unit, u64 n) { return (n + unit - 1) / unit * unit; }

template <int N, class Tile, class Result, class Scales>
void one_scaled_allgather_matmul(Arguments a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2], own = a.count[a.rank];
  char* const first = static_cast<char*>(const_cast<void*>(a.input)) + 12 * sizeof(u64);
  char* const second = first + own * up_to(16, k);
  char* const bias = second + n * up_to(16, k);
  const float* const a_scale = reinterpret_cast<const float*>(bias + up_to(8, n) * sizeof(u16));
  const ScaledMatmulArguments arguments{
      {sizes[4] ? bias : nullptr, u32(m), u32(n), u32(k), 0, u32(sizes[3])},
      a_scale,
      a_scale + sizes[5],
      sizes[6],
      sizes[7],
      sizes[8],
      sizes[9],
      sizes[10] ? reinterpret_cast<float*>(static_cast<char*>(a.output) + m * n * sizeof(u16) + m * up_to(16, k)) : nullptr};
  const auto map_of = [&](void* base, u64 rows, u64 box_rows) {
    return TensorMap{static_cast<u16*>(base), (k + 1) / 2, rows, up_to(16, k) / 2, box_rows, 1, k % 2 == 1};
  };
  const TensorMap w_map = map_of(second, n, Tile::columns / Tile::cluster);
  u16* const c = static_cast<u16*>(a.output);
  RowsOfRanks<N> a_maps, c_maps;
  for (int rank = 0; rank < N; ++rank) {
    if (a.count[rank] == 0) continue;  // as in tile_launches.py of the package
    void* const rows = rank == a.rank ? first : static_cast<void*>(
        GatheredRows<e4m3, N, Scales>(arguments, a).slot(a.rank, rank));
    a_maps.of[rank] = map_of(rows, a.count[rank], min(u64(Tile::rows), up_to(8, a.count[rank])));
    c_maps.of[rank] = {c + a.begin[rank] * n, n, a.count[rank], n, 64};
  }
  a.input = first;
  a.output = sizes[10] ? c + m * n : nullptr;
  allgather_matmul<Result, N, Tile, by_rows, Identity, Scales>(a_maps, w_map, c_maps, arguments, a);
}
