// softmax_partials: the maximum and the sum of exponentials of each row of a rank's logits, in one pass.
//
//   logits [rows, leaves x columns of a leaf] -> warp of a leaf, lane after lane: packs of 8 elements
//     -> the leaf's lanes, by shuffles -> shared memory -> the leaves of a row as a tree, by shuffles
//     -> the rank's partial of the row; or, if there is one rank, the results of the row
//
// A block has 8 leaves: of one row, or of up to 8 rows if ranks divide the leaves of a row. A warp takes one leaf. If
// there are few rows, a leaf has a warp for each 32 lanes instead, and the blocks of a cluster divide the 8 leaves. An
// element takes 13 instructions, about as many as memory leaves time for. It waits for no rank.
#include "device/softmax.cuh"

constexpr int groups = softmax_lanes / 32;                 // of lanes, which a warp takes one after another
constexpr int step_packs = softmax_packs * softmax_lanes;  // of all lanes

// 8 neighbouring elements of a row.
template <class T>
struct Eight {
  static constexpr int packs = 8 / elements_per_pack<T>, words = 4 * packs, W = elements_per_word<T>;
  u32 word[words];

  // Of each half of a word, or of the word.
  DEVICE u32 largest() const {
    u32 v = word[0];
    for (int w = 1; w < words; ++w) v = larger(T{}, v, word[w]);
    return v;
  }
  DEVICE u32 smallest() const {
    u32 v = word[0];
    for (int w = 1; w < words; ++w) v = smaller(T{}, v, word[w]);
    return v;
  }

  // Makes the elements from `count` on absent.
  DEVICE void keep(u32 count) {
    constexpr u32 bits = 32 / W, mask = ~u32(0) >> (32 - bits);
    for (int e = 0; e < 8; ++e)
      if (e >= count) {
        u32& v = word[e / W];
        v = (v & ~(mask << e % W * bits)) | (no_logits<T> & mask << e % W * bits);
      }
  }
};

// The logits of one row in one leaf, but for padding.
template <class T, bool aligned>
struct Leaf {
  using Storage = typename T::Storage;
  const Storage* base;
  u32 numel, packs;
  u32 first;    // column of the vocabulary
  bool ragged;  // whether some leaf of the row ends within a pack

  // The pack at `from`, of index i, or one `lanes` after it for each k. Aligned leaves consist of whole packs, of which
  // padding is loaded, too.
  DEVICE Eight<T> load(const Storage* from, u32 i, int k) const {
    constexpr int E = elements_per_pack<T>;
    Eight<T> x;
    for (int p = 0; p < x.packs; ++p) {
      Pack pack = {};
      if constexpr (aligned)
        pack = reinterpret_cast<const Pack*>(from)[k * softmax_lanes * x.packs + p];
      else {
        const u32 at = (i + k * softmax_lanes) * 8 + p * E;
        pack = Tensor<T>::load_elements(base + at, at < numel ? min(numel - at, u32(E)) : 0);
      }
      for (int w = 0; w < 4; ++w) x.word[p * 4 + w] = pack.word[w];
    }
    return x;
  }

  // The same, or -inf past the end.
  DEVICE Eight<T> load_if_any(const Storage* from, u32 i, int k) const {
    Eight<T> x;
    for (int w = 0; w < x.words; ++w) x.word[w] = no_logits<T>;
    if (i + k * softmax_lanes < packs) x = load(from, i, k);
    return x;
  }
};

// What lanes have, in a plane for each number.
using LanesOfLeaf = float[softmax_lanes];

// In dynamic shared memory, so that it has the same address in all blocks. `shared_nbytes` in runtime/bind/loss.py.
struct SharedOfSoftmax {
  static constexpr int numbers = 5;
  float leaf[softmax_leaves][numbers];  // merged
  LanesOfLeaf lanes[1];                 // [leaves of the block][planes]
};

template <Also also>
constexpr int planes = also == nothing ? 2 : also == sum_of_logits ? 3 : 4;

template <Also also>
DEVICE void put(LanesOfLeaf* lanes, u32 at, const SoftmaxNode& node) {
  lanes[0][at] = node.m, lanes[1][at] = node.s;
  if constexpr (also == sum_of_logits) lanes[2][at] = node.sum_x;
  if constexpr (also == entropy_and_top1) lanes[2][at] = node.sum_xe, lanes[3][at] = __uint_as_float(node.top1);
}

template <Also also>
DEVICE SoftmaxNode get(const LanesOfLeaf* lanes, u32 at) {
  SoftmaxNode node;
  node.m = lanes[0][at], node.s = lanes[1][at];
  if constexpr (also == sum_of_logits) node.sum_x = lanes[2][at];
  if constexpr (also == entropy_and_top1) node.sum_xe = lanes[2][at], node.top1 = __float_as_uint(lanes[3][at]);
  return node;
}

