// The host's twin of cuda_src/device/ptx/wgmma.cuh: products are carried out in order, at any time until a wait for
// them returns. A thread computes its own sums. As on the GPU, its whole warp waits.
#pragma once
#include "device/pack.cuh"
#include "device/ptx/tma.cuh"

namespace twin {
struct QueuedProduct {
  void (*carry_out)(float* sums, u64 a, u64 b, bool first);
  float* sums;
  u64 a, b;
  bool first;
  u32 group;
};

// Of one thread.
struct Products {
  QueuedProduct queue[16]{};
  u32 begin = 0, end = 0, groups = 0;
  u32 barriers = 0;     // of its warpgroup it has passed
  u32 waits = 0;        // for products that have returned
  bool fenced = false;  // since the sums may have been accessed

  void carry_out_one() {
    const QueuedProduct& it = queue[begin++ % 16];
    it.carry_out(it.sums, it.a, it.b, it.first);
  }
  void carry_out_but(u32 pending) {
    while (begin < end && queue[begin % 16].group + pending < groups) carry_out_one();
  }
  void perhaps_carry_out_one() {
    if (begin < end && simulator::random(4) == 0) carry_out_one();
  }
};

inline Products& products() {
  static constinit Products of_threads[most_blocks][512]{};  // 350 MB, of which a run touches little
  return of_threads[block_of_all()][threadIdx.x];
}

// Products are the warp's, so the reads of all its lanes are over once its wait returns. No other access is ordered.
struct OrderOfProducts {
  std::atomic<u32> words[32][2];
};
inline void end_wait_of_warp() {
  auto& order = static_shared<OrderOfProducts>().words[threadIdx.x / 32][products().waits++ % 2];
  simulator::release_view(&order, simulator::products, simulator::products);
  simulator::warp_barrier(false);
  simulator::acquire_view(&order, simulator::products);
  simulator::fence(simulator::products, simulator::async_shared);
}

[[gnu::always_inline]] inline float decoded(bf16, u16 bits) { return __builtin_bit_cast(float, u32(bits) << 16); }
[[gnu::always_inline]] inline float decoded(fp16, u16 bits) { return __builtin_bit_cast(_Float16, bits); }
[[gnu::always_inline]] inline float decoded(e4m3, unsigned char bits) {
  const u32 magnitude = bits & 0x7f;
  const float v = magnitude == 0x7f ? NAN : __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
  return __builtin_bit_cast(float, __builtin_bit_cast(u32, v) | (bits & 0x80u) << 24);
}

// An operand, by the bits of its descriptor.
template <class T>
struct Operand {
  u32 begin, leading, stride;
  const char* boxes = dynamic_shared_boxes() - 1024;

  explicit Operand(u64 bits)
      : begin((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1) std::abort();
  }

  // Row (or column) i: 16 bytes at a time where its elements follow one another.
  template <bool by_columns, u32 Count>
  [[gnu::always_inline]] void read(u32 i, float (&elements)[Count]) const {
    typename T::Storage bits[by_columns ? 1 : 16 / sizeof(typename T::Storage)];
    constexpr u32 together = sizeof bits / sizeof bits[0];
    for (u32 k = 0; k < Count; k += together) {
      u32 at = begin + (by_columns ? i / 64 * leading + i % 64 * 2 + k / 8 * stride + k % 8 * 128
                                   : i / 8 * stride + i % 8 * 128 + k * sizeof bits[0]);
      at ^= at / 128 % 8 * 16;
      if (__tsan_read_range) __tsan_read_range(boxes + at, sizeof bits);
      __builtin_memcpy(bits, boxes + at, sizeof bits);
      for (u32 j = 0; j < together; ++j) elements[k + j] = decoded(T{}, bits[j]);
    }
  }
};

// The addresses of all lanes of the warp, valid until the lanes meet again. The stores to them are ordered by nothing.
inline auto places_of_warp(void* shared) -> std::atomic<void*> (&)[32] {
  static std::atomic<void*> places[most_blocks][16][32];
  auto& of_warp = places[block_of_all()][threadIdx.x / 32];
  of_warp[threadIdx.x % 32].store(shared, std::memory_order_relaxed);
  simulator::warp_barrier(false);
  return of_warp;
}

template <class Word>
inline Word* place_in(const std::atomic<void*>& place) {
  return static_cast<Word*>(place.load(std::memory_order_relaxed));
}
}  // namespace twin

