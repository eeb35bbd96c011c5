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
}  // namespace twin

inline void prefetch(const TensorMap& map) { twin::check(map); }

namespace twin {
// 8 rows of a box on their way, between the matrix and shared memory.
struct Piece {
  TensorMap map;
  u32 x, y;
  char* shared;

  template <class Visit>
  void visit(u64 columns, Visit visit) const {
    for (u32 r = 0; r < 8; ++r)
      for (u32 c = 0; c < 64; ++c) {
        const bool inside = x + c < columns && y + r < map.rows;
        u16* const global = inside ? map.base + (y + r) * map.leading + x + c : nullptr;
        visit(reinterpret_cast<u16*>(shared + r * 128 + (c / 8 ^ r) * 16) + c % 8, global);
      }
  }

  // Whether the row of an element ends after its first byte.
  bool ends_within(const u16* global) const {
    return map.is_odd && global && u64(global - map.base) % map.leading + 1 == map.columns;
  }

  static void load(const simulator::Copy& copy) {
    const Piece& piece = *static_cast<const Piece*>(copy.from);
    piece.visit(piece.map.columns, [&](u16* there, const u16* global) {
      const u16 v = global ? load_as(simulator::view(copy.read), global) : 0;
      store_as(simulator::view(copy.written), there, piece.ends_within(global) ? u16(v & 0xff) : v);
    });
    simulator::Copy done = copy;
    done.nbytes = 1024;
    Mbarrier::complete(done);
  }

  // If a row ends within 16 bytes, the hardware writes all of these 16.
  static void store(const simulator::Copy& copy) {
    const Piece& piece = *static_cast<const Piece*>(copy.from);
    piece.visit((piece.map.columns + 7) / 8 * 8, [&](const u16* here, u16* global) {
      if (global) store_as(simulator::view(copy.written), global, load_as(simulator::view(copy.read), here));
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
}  // namespace twin

inline void tensor_load(void* shared, const TensorMap& map, u32 x, u32 y, Mbarrier& loaded, u32 blocks) {
  for (u32 block = 0; blocks >> block; ++block) {
    if ((blocks >> block & 1) == 0) continue;
    twin::add_pieces(map, x, y, shared, [&](twin::Piece* piece) {
      piece->shared = twin::shared_of_block(block, piece->shared);
      simulator::self().copies.push_back({.kind = simulator::Copy::bulk_load,
                                          .to = nullptr,
                                          .from = piece,
                                          .nbytes = 0,
                                          .read = simulator::async_global,
                                          .written = simulator::async_shared,
                                          .mbarrier = twin::shared_of_block(block, &loaded),
                                          .complete = twin::Piece::load});
    });
  }
  twin::after_access();
}

inline void tensor_load(void* shared, const TensorMap& map, u32 x, u32 y, Mbarrier& loaded) {
  tensor_load(shared, map, x, y, loaded, 1 << block_in_cluster());
}

inline void tensor_store(const TensorMap& map, u32 x, u32 y, const void* shared) {
  auto& me = simulator::self();
  twin::add_pieces(map, x, y, shared, [&](const twin::Piece* piece) {
    me.copies.push_back({.kind = simulator::Copy::bulk_store,
                         .to = nullptr,
                         .from = piece,
                         .nbytes = 0,
                         .read = simulator::async_shared,
                         .written = simulator::async_global,
                         .group = me.copy_groups,
                         .complete = twin::Piece::store});
  });
  twin::after_access();
}

inline void commit_bulk_stores() { ++simulator::self().copy_groups; }

namespace twin {
// Reads the source of a store now. The store itself comes later.
inline void read_source(simulator::Copy& copy) {
  const auto keep = [&](const void* from, u32 nbytes) {
    const simulator::Observer reader = simulator::view(copy.read);
    char* const kept = simulator::make_memory(nbytes);
    for (u32 at = 0; at < nbytes; at += sizeof(u64))
      store_as(reader, reinterpret_cast<u64*>(kept + at),
               load_as(reader, reinterpret_cast<const u64*>(static_cast<const char*>(from) + at)));
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

template <int Pending>
inline void wait_for_bulk_sources() {
  auto& me = simulator::self();
  for (simulator::Copy& copy : me.copies)
    if (copy.kind == simulator::Copy::bulk_store && copy.group + Pending < me.copy_groups && !copy.source_is_read)
      twin::read_source(copy);
  simulator::fence(simulator::async_shared, simulator::generic);
  twin::after_access();
}

