// Residual and RMS norm of rows of a sum.
//
//   r = round(sum + residual)
//   n = (r / sqrt(mean(r * r) + eps)) * (weight + offset)
//   normed = round(n), or n * (1 / scale) in e4m3, with the caller's scale, the row's own or the group's: max |n| / 448
//
// A team handles one row at a time. It is a block, or for few rows the C blocks of a cluster, then for one row at most.
// Thread t has the packs t, t + threads, ... of the row. Squares are added in an order that does not depend on the
// launch: slot s of `norm_slots` adds the squares of packs s, s + norm_slots, ..., element by element; then
// neighbouring slots are added in pairs, the pairs in pairs, and so on. Slots without a pack are zeros, so a team needs
// as many threads as a row has packs, rounded up to a power of two: at most `norm_slots`, and half of that in one block
// of a collective kernel, whose threads then have two slots. Nothing is contracted: norms.py gives the same bits.
#pragma once
#include "device/pack.cuh"
#include "device/sync/call.cuh"
#include "device/wire/codec.cuh"

constexpr int norm_slots = 1024;
constexpr int group_columns = 128;  // that share a scale in grouped_fp8

// The format of normed rows; e4m3 is aligned to the bytes of a pack. NORM_OUTPUTS in graphar/numerics/norms.py.
enum NormOutput { like_input, static_fp8, dynamic_fp8, grouped_fp8 };

// One number of each warp of a team, in two places that alternate, at one address in all blocks of a cluster.
// NORM_SHARED_NBYTES in graphar/plan/scratch.py.
using NumbersOfWarps = float[2][norm_slots / 32];

struct Nothing {
  DEVICE void operator()(u32, const Pack&) const {}
};

// T is the type of residual, weight and results. Sum is the type of the sums: T, or fp32, so that only r is rounded.
template <class T, int C, NormOutput O, class Sum = T>
struct RmsNorm {
  static constexpr int E = elements_per_pack<T>, W = elements_per_word<T>;
  static constexpr int sums = E / elements_per_pack<Sum>;  // packs of sums for one pack of T
  static constexpr int together = C >= 4 ? sums : 1;  // of these, as many as registers hold while a thread waits
  static constexpr int own_slots = C == 1 ? 2 : 1;    // of a thread: `thread`, and norm_slots / 2 after it
  const NormArguments& a;
  const u64 numel, skipped;
  const u32 columns = a.columns, packs = columns / E, rows = numel / columns;  // packs of a row
  const u32 team = blockIdx.x / C, teams = gridDim.x / C;
  const u32 thread = C == 1 ? threadIdx.x : block_in_cluster() * blockDim.x + threadIdx.x;  // of the team
  const u32 threads = C * blockDim.x;
  const float eps = a.eps, offset = a.weight_offset;
  const WholePacks<T> residual{element(a.residual, skipped)}, weight{a.weight}, summed{element(a.summed, skipped)};
  const WholePacks<T> normed{a.output};
  Words<E / 4>* const codes = static_cast<Words<E / 4>*>(a.output);  // in e4m3, instead of `normed`
  const float* const caller_scale = a.scale;                         // static_fp8
  float* const scales = a.scales + scales_of(skipped);               // of rows or groups, written
  float by_caller = 0;                                               // one over the caller's scale, of static_fp8
  bool comes;  // false once a sum has not come; such a thread still takes part in barriers
  int turn = 0;

  // Of `numel` elements, behind `skipped` ones that earlier launches have normed. Touches no memory.
  __device__ RmsNorm(const NormArguments& a, bool aborted, u64 numel, u64 skipped = 0)
      : a(a), numel(numel), skipped(skipped), comes(!aborted) {
    if constexpr (C > 1) arrive_at_cluster();
  }

  // By all threads before the first row. Call it after the first pushes, since it waits for memory.
  DEVICE void start() {
    if constexpr (O == static_fp8) by_caller = __fdiv_rn(1.0f, *caller_scale);
    if constexpr (C > 1) wait_for_cluster();  // all blocks run, and have their shared memory
  }