template <int N, bool a_by_columns, bool b_by_columns>
struct Product {
  template <class T>
  static void add(T, float (&sums)[N / 2], u64 a, u64 b, bool first) {
    twin::Products& mine = twin::products();
    if (!mine.fenced) std::abort();
    mine.queue[mine.end++ % 16] = {carry_out<T>, sums, a, b, first, mine.groups};
    mine.perhaps_carry_out_one();
  }

  // Adds in the order of graphar.numerics.leaf_tree.product: the products of one instruction are a step. Optimised in
  // every program, since runs spend most of their time here.
  template <class T>
  [[gnu::no_sanitize("thread"), gnu::optimize("O2")]] static void carry_out(float* sums, u64 a, u64 b, bool first) {
    const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    simulator::fence(simulator::async_shared, simulator::products);
    constexpr u32 step = 32 / sizeof(typename T::Storage);
    const twin::Operand<T> rows(a), columns(b);
    const simulator::As as(simulator::view(simulator::products));
    float row[2][step], column[step];
    for (u32 r = 0; r < 2; ++r) rows.template read<a_by_columns>(warp * 16 + lane / 4 + r * 8, row[r]);
    for (u32 c = 0; c < N / 4; ++c) {
      float sum[2] = {};
      columns.template read<b_by_columns>(c / 2 * 8 + lane % 4 * 2 + c % 2, column);
      for (u32 k = 0; k < step; ++k)
        for (u32 r = 0; r < 2; ++r) sum[r] += row[r][k] * column[k];
      for (u32 r = 0; r < 2; ++r) {
        float& to = sums[c / 2 * 4 + r * 2 + c % 2];
        to = first ? sum[r] : to + sum[r];
      }
    }
  }
};

inline void fence_sums() { twin::products().fenced = true; }

inline void commit_products() {
  ++twin::products().groups;
  twin::after_access();
}

inline void wait_for_all_but_last_products() {
  twin::products().carry_out_but(1);
  twin::end_wait_of_warp();
}

template <int Count>
inline void wait_for_all_but_last_products(float (&)[Count]) {
  twin::products().fenced = false;
  wait_for_all_but_last_products();
}

template <int Count>
inline void wait_for_products(float (&)[Count]) {
  while (simulator::random(16)) simulator::step();  // products take their time
  twin::products().carry_out_but(0);
  twin::products().fenced = false;
  twin::end_wait_of_warp();
}

inline u32 word_of_sum(float sum) { return __float_as_uint(sum); }

template <int Registers>
inline void shrink_registers() {}
template <int Registers>
inline void grow_registers() {}

// Two words alternate, as for barriers of the block.
inline void sync_warpgroup(u32 barrier) {
  static std::atomic<u32> words[twin::most_blocks][16][2];
  auto& word = words[twin::block_of_all()][barrier][twin::products().barriers++ % 2];
  const u32 all = (word.load(std::memory_order_relaxed) / 128 + 1) * 128;
  twin::release(word);
  twin::wait_for_arrivals(word, all);
}

inline void store_matrices(void* shared, const u32 (&words)[4]) {
  auto& of_warp = twin::places_of_warp(shared);
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; ++i) twin::place_in<u32>(of_warp[8 * i + lane / 4])[lane % 4] = words[i];
  simulator::warp_barrier(false);
}

inline void store_transposed_matrices(void* shared, const u32 (&words)[2]) {
  auto& of_warp = twin::places_of_warp(shared);
  const u32 lane = threadIdx.x % 32;
  for (u32 i = 0; i < 4; ++i)
    twin::place_in<u16>(of_warp[i / 2 * 8 + lane % 4 * 2 + i % 2])[lane / 4] = u16(words[i / 2] >> i % 2 * 16);
  simulator::warp_barrier(false);
}
