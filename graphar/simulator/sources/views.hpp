// What a thread knows of the others' accesses, as ThreadSanitizer keeps it: an observer, a fiber to it, for each view.
//
// A bulk copy goes through the async proxy, and a multimem access through an alias. Without a fence, neither need see
// accesses by another path, not even those of the same thread. So each of these paths is a view of its own.
// Barriers, releases and acquires carry along what every view knows; a fence tells one view what another knows.
//
// An instruction that orders some accesses and not others has views, too: what it orders is seen through them, and they
// alone are released. Barriers do not carry these views along.
#pragma once

namespace simulator {

// Who makes an access, to ThreadSanitizer; null where it is not there.
using Observer = void*;
// The scheduler's own. It has seen how shared memory was made, and no access by a thread. One that is made as this
// observer begins with the same.
inline Observer scheduler_observer;

enum View {
  generic,
  async_shared,
  async_global,
  alias,
  products,          // reads by wgmma
  inits,             // the initialisation of mbarriers
  inits_for_copies,  // the same, once a fence has told the async proxy of it
};
constexpr int view_count = 7;

// Null where this program has no such view, which then is the generic one. A thread's last three views are made once it
// needs them.
struct Views {
  Observer of[view_count] = {};
};

Views make_views();
void name_views(const Views& views, const char* name);  // in reports
void forget(const Views& views);

// Attributes later accesses to this observer.
void become(Observer next);

// Attributes accesses to the observer while the object lives.
class As {
 public:
  [[gnu::always_inline]] explicit As(Observer observer) {
    if (observer) begin(observer);
  }
  [[gnu::always_inline]] ~As() {
    if (before_) become(before_);
  }
  As(const As&) = delete;

 private:
  void begin(Observer observer);
  Observer before_ = nullptr;
};

// Gives this program's threads a view beside the generic one. Called before anything runs.
bool add_view(View added);

Observer view(View which);
// Makes what the thread has seen through `from` visible to `to`.
void fence(View from, View to);
// Releases at this address what the thread has seen through `from`, to threads that acquire there through `to`.
void release_view(const void* address, View from, View to);
void acquire_view(const void* address, View to);
// Release or acquire for the views beside the generic one, with the thread's own release or acquire at this address.
void release_views(const void* address);
void acquire_views(const void* address);

}  // namespace simulator