  // By all threads of the team: norms a row. `next(i, sum)` gets the row's sums from pack i on, or with `has_residual`
  // pack i of r; it returns false if one does not come. `then(i, r)` is called with each pack of r.
  template <bool has_residual = false, class Next, class Then = Nothing>
  DEVICE void take(u32 row, Next next, Then then = {}) {
    const u64 start = u64(row) * packs;
    float squares[own_slots] = {};
    Pack mine{}, by{};
    if (thread < packs) by = weight.load(thread);
    for (u32 i = thread; i < packs; i += threads) {
      Pack from = {};
      if constexpr (!has_residual) from = residual.load(start + i);
      Pack sum[has_residual ? 1 : together] = {};
      if (!(comes = comes && next(has_residual ? i : sums * i, sum))) continue;
      // Chosen by value: an index known at run time only would put `squares` into local memory.
      const bool second = has_two_slots() && i & norm_slots / 2;
      float of_slot = squares[0];
      if (second) of_slot = squares[own_slots - 1];
      Pack r;
      if constexpr (has_residual) {
        add_squares(r = sum[0], of_slot);
      } else if constexpr (sums == 1) {
        r = add(sum[0], from, of_slot);
      } else {
        const HalfPack left = add(sum[0], {from.word[0], from.word[1]}, of_slot);
        if (together == 1 && !(comes = next(sums * i + 1, sum))) continue;
        const HalfPack right = add(sum[together - 1], {from.word[2], from.word[3]}, of_slot);
        r = {left.word[0], left.word[1], right.word[0], right.word[1]};
      }
      if (!second) squares[0] = of_slot;
      if (second) squares[own_slots - 1] = of_slot;
      summed.store(start + i, r);
      then(i, r);
      if (i == thread) mine = r;
    }
    const float inverse = inverse_root(squares);
    if constexpr (C > 1) release_next_kernel();  // the team's only row has come: (18) in kernel_order.cuh
    if constexpr (O == like_input) {
      for (u32 i = thread; comes && i < packs; i += threads) {
        if (i != thread) mine = summed.load(start + i), by = weight.load(i);  // which this thread stored
        normed.store(start + i, round(mine, by, inverse));
      }
    } else {
      store_codes(row, mine, by, inverse);
    }
  }

 private:
  static DEVICE const void* element(const void* tensor, u64 i) {
    return static_cast<const typename T::Storage*>(tensor) + i;
  }

  // The scales of the first `numel` elements.
  DEVICE u64 scales_of(u64 numel) const {
    if (O == dynamic_fp8 && numel != 0) return numel / columns;  // a division takes long
    return O == grouped_fp8 ? numel / group_columns : 0;
  }

  DEVICE bool has_two_slots() const { return C == 1 && threads == norm_slots / 2; }

  // Stores the row in e4m3. `mine` and `by` are the thread's first pack of sums and weights.
  DEVICE void store_codes(u32 row, const Pack& mine, const Pack& by, float inverse) {
    const u64 start = u64(row) * packs;
    const auto load = [&](u32 i, float* v) {
      if (i == thread)
        norm(mine, by, inverse, v);
      else
        norm(summed.load(start + i), weight.load(i), inverse, v);  // which this thread stored
    };
    if constexpr (O == grouped_fp8) return store_groups(row, load);
    float by_scale = by_caller;
    if constexpr (O == dynamic_fp8) {
      u32 largest = 0;
      for (u32 i = thread; comes && i < packs; i += threads) {
        float v[E];
        load(i, v);
        largest = max(largest, largest_of(v));
      }
      largest = __reduce_max_sync(0xffffffff, largest);
      largest = __reduce_max_sync(0xffffffff, __float_as_uint(of_warps(__uint_as_float(largest))));
      const float scale = scale_of(largest);
      if (thread == 0 && comes) scales[row] = scale;
      by_scale = __fdiv_rn(1.0f, scale);
    }
    for (u32 i = thread; comes && i < packs; i += threads) {
      float v[E];
      load(i, v);
      codes[start + i] = encode(v, by_scale);
    }
  }

