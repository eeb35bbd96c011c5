// Compiled without sanitizers, as scheduler.cpp is.
#include "views.hpp"

#include <map>

#include "kept.hpp"
#include "sanitizers.hpp"
#include "scheduler.hpp"

namespace simulator {
namespace {

bool has_view[view_count] = {true};
Observer maker;  // knows of no thread's doings

// A word that stands for `address` in one view: a release by one view is not acquired by another.
void* word_of(const void* address, int view) {
  using Key = std::pair<const void*, int>;
  static std::map<Key, void*, std::less<>, Kept<std::pair<const Key, void*>>> words;
  void*& word = words[{address, view}];
  if (word == nullptr) word = take(16);
  return word;
}

template <class Visit>
void for_each_other_view(const void* address, Visit visit) {
  for (int v = generic + 1; v <= alias; ++v) {
    if (self().views.of[v] == nullptr) continue;
    const As as(self().views.of[v]);
    visit(word_of(address, v));
  }
}

}  // namespace

Views make_views() {
  Views views;
  if (__tsan_get_current_fiber) maker = __tsan_get_current_fiber();
  for (int v = 0; v < view_count; ++v)
    if (has_view[v] && __tsan_create_fiber) views.of[v] = __tsan_create_fiber(0);
  return views;
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
    const As as(maker);
    mine.of[which] = __tsan_create_fiber(0);
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

void release_views(const void* address) { for_each_other_view(address, __tsan_release); }
void acquire_views(const void* address) { for_each_other_view(address, __tsan_acquire); }

}  // namespace simulator
