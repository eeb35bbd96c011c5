// Compiled without sanitizers, as scheduler.cpp is.
#include "steps.hpp"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "scheduler.hpp"

namespace simulator {
namespace {

constexpr size_t most_steps = 8, most_waits = 4;  // lines of a rank

bool same(const Step& a, const Step& b) {
  return a.kind == b.kind && a.what == b.what && a.address == b.address && a.nbytes == b.nbytes &&
         a.value[0] == b.value[0] && a.value[1] == b.value[1];
}

// What several threads of a block did alike.
struct Line {
  const Thread* first;
  Step step;
  bool waits;
  std::vector<unsigned> threads;
};

bool belongs(const Line& line, const Thread& thread, const Step& step, bool waits) {
  const Thread& first = *line.first;
  return first.stream == thread.stream && first.kernel == thread.kernel && first.block.x == thread.block.x &&
         line.waits == waits && same(line.step, step);
}

void add(std::vector<Line>& lines, const Thread& thread, const Step& step) {
  const bool waits = step.kind == Step::wait && thread.waits && &step == &thread.steps.last();
  for (Line& line : lines)
    if (belongs(line, thread, step, waits)) {
      if (line.threads.back() != thread.thread.x) line.threads.push_back(thread.thread.x);
      line.step.times += step.times;
      line.step.number = std::max(line.step.number, step.number);
      return;
    }
  lines.push_back({&thread, step, waits, {thread.thread.x}});
}

std::string in_words(const std::vector<unsigned>& threads) {
  std::string text = threads.size() == 1 ? "thread " : "threads ";
  for (size_t at = 0; at < threads.size(); ++at) {
    size_t last = at;
    while (last + 1 < threads.size() && threads[last + 1] == threads[last] + 1) ++last;
    text += (at ? ", " : "") + std::to_string(threads[at]);
    if (last > at) text += "-" + std::to_string(threads[last]);
    at = last;
  }
  return text;
}

std::string value_of(const Step& step) {
  char text[64];
  const auto [low, high] = step.value;
  const unsigned words[] = {unsigned(low), unsigned(low >> 32), unsigned(high), unsigned(high >> 32)};
  if (step.nbytes <= 8)
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(low));
  else if (low == high && words[0] == words[1])
    std::snprintf(text, sizeof text, "0x%x in each word", words[0]);
  else
    std::snprintf(text, sizeof text, "0x%x 0x%x 0x%x 0x%x", words[0], words[1], words[2], words[3]);
  return text;
}

std::string in_brackets(const void* address) {
  char text[32];
  std::snprintf(text, sizeof text, "<%p>", address);
  return text;
}

std::string in_words(const Line& line) {
  const Step& step = line.step;
  std::string text = "  call " + std::to_string(launched_by(*line.first).call) + ", block " +
                     std::to_string(line.first->block.x) + ", " + in_words(line.threads) + ": ";
  const char* const verb = !line.waits ? "passed " : line.threads.size() == 1 ? "waits at " : "wait at ";
  if (step.kind == Step::wait) return text + verb + step.what;
  text += step.what;
  if (step.address) {
    const std::string shared = name_of_shared(*line.first, step.address);
    text += (step.kind == Step::load ? " of " : " to ") + (shared.empty() ? in_brackets(step.address) : shared);
  }
  if (step.nbytes) text += (step.kind == Step::load ? " sees " : " of ") + value_of(step);
  if (step.times > line.threads.size()) text += " (" + std::to_string(step.times) + " times)";
  return text;
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

std::string last_steps(int ranks) {
  std::string text;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<Line> lines;
    visit_threads([&](const Thread& thread) {
      if (thread.rank != rank || launched_by(thread).call < 0) return;
      thread.steps.visit([&](const Step& step) { add(lines, thread, step); });
    });
    std::stable_sort(lines.begin(), lines.end(),
                     [](const Line& a, const Line& b) { return a.step.number < b.step.number; });
    const auto waits = std::stable_partition(lines.begin(), lines.end(), [](const Line& line) { return !line.waits; });
    const size_t steps = waits - lines.begin();
    text += "rank " + std::to_string(rank) + (lines.empty() ? ": no steps\n" : ":\n");
    for (size_t at = 0; at < lines.size(); ++at)
      if (at < steps ? steps - at <= most_steps : lines.size() - at <= most_waits)
        text += in_words(lines[at]) + "\n";
  }
  return text;
}

}  // namespace simulator
