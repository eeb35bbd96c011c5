// A stack of its own for each fiber, and the switch from one to another.
//
// swapcontext makes a system call for the signal mask each time. So only the first switch to a fiber is by setcontext.
// The scheduler, not this file, informs the sanitizers.
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <utility>

namespace simulator {

class Context {
 public:
  // The first switch here calls `entry`, which must not return.
  void begin(void* stack, size_t nbytes, void (*entry)()) {
    getcontext(&first_);
    first_.uc_stack = {.ss_sp = stack, .ss_flags = 0, .ss_size = nbytes};
    makecontext(&first_, entry, 0);
    is_new_ = true;
  }

  void switch_to(Context& other) {
    if (__builtin_setjmp(place_) == 0) other.go_on();
  }

 private:
  // A function of its own, since the function that has a __builtin_setjmp may have no __builtin_longjmp.
  [[gnu::noinline]] void go_on() {
    if (std::exchange(is_new_, false)) setcontext(&first_);
    __builtin_longjmp(place_, 1);
  }

  ucontext_t first_;
  bool is_new_ = false;
  void* place_[5];  // of the last switch from here: what __builtin_setjmp keeps
};

}  // namespace simulator
