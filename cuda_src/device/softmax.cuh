// Sums of exponentials over a vocabulary that ranks divide: what a lane of a leaf adds, and how lanes, leaves and ranks
// are merged. numerics/softmax.py of the package specifies each operation. The compiler contracts none.
#pragma once
#include "device/ptx/codec.cuh"

// LANES, PACK and PACKS_OF_STEP in numerics/softmax.py, and LEAVES in numerics/leaf_tree.py.
constexpr int softmax_lanes = 64;  // of a leaf
constexpr int softmax_packs = 4;   // of 8 elements, that a lane takes in a step
constexpr int softmax_leaves = 8;  // of the vocabulary

// What a row needs beside its maximum and its sum of exponentials.
enum Also { nothing, sum_of_logits, entropy_and_top1 };

DEVICE float no_logit() { return __uint_as_float(0xff800000u); }  // -inf

// A word of such elements.
template <class T>
constexpr u32 no_logits = 0xff800000u;
template <>
inline constexpr u32 no_logits<bf16> = 0xff80ff80u;
template <>
inline constexpr u32 no_logits<fp16> = 0xfc00fc00u;

DEVICE float larger(float a, float b) {
  return __uint_as_float(larger(fp32{}, __float_as_uint(a), __float_as_uint(b)));
}

// d, or -88 if it is less, whose exponential is 0: so are products with it. NaN stays NaN.
DEVICE float clamped(float d) { return larger(d, -88.0f); }

// exp(d) = p x power for a clamped d. A sum takes it as fma(p, power, sum).
struct Exponential {
  float p, power;
  DEVICE explicit Exponential(float d) {
    constexpr float log2e = 0x1.715476p+0f, to_integer = 12582912.0f;
    const float shifted = __fmaf_rn(d, log2e, to_integer);
    const float f = __fmaf_rn(d, log2e, -__fsub_rn(shifted, to_integer));
    p = __fmaf_rn(0x1.5bba14p-10f, f, 0x1.3cea88p-7f);
    p = __fmaf_rn(p, f, 0x1.c6b752p-5f);
    p = __fmaf_rn(p, f, 0x1.ebf9bcp-3f);
    p = __fmaf_rn(p, f, 0x1.62e42ap-1f);
    p = __fmaf_rn(p, f, 1.0f);
    power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
  }
  DEVICE operator float() const { return __fmul_rn(p, power); }
};

// What is subtracted from the elements whose maximum is m: if they are all -inf, their exponentials are then 0.
DEVICE float reference_of(float m) { return m == no_logit() ? 0.0f : m; }

// A node of the tree. `top1` is a column of the vocabulary.
struct SoftmaxNode {
  float m = no_logit(), s = 0, sum_x = 0, sum_xe = 0;
  u32 top1 = 0;

  // Scales what has been summed beside m to the reference r of a larger maximum.
  template <Also also>
  DEVICE void move_to(float r) {
    const float delta = clamped(__fsub_rn(m, r)), factor = Exponential(delta);
    if constexpr (also == entropy_and_top1) sum_xe = __fmul_rn(__fmaf_rn(s, delta, sum_xe), factor);
    s = __fmul_rn(s, factor);
  }
};

// Of neighbours. `a` has the lower columns.
template <Also also>
DEVICE SoftmaxNode merge(const SoftmaxNode& a, const SoftmaxNode& b) {
  const bool second = b.m > a.m;
  const float small_s = second ? a.s : b.s, large_s = second ? b.s : a.s;
  SoftmaxNode both;
  both.m = larger(a.m, b.m);
  const float delta = clamped(__fsub_rn(second ? a.m : b.m, reference_of(both.m))), factor = Exponential(delta);
  both.s = __fmaf_rn(small_s, factor, large_s);
  if constexpr (also == sum_of_logits) both.sum_x = __fadd_rn(a.sum_x, b.sum_x);
  if constexpr (also == entropy_and_top1) {
    const float moved = __fmaf_rn(small_s, delta, second ? a.sum_xe : b.sum_xe);
    both.sum_xe = __fmaf_rn(moved, factor, second ? b.sum_xe : a.sum_xe);
    both.top1 = second ? b.top1 : a.top1;
  }
  return both;
}

// The node of `count` neighbours: 1, 2, 4 or 8. The nodes are overwritten.
template <Also also>
DEVICE SoftmaxNode merge_all(SoftmaxNode (&node)[softmax_leaves], u32 count) {
  for (int step = 1; step < softmax_leaves; step *= 2)
    for (int i = 0; i + step < softmax_leaves; i += 2 * step)
      if (step < count && i < count) node[i] = merge<also>(node[i], node[i + step]);
  return node[0];
}

