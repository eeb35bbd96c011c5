// Packs of 16 bytes as elements: unpacked to fp32, summed in an order, rounded once. And tensors as packs.
//
// A pack that a loop loads under a condition is declared as zeros, `Pack p = {}`. Else the compiler keeps what an
// earlier iteration may have left in it, in registers, through all loops around.
#pragma once
#include "device/sync/kernel_order.cuh"

// Elements of bfloat16. By any thread: `unpack` widens a word to fp32, and `round` rounds fp32 to a word, to nearest
// even, with any NaN as the canonical one. They touch no memory.
struct bf16 {
  using Storage = u16;
  static DEVICE void unpack(u32 word, float* v) {
    v[0] = __uint_as_float(word << 16);
    v[1] = __uint_as_float(word & 0xffff0000u);
  }
  static DEVICE u32 round(const float* v) { return bf16x2_from_floats(v[0], v[1]); }
};

// The same for elements of IEEE half precision. By any thread.
struct fp16 {
  using Storage = u16;
  static DEVICE void unpack(u32 word, float* v) { floats_from_fp16x2(word, v[0], v[1]); }
  static DEVICE u32 round(const float* v) { return fp16x2_from_floats(v[0], v[1]); }
};

// The same for elements of single precision, whose bits stay as they are. By any thread.
struct fp32 {
  using Storage = u32;
  static DEVICE void unpack(u32 word, float* v) { v[0] = __uint_as_float(word); }
  static DEVICE u32 round(const float* v) { return __float_as_uint(v[0]); }
};

// Internal: for operands of products: a sign, four bits of exponent and three of mantissa.
struct e4m3 {
  using Storage = unsigned char;
};

// Elements of one byte, of kernels that move and do not add.
struct byte {
  using Storage = unsigned char;
};

// Elements of T in 4 bytes.
template <class T>
constexpr int elements_per_word = sizeof(u32) / sizeof(typename T::Storage);
// Elements of T in a pack.
template <class T>
constexpr int elements_per_pack = 4 * elements_per_word<T>;

// 8 bytes that move as one access.
using HalfPack = Words<2>;

// What holds as many elements of Out as a pack has of T: a pack, or half of one.
template <class T, class Out>
using PackOf = Words<elements_per_pack<T> / elements_per_word<Out>>;
template <class P>
constexpr u32 in_a_pack = sizeof(Pack) / sizeof(P);

// Instead of an epilogue: leaves the sum as it is. By any thread.
struct Identity {
  DEVICE float operator()(int, float v) const { return v; }
};

template <class A, class B>
constexpr bool are_same = false;
template <class A>
constexpr bool are_same<A, A> = true;

// Internal: element w of ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), the ranks' fp32 packs as a binary tree. The host's
// order is `tree_sum` in the package's leaf_tree.py.
template <int Count>
DEVICE float sum_of_tree(const Pack* part, int w) {
  if constexpr (Count == 1)
    return __uint_as_float(part->word[w]);
  else
    return sum_of_tree<Count / 2>(part, w) + sum_of_tree<Count / 2>(part + Count / 2, w);
}

// An order in which a kernel adds word w of the ranks' packs: part[0] + part[1] + ... + part[N - 1] in fp32. By any
// thread. An addition turns any NaN into 0x7fffffff, and so does an epilogue (epilogue.cuh). So a NaN result, once
// rounded, is the canonical NaN of its dtype, and never the sentinel (sentinel.cuh).
struct RankOrder {
  template <class T, int N>
  static DEVICE void add(const Pack (&part)[N], int w, float* total) {
    constexpr int E = elements_per_word<T>;
    T::unpack(part[0].word[w], total);
    for (int r = 1; r < N; ++r) {
      float v[E];
      T::unpack(part[r].word[w], v);
      for (int e = 0; e < E; ++e) total[e] += v[e];
    }
  }
};

