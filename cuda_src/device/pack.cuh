// A 16-byte pack as elements: unpacked to fp32, summed in rank order, rounded once.
#pragma once
#include "arguments.cuh"

struct bf16 {
  using Storage = u16;
  static __device__ __forceinline__ void unpack(u32 word, float* v) {
    v[0] = __uint_as_float(word << 16);
    v[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ __forceinline__ u32 round(const float* v) { return bf16x2_from_floats(v[0], v[1]); }
};

struct fp16 {
  using Storage = u16;
  static __device__ __forceinline__ void unpack(u32 word, float* v) { floats_from_fp16x2(word, v[0], v[1]); }
  static __device__ __forceinline__ u32 round(const float* v) { return fp16x2_from_floats(v[0], v[1]); }
};

struct fp32 {
  using Storage = u32;
  static __device__ __forceinline__ void unpack(u32 word, float* v) { v[0] = __uint_as_float(word); }
  static __device__ __forceinline__ u32 round(const float* v) { return __float_as_uint(v[0]); }
};

// What is moved and never added.
struct byte {
  using Storage = unsigned char;
};

template <class T>
constexpr int elements_per_word = sizeof(u32) / sizeof(typename T::Storage);
template <class T>
constexpr int elements_per_pack = 4 * elements_per_word<T>;

// In place of an epilogue: what is rounded is the sum itself.
struct Identity {
  __device__ __forceinline__ float operator()(int, float v) const { return v; }
};

template <class Expression>
constexpr bool is_identity = false;
template <>
constexpr bool is_identity<Identity> = true;

// Word w of part[0] + part[1] + ... + part[N - 1], in fp32 and in that order. An addition turns any NaN into 0x7fffffff,
// and so does an epilogue (epilogue.cuh), so a NaN result is the canonical one of its dtype once it is rounded, which is
// never the sentinel (sentinel.cuh).
template <class T, int N>
__device__ __forceinline__ void add_in_rank_order(const Pack (&part)[N], int w, float* total) {
  constexpr int E = elements_per_word<T>;
  T::unpack(part[0].word[w], total);
#pragma unroll
  for (int r = 1; r < N; ++r) {
    float v[E];
    T::unpack(part[r].word[w], v);
#pragma unroll
    for (int e = 0; e < E; ++e) total[e] += v[e];
  }
}

// The sum, then the epilogue, rounded once.
template <class T, int N, class Epilogue = Identity>
__device__ __forceinline__ Pack sum_in_rank_order(const Pack (&part)[N], const Epilogue& epilogue = {}) {
  constexpr int E = elements_per_word<T>;
  Pack result;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float total[E];
    add_in_rank_order<T, N>(part, w, total);
#pragma unroll
    for (int e = 0; e < E; ++e) total[e] = epilogue(w * E + e, total[e]);
    result.word[w] = T::round(total);
  }
  return result;
}

template <class T>
__device__ __forceinline__ u64 pack_count(u64 numel) {
  return (numel + elements_per_pack<T> - 1) / elements_per_pack<T>;
}

// `packs` cut into `parts` equal parts of whole 128-byte lines; the last parts may have fewer packs, or none. A warp's
// stores over the link that straddle one more line take a tenth longer.
__device__ __forceinline__ u64 packs_a_part(u64 packs, u64 parts) {
  constexpr u64 line = 8;
  return (packs + parts * line - 1) / (parts * line) * line;
}

// A caller's tensor as packs. Any alignment and any numel: whole aligned packs move as 16 bytes, the others element by
// element, out of line to keep the kernels short. The missing end of the last pack reads as zeros and is not written.
template <class T>
struct Tensor {
  using Storage = typename T::Storage;
  static constexpr int E = elements_per_pack<T>;
  Storage* base;
  u64 numel;
  u64 whole;  // packs [0, whole) may move as 16 bytes

  __device__ __forceinline__ Tensor(const void* p, u64 n)
      : base(static_cast<Storage*>(const_cast<void*>(p))), numel(n), whole(reinterpret_cast<u64>(p) % 16 ? 0 : n / E) {}

  __device__ __forceinline__ Pack load(u64 i) const {
    return i < whole ? reinterpret_cast<const Pack*>(base)[i] : load_elements(base + i * E, numel - i * E);
  }

  __device__ __forceinline__ void store(u64 i, const Pack& p) const {
    if (i < whole)
      reinterpret_cast<Pack*>(base)[i] = p;
    else
      store_elements(base + i * E, numel - i * E, p);
  }

  // Into the same tensor on N ranks, aligned there as here, this rank's next peer first.
  template <int N>
  __device__ __forceinline__ void store_to_all(char* const* bases, int rank, u64 i, const Pack& p) const {
    if (i < whole) {
#pragma unroll
      for (int hop = 1; hop <= N; ++hop) reinterpret_cast<Pack*>(bases[(rank + hop) % N])[i] = p;
    } else {
#pragma unroll 1
      for (int hop = 1; hop <= N; ++hop) at(bases[(rank + hop) % N]).store(i, p);
    }
  }

  // The same tensor on another rank, where its alignment is this one's.
  __device__ __forceinline__ Tensor at(const void* p) const {
    Tensor there = *this;
    there.base = static_cast<Storage*>(const_cast<void*>(p));
    return there;
  }

  static __device__ __noinline__ Pack load_elements(const Storage* from, u64 count) {
    Pack p = {};
    if (in_words(from, count)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) p.word[w] = reinterpret_cast<const u32*>(from)[w];
      return p;
    }
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (e < count) p.word[e * sizeof(Storage) / 4] |= u32(from[e]) << e * sizeof(Storage) % 4 * 8;
    return p;
  }

  static __device__ __noinline__ void store_elements(Storage* to, u64 count, Pack p) {
    if (in_words(to, count)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) reinterpret_cast<u32*>(to)[w] = p.word[w];
      return;
    }
#pragma unroll
    for (int e = 0; e < E; ++e)
      if (e < count) to[e] = Storage(p.word[e * sizeof(Storage) / 4] >> e * sizeof(Storage) % 4 * 8);
  }

  static __device__ __forceinline__ bool in_words(const Storage* at, u64 count) {
    return count >= E && reinterpret_cast<u64>(at) % 4 == 0;
  }
};

// The part of `rank` in a tensor at `whole`, as far as this launch handles it.
template <class T>
__device__ __forceinline__ Tensor<T> part_of(const void* whole, const Arguments& a, int rank) {
  return {static_cast<const typename T::Storage*>(whole) + a.begin[rank], a.count[rank]};
}
