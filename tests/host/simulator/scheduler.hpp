// Every CUDA thread of every rank as a fiber of one OS thread, and a seeded scheduler that picks which one goes on.
//
// The twins of the PTX functions call this at each access that other threads can see; between two such calls a thread
// runs alone. The seed decides everything, so a run can be repeated. This interface is all that the kernels' side knows.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace simulator {

struct Index {
  unsigned x;
};

// Who makes an access, to ThreadSanitizer; null where it is not there.
using Observer = void*;

// The ways to memory that see one another's accesses only after a fence (views.hpp).
enum View { generic, async_shared, async_global, alias };
constexpr int view_count = 4;

// A copy that has been issued and will be carried out later, while the thread that issued it does something else.
struct Copy {
  enum Kind { async, bulk_load, bulk_store } kind;
  void* to;
  const void* from;
  uint32_t nbytes;
  uint32_t group = 0;                             // of async copies
  void* mbarrier = nullptr;                       // of bulk loads: what they complete
  void (*complete)(const Copy& copy) = nullptr;
  Observer reader = nullptr, writer = nullptr;
  uint32_t done = 0;  // bytes
};

// What a CUDA thread knows of itself.
struct Thread {
  Index thread, block, block_dim, grid_dim;
  int rank;
  std::vector<Copy> copies;
  uint32_t copy_groups = 0;
  uint32_t kernel = 0;  // of its rank's stream
  uint32_t block_barriers = 0, warp_barriers = 0;  // it has passed
};

Thread& self();

// ---- time and chance ------------------------------------------------------------------------------------------------

uint64_t now_ns();
uint32_t random(uint32_t below);

// Lets others run, perhaps: once after each access that others can see.
void step();
// The same after a load that may be one of many in a spin; the more of them in a row, the longer the thread stays away.
void step_after_load();

// ---- relaxed stores, which become visible late and in any order -----------------------------------------------------

void post(void* address, uint64_t value, uint32_t nbytes);
// The thread's own store to this address that is not visible yet, if there is one.
bool find_own(const void* address, uint64_t& value);
void make_own_visible();
// Those of the whole block: what a release store must do first, since it is cumulative over the block's barriers.
void make_block_visible();

// ---- what is ordered, for ThreadSanitizer ---------------------------------------------------------------------------

// While it lives, accesses are another observer's.
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
// Of the running thread.
Observer view(View which);
// What the thread knows through one view, it knows through the other as well.
void fence(View from, View to);
// What the other views know, beside a release or an acquire of the thread's own at this address.
void release_views(const void* address);
void acquire_views(const void* address);
// What the present observer knows, to all those that acquire at this address through another view than the generic one.
void release_to_views(const void* address);
// An observer for a copy that begins now and goes through that view; and that the thread has waited for such copies.
Observer begin_copy(View through);
void learn_of_copies(View through);

// ---- barriers, memory, kernels --------------------------------------------------------------------------------------

// The barrier of the block or the warp, and whether any thread voted yes. `pump` is called while copies are under way.
bool block_barrier(bool vote, void (*pump)());
bool warp_barrier(bool vote, void (*pump)());

// Never given back (kept.hpp).
char* make_memory(size_t nbytes);

void* dynamic_shared();
void* static_shared(const void* key, size_t nbytes);

void release_next_kernel();
void wait_for_previous_kernel();

struct Kernel {
  unsigned blocks, threads, shared_nbytes;
  std::function<void()> body;  // of every thread
};

// Runs each rank's kernels in order, those of different ranks at the same time. False: nothing went on for too long.
bool run(const std::vector<std::vector<Kernel>>& kernels_of_ranks, uint64_t seed);

}  // namespace simulator
