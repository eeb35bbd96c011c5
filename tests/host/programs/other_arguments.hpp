// How the simulator calls kernels whose arguments are others than those that a case has (graphar's kernels.hpp).
#pragma once
#include <algorithm>
#include <cstring>

#include "device/arguments.cuh"

namespace simulator {

// A call gives the bytes of a row of each tensor as numbers of the epilogue. The tensors follow one another in input and
// output, without gaps, so they begin at any byte.
inline void call(void (*kernel)(TupleArguments), Arguments a) {
  TupleArguments all{};
  static_cast<Arguments&>(all) = a;
  u64 row_nbytes = 0, whole_rows = 0;
  for (float nbytes : a.epilogue.scalar) row_nbytes += nbytes;
  for (u32 r = 0; r < a.world_size; ++r) {
    all.rows[r] = a.count[r] / row_nbytes;
    all.first_row[r] = a.begin[r] / row_nbytes;
    whole_rows += all.rows[r];
  }
  std::fill(all.count, all.count + max_ranks, 0);
  for (u64 t = 0, before = 0; t < max_tensors && a.epilogue.scalar[t] != 0; before += all.row_nbytes[t++]) {
    all.inputs[t] = static_cast<const char*>(a.input) + all.rows[a.rank] * before;
    all.outputs[t] = static_cast<char*>(a.output) + whole_rows * before;
    all.row_nbytes[t] = a.epilogue.scalar[t];
    for (u32 r = 0; r < a.world_size; ++r) all.count[r] += (all.rows[r] * all.row_nbytes[t] + 15) / 16 * 16;
  }
  kernel(all);
}

// A call gives residual, weight, sums, and the scale or scales as tensors, and eps and the weight's offset as numbers.
inline void call(void (*kernel)(NormArguments), Arguments a) {
  NormArguments all{};
  static_cast<Arguments&>(all) = a;
  const auto written = [&](int i) { return const_cast<void*>(a.epilogue.tensor[i]); };
  all.residual = a.epilogue.tensor[0];
  all.weight = a.epilogue.tensor[1];
  all.summed = written(2);
  all.scale = all.scales = static_cast<float*>(written(3));  // a kernel uses one of them
  all.columns = a.epilogue.columns;
  all.skipped = a.epilogue.skipped;
  all.eps = a.epilogue.scalar[0];
  all.weight_offset = a.epilogue.scalar[1];
  all.epilogue = {};
  kernel(all);
}

// A call gives the bytes of the arguments as the tensor. They begin with so many addresses. Each is there an offset in the
// input, or in the output if bit 62 is set, plus one; 0: null.
template <int addresses, class Own>
void call_with_own(void (*kernel)(Own), const Arguments& a) {
  Own all;
  std::memcpy(&all, a.epilogue.tensor[0], sizeof all);
  for (u64* at = reinterpret_cast<u64*>(&all); at < reinterpret_cast<u64*>(&all) + addresses; ++at)
    if (*at) *at = reinterpret_cast<u64>(*at >> 62 ? a.output : a.input) + (*at << 2 >> 2) - 1;
  kernel(all);
}
inline void call(void (*kernel)(NormGradientArguments), Arguments a) { call_with_own<7>(kernel, a); }
inline void call(void (*kernel)(LossArguments), Arguments a) { call_with_own<11>(kernel, a); }

}  // namespace simulator
