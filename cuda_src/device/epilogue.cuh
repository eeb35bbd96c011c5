// Epilogues: an elementwise expression of a sum in fp32, generated from its text, before the sum is rounded.
//
// Not contracted. Functions that code.py of the package lists as transcendental are approximate; others as on the CPU.
#pragma once
#include "device/pack.cuh"

// The indices of an element in a tensor, seen as rows of its last dimension.
struct Indices {
  u64 index, row, col;
};

// Those in the whole tensor of an element in this launch's row and column.
DEVICE Indices indices_of(const EpilogueArguments& e, u64 row, u64 col) {
  return {(e.first_row + row) * e.pitch + e.first_col + col, e.first_row + row, e.first_col + col};
}

DEVICE bool is_nan(float x) { return x != x; }
DEVICE float truth(bool condition) { return condition ? 1.0f : 0.0f; }
DEVICE float maximum(float a, float b) { return a > b || is_nan(a) ? a : b; }
DEVICE float minimum(float a, float b) { return a < b || is_nan(a) ? a : b; }

template <class T>
DEVICE float rounded(float x) {
  const float pair[2] = {x, 0.0f};
  float v[2];
  T::unpack(T::round(pair), v);
  return v[0];
}

DEVICE float sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }
DEVICE float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x))); }
DEVICE float gelu(float x) {
  return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, erff(__fmul_rn(x, 0.70710678118654752f))));
}
DEVICE float gelu_tanh(float x) {
  const float cube = __fmul_rn(__fmul_rn(x, x), x);
  const float inner = __fmul_rn(0.79788456080286536f, __fadd_rn(x, __fmul_rn(0.044715f, cube)));
  return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, tanhf(inner)));
}
DEVICE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
DEVICE float elu(float x) { return x > 0.0f ? x : expm1f(x); }
DEVICE float mish(float x) { return __fmul_rn(x, tanhf(softplus(x))); }
DEVICE float hardswish(float x) {
  return __fdiv_rn(__fmul_rn(x, minimum(maximum(__fadd_rn(x, 3.0f), 0.0f), 6.0f)), 6.0f);
}

// Element i of an operand of any dtype, aligned to its size.
template <class T>
DEVICE float element(const void* tensor, u64 i) {
  float v[2];
  T::unpack(static_cast<const typename T::Storage*>(tensor)[i], v);
  return v[0];
}

// The epilogue of one pack's sums. Construct it before a wait, to overlap its loads of operands; past the end: zeros.
template <class T, class Expression>
struct Epilogue {
  static constexpr int E = elements_per_pack<T>;
  const EpilogueArguments& arguments;
  Indices indices[E];
  float operand[E][Expression::operands ? Expression::operands : 1];

  DEVICE Epilogue(const Arguments& a, u64 pack) : Epilogue(a, pack, a.numel, 0) {}

  // For a launch that handles `numel` elements of a tensor after the first `skipped`.
  DEVICE Epilogue(const Arguments& a, u64 pack, u64 numel, u64 skipped) : arguments(a.epilogue) {
    const u32 count = min(numel - pack * E, u64(E));
    const u64 first = skipped + pack * E, row = first / arguments.columns;
    Indices at = indices_of(arguments, row, first - row * arguments.columns);
    const u64 end = arguments.first_col + arguments.columns, beside = arguments.pitch - arguments.columns;
#pragma unroll
    for (u32 e = 0; e < E; ++e) {
      indices[e] = at;
#pragma unroll
      for (float& number : operand[e]) number = 0.0f;
      if (e < count) Expression::load(arguments, at, operand[e]);
      const bool ends = at.col + 1 == end;
      at = {at.index + 1 + (ends ? beside : 0), at.row + ends, ends ? arguments.first_col : at.col + 1};
    }
  }

  // The value for element e. An fp32 NaN becomes the canonical one here; for other types rounding does that.
  DEVICE float operator()(int e, float v) const {
    const float result = Expression::value(arguments, indices[e], operand[e], v);
    return elements_per_word<T> == 1 && is_nan(result) ? __uint_as_float(0x7fffffffu) : result;
  }
};

template <class T>
struct Epilogue<T, Identity> : Identity {
  DEVICE Epilogue(const Arguments&, u64, u64 = 0, u64 = 0) {}
};

// The same of a warpgroup tile's sums, from `row` and `column` on. Those past `rows` and `columns` have no operands.
template <class Expression, int Count>
DEVICE void apply_to_rows(const EpilogueArguments& e, u32 row, u32 rows, u32 column, u32 columns,
                          float (&sums)[Count]) {
  row += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const u32 my_row = row + (i & 2) * 4, my_column = column + i / 4 * 8 + (i & 1);
    const Indices at = indices_of(e, my_row, my_column);
    float operand[Expression::operands ? Expression::operands : 1] = {};
    if (my_row < rows && my_column < columns) Expression::load(e, at, operand);
    sums[i] = Expression::value(e, at, operand, sums[i]);
  }
}
