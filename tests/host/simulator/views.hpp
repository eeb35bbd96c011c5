// What a thread knows of the others' accesses, as ThreadSanitizer keeps it: an observer, a fiber to it, for each view.
//
// A bulk copy goes through the async proxy, and a multimem access through an alias: neither need see what went another
// way, not even the same thread's, without a fence between the two. So each of these ways is a view of its own. Barriers,
// releases and acquires carry what every view knows along; a fence tells one view what another knows. A copy under way
// is an observer again: it knows what its view knew when it was issued, and the thread learns of it when it waits.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>

#include "kept.hpp"
#include "sanitizers.hpp"
#include "scheduler.hpp"

namespace simulator {

inline Observer make_observer() { return __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr; }

inline void forget_observer(Observer& observer) {
  if (observer) __tsan_destroy_fiber(observer);
  observer = nullptr;
}

struct Views {
  Observer of[view_count] = {};       // null where a view is not told from the generic one
  Observer copies[view_count] = {};   // made once they are needed

  void make(const bool (&told_apart)[view_count]) {
    for (int v = 0; v < view_count; ++v)
      if (told_apart[v]) of[v] = make_observer();
  }
  Observer get(int v) const { return of[v] ? of[v] : of[generic]; }
  void forget() {
    for (Observer& observer : of) forget_observer(observer);
    for (Observer& observer : copies) forget_observer(observer);
  }
};

// A word beside `address`, for what a view releases there: views do not hear of one another by it.
inline void* word_of(const void* address, int view) {
  using Key = std::pair<const void*, int>;
  static std::map<Key, void*, std::less<>, Kept<std::pair<const Key, void*>>> words;
  void*& word = words[{address, view}];
  if (word == nullptr) word = take(16);
  return word;
}

// Makes what one observer knows known to another, and to no third one: a release store replaces what was there.
inline void tell(Observer to, Observer from) {
  static int word;
  if (from == nullptr || from == to) return;
  {
    const As as(from);
    __tsan_atomic32_store(&word, 0, order_release);
  }
  const As as(to);
  __tsan_atomic32_load(&word, order_acquire);
}

}  // namespace simulator
