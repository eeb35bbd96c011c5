// Compiled without sanitizers, as scheduler.cpp is.
#include "views.hpp"

#include <algorithm>

#include "kept.hpp"
#include "sanitizers.hpp"
#include "scheduler.hpp"

namespace simulator {
namespace {

bool has_view[view_count] = {true};

// ThreadSanitizer maps most of a megabyte for each fiber, uses a few pages of it, and clears all of it, its clocks even
// twice. Pages touched for the first time would take most of a run. So what is clear already is left as it is.
bool in_fiber_call;
size_t fiber_nbytes;
char* new_fiber;
Vector<std::pair<size_t, size_t>> cleared;  // ranges in it that were clear when the first fiber's were cleared
bool is_first = true;

// Whether a range that is to be set to a value is a new fiber's, and clear.
bool is_clear(const char* begin, int value, size_t nbytes) {
  constexpr size_t least = 64 << 10;
  if (!in_fiber_call || nbytes < least || value || begin < new_fiber || begin + nbytes > new_fiber + fiber_nbytes)
    return false;
  const std::pair range(size_t(begin - new_fiber), nbytes);
  if (is_first && std::all_of(begin, begin + nbytes, [](char byte) { return byte == 0; })) cleared.push_back(range);
  return std::find(cleared.begin(), cleared.end(), range) != cleared.end();
}

Observer make_observer() {
  in_fiber_call = true;
  const Observer made = __tsan_create_fiber(0);
  in_fiber_call = is_first = false;
  return made;
}

// A word that stands for `address` in one view: a release by one view is not acquired by another.
void* word_of(const void* address, int view) {
  static Map<std::pair<const void*, int>, void*> words;
  void*& word = words[{address, view}];
  if (word == nullptr) word = take(16);
  return word;
}

}  // namespace

Views make_views() {
  Views views;
  for (int v = 0; v < view_count; ++v)
    if (has_view[v] && __tsan_create_fiber) views.of[v] = make_observer();
  return views;
}

void name_views(const Views& views, const char* name) {
  for (Observer observer : views.of)
    if (observer) __tsan_set_fiber_name(observer, name);
}

void forget(const Views& views) {
  for (Observer observer : views.of)
    if (observer) __tsan_destroy_fiber(observer);
}

void become(Observer next) {
  if (next) __tsan_switch_to_fiber(next, without_synchronisation);
}

void As::begin(Observer next) {
  before_ = __tsan_get_current_fiber();
  become(next);
}

bool add_view(View added) { return has_view[added] = true; }

Observer view(View which) {
  Views& mine = self().views;
  if (which > alias && mine.of[which] == nullptr && __tsan_create_fiber) {
    const As as(scheduler_observer);
    mine.of[which] = make_observer();
  }
  return mine.of[which] ? mine.of[which] : mine.of[generic];
}

// A release store replaces earlier releases in the word, so that only these two views synchronise.
void fence(View from, View to) {
  static int word;
  if (self().views.of[from] == nullptr || view(from) == view(to)) return;
  {
    const As as(view(from));
    __tsan_atomic32_store(&word, 0, order_release);
  }
  const As as(view(to));
  __tsan_atomic32_load(&word, order_acquire);
}

void release_view(const void* address, View from, View to) {
  if (self().views.of[from] == nullptr) return;
  const As as(view(from));
  __tsan_release(to == generic ? const_cast<void*>(address) : word_of(address, to));
}

void acquire_view(const void* address, View to) {
  if (self().views.of[to] == nullptr) return;
  const As as(view(to));
  __tsan_acquire(word_of(address, to));
}

void release_views(const void* address) {
  for (int v = generic + 1; v <= alias; ++v) release_view(address, View(v), View(v));
}

void acquire_views(const void* address) {
  for (int v = generic + 1; v <= alias; ++v) acquire_view(address, View(v));
}

}  // namespace simulator

// The linker (build.py) has ThreadSanitizer call these in place of its own functions of these names.
extern "C" {
__attribute__((weak)) void* __real__ZN11__sanitizer21MmapOrDieOnFatalErrorEmPKc(size_t nbytes, const char* what);
__attribute__((weak)) void* __real__ZN11__sanitizer15internal_memsetEPvim(void* to, int value, size_t nbytes);

void* __wrap__ZN11__sanitizer21MmapOrDieOnFatalErrorEmPKc(size_t nbytes, const char* what) {
  void* const begin = __real__ZN11__sanitizer21MmapOrDieOnFatalErrorEmPKc(nbytes, what);
  if (!simulator::in_fiber_call) return begin;
  if (simulator::fiber_nbytes == 0) simulator::fiber_nbytes = nbytes;  // a fiber's is the first that its creation maps
  if (simulator::fiber_nbytes == nbytes) simulator::new_fiber = static_cast<char*>(begin);
  return begin;
}

void* __wrap__ZN11__sanitizer15internal_memsetEPvim(void* to, int value, size_t nbytes) {
  return simulator::is_clear(static_cast<char*>(to), value, nbytes)
             ? to
             : __real__ZN11__sanitizer15internal_memsetEPvim(to, value, nbytes);
}
}
