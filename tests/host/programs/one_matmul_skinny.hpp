// A skinny matmul and the sum of its result over ranks, with operands that lie in one tensor: as in one_matmul.cu. The
// fourth size says whether W is called constant. The fifth says whether it is: it then lies in the host's copy of that
// tensor, which nothing writes. Otherwise the kernel before writes it.
#pragma once

inline u64 up_to_8(u64 n) { return (n + 7) / 8 * 8; }

template <class Tile, OperandLayout W, class Kernel>
void one_matmul_skinny(Kernel kernel, const Arguments& a) {
  const u64* const sizes = static_cast<const u64*>(simulator::launched().given);
  const u64 m = sizes[0], n = sizes[1], k = sizes[2];
  const u64 w_rows = W == by_rows ? n : k, w_columns = W == by_rows ? k : n;
  u16* const first = static_cast<u16*>(const_cast<void*>(a.input)) + 6 * sizeof(u64) / sizeof(u16);
  u16* const second = first + m * up_to_8(k);
  const u64 share = (m + 8 * Tile::cluster - 1) / (8 * Tile::cluster) * 8;
  u16* const held = reinterpret_cast<u16*>(const_cast<u64*>(sizes + 6)) + m * up_to_8(k);
  u16* const w = sizes[4] ? held : second;
  const TensorMap a_map{first, k, m, up_to_8(k), share}, w_map{w, w_columns, w_rows, up_to_8(w_columns), 64};
  const void* bias = sizes[5] ? second + w_rows * up_to_8(w_columns) : nullptr;
  const MatmulArguments m_arguments{bias, u32(m), u32(n), u32(k), 0, 0, nullptr, u32(sizes[3])};
  kernel(w_map, a_map, m_arguments, a);
}
