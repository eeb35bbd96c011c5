// What a thread knows of the others' accesses, as ThreadSanitizer keeps it: an observer, a fiber to it, for each view.
//
// A bulk copy goes through the async proxy, and a multimem access through an alias: neither need see what went another
// way, not even the same thread's, without a fence between the two. So each of these ways is a view of its own.
// Barriers, releases and acquires carry along what every view knows; a fence tells one view what another knows.
#pragma once

namespace simulator {

// Who makes an access, to ThreadSanitizer; null where it is not there.
using Observer = void*;

enum View { generic, async_shared, async_global, alias };
constexpr int view_count = 4;

// Null where this program has no such view, which then is the generic one.
struct Views {
  Observer of[view_count] = {};
};

Views make_views();
void forget(const Views& views);

// From here on accesses are this observer's.
void become(Observer next);

// While it lives.
class As {
 public:
  explicit As(Observer observer);
  ~As();
  As(const As&) = delete;

 private:
  Observer before_;
};

// Before anything runs: this program's threads have this view beside the generic one.
bool add_view(View added);

// ---- of the running thread ------------------------------------------------------------------------------------------

Observer view(View which);
// What it knows through one view, it knows through the other as well.
void fence(View from, View to);
// What the views beside the generic one know, with a release or an acquire of the thread's own at this address.
void release_views(const void* address);
void acquire_views(const void* address);

}  // namespace simulator
