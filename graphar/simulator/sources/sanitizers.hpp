// Calls that inform the sanitizers when one OS thread switches between stacks.
#pragma once
#include <cstddef>

// Weak: null where no sanitizer is linked. A ThreadSanitizer fiber is a thread to it, and a switch without
// synchronisation leaves the ordering of accesses to the twins.
extern "C" {
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_set_fiber_name(void* fiber, const char* name);
__attribute__((weak)) void __tsan_destroy_fiber(void* fiber);
__attribute__((weak)) void __tsan_switch_to_fiber(void* fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void __tsan_read_range(const void* begin, unsigned long size);
__attribute__((weak)) void __tsan_write_range(void* begin, unsigned long size);
__attribute__((weak)) int __tsan_atomic32_load(const volatile int* address, int order);
__attribute__((weak)) void __tsan_atomic32_store(volatile int* address, int value, int order);
__attribute__((weak)) void __tsan_atomic64_store(volatile long long* address, long long value, int order);
__attribute__((weak)) void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* begin, size_t size);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* begin, size_t size);
}

namespace simulator {

constexpr unsigned without_synchronisation = 1;
constexpr int order_relaxed = 0, order_acquire = 2, order_release = 3;  // ThreadSanitizer's numbers

// AddressSanitizer reports accesses to [begin, end).
inline void forbid(const void* begin, const void* end) {
  if (__asan_poison_memory_region)
    __asan_poison_memory_region(begin, static_cast<const char*>(end) - static_cast<const char*>(begin));
}

inline void allow(const void* begin, const void* end) {
  if (__asan_unpoison_memory_region)
    __asan_unpoison_memory_region(begin, static_cast<const char*>(end) - static_cast<const char*>(begin));
}

}  // namespace simulator
