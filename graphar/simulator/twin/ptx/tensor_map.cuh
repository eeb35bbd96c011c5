// The host's twin of cuda_src/device/ptx/tensor_map.cuh: boxes that travel in pieces of 8 rows, each at any later time.
#pragma once
#include "device/ptx/tma.cuh"

template const bool twin::has_async_proxy<>;

// Columns are counted in 16 bits, whatever an element has. Of the last one only a byte lies in a matrix with an odd
// number of bytes in a row.
struct TensorMap {
  u16* base;
  u64 columns, rows, leading, box_rows, element_nbytes = 2;
  bool is_odd = false;
};

namespace twin {
// The hardware may not be given a map that nobody has filled.
inline void check(const TensorMap& map) {
  if (map.base == nullptr) std::abort();
}

// 8 rows of a box on their way, between the matrix and shared memory.
struct Piece {
  TensorMap map;
  u32 x, y;
  char* shared;

  // 8 elements at a time: how many of them are in the matrix, and where.
  template <class Visit>
  void visit(Visit visit) const {
    for (u32 r = 0; r < 8; ++r)
      for (u64 c = x; c < x + 64u; c += 8) {
        const u64 count = y + r < map.rows && c < map.columns ? min(map.columns - c, u64(8)) : 0;
        visit(shared + r * 128 + ((c - x) / 8 ^ r) * 16, count, map.base + (y + r) * map.leading + c);
      }
  }

  static void load(const simulator::Copy& copy) {
    const Piece& piece = *static_cast<const Piece*>(copy.from);
    piece.visit([&](char* there, u64 count, const u16* global) {
      u16 eight[8] = {};
      if (count) copy_as(simulator::view(copy.read), nullptr, eight, global, 2 * count);
      // Whether the row ends after the first byte of this element.
      if (piece.map.is_odd && count && u64(global - piece.map.base) % piece.map.leading + count == piece.map.columns)
        eight[count - 1] &= 0xff;
      copy_as(nullptr, simulator::view(copy.written), there, eight, sizeof eight);
    });
    simulator::Copy done = copy;
    done.nbytes = 1024;
    Mbarrier::complete(done);
  }

  // If a row ends within 16 bytes, the hardware writes all of these 16.
  static void store(const simulator::Copy& copy) {
    const Piece& piece = *static_cast<const Piece*>(copy.from);
    piece.visit([&](const char* here, u64 count, u16* global) {
      if (count) copy_as(simulator::view(copy.read), simulator::view(copy.written), global, here, 16);
    });
  }
};

template <class Add>
inline void add_pieces(const TensorMap& map, u32 x, u32 y, const void* shared, Add add) {
  check(map);
  char* const box = static_cast<char*>(const_cast<void*>(shared));
  if (shared_address(box) % 1024) std::abort();
  for (u32 r = 0; r < map.box_rows; r += 8)
    add(new (simulator::make_memory(sizeof(Piece))) Piece{map, u32(x * map.element_nbytes / 2), y + r, box + r * 128});
}

// Reads the source of a store now. The store itself comes later.
inline void read_source(simulator::Copy& copy) {
  const auto keep = [&](const void* from, u32 nbytes) {
    char* const kept = simulator::make_memory(nbytes);
    copy_as(simulator::view(copy.read), nullptr, kept, from, nbytes);
    return kept;
  };
  copy.source_is_read = true;
  if (copy.complete == Piece::store) {
    Piece* const piece = new (simulator::make_memory(sizeof(Piece))) Piece(*static_cast<const Piece*>(copy.from));
    piece->shared = keep(piece->shared, 1024);
    copy.from = piece;
  } else {
    copy.from = keep(copy.from, copy.nbytes);
  }
}
}  // namespace twin

inline void prefetch(const TensorMap& map) { twin::check(map); }

inline void tensor_load(void* shared, const TensorMap& map, u32 x, u32 y, Mbarrier& loaded,
                        u32 blocks = 1 << block_in_cluster()) {
  for (u32 block = 0; blocks >> block; ++block) {
    if ((blocks >> block & 1) == 0) continue;
    twin::add_pieces(map, x, y, shared, [&](twin::Piece* piece) {
      piece->shared = twin::shared_of_block(block, piece->shared);
      twin::issue_load(nullptr, piece, 0, simulator::async_global, twin::shared_of_block(block, &loaded),
                       twin::Piece::load);
    });
  }
  twin::after_access();
}

inline void tensor_store(const TensorMap& map, u32 x, u32 y, const void* shared) {
  twin::add_pieces(map, x, y, shared, [](const twin::Piece* piece) {
    twin::issue_store(nullptr, piece, 0, twin::Piece::store);
  });
  twin::after_access();
}

inline void commit_bulk_stores() { ++simulator::self().copy_groups; }

template <int Pending>
inline void wait_for_bulk_sources() {
  auto& me = simulator::self();
  for (simulator::Copy& copy : me.copies)
    if (copy.kind == simulator::Copy::bulk_store && copy.group + Pending < me.copy_groups && !copy.source_is_read)
      twin::read_source(copy);
  simulator::fence(simulator::async_shared, simulator::generic);
  twin::after_access();
}