// The same as a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), of fp32 and 2, 4 or 8 ranks. By any thread.
struct TreeOrder {
  template <class T, int N>
  static DEVICE void add(const Pack (&part)[N], int w, float* total) {
    static_assert(elements_per_word<T> == 1 && (N & (N - 1)) == 0, "a tree adds fp32 of 2, 4 or 8 ranks");
    total[0] = sum_of_tree<N>(part, w);
  }
};

// By any thread: the sum of N ranks' packs in fp32, in an order, then the epilogue, rounded to Out. Touches no memory.
template <class T, int N, class Order, class Out, class Epilogue = Identity>
DEVICE PackOf<T, Out> sum_in_order(const Pack (&part)[N], const Epilogue& epilogue = {}) {
  constexpr int E = elements_per_word<T>, words = elements_per_word<Out> / E;  // of T, that make one of Out
  PackOf<T, Out> result;
#pragma unroll
  for (int w = 0; w < 4; w += words) {
    float total[words * E];
#pragma unroll
    for (int i = 0; i < words; ++i) Order::template add<T, N>(part, w + i, total + i * E);
#pragma unroll
    for (int e = 0; e < words * E; ++e) total[e] = epilogue(w * E + e, total[e]);
    result.word[w / words] = Out::round(total);
  }
  return result;
}

// By any thread: sum_in_order in rank order, rounded to T, as the exact ops are specified.
template <class T, int N, class Epilogue = Identity>
DEVICE Pack sum_in_rank_order(const Pack (&part)[N], const Epilogue& epilogue = {}) {
  return sum_in_order<T, N, RankOrder, T>(part, epilogue);
}

