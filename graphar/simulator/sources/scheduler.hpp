// Every CUDA thread of every rank as a fiber of one OS thread, and a seeded scheduler that picks which one goes on.
//
// The twins of the PTX functions call this at each access that other threads can see; between two such calls a thread
// runs alone. The seed decides everything, so a run can be repeated. This interface is all that the kernels' side knows.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "views.hpp"

namespace simulator {

struct Index {
  unsigned x;
};

// A copy that has been issued and will be carried out later, while the thread that issued it does something else.
struct Copy {
  enum Kind { async, bulk_load, bulk_store } kind;
  void* to;
  const void* from;
  uint32_t nbytes;
  View read = generic, written = generic;
  uint32_t group = 0;                              // of async copies and bulk stores
  bool source_is_read = false;                     // of bulk stores
  void* mbarrier = nullptr;                        // of bulk loads: what they complete
  void (*complete)(const Copy& copy) = nullptr;
};

// A step of a thread, for the report of a failure.
struct Step {
  enum Kind { none, load, store, wait } kind = none;
  const char* what = nullptr;  // the primitive's name
  const void* address = nullptr;
  uint32_t nbytes = 0;  // of the value: at most 16
  uint64_t value[2] = {};
  uint64_t number = 0;  // of the scheduler's step
  uint32_t times = 1;   // that it was repeated in a spin
};

// What a CUDA thread knows of itself.
struct Thread {
  Index thread, block, block_dim, grid_dim;
  int rank;
  size_t stream;
  Views views;
  std::vector<Copy> copies;
  uint32_t copy_groups = 0;
  uint32_t kernel = 0;  // of its stream
  uint32_t block_barriers = 0, warp_barriers = 0, cluster_barriers = 0;  // it has passed, or arrived at
  static constexpr int most_steps = 8;
  Step steps[most_steps];  // the last ones, in turn. A load that a spin repeats is one step.
  uint32_t steps_noted = 0;
  bool waits = false;  // at what its last step names
};

Thread& self();

// Notes a step of the running thread, if steps are noted.
void note(Step::Kind kind, const char* what, const void* address = nullptr, uint32_t nbytes = 0, uint64_t low = 0,
          uint64_t high = 0);

// While it lives, the thread waits at `what`.
class Waiting {
 public:
  explicit Waiting(const char* what) {
    note(Step::wait, what);
    self().waits = true;
  }
  ~Waiting() { self().waits = false; }
  Waiting(const Waiting&) = delete;
};

uint64_t now_ns();
uint64_t step_number();
uint32_t random(uint32_t below);

// May let other threads run. Called once after each access that they can see.
void step();
// The same after a load that may be part of a spin: after many loads in a row, the thread sleeps longer.
void step_after_load();

// Relaxed stores, which become visible late and in any order.
void post(void* address, uint64_t value, uint32_t nbytes);
// Called for each of these stores, and for each bulk copy to memory.
inline void (*look_at_store)(const void* address, uint32_t nbytes);
// Finds the thread's own pending store to this address.
bool find_own(const void* address, uint64_t& value);
void make_own_visible();
// Performs the thread's own store to this address. An atomic operation does so first, and orders no other store.
void make_visible_at(const void* address);

// The threads whose releases publish a store: its own thread, and once it has met others at a barrier or has arrived at
// an mbarrier, those of its warp or of its block.
enum Reach { of_thread, of_warp, of_block };
// Extends the reach of the thread's stores, and of those of its warp that have reached it.
void extend_reach(Reach reach);
// Performs the stores that a release by this thread publishes.
void make_released_visible();

// The barrier of the block or the warp, and whether any thread voted yes.
bool block_barrier(bool vote);
bool warp_barrier(bool vote);
// Called again and again while a thread with copies under way waits. It may carry one out.
inline void (*pump)();
// Called by each thread after its kernel's body.
inline void (*end_of_thread)();

// Never given back (kept.hpp).
char* make_memory(size_t nbytes);

// Multicast addresses: an offset from `base` stands for this offset in every rank's scratch. Nobody may access `base`.
struct Multicast {
  char* base;
  std::vector<char*> scratch;
};
inline Multicast multicast;

void* dynamic_shared();
void* static_shared(const void* key, size_t nbytes);
void* dynamic_shared_of(unsigned block, const void* here);  // where `here` lies in this block's

void release_next_kernel();
bool has_released();  // whether this thread has
void wait_for_previous_kernel();

struct Kernel {
  unsigned blocks, threads, shared_nbytes;
  std::function<void()> body;  // of every thread
  unsigned cluster = 1;        // blocks of one
  unsigned places = 1;         // of the GPU's that a block takes
  bool waits = true;           // false: as if it had no wait for the kernel before
  const void* given = nullptr; // what the host knows when it launches the kernel
  int call = -1;               // its number, if its steps are told of
};

// The kernel that this thread runs.
const Kernel& launched();

// stuck: all threads wait for one another; endless: they look for something again and again, or take too many steps.
enum End { complete, stuck, endless };

// Runs each stream's kernels in order, those of different streams at the same time; stream s is one of rank s % ranks.
// The blocks of a rank that are under way take at most `room` places at a time. Threads that do nothing but look for
// something are given up after `patience_ns`, and the time that they may take to notice. Calls `look` between steps.
End run(const std::vector<std::vector<Kernel>>& streams, int ranks, unsigned room, uint64_t seed, uint64_t patience_ns,
        void (*look)());

// Addresses of accesses that are not noted.
struct Range {
  const void *begin = nullptr, *end = nullptr;
};
inline Range not_noted;
inline bool are_noted = false;  // a run that nobody asks for its last steps notes none

// The last steps of all threads of calls, a line each. sanitizer_report.py reads them.
std::string last_steps();

}  // namespace simulator