  // The same with a scale for each group: packs of neighbouring lanes, which all take part in shuffles.
  template <class Load>
  DEVICE void store_groups(u32 row, const Load& load) {
    constexpr int lanes = group_columns / E;
    const u32 lane = threadIdx.x % 32;
    for (u32 first = thread - lane; first < packs; first += threads) {
      const u32 i = first + lane;
      const bool mine = comes && i < packs;
      float v[E] = {};
      if (mine) load(i, v);
      u32 largest = largest_of(v);
      for (int step = 1; step < lanes; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
      const float scale = scale_of(largest);
      if (mine && lane % lanes == 0) scales[u64(row) * (packs / lanes) + i / lanes] = scale;
      if (mine) codes[u64(row) * packs + i] = encode(v, __fdiv_rn(1.0f, scale));
    }
  }

  // The bits of the largest magnitude. A NaN compares above all numbers.
  static DEVICE u32 largest_of(const float (&v)[E]) {
    u32 largest = 0;
    for (int e = 0; e < E; ++e) largest = max(largest, __float_as_uint(v[e]) & 0x7fffffff);
    return largest;
  }

  // The scale of a row or a group, from the bits of its largest magnitude.
  static DEVICE float scale_of(u32 largest) {
    if (largest >= 0x7f800000) return __uint_as_float(0x7fffffff);
    constexpr u32 smallest_normal = 0x00800000;
    return __uint_as_float(max(__float_as_uint(__fdiv_rn(__uint_as_float(largest), 448)), smallest_normal));
  }

  // round(sum + residual). Adds its squares to `squares`.
  DEVICE PackOf<Sum, T> add(const Pack& sum, const PackOf<Sum, T>& from, float& squares) const {
    constexpr int S = elements_per_word<Sum>;
    PackOf<Sum, T> result;
    for (int w = 0; w < 4 / sums; ++w) {
      float v[W], more[W];
      for (int e = 0; e < W; e += S) Sum::unpack(sum.word[(w * W + e) / S], v + e);
      T::unpack(from.word[w], more);
      for (int e = 0; e < W; ++e) v[e] = __fadd_rn(v[e], more[e]);
      result.word[w] = T::round(v);
      T::unpack(result.word[w], v);
      for (int e = 0; e < W; ++e) squares = __fadd_rn(squares, __fmul_rn(v[e], v[e]));
    }
    return result;
  }

  static DEVICE void add_squares(const Pack& pack, float& squares) {
    for (int w = 0; w < 4; ++w) {
      float v[W];
      T::unpack(pack.word[w], v);
      for (int e = 0; e < W; ++e) squares = __fadd_rn(squares, __fmul_rn(v[e], v[e]));
    }
  }

  // One over the root of the row's mean square, from all threads' squares.
  DEVICE float inverse_root(const float (&squares)[own_slots]) {
    const float further = own_slots == 2 ? sum_of_warp(squares[own_slots - 1]) : 0;
    const float total = sum_of_warp(of_warps(sum_of_warp(squares[0]), further));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(total, float(columns)), eps)));
  }

  // Exchanges one number of each warp of the team: lane w gets the number of warp w, and other lanes get 0. If threads
  // have two slots, lanes w from 16 on get `further` of warp w - 16. A place is overwritten two exchanges later, and
  // all threads have read it before the barrier in between. After the last exchange no block writes to another.
  DEVICE float of_warps(float own, float further = 0) {
    auto& of_warp = (*reinterpret_cast<NumbersOfWarps*>(dynamic_shared()))[turn];
    turn ^= 1;
    const u32 lane = threadIdx.x % 32;
    if constexpr (C == 1) {
      if (lane == 0) of_warp[thread / 32] = own;
      if (lane == 0 && has_two_slots()) of_warp[(norm_slots / 2 + thread) / 32] = further;
      __syncthreads();
    } else {
      if (lane < C) store_in_cluster(&of_warp[thread / 32], lane, own);
      arrive_at_cluster();
      wait_for_cluster();
    }
    return lane < (has_two_slots() ? norm_slots : threads) / 32 ? of_warp[lane] : 0.0f;
  }

  DEVICE Pack round(const Pack& row, const Pack& by, float inverse) const {
    Pack result;
    for (int w = 0; w < 4; ++w) {
      float v[W];
      norm_word(row.word[w], by.word[w], inverse, v);
      result.word[w] = T::round(v);
    }
    return result;
  }

  DEVICE void norm_word(u32 row, u32 by, float inverse, float* v) const {
    float factor[W];
    T::unpack(row, v);
    T::unpack(by, factor);
    for (int e = 0; e < W; ++e) v[e] = __fmul_rn(__fmul_rn(v[e], inverse), __fadd_rn(factor[e], offset));
  }

  DEVICE void norm(const Pack& row, const Pack& by, float inverse, float* v) const {
    for (int w = 0; w < 4; ++w) norm_word(row.word[w], by.word[w], inverse, v + w * W);
  }

  static DEVICE Words<E / 4> encode(const float (&v)[E], float by_scale) {
    Words<E / 4> result{};
    for (int e = 0; e < E; e += 2)
      result.word[e / 4] |= saturated_e4m3x2(__fmul_rn(v[e], by_scale), __fmul_rn(v[e + 1], by_scale)) << 8 * (e % 4);
    return result;
  }
};
