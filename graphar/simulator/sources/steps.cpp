// Compiled without sanitizers, as scheduler.cpp is.
#include "steps.hpp"

#include <sstream>

#include "scheduler.hpp"

namespace simulator {
namespace {

bool same(const Step& a, const Step& b) {
  return a.kind == b.kind && a.what == b.what && a.address == b.address && a.nbytes == b.nbytes &&
         a.value[0] == b.value[0] && a.value[1] == b.value[1];
}

}  // namespace

void Steps::add(const Step& step) {
  for (uint32_t back = 1; back <= most && step.kind == Step::load; ++back) {
    Step& older = steps_[(count_ + most - back) % most];
    if (older.kind != Step::load) break;
    if (!same(older, step)) continue;
    older.number = step.number;
    ++older.times;
    return;
  }
  steps_[count_++ % most] = step;
}

void note(Step::Kind kind, const char* what, const void* address, uint32_t nbytes, uint64_t low, uint64_t high) {
  if (!are_noted) return;
  if (not_noted.begin <= address && address < not_noted.end) return;
  self().steps.add({kind, what, address, nbytes, {low, high}, step_number(), 1});
}

std::string last_steps() {
  std::ostringstream text;
  visit_threads([&](const Thread& thread) {
    const int call = launched_by(thread).call;
    if (call < 0) return;
    thread.steps.visit([&](const Step& step) {
      const bool waits = step.kind == Step::wait && thread.waits && &step == &thread.steps.last();
      text << thread.rank << ' ' << thread.stream << ' ' << call << ' ' << thread.block.x << ' ' << waits << ' '
           << step.kind << ' ' << step.nbytes << ' ' << step.value[0] << ' ' << step.value[1] << ' '
           << reinterpret_cast<uintptr_t>(step.address) << '\t' << name_of_shared(thread, step.address) << '\t'
           << step.what << '\t' << thread.thread.x << ' ' << step.number << ' ' << step.times << '\n';
    });
  });
  return text.str();
}

}  // namespace simulator