// A step of one lane: 4 packs. The first has the index i, the next i + lanes, ...
template <class T, Also also, bool scaled, bool aligned>
struct Step {
  static constexpr int W = Eight<T>::W;
  const Leaf<T, aligned>& leaf;
  const float inverse_temperature;
  Eight<T> x[softmax_packs];
  u32 i;

  DEVICE float x_of(float logit) const { return scaled ? __fmul_rn(logit, inverse_temperature) : logit; }

  // Moves the node to the maximum of it and the step. Returns what is then subtracted from elements.
  DEVICE float raise(SoftmaxNode& node) const {
    u32 largest = x[0].largest();
    for (int k = 1; k < softmax_packs; ++k) largest = larger(T{}, largest, x[k].largest());
    float v[W], m = node.m;
    T::unpack(largest, v);
    for (int e = 0; e < W; ++e) m = larger(m, x_of(v[e]));
    if constexpr (also == entropy_and_top1)
      if (m > node.m) node.top1 = leaf.first + first_of(m);
    const float r = reference_of(m);
    if (i >= softmax_lanes) node.template move_to<also>(r);
    node.m = m;
    return r;
  }

  // By a warp: whether all elements are so near to r that no difference has to be clamped.
  DEVICE bool is_near(float r) const {
    u32 smallest = x[0].smallest();
    for (int k = 1; k < softmax_packs; ++k) smallest = smaller(T{}, smallest, x[k].smallest());
    float v[2];
    T::unpack(smallest, v);
    return __all_sync(0xffffffff, __fsub_rn(x_of(v[0]), r) > -88 && __fsub_rn(x_of(v[1]), r) > -88);
  }

  // The leaf's first element of the step that equals m.
  DEVICE u32 first_of(float m) const {
    u32 at = 0;
    for (int k = softmax_packs - 1; k >= 0; --k)
      for (int w = x[k].words - 1; w >= 0; --w) {
        float v[W];
        T::unpack(x[k].word[w], v);
        for (int e = W - 1; e >= 0; --e)
          if (x_of(v[e]) == m) at = (i + k * softmax_lanes) * 8 + w * W + e;
      }
    return at;
  }

  // Adds pack k. If it is `whole`, all of its elements are present, or absent ones do not matter; if it is `near`, none
  // has to be clamped.
  template <bool whole, bool near = false>
  DEVICE void add(SoftmaxNode& node, int k, float r) const {
    for (int w = 0; w < Eight<T>::words; ++w) {
      float v[W];
      T::unpack(x[k].word[w], v);
      for (int e = 0; e < W; ++e) {
        const float logit = x_of(v[e]), unclamped = __fsub_rn(logit, r), d = near ? unclamped : clamped(unclamped);
        const Exponential exponential(d);
        node.s = __fmaf_rn(exponential.p, exponential.power, node.s);
        if constexpr (also == entropy_and_top1) node.sum_xe = __fmaf_rn(exponential, d, node.sum_xe);
        if constexpr (also == sum_of_logits) {
          const bool present = whole || (i + k * softmax_lanes) * 8 + w * W + e < leaf.numel;
          node.sum_x = __fadd_rn(node.sum_x, present ? logit : 0.0f);
        }
      }
    }
  }
};

