// The random numbers of std::mt19937_64, in a third of its time: a compiler vectorises how a whole state is made.
#pragma once
#include <cstddef>
#include <cstdint>

namespace simulator {

class Generator {
 public:
  void seed(uint64_t seed) {
    state_[0] = seed;
    for (size_t i = 1; i < count; ++i) state_[i] = 6364136223846793005u * (state_[i - 1] ^ state_[i - 1] >> 62) + i;
    next_ = count;
  }

  uint64_t operator()() {
    if (next_ == count) refill();
    return tempered_[next_++];
  }

 private:
  static constexpr size_t count = 312, half = count / 2;

  static uint64_t mixed(uint64_t high, uint64_t low, uint64_t far) {
    const uint64_t bits = (high & ~uint64_t(0) << 31) | (low & 0x7fffffff);
    return far ^ bits >> 1 ^ (-(bits & 1) & 0xb5026f5aa96619e9);
  }

  static uint64_t tempered(uint64_t x) {
    x ^= x >> 29 & 0x5555555555555555;
    x ^= x << 17 & 0x71d67fffeda60000;
    x ^= x << 37 & 0xfff7eee000000000;
    return x ^ x >> 43;
  }

  [[gnu::noinline, gnu::optimize("O3")]] void refill() {
    for (size_t i = 0; i < half; ++i) state_[i] = mixed(state_[i], state_[i + 1], state_[i + half]);
    for (size_t i = half; i < count - 1; ++i) state_[i] = mixed(state_[i], state_[i + 1], state_[i - half]);
    state_[count - 1] = mixed(state_[count - 1], state_[0], state_[half - 1]);
    for (size_t i = 0; i < count; ++i) tempered_[i] = tempered(state_[i]);
    next_ = 0;
  }

  uint64_t state_[count], tempered_[count];
  size_t next_ = count;
};

}  // namespace simulator