// The logarithm of a sum of exponentials, in fp64: `log` in numerics/softmax.py.
DEVICE double log_of_sum(float s) {
  const u32 bits = __float_as_uint(s);
  int k = int(bits >> 23) - 126;
  double c = __uint_as_float((bits & 0x7fffff) | 0x3f000000);
  if (c < 0.70710678118654757) c += c, --k;
  const double r = __ddiv_rn(c - 1, c + 1), square = __dmul_rn(r, r);
  double series = 1.0 / 15;
  for (int odd = 13; odd > 0; odd -= 2) series = __dadd_rn(__dmul_rn(series, square), 1.0 / odd);
  const double log = __dadd_rn(__dmul_rn(double(k), 0.69314718055994530942), __dmul_rn(r + r, series));
  return s == 0 ? double(no_logit()) : s == s ? log : double(s);
}

// Whether a target is a column that is no padding, or one of rows without a loss.
struct Target {
  long long column;
  bool ignored, valid;
  DEVICE Target(const LossArguments& a, u64 row) : column(a.target[row]) {
    ignored = a.may_ignore && column == a.ignore_index;
    valid = !ignored && column >= 0 && column < a.vocab_size;
  }
};

// A node and the target's x as a rank's partial: `width` in numerics/softmax.py.
template <Also also>
DEVICE void store_partial(const LossArguments& a, u64 row, const SoftmaxNode& node, float x) {
  float* const to = a.partials + row * a.width;
  to[0] = node.m, to[1] = node.s, to[2] = x;
  if constexpr (also == sum_of_logits) to[3] = node.sum_x;
  if constexpr (also == entropy_and_top1) {
    if (a.with_entropy) to[3] = node.sum_xe;
    if (a.with_top1) to[a.width - 1] = node.m == node.m ? float(node.top1) : -1.0f;
  }
}

// Internal: of a partial of another rank.
template <Also also>
DEVICE SoftmaxNode load_partial(const LossArguments& a, u64 row, u32 rank) {
  const float* const from = a.gathered + (u64(rank) * a.rows + row) * a.width;
  SoftmaxNode node;
  node.m = from[0], node.s = from[1];
  if constexpr (also == sum_of_logits) node.sum_x = from[3];
  if constexpr (also == entropy_and_top1) {
    if (a.with_entropy) node.sum_xe = from[3];
    if (a.with_top1) node.top1 = u32(from[a.width - 1]);
  }
  return node;
}

// Rounded, with any NaN as the canonical one: fp64 has NaNs of both signs.
DEVICE float rounded(double v) { return v == v ? float(v) : __uint_as_float(0x7fffffff); }

// Writes the results of a row, whose target has the logit x: `finish` in numerics/softmax.py.
template <Also also>
DEVICE void store_results(const LossArguments& a, u64 row, const Target& target, const SoftmaxNode& node, float x) {
  const double m = node.m, log_s = log_of_sum(node.s), nan = __uint_as_float(0x7fffffff);
  double result = target.valid ? __dsub_rn(__dsub_rn(x, m), log_s) : nan;
  if (a.is_loss) {
    const double lse = __dadd_rn(m, log_s), all = a.label_smoothing;
    result = __dmul_rn(1 - all, -result);
    if constexpr (also == sum_of_logits)
      result = __dsub_rn(result, __dmul_rn(all, __dsub_rn(__ddiv_rn(node.sum_x, double(a.vocab_size)), lse)));
    if (a.lse_square_scale != 0) result = __dadd_rn(result, __dmul_rn(a.lse_square_scale, __dmul_rn(lse, lse)));
    if (target.ignored) result = 0;
  }
  const float loss = rounded(result);
  a.results[row] = loss;
  if (a.rows == 1 && !a.is_per_row) {  // the sum of the rows, as softmax_results_total has it of several
    const float rows = !target.ignored;
    a.state[2] = rows;
    a.total[0] = a.is_mean ? __fdiv_rn(loss, rows) : loss;
  }
  a.state[2 * row] = node.m, a.state[2 * row + 1] = node.s;
  if constexpr (also == entropy_and_top1) {
    if (a.with_entropy) a.entropy[row] = rounded(__dsub_rn(log_s, __ddiv_rn(node.sum_xe, double(node.s))));
    if (a.with_top1) a.top1[row] = node.m == node.m ? (long long)(node.top1) : -1;
  }
}