// By a warp: puts the lanes of the groups [group, end) of a leaf into shared memory. `ignored` reads the target. It is
// called when the loads of the first step are on their way.
template <class T, Also also, bool scaled, bool early, bool aligned, class Ignored>
DEVICE void take(const Leaf<T, aligned>& leaf, float inverse_temperature, u32 group, u32 end, LanesOfLeaf* lanes,
                 const Ignored& ignored) {
  const u32 thread = threadIdx.x % 32, packs = leaf.packs;
  Step<T, also, scaled, aligned> step{leaf, inverse_temperature, {}, group * 32 + thread};
  const auto* at = leaf.base + step.i * 8;
  for (int k = 0; k < softmax_packs; ++k) step.x[k] = leaf.load_if_any(at, step.i, k);
  const bool skips = ignored();
  SoftmaxNode node;
  node.top1 = leaf.first + step.i * 8;
#pragma unroll 1
  for (bool more = true; more;) {
    const u32 begin = step.i - thread;  // the same in all threads
    const bool ends = begin + step_packs >= packs || skips;
    more = !ends || group + 1 < end;
    const u32 next = (ends ? (group + 1) * 32 : begin + step_packs) + thread;
    at += int(next - step.i) * 8;
    if (leaf.ragged && ends)
      for (int k = 0; k < softmax_packs; ++k)
        if (step.i + k * softmax_lanes + 1 == packs) step.x[k].keep(leaf.numel - (packs - 1) * 8);
    // Where warps are few, the next step is on its way while this one is computed; else other warps fill the time.
    Eight<T> following[softmax_packs];
    const auto load = [&](Eight<T>(&into)[softmax_packs]) {
      if (next - thread + (softmax_packs - 1) * softmax_lanes + 32 <= packs) {
        for (int k = 0; k < softmax_packs; ++k) into[k] = leaf.load(at, next, k);
      } else {
        for (int k = 0; k < softmax_packs; ++k) into[k] = leaf.load_if_any(at, next, k);
      }
    };
    if (early && more) load(following);
    const float r = step.raise(node);
    const u32 last = begin + (softmax_packs - 1) * softmax_lanes;
    if (also == sum_of_logits ? last + 32 <= packs && !(leaf.ragged && ends) : last < packs) {
      bool near = false;
      if constexpr (!early && aligned && Eight<T>::W == 2) near = step.is_near(r);  // few warps wait for memory anyway
      if (near) {
        for (int k = 0; k < softmax_packs; ++k) step.template add<true, true>(node, k, r);
      } else {
        for (int k = 0; k < softmax_packs; ++k) step.template add<true>(node, k, r);
      }
    } else {
      for (int k = 0; k < softmax_packs; ++k)
        if (begin + k * softmax_lanes < packs) step.template add<false>(node, k, r);
    }
    if (early) {
      for (int k = 0; k < softmax_packs; ++k) step.x[k] = following[k];
    } else if (more)
      load(step.x);
    if (ends) {
      put<also>(lanes, group * 32 + thread, node);
      ++group;
      node = {};
      node.top1 = leaf.first + next * 8;
    }
    step.i = next;
  }
}

// Out of line, since vocabularies whose leaves are not whole packs, aligned to 16 bytes, are rare.
template <class T, Also also, bool scaled>
__device__ __noinline__ void take_elements(Leaf<T, false> leaf, float inverse_temperature, u32 group, u32 end,
                                           LanesOfLeaf* lanes, bool ignored) {
  take<T, also, scaled, false>(leaf, inverse_temperature, group, end, lanes, [=] { return ignored; });
}