// Internal: the sum of a number over a warp, the same in all lanes: neighbours first, then pairs, and so on, as sums of
// slots in graphar/numerics/norms.py.
DEVICE float sum_of_warp(float v) {
  for (int step = 1; step < 32; step *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  return v;
}

// By any thread: the packs of so many elements; the last one may be part empty.
template <class T>
DEVICE u64 pack_count(u64 numel) {
  return (numel + elements_per_pack<T> - 1) / elements_per_pack<T>;
}

// By any thread: the size of the first of `parts` equal parts of `units`: a multiple of `Line`. The last parts may have
// fewer units, or none.
template <class Index, int Line>
DEVICE Index equal_share(Index units, Index parts) {
  return (units + parts * Line - 1) / (parts * Line) * Line;
}

// Packs of a 128-byte line, at which shards begin: a warp's stores over the link take longer if they touch one more.
constexpr int line = 8;

// A caller's tensor as packs, of any alignment and numel. Whole aligned packs move as 16 bytes, or half packs as 8;
// others element by element, out of line to keep the kernels short. Past the end of the tensor the last pack reads as
// zeros and is not written. By any thread, after wait_for_previous_kernel. All its accesses are weak: they order
// nothing, and peers see a store only after a signal (2). `load` and `store` take the index of a pack.
template <class T, class P = Pack>
struct Tensor {
  using Storage = typename T::Storage;
  static constexpr int words = sizeof(P) / 4, E = words * elements_per_word<T>;
  Storage* base;
  u64 numel;
  u64 whole;  // packs [0, whole) may move as 16 bytes

  DEVICE Tensor(const void* p, u64 n)
      : base(static_cast<Storage*>(const_cast<void*>(p))),
        numel(n),
        whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : n / E) {}

  // Internal: (16).
  DEVICE u32 hold() { return ::hold(base) | ::hold(whole); }

  DEVICE P load(u64 i) const {
    return i < whole ? reinterpret_cast<const P*>(base)[i] : load_elements(base + i * E, elements_of(i));
  }

  DEVICE void store(u64 i, const P& p) const {
    if (i < whole)
      reinterpret_cast<P*>(base)[i] = p;
    else
      store_elements(base + i * E, elements_of(i), p);
  }

  // By any thread: the store, weak, of a pack that is whole and aligned.
  DEVICE void store_whole(u32 i, const P& p) const { reinterpret_cast<P*>(base)[i] = p; }

  // By any thread: stores, weak, into the same tensor on N ranks, aligned there as here, this rank's next peer first.
  template <int N>
  DEVICE void store_to_all(char* const* bases, int rank, u64 i, const P& p) const {
    if (i < whole) {
      for (int hop = 1; hop <= N; ++hop) reinterpret_cast<P*>(bases[(rank + hop) % N])[i] = p;
    } else {
#pragma unroll 1
      for (int hop = 1; hop <= N; ++hop) at(bases[(rank + hop) % N]).store(i, p);
    }
  }

  // By any thread: the same tensor on another rank, with the same alignment.
  DEVICE Tensor at(const void* p) const {
    Tensor there = *this;
    there.base = static_cast<Storage*>(const_cast<void*>(p));
    return there;
  }

  // By any thread: how many elements of pack i, below pack_count, lie in the tensor.
  DEVICE u32 elements_of(u64 i) const { return min(numel - i * E, u64(E)); }

  // Internal: the loads of packs that are not whole and aligned.
  static __device__ __noinline__ P load_elements(const void* begin, u32 count) {
    const Storage* const from = static_cast<const Storage*>(begin);
    P p = {};
    if (in_words(from, count)) {
      for (int w = 0; w < words; ++w) p.word[w] = reinterpret_cast<const u32*>(from)[w];
      return p;
    }
    for (int e = 0; e < E; ++e)
      if (e < count) p.word[e * sizeof(Storage) / 4] |= u32(from[e]) << e * sizeof(Storage) % 4 * 8;
    return p;
  }

  // Internal: their stores.
  static __device__ __noinline__ void store_elements(Storage* to, u32 count, P p) {
    if (in_words(to, count)) {
      for (int w = 0; w < words; ++w) reinterpret_cast<u32*>(to)[w] = p.word[w];
      return;
    }
    for (int e = 0; e < E; ++e)
      if (e < count) to[e] = Storage(p.word[e * sizeof(Storage) / 4] >> e * sizeof(Storage) % 4 * 8);
  }

  // Internal: whether they move as words.
  static DEVICE bool in_words(const Storage* at, u32 count) { return count == E && reinterpret_cast<u64>(at) % 4 == 0; }
};

// By any thread: whether the packs `first`, `first` + `stride`, ... below `end` are whole and aligned in both tensors.
template <class A, class B>
DEVICE bool are_whole(const A& a, const B& b, u32 first, u32 end, u32 stride) {
  const u64 whole = min(a.whole, b.whole);
  return end <= whole || (first < whole && first + stride >= end);
}

// A caller's tensor of whole packs, of any alignment. By any thread, with weak accesses, as Tensor.
template <class T>
struct WholePacks {
  using Storage = typename T::Storage;
  static constexpr int E = elements_per_pack<T>;
  Storage* base;

  DEVICE explicit WholePacks(const void* p) : base(static_cast<Storage*>(const_cast<void*>(p))) {}

  DEVICE Pack load(u64 i) const {
    return aligned() ? reinterpret_cast<const Pack*>(base)[i] : Tensor<T>::load_elements(base + i * E, E);
  }

  DEVICE void store(u64 i, const Pack& p) const {
    if (aligned())
      reinterpret_cast<Pack*>(base)[i] = p;
    else
      Tensor<T>::store_elements(base + i * E, E, p);
  }

  DEVICE bool aligned() const { return reinterpret_cast<u64>(base) % 16 == 0; }
};

// By any thread: the elements of the part of `rank`, in a tensor at `whole`, that this launch handles.
template <class T>
DEVICE Tensor<T> part_of(const void* whole, const Arguments& a, int rank) {
  return {static_cast<const typename T::Storage*>(whole) + a.begin[rank], a.count[rank]};
}
