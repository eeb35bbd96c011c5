// A product's operands, which lie in one tensor behind its sizes: A, W or its transpose, the bias, the scales of A and of
// W. Rows of A, of W and of the result begin at multiples of 16 bytes, as tensor maps demand it.
#pragma once
#include <algorithm>

inline u64 up_to(u64 unit, u64 n) { return (n + unit - 1) / unit * unit; }

// Mirrored in products.py.
struct Sizes {
  u64 m, n, k, with_bias;
  u64 group_rows, first_tile, end_tile;  // as in MatmulArguments
  u64 constant, held;  // whether W is called constant, and is: it then lies in the host's copy, which nothing writes
  u64 wants_rows;      // whether the gathered rows follow the result, and their scales
  u64 a_scales;        // numbers of A's scale in memory
  u64 a_scale_row, a_scale_block, w_scale_row, w_scale_block;
  u64 padding;  // the operands behind it begin at a whole pack
};

// `rows`: how many of A are here.
template <class Tile, OperandLayout W, class Scales>
struct Operands {
  static constexpr u64 element_nbytes = is_scaled<Scales> ? 1 : 2;
  const Sizes& sizes;
  const u64 w_rows = W == by_rows ? sizes.n : sizes.k, w_columns = W == by_rows ? sizes.k : sizes.n;
  char *const a, *const w, *const bias;

  Operands(const Arguments& arguments, u64 rows)
      : sizes(*static_cast<const Sizes*>(simulator::launched().given)),
        a(static_cast<char*>(const_cast<void*>(arguments.input)) + sizeof(Sizes)),
        w(a + rows * row_nbytes(sizes.k)),
        bias(w + w_rows * row_nbytes(w_columns)) {}

  static u64 row_nbytes(u64 columns) { return up_to(16, columns * element_nbytes); }

  static TensorMap map_of(void* base, u64 rows, u64 columns, u64 box_rows) {
    const u64 nbytes = columns * element_nbytes;
    return {static_cast<u16*>(base), (nbytes + 1) / 2, rows, up_to(16, nbytes) / 2, box_rows, element_nbytes, nbytes % 2 == 1};
  }
  TensorMap a_map(void* base, u64 rows, u64 box_rows) const { return map_of(base, rows, sizes.k, box_rows); }
  TensorMap a_tile_map(void* base, u64 rows) const { return a_map(base, rows, std::min(up_to(8, rows), u64(Tile::rows))); }
  TensorMap w_map(u64 box_rows) const {
    const auto given = reinterpret_cast<char*>(const_cast<Sizes*>(&sizes + 1));
    return map_of(sizes.held ? given + (w - a) : w, w_rows, w_columns, box_rows);
  }
  TensorMap w_tile_map() const { return w_map((W == by_rows ? Tile::columns : tile_depth) / Tile::cluster); }
  TensorMap result_map(void* base, u64 rows, u64 nbytes = 2) const {
    return {static_cast<u16*>(base), nbytes / 2 * sizes.n, rows, nbytes / 2 * up_to(8, sizes.n), 64, nbytes};
  }

  typename Scales::Arguments arguments() const {
    typename Scales::Arguments made{};
    made.bias = sizes.with_bias ? bias : nullptr;
    made.m = sizes.m;
    made.n = sizes.n;
    made.k = sizes.k;
    made.group_rows = sizes.group_rows;
    made.first_tile = sizes.first_tile;
    made.end_tile = sizes.end_tile;
    made.constant_weight = sizes.constant;
    if constexpr (is_scaled<Scales>) {
      made.a_scale = reinterpret_cast<const float*>(bias + up_to(8, sizes.n) * 2);
      made.w_scale = made.a_scale + sizes.a_scales;
      made.a_scale_row = sizes.a_scale_row;
      made.a_scale_block = sizes.a_scale_block;
      made.w_scale_row = sizes.w_scale_row;
      made.w_scale_block = sizes.w_scale_block;
    }
    return made;
  }
};

// Runs a kernel of tiles, which writes its rank's rows to the output's from `first_row` on.
template <class Tile, OperandLayout W, class Scales, class Kernel>
void run_tiles(Kernel kernel, Arguments& a, u64 first_row) {
  a.epilogue.first_row = first_row;
  const Operands<Tile, W, Scales> given(a, static_cast<const Sizes*>(simulator::launched().given)->m);
  u16* const rows = static_cast<u16*>(a.output) + first_row * up_to(8, given.sizes.n);
  const TensorMap output_map = given.result_map(rows, a.count[a.rank]);
  kernel(given.a_tile_map(given.a, given.sizes.m), given.w_tile_map(), output_map, given.arguments(), a);
}

// Runs a skinny kernel.
template <class Tile, OperandLayout W, class Scales, class Kernel>
void run_skinny(Kernel kernel, const Arguments& a) {
  const u64 m = static_cast<const Sizes*>(simulator::launched().given)->m;
  const Operands<Tile, W, Scales> given(a, m);
  const u64 share = up_to(8 * Tile::cluster, m) / Tile::cluster;  // of A's rows, of each block
  kernel(given.w_map(64), given.a_map(given.a, m, share), given.arguments(), a);
}
