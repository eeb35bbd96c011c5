// The kernels that a program has, in the order in which a case numbers them; build.py writes their list. All are called
// with Arguments. A kernel that takes others gets what it lacks from the epilogue of these.
#pragma once
#include <cstring>

#include "device/arguments.cuh"
#if __has_include("other_arguments.hpp")
#include "other_arguments.hpp"  // of the folder that a program is built with: more functions like those below
#endif

extern void (*const kernels[])(Arguments);

namespace simulator {

inline void call(void (*kernel)(Arguments), Arguments a) { kernel(a); }

// A call gives what follows Arguments, of rank by rank, as the first tensor.
inline void call(void (*kernel)(ExchangeArguments), Arguments a) {
  constexpr size_t nbytes = sizeof(ExchangeArguments) - sizeof(Arguments);
  ExchangeArguments all{};
  static_cast<Arguments&>(all) = a;
  std::memcpy(&all.sends, static_cast<const char*>(a.epilogue.tensor[0]) + a.rank * nbytes, nbytes);
  kernel(all);
}

// A kernel as one of the table.
template <auto kernel>
void entry(Arguments a) {
  call(kernel, a);
}

}  // namespace simulator
