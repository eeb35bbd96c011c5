// The last steps of each thread, for the report of a failure.
#pragma once
#include <cstdint>
#include <string>

namespace simulator {

struct Step {
  enum Kind { none, load, store, wait } kind = none;
  const char* what = nullptr;  // the primitive's name
  const void* address = nullptr;
  uint32_t nbytes = 0;  // of the value: at most 16
  uint64_t value[2] = {};
  uint64_t number = 0;  // of the scheduler's step
  uint32_t times = 1;   // that it was repeated in a spin
};

// The last of them. A load that a spin repeats is one step.
class Steps {
 public:
  static constexpr int most = 8;
  void add(const Step& step);
  const Step& last() const { return steps_[(count_ + most - 1) % most]; }

  template <class Visit>
  void visit(Visit visit) const {
    for (const Step& step : steps_)
      if (step.kind != Step::none) visit(step);
  }

 private:
  Step steps_[most];
  uint32_t count_ = 0;
};

// Addresses of accesses that are not noted.
struct Range {
  const void *begin = nullptr, *end = nullptr;
};
inline Range not_noted;
inline bool are_noted = false;  // a run that nobody asks for its last steps notes none

// Notes a step of the running thread, if they are noted.
void note(Step::Kind kind, const char* what, const void* address = nullptr, uint32_t nbytes = 0, uint64_t low = 0,
          uint64_t high = 0);

// The last steps of all threads of calls, a line each. sanitizer_report.py reads them.
std::string last_steps();

}  // namespace simulator
