// Codecs: values to codes and back, and scales, in registers; how lanes find a bucket's largest value together, and how
// words of codes and scales move, in all layouts. graphar/numerics/codec_reference.py specifies them.
//
// The compiler neither contracts nor reorders these operations (__fmaf_rn and so on): all machines give the same bits.
#pragma once
#include "device/ptx/codec.cuh"

// fp32 to e4m3 and back. e4m3 has a sign, four bits of exponent and three of mantissa, no infinity; its largest is 448.
// Rounds to nearest, ties to even. For magnitudes up to 464.
DEVICE u32 e4m3_from_float(float v) {
  const u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffff;
  const u32 normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384)) - 0x46800000u;  // units of 2^-9
  return (bits >> 24 & 0x80) | (magnitude < 0x3c800000u ? subnormal : normal);
}

#if !(__CUDA_ARCH__ >= 890)
DEVICE u32 e4m3x2_from_floats(float low, float high) { return e4m3_from_float(low) | e4m3_from_float(high) << 8; }

// Through fp16, whose exponent bias is larger by 8.
DEVICE void floats_from_e4m3x2(u32 v, float& low, float& high) {
  const u32 spread = (v << 8 & 0xff00) | (v << 16 & 0xff000000u);
  floats_from_fp16x2((spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u), low, high);
  low = __fmul_rn(low, 256);
  high = __fmul_rn(high, 256);
}
#endif

// For any two floats: magnitudes beyond 448, infinities included, become 448. A NaN must have the sign plus.
DEVICE u32 saturated_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return e4m3x2_from_floats(low, high);
#else
  const auto saturated = [](float v) -> u32 {
    const u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    return e4m3_from_float(__uint_as_float((bits & 0x80000000u) | min(magnitude, 0x43e00000u)));
  };
  return saturated(low) | saturated(high) << 8;
#endif
}

enum Scheme { absmax, minmax };
enum Rounding { nearest, stochastic };

constexpr int run_numel = 8;  // consecutive elements that a lane codes at a time

// The random bits depend on these and on the index in the tensor.
struct Noise {
  u64 seed;
  u32 call;
  u32 source;  // the rank, or noise_of_sum
};

constexpr u32 noise_of_sum = 0xff;

