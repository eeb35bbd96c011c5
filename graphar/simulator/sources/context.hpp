// A stack of its own for each fiber, and the switch from one to another.
//
// On x86-64 a switch exchanges stack pointers, since swapcontext makes a system call for the signal mask each time. The
// scheduler, not this file, informs the sanitizers.
#pragma once
#include <cstddef>
#include <cstdint>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simulator {

#ifdef __x86_64__

// Saves what a function must leave as it was, and the stack pointer, and goes on where `to` was saved.
extern "C" void simulator_switch_stacks(void** from, void* to);
asm(R"(
  .text
  .type simulator_switch_stacks, @function
simulator_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simulator_switch_stacks, .-simulator_switch_stacks
)");

class Context {
 public:
  // The first switch here calls `entry`, which must not return.
  void begin(void* stack, size_t nbytes, void (*entry)()) {
    uint64_t* const caller = reinterpret_cast<uint64_t*>(static_cast<char*>(stack) + nbytes) - 3;  // a call's alignment
    caller[0] = 0;                                  // none, for stack unwinding
    caller[-1] = reinterpret_cast<uint64_t>(entry);
    caller[-2] = 0;                                 // rbp: no frame either
    stack_pointer_ = caller - 7;                    // six registers lie below the return address
  }

  void switch_to(Context& other) { simulator_switch_stacks(&stack_pointer_, other.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

#else

class Context {
 public:
  // The first switch here calls `entry`, which must not return.
  void begin(void* stack, size_t nbytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = nbytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
};

#endif

}  // namespace simulator