// By a warp: merges the lanes of a leaf, as plain sums beside their maximum.
template <Also also>
DEVICE SoftmaxNode merge_lanes(const LanesOfLeaf* lanes) {
  const u32 thread = threadIdx.x % 32;
  SoftmaxNode node[groups], all;
  for (int g = 0; g < groups; ++g) {
    node[g] = get<also>(lanes, g * 32 + thread);
    all.m = larger(all.m, node[g].m);
  }
  for (int step = 16; step > 0; step /= 2) all.m = larger(all.m, __shfl_xor_sync(0xffffffff, all.m, step));
  const float r = reference_of(all.m);
  all.top1 = ~0u;
  for (int g = 0; g < groups; ++g) {
    if (also == entropy_and_top1 && node[g].m == all.m) all.top1 = min(all.top1, node[g].top1);
    node[g].template move_to<also>(r);
  }
  // The halves of all lanes, then the halves of their sum, and so on.
  const auto sum = [&](float SoftmaxNode::* number) {
    for (int half = groups / 2; half > 0; half /= 2)
      for (int g = 0; g < half; ++g) node[g].*number = __fadd_rn(node[g].*number, node[g + half].*number);
    float v = node[0].*number;
    for (int step = 16; step > 0; step /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
    return v;
  };
  all.s = sum(&SoftmaxNode::s);
  if constexpr (also == sum_of_logits) all.sum_x = sum(&SoftmaxNode::sum_x);
  if constexpr (also == entropy_and_top1) {
    all.sum_xe = sum(&SoftmaxNode::sum_xe);
    for (int step = 16; step > 0; step /= 2) all.top1 = min(all.top1, __shfl_xor_sync(0xffffffff, all.top1, step));
  }
  return all;
}

// By a warp: merges `leaves` neighbours, one of each thread, as a tree. The first of these threads gets it.
template <Also also>
DEVICE SoftmaxNode merge_leaves(SoftmaxNode node, u32 leaves) {
#pragma unroll 1
  for (u32 step = 1; step < leaves; step *= 2) {
    SoftmaxNode other;
    other.m = __shfl_xor_sync(0xffffffff, node.m, step), other.s = __shfl_xor_sync(0xffffffff, node.s, step);
    if constexpr (also == sum_of_logits) other.sum_x = __shfl_xor_sync(0xffffffff, node.sum_x, step);
    if constexpr (also == entropy_and_top1) {
      other.sum_xe = __shfl_xor_sync(0xffffffff, node.sum_xe, step);
      other.top1 = __shfl_xor_sync(0xffffffff, node.top1, step);
    }
    node = merge<also>(node, other);
  }
  return node;
}

// Blocks on an SM, by the registers of a step.
template <class T, Also also, bool spread>
constexpr int at_once = spread ? 2 : elements_per_word<T> == 1 || also != nothing ? 4 : 6;

template <class T, Also also, bool scaled, bool spread>
__global__ void __launch_bounds__(256, at_once<T, also, spread>) softmax_partials(
    const __grid_constant__ LossArguments a) {
  using Storage = typename T::Storage;
  constexpr u32 warps_of_leaf = spread ? groups : 1;
  SharedOfSoftmax& shared = *reinterpret_cast<SharedOfSoftmax*>(dynamic_shared());
  const u32 warp = same_in_warp(threadIdx.x / 32), group = warp % warps_of_leaf, leaf_here = warp / warps_of_leaf;
  const u32 in_cluster = spread ? block_in_cluster() : 0, own = softmax_leaves >> (spread ? a.cluster_log2 : 0);
  const u32 slot = in_cluster * own + leaf_here, leaves_log2 = a.leaves_log2;  // slot: of the 8 leaves
  const u32 first_row = (spread ? blockIdx.x >> a.cluster_log2 : blockIdx.x) << (3 - leaves_log2);
  const u32 row = first_row + (slot >> leaves_log2), begin = (slot & ((1 << leaves_log2) - 1)) * a.leaf_columns;
  LanesOfLeaf* const lanes = shared.lanes + leaf_here * planes<also>;
  const u32 end = spread ? group + 1 : groups;  // of this warp's lanes
  wait_for_previous_kernel();
  release_next_kernel();
  if (row < a.rows) {
    const u32 numel = min(a.leaf_columns, a.real_columns - min(a.real_columns, begin)), packs = (numel + 7) / 8;
    const long long target = a.target[row];
    const auto ignored = [&] { return a.may_ignore && target == a.ignore_index; };
    const Storage* const base = static_cast<const Storage*>(a.logits) + u64(row) * a.columns + begin;
    const u32 first = a.first + begin;
    const bool ragged = (a.real_columns | a.leaf_columns) % 8 != 0;
    const float scale = a.inverse_temperature;
    if (reinterpret_cast<u64>(base) % 16 == 0 && a.leaf_columns % 8 == 0)
      take<T, also, scaled, spread>(Leaf<T, true>{base, numel, packs, first, ragged}, scale, group, end, lanes,
                                    ignored);
    else
      take_elements<T, also, scaled>({base, numel, packs, first, ragged}, scale, group, end, lanes, ignored());
  } else
    for (u32 at = group * 32 + threadIdx.x % 32; at < end * 32; at += 32) put<also>(lanes, at, {});

  // The row of one leaf of each of the first 8 threads, and its target's logit, which comes while lanes are merged.
  const u32 thread = threadIdx.x % softmax_leaves, row_here = first_row + (thread >> leaves_log2);
  const bool stores = in_cluster == 0 && threadIdx.x < softmax_leaves && row_here < a.rows &&
                      (thread & ((1 << leaves_log2) - 1)) == 0;
  float x = 0;
  if (stores) {
    const Target target(a, row_here);
    const u64 column = target.column - a.first;
    if (target.valid && column < a.columns) {
      float v[2];
      T::unpack(static_cast<const Storage*>(a.logits)[u64(row_here) * a.columns + column], v);
      x = __fadd_rn(scaled ? __fmul_rn(v[0], a.inverse_temperature) : v[0], -0.0f);  // makes a NaN the canonical one
    }
  }
  if constexpr (spread) __syncthreads();
  if (group == 0) {
    const SoftmaxNode node = merge_lanes<also>(lanes);
    const float number[] = {node.m, node.s, node.sum_x, node.sum_xe, __uint_as_float(node.top1)};
    if (threadIdx.x % 32 == 0)
      for (int n = 0; n < shared.numbers; ++n) {
        float* const place = &shared.leaf[slot][n];
        if constexpr (spread)
          store_in_cluster(place, 0, number[n]);
        else
          *place = number[n];
      }
  }
  if constexpr (spread) {
    arrive_at_cluster();
    wait_for_cluster();
  } else
    __syncthreads();
  if (in_cluster != 0 || warp != 0) return;
  SoftmaxNode node;
  const float(&number)[SharedOfSoftmax::numbers] = shared.leaf[thread];
  node.m = number[0], node.s = number[1], node.sum_x = number[2], node.sum_xe = number[3];
  node.top1 = __float_as_uint(number[4]);
  node = merge_leaves<also>(node, 1 << leaves_log2);
  if (!stores) return;
  if (a.partials)
    store_partial<also>(a, row_here, node, x);
  else
    store_results<also>(a, row_here, Target(a, row_here), node, x);
}