// 16 bits for each element of run `index`, the first lowest. Philox-4x32-7 passes BigCrush (Salmon et al., 2011).
DEVICE void random_halves(const Noise& noise, u64 index, u32 (&word)[4]) {
  u32 key0 = u32(noise.seed), key1 = u32(noise.seed >> 32);
  u32 c0 = u32(index), c1 = u32(index >> 32), c2 = noise.call, c3 = noise.source;
  for (int round = 0; round < 7; ++round) {
    const u64 product0 = u64(0xd2511f53u) * c0, product1 = u64(0xcd9e8d57u) * c2;
    c0 = u32(product1 >> 32) ^ c1 ^ key0;
    c1 = u32(product1);
    c2 = u32(product0 >> 32) ^ c3 ^ key1;
    c3 = u32(product0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// Bits on the wire. A scale is a positive number, at least `smallest_scale`, or the canonical NaN.
constexpr u32 smallest_scale = 0x00800000;
template <class S>
constexpr u32 no_scale = sizeof(typename S::Storage) == 2 ? 0x7fff : 0x7fffffff;

DEVICE u32 round_up(bf16, float positive) { return (__float_as_uint(positive) + 0xffff) >> 16; }
DEVICE u32 round_up(fp32, float positive) { return __float_as_uint(positive); }

DEVICE u32 round_down(bf16, float v) {
  const u32 bits = __float_as_uint(v);
  return (bits + (bits >> 31 ? 0xffff : 0)) >> 16;
}
DEVICE u32 round_down(fp32, float v) { return __float_as_uint(v); }

DEVICE float number(bf16, u32 bits) { return __uint_as_float(bits << 16); }
DEVICE float number(fp32, u32 bits) { return __uint_as_float(bits); }

constexpr u32 bf16_ones = 0x3f803f80;  // 1 in both halves of a word

template <int Bits>
struct Int {
  static constexpr int bits = Bits;
  template <Scheme S>
  static constexpr int largest = (1 << (S == minmax ? Bits : Bits - 1)) - 1;

  // Adds codes 8 j .. 8 j + 7 to zeros: integers in the low bits of floats from 2^23 to 2^24, minus those in `base`.
  template <Scheme S, Rounding R>
  static DEVICE void encode(const float (&v)[run_numel], float inverse, const u32 (&random)[4], int j,
                            u32 (&word)[Bits]) {
    constexpr float round_at_one = 12582912;  // 1.5 x 2^23
    constexpr u32 base = 0x4b400000u - (S == absmax ? largest<S> : 0);
    for (int e = 0; e < run_numel; ++e) {
      float t;
      if (R == nearest) {
        t = __fmaf_rn(v[e], inverse, round_at_one);
      } else {
        const u32 half = e % 2 ? random[e / 2] >> 16 : random[e / 2] & 0xffff;
        t = __fmaf_rn(v[e], inverse, __uint_as_float(0x43000000u | half));  // 128 + half / 2^16
        t = __fadd_rd(t, round_at_one - 128);
      }
      const u32 code = __float_as_uint(t);
      const int at = (run_numel * j + e) * Bits, w = at / 32, s = at % 32;
      word[w] += (code << s) - (base << s);
      if (s + Bits > 32) word[w + 1] += (code - base) >> (32 - s);
    }
  }

  // The same codes as numbers, without the offset.
  template <Scheme S>
  static DEVICE void decode(const u32 (&word)[Bits], int j, float (&v)[run_numel]) {
    for (int e = 0; e < run_numel; ++e) {
      const Raised code = raised(word, (run_numel * j + e) * Bits);
      v[e] = __fadd_rn(code.sum, -code.power - (S == absmax ? largest<S> : 0));
    }
  }

  // Codes 8 j + 2 pair and the next, of absmax: without the offset, divided by `divisor`, as bf16 numbers.
  static constexpr u32 divisor = Bits == 8 ? 0x42804280 : bf16_ones;  // in each half; 64 or 1
  static DEVICE u32 decode_pair(const u32 (&word)[Bits], int j, int pair) {
    const int at = (run_numel * j + 2 * pair) * Bits;
    if (Bits == 8) {
      // A byte alone is a number in units of 2^-133, subnormal or not. This multiplies by 2^127, and adds -127 / 64.
      return fma_bf16x2(__byte_perm(word[at / 32], 0, at % 32 ? 0x4342 : 0x4140), 0x7f007f00, 0xbffebffe);
    }
    const Byte low = byte_of(word, at), high = byte_of(word, at + Bits);
    const u32 bytes = __byte_perm(low.word, high.word, low.index * 0x11 + (high.index + 4) * 0x1100);
    const u32 units = (1u << low.bit) + (0x10000u << high.bit);  // of the codes
    const u32 powers = 0x43004300 - (low.bit << 7) - (high.bit << 23);  // 2^7, less for codes at higher bits
    const u32 raised = choose_bits(((1u << Bits) - 1) * units, bytes, powers);
    return fma_bf16x2(raised, bf16_ones, (powers + largest<absmax> * units) | 0x80008000);
  }

 private:
  // The byte that holds the code at bit `at`, and its lowest bit there: it fits into the 7 bits of a bf16 mantissa.
  struct Byte {
    u32 word;
    int index, bit;
  };

  static DEVICE Byte byte_of(const u32 (&word)[Bits], int at) {
    constexpr int window = 8 - Bits < 1 ? 1 : 8 - Bits;
    const int w = at / 32, s = at % 32, shift = s % 8 / window * window;
    const u64 both = u64(s + Bits > 32 ? word[w + 1] : 0) << 32 | word[w];
    return {u32(both >> shift), s / 8, s % 8 - shift};
  }

  // A power of two, and its sum with the code at bit `at`, which is put into the mantissa.
  struct Raised {
    float power, sum;
  };

  static DEVICE Raised raised(const u32 (&word)[Bits], int at) {
    constexpr int window = 24 - Bits;  // of the mantissa's bits that may be a code's lowest
    constexpr u32 mask = (1u << Bits) - 1, at_bit_0 = 0x4b000000;
    const int w = at / 32, s = at % 32;
    if (Bits == 8)
      return {__uint_as_float(at_bit_0), __uint_as_float(__byte_perm(word[w], at_bit_0, 0x7440 + s / 8))};
    const int shift = s / window * window, bit = s - shift;
    const u64 both = u64(s + Bits > 32 ? word[w + 1] : 0) << 32 | word[w];
    const u32 power = at_bit_0 - (bit << 23);
    return {__uint_as_float(power), __uint_as_float(choose_bits(mask << bit, u32(both >> shift), power))};
  }
};

struct E4m3 {
  static constexpr int bits = 8;
  template <Scheme S>
  static constexpr int largest = 448;

  template <Scheme S, Rounding R>
  static DEVICE void encode(const float (&v)[run_numel], float inverse, const u32 (&random)[4], int j, u32 (&word)[8]) {
    for (int e = 0; e < run_numel; e += 2) {
      const float low = __fmul_rn(v[e], inverse), high = __fmul_rn(v[e + 1], inverse);
      u32 pair;
      if (R == nearest)
        pair = e4m3x2_from_floats(low, high);
      else
        pair = cut(low, random[e / 2] & 0xffff) | cut(high, random[e / 2] >> 16) << 8;
      word[2 * j + e / 4] |= pair << 8 * (e % 4);
    }
  }

  template <Scheme S>
  static DEVICE void decode(const u32 (&word)[8], int j, float (&v)[run_numel]) {
    for (int e = 0; e < run_numel; e += 2) floats_from_e4m3x2(word[2 * j + e / 4] >> 8 * (e % 4), v[e], v[e + 1]);
  }

 private:
  // Stochastic rounding: adds random bits below e4m3's last place, which is bit 20 of v x 2^-120, and cuts them off.
  static DEVICE u32 cut(float v, u32 half) {
    const u32 bits = __float_as_uint(__fmul_rn(v, 0x1p-120f));
    return (bits >> 24 & 0x80) | ((bits & 0x7fffffff) + (half << 4) + 8) >> 20;
  }
};

// graphar.Codec mirrors it.
template <class Code_, int Bucket, class Scale_, Scheme S, Rounding R, bool Feedback = false>
struct Codec {
  using Code = Code_;
  using Scale = Scale_;
  static constexpr int bits = Code::bits;
  static constexpr int bucket = Bucket;
  static constexpr Scheme scheme = S;
  static constexpr Rounding rounding = R;
  static constexpr bool feedback = Feedback;
  static constexpr float largest_code = Code::template largest<S>;

  // A product with a 16-bit scale is exact, so a fused multiply-add gives the bits of two operations.
  static constexpr bool exact_product = sizeof(typename Scale::Storage) == 2;

  // Derived from a bucket's largest and smallest values.
  struct Range {
    u32 scale, zero;     // as on the wire
    float inverse, low;  // 0 where the bucket has no scale
  };

  static DEVICE Range range(float largest, float smallest) {
    Range b{0, 0, 0, 0};
    if (S == minmax) {
      b.zero = round_down(Scale{}, smallest);
      b.low = number(Scale{}, b.zero);
      largest = __fsub_rn(largest, b.low);
    }
    constexpr float r = 1.0f / largest_code;
    const int wanted = max(int(__float_as_uint(__fmul_rn(largest, r))), int(smallest_scale));
    b.scale = round_up(Scale{}, __uint_as_float(wanted));
    b.inverse = __frcp_rn(number(Scale{}, b.scale));
    if (R == stochastic) b.inverse = __fmul_rn(b.inverse, 1 - 0x1p-20f);
    // So far below infinity that every code decodes to a finite number, and a fused multiply-add gives the same bits.
    const bool in_reach = __fmul_rn(number(Scale{}, b.scale), largest_code) < __uint_as_float(0x7f800000);
    if (wanted >= 0x7f800000 || !in_reach) b = {no_scale<Scale>, 0, 0, 0};
    return b;
  }

  // Decodes codes 8 j .. 8 j + 7 of a lane into `v`, or adds their values to it.
  static DEVICE void decode(const u32 (&code)[bits], int j, float scale, float zero, float (&v)[run_numel],
                            bool add = false) {
    float unit[run_numel];
    Code::template decode<S>(code, j, unit);
    for (int e = 0; e < run_numel; ++e) {
      if (S == absmax && add && exact_product) {
        v[e] = __fmaf_rn(unit[e], scale, v[e]);
        continue;
      }
      const float product = __fmul_rn(unit[e], scale);
      const float value = S == absmax     ? product
                          : exact_product ? __fmaf_rn(unit[e], scale, zero)
                                          : __fadd_rn(product, zero);
      v[e] = add ? __fadd_rn(v[e], value) : value;
    }
  }
};

// Whether a value, rounded to T, is the product of two bf16 numbers, rounded to bf16.
template <class C, class T>
constexpr bool has_bf16_products = false;
template <int Bits, int Bucket, Rounding R, bool Feedback>
constexpr bool has_bf16_products<Codec<Int<Bits>, Bucket, bf16, absmax, R, Feedback>, bf16> = true;

constexpr u32 all_lanes = 0xffffffffu;
DEVICE int lane() { return threadIdx.x % 32; }

enum Largest { magnitudes, values };

template <class T, Largest what>
DEVICE u32 larger_of(u32 a, u32 b) {
  return what == magnitudes ? larger_magnitude(T{}, a, b) : larger(T{}, a, b);
}

// The larger of `mine` and of the value `sent` by lane `lane() ^ mask`.
template <class T, Largest what>
DEVICE u32 largest_of_lanes(u32 mine, u32 sent, int mask) {
  return larger_of<T, what>(mine, __shfl_xor_sync(all_lanes, sent, mask));
}

// Four neighbouring lanes each have a word of four rows. Lane l gets the largest of row l % 4.
template <class T, Largest what>
DEVICE u32 largest_of_four_lanes(const u32 (&value)[4]) {
  const bool upper = lane() & 2, odd = lane() & 1;
  const u32 first = largest_of_lanes<T, what>(upper ? value[2] : value[0], upper ? value[0] : value[2], 2);
  const u32 second = largest_of_lanes<T, what>(upper ? value[3] : value[1], upper ? value[1] : value[3], 2);
  return largest_of_lanes<T, what>(odd ? second : first, odd ? first : second, 1);
}

template <class T, Largest what>
DEVICE float largest_of_word(u32 word) {
  float v[2];
  T::unpack(word, v);
  for (int e = 1; e < elements_per_word<T>; ++e)
    v[0] = __uint_as_float(larger_of<fp32, what>(__float_as_uint(v[0]), __float_as_uint(v[e])));
  return v[0];
}

// Calls `visit(address, words)` for `Count` words in pieces of 4, 2 and 1. Word w lies `pitch` x w after `at`. A
// piece's words are neighbours, and lanes' pieces follow each other; with lane = 0 in all lanes they share one.
template <int Count, class Word, class Visit>
DEVICE void visit_pieces(char* at, int pitch, int lane, Word (&word)[Count], Visit visit) {
  constexpr int two = Count / 4 * 4, one = Count / 2 * 2;
  for (int w = 0; w < two; w += 4) visit(reinterpret_cast<Words<4>*>(at + pitch * w) + lane, word + w);
  if constexpr (Count & 2) visit(reinterpret_cast<Words<2>*>(at + pitch * two) + lane, word + two);
  if constexpr (Count & 1) visit(reinterpret_cast<Words<1>*>(at + pitch * one) + lane, word + one);
}

// Visitors with ordinary accesses.
struct Store {
  template <int Count>
  DEVICE void operator()(Words<Count>* address, const u32* words) const {
    Words<Count> piece;
#pragma unroll
    for (int w = 0; w < Count; ++w) piece.word[w] = words[w];
    *address = piece;
  }
};

struct Load {
  template <int Count>
  DEVICE void operator()(const Words<Count>* address, u32* words) const {
    const Words<Count> piece = *address;
    for (int w = 0; w < Count; ++w) words[w] = piece.word[w];
  }
};
