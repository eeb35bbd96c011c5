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

// A call gives the gradient of normed rows as input, that of rows (the input: none), the rows, the weight and the groups
// as tensors; and eps, the weight's offset, and how many rows and groups there are as numbers. The output is the gradient
// of rows, or of the weight.
inline void call(void (*kernel)(NormGradientArguments), Arguments a) {
  const auto& [tensor, scalar, columns, skipped, first_row, first_col, pitch] = a.epilogue;
  NormGradientArguments all{};
  all.of_normed = a.input;
  all.of_summed = tensor[0] == a.input ? nullptr : tensor[0];
  all.summed = tensor[1];
  all.weight = tensor[2];
  all.of_rows = a.output;
  all.groups = static_cast<float*>(const_cast<void*>(tensor[3]));
  all.of_weight = a.output;
  all.rows = scalar[2];
  all.columns = columns;
  all.row_groups = scalar[3];
  all.with_weight = true;
  all.eps = scalar[0];
  all.weight_offset = scalar[1];
  kernel(all);
}

// A call gives the bytes of LossArguments as the tensor. Each address is there an offset in the input, or in the output
// if bit 62 is set, plus one; 0: null.
inline void call(void (*kernel)(LossArguments), Arguments a) {
  LossArguments all;
  std::memcpy(&all, a.epilogue.tensor[0], sizeof all);
  const auto place = [&](auto& pointer) {
    u64 at;
    std::memcpy(&at, &pointer, sizeof at);
    const u64 base = reinterpret_cast<u64>(at >> 62 ? a.output : a.input), address = base + (at << 2 >> 2) - 1;
    if (at) std::memcpy(&pointer, &address, sizeof at);
  };
  place(all.logits), place(all.target), place(all.partials), place(all.gathered), place(all.results);
  place(all.state), place(all.entropy), place(all.top1), place(all.total), place(all.upstream), place(all.gradient);
  kernel(all);
}

}  // namespace simulator
