// The scheduler. Compiled without sanitizers: it touches every thread's state, which would look like races to them, and
// it must not order the threads it switches between.
#include "scheduler.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>

#include "context.hpp"
#include "kept.hpp"
#include "sanitizers.hpp"
#include "views.hpp"

namespace simulator {
namespace {

constexpr size_t stack_nbytes = (256 << 10) + 4096 + 64;  // a power of two would put all in the same sets of caches
constexpr size_t static_shared_nbytes = 16 << 10;
constexpr size_t alignment = 128;
constexpr size_t most_pending = 256;  // stores
constexpr uint64_t step_ns = 100;
constexpr uint32_t longest_pause = 512;  // steps between two loads of a thread that looks for something
// A wait begins with its first look at the clock and ends with the last one. Between two looks are 1,024 times
// (device/sync/deadline.cuh) of up to 8 loads.
constexpr uint64_t loads_of_looks = 2 * 1024 * 8;
constexpr uint64_t first_ns = uint64_t(1) << 60;  // as on GPUs, whose clocks count from long ago
constexpr uint64_t most_steps = 200'000'000;  // more than twice as many as any test takes

struct Barrier {
  explicit Barrier(unsigned members = 0) : members(members) { sleepers.reserve(members); }
  unsigned members, arrived = 0;
  bool vote = false, result = false;
  uint64_t generation = 0;
  Vector<struct Fiber*> sleepers;
};

struct Block {
  Barrier barrier;
  Vector<Barrier> warps;
  char *dynamic, *statics;
  Map<const void*, size_t> places;  // in `statics`
  size_t used = 0;
};

struct Launch {
  const Kernel* kernel;
  size_t stream, at;  // its place in `launches`
  unsigned placed = 0;  // blocks that have begun
  unsigned released = 0, ended = 0;
  bool started = false, complete = false;
  Vector<Block> blocks{};
  Vector<Fiber*> waiting{};  // of the next launch, for this one
  unsigned size() const { return kernel->blocks * kernel->threads; }
};

struct Fiber : Thread {
  Context context;
  void* stack = nullptr;
  void* asan = nullptr;
  Launch* launch = nullptr;
  Launch* previous = nullptr;
  Block* home = nullptr;
  bool ended = false, released = false;
  unsigned loads_in_a_row = 0;
};

// A relaxed store on its way: visible late and in any order, but for those of one thread to one address.
struct Store {
  Fiber* owner;
  void* address;
  uint64_t value;
  uint32_t nbytes;
  Reach reach = of_thread;
};

struct Sleeper {
  uint64_t wakes;
  Fiber* fiber;
};

struct Gpu {
  uint64_t frozen_until;
  unsigned free_places;  // for blocks
  Vector<Launch*> begun{};
};

uint64_t generator;  // the state of SplitMix64
Vector<Vector<Launch>> launches;  // by stream
size_t incomplete;                // launches
Vector<Gpu> gpus;                 // by rank
Vector<Fiber*> runnable;
Vector<Sleeper> sleeping;  // a heap
Vector<Store> pending;
Vector<void*> free_stacks;
Fiber* current;
Context scheduler_context;
void* scheduler_asan;
const void* scheduler_stack;
size_t scheduler_stack_nbytes;
uint64_t steps, last_event;  // the event is an access that is no load, a barrier that opens, or the end of a thread
Vector<Fiber*> all_fibers;

// Shared memory of a block: aligned, with random content and a forbidden zone on both sides.
char* make_shared(size_t nbytes) {
  const size_t room = (nbytes + 2 * alignment - 1) / alignment * alignment;
  char* const whole = take(room + 2 * alignment);
  const auto begin = (reinterpret_cast<uintptr_t>(whole) + alignment) / alignment * alignment;
  char* const data = reinterpret_cast<char*>(begin);
  std::fill_n(data, nbytes, char(random(256)));
  forbid(whole, data);
  forbid(data + nbytes, whole + room + 2 * alignment);
  return data;
}

bool chance(uint32_t one_in) { return random(one_in) == 0; }

constexpr auto later = [](const Sleeper& a, const Sleeper& b) { return a.wakes > b.wakes; };

void sleep_until(Fiber* fiber, uint64_t when) {
  sleeping.push_back({when, fiber});
  std::push_heap(sleeping.begin(), sleeping.end(), later);
}

void wake_all(Vector<Fiber*>& fibers) {
  for (Fiber* fiber : fibers) runnable.push_back(fiber);
  fibers.clear();
}

template <class Word>
void store_relaxed(Word* address, Word value, void (*as_observed)(volatile Word*, Word, int)) {
  if (as_observed)
    as_observed(address, value, order_relaxed);
  else
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

void perform(size_t at) {
  const Store store = pending[at];
  pending[at] = pending.back();
  pending.pop_back();
  const As as(store.owner->views.of[generic]);
  if (store.nbytes == 4)
    store_relaxed(static_cast<int*>(store.address), int(store.value), __tsan_atomic32_store);
  else
    store_relaxed(static_cast<long long*>(store.address), static_cast<long long>(store.value), __tsan_atomic64_store);
}

void perform_one() {
  if (!pending.empty()) perform(random(pending.size()));
}

template <class Choose>
void perform_where(Choose choose) {
  for (size_t at = 0; at < pending.size();)
    if (choose(pending[at]))
      perform(at);
    else
      ++at;
}

bool has_reached_this_thread(const Store& store) {
  if (store.owner == current) return true;
  if (store.owner->home != current->home) return false;
  return store.reach == of_block || (store.reach == of_warp && store.owner->thread.x / 32 == current->thread.x / 32);
}

void resume(Fiber* fiber) {
  current = fiber;
  become(fiber->views.of[generic]);
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(&scheduler_asan, fiber->stack, stack_nbytes);
  scheduler_context.switch_to(fiber->context);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(scheduler_asan, nullptr, nullptr);
}

// Back to the scheduler, from which this thread goes on once it is picked again, unless it has ended.
void leave() {
  Fiber* fiber = current;
  become(scheduler_observer);
  if (__sanitizer_start_switch_fiber)
    __sanitizer_start_switch_fiber(fiber->ended ? nullptr : &fiber->asan, scheduler_stack, scheduler_stack_nbytes);
  fiber->context.switch_to(scheduler_context);
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fiber->asan, nullptr, nullptr);
}

void enter_fiber() {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_nbytes);
  launched().body();
  end_of_thread();
  current->ended = true;
  leave();
}

void leave_for(uint64_t how_long) {
  sleep_until(current, steps + how_long);
  leave();
}

void open(Barrier& barrier) {
  barrier.result = barrier.vote;
  barrier.vote = false;
  barrier.arrived = 0;
  ++barrier.generation;
  last_event = steps;
  wake_all(barrier.sleepers);
}

void wait_for(Vector<Fiber*>& waker) {
  if (current->copies.empty()) {
    waker.push_back(current);
    return leave();
  }
  pump();
  leave_for(random(8));
}

bool pass(Barrier& barrier, bool vote, const char* what) {
  const Waiting waiting(what);
  current->loads_in_a_row = 0;
  const uint64_t generation = barrier.generation;
  barrier.vote |= vote;
  if (++barrier.arrived == barrier.members) open(barrier);
  while (barrier.generation == generation) wait_for(barrier.sleepers);
  return barrier.result;
}

// A thread that has ended is no longer waited for.
void give_up_place(Barrier& barrier) {
  --barrier.members;
  if (barrier.members > 0 && barrier.arrived >= barrier.members) open(barrier);
}

void* find_stack() {
  if (free_stacks.empty()) return take(stack_nbytes);
  void* const stack = free_stacks.back();
  free_stacks.pop_back();
  allow(stack, static_cast<char*>(stack) + stack_nbytes);
  return stack;
}

int rank_of(size_t stream) { return stream % gpus.size(); }

void make_fiber(Launch& launch, unsigned block, unsigned thread) {
  Fiber* fiber = new (take(sizeof(Fiber))) Fiber;
  fiber->thread = {thread};
  fiber->block = {block};
  fiber->block_dim = {launch.kernel->threads};
  fiber->grid_dim = {launch.kernel->blocks};
  fiber->rank = rank_of(launch.stream);
  fiber->stream = launch.stream;
  fiber->kernel = launch.at;
  fiber->launch = &launch;
  fiber->previous = launch.at ? &launch - 1 : nullptr;
  fiber->home = &launch.blocks[block];
  fiber->stack = find_stack();
  fiber->views = make_views();
  if (launch.kernel->call >= 0) {
    char name[64];
    std::snprintf(name, sizeof name, "rank %d, block %u, thread %u", fiber->rank, block, thread);
    name_views(fiber->views, name);
  }
  fiber->context.begin(fiber->stack, stack_nbytes, enter_fiber);
  all_fibers.push_back(fiber);
  runnable.push_back(fiber);
}

// Blocks begin in the order of their indices, those of a cluster together, where there is room for them.
void place_blocks(int rank) {
  const As as(scheduler_observer);
  unsigned& free_places = gpus[rank].free_places;
  for (Launch* launch : gpus[rank].begun) {
    const Kernel& kernel = *launch->kernel;
    for (; launch->placed < kernel.blocks && free_places >= kernel.places; ++launch->placed) {
      if (launch->placed % kernel.cluster == 0 && free_places < kernel.cluster * kernel.places) return;
      free_places -= kernel.places;
      for (unsigned t = 0; t < kernel.threads; ++t) make_fiber(*launch, launch->placed, t);
    }
    if (launch->placed < kernel.blocks) return;
  }
}

void start(Launch& launch) {
  const As as(scheduler_observer);
  launch.started = true;
  // Nothing may grow while threads run.
  launch.waiting.reserve(1 << 14);
  launch.blocks.resize(launch.kernel->blocks);
  for (Block& block : launch.blocks) {
    block.barrier = Barrier(launch.kernel->threads);
    for (unsigned t = 0; t < launch.kernel->threads; t += 32)
      block.warps.emplace_back(std::min(32u, launch.kernel->threads - t));
    block.dynamic = make_shared(launch.kernel->shared_nbytes);
    block.statics = make_shared(static_shared_nbytes);
  }
  gpus[rank_of(launch.stream)].begun.push_back(&launch);
  place_blocks(rank_of(launch.stream));
}

// A kernel may begin once all threads of its predecessor have released it or ended, and the kernel before the
// predecessor is complete.
void start_what_may(size_t stream) {
  Vector<Launch>& mine = launches[stream];
  size_t at = 0;
  while (at < mine.size() && mine[at].started) ++at;
  if (at == mine.size()) return;
  if (at > 0 && mine[at - 1].released < mine[at - 1].size()) return;
  if (at < 2 || mine[at - 2].complete) start(mine[at]);
}

void end(Fiber* fiber) {
  last_event = steps;
  Launch& launch = *fiber->launch;
  give_up_place(fiber->home->barrier);
  give_up_place(fiber->home->warps[fiber->thread.x / 32]);
  if (fiber->home->barrier.members == 0) {
    gpus[fiber->rank].free_places += launch.kernel->places;
    place_blocks(fiber->rank);
  }
  if (!fiber->released) ++launch.released;
  if (++launch.ended == launch.size()) {
    launch.complete = true;
    --incomplete;
    wake_all(launch.waiting);
  }
  start_what_may(launch.stream);
  forget(fiber->views);
  if (!__tsan_create_fiber) free_stacks.push_back(fiber->stack);  // to ThreadSanitizer, two fibers of it would race
}

Fiber* pick() {
  while (!sleeping.empty() && sleeping.front().wakes <= steps) {
    std::pop_heap(sleeping.begin(), sleeping.end(), later);
    runnable.push_back(sleeping.back().fiber);
    sleeping.pop_back();
  }
  if (runnable.empty()) return nullptr;
  const size_t at = random(runnable.size());
  Fiber* fiber = runnable[at];
  runnable[at] = runnable.back();
  runnable.pop_back();
  return fiber;
}

// A rank stands still for a while: hosts and GPUs are never in step.
void perhaps_freeze_a_rank() {
  if (!chance(4096)) return;
  gpus[random(gpus.size())].frozen_until = steps + random(40'000);
}

// Where an address lies in the shared memory of a thread's block; empty if it does not.
std::string name_of_shared(const Fiber& fiber, const void* address) {
  const Block& block = *fiber.home;
  const auto within = [=](const char* begin, size_t nbytes) { return begin <= address && address < begin + nbytes; };
  const auto byte_of = [=](const char* begin) { return std::to_string(static_cast<const char*>(address) - begin); };
  if (within(block.dynamic, fiber.launch->kernel->shared_nbytes))
    return "dynamic shared memory, byte " + byte_of(block.dynamic);
  return within(block.statics, static_shared_nbytes) ? "static shared memory, byte " + byte_of(block.statics) : "";
}

}  // namespace

Thread& self() { return *current; }
const Kernel& launched() { return *current->launch->kernel; }
uint64_t now_ns() { return first_ns + steps * step_ns; }
uint64_t step_number() { return steps; }
uint32_t random(uint32_t below) {
  uint64_t it = generator += 0x9e3779b97f4a7c15;
  it = (it ^ it >> 30) * 0xbf58476d1ce4e5b9;
  it = (it ^ it >> 27) * 0x94d049bb133111eb;
  return (it >> 32) * below >> 32;
}

void step() {
  last_event = steps;
  current->loads_in_a_row = 0;
  if (chance(2)) leave_for(0);
}

void step_after_load() {
  const unsigned in_a_row = ++current->loads_in_a_row;
  leave_for(in_a_row < 16 ? 0 : random(std::min<uint32_t>(in_a_row, longest_pause)));
}

void post(void* address, uint64_t value, uint32_t nbytes) {
  look_at_store(address, nbytes);
  const Store store{current, address, value, nbytes};
  // One of the same thread to the same address that is still pending will be seen by nobody.
  for (Store& older : pending)
    if (older.owner == current && older.address == address) return void(older = store);
  if (pending.size() == most_pending) perform_one();
  pending.push_back(store);
}
bool find_own(const void* address, uint64_t& value) {
  for (const Store& store : pending)
    if (store.owner == current && store.address == address) {
      value = store.value;
      return true;
    }
  return false;
}
void make_own_visible() {
  perform_where([](const Store& store) { return store.owner == current; });
}
void make_visible_at(const void* address) {
  perform_where([=](const Store& store) { return store.owner == current && store.address == address; });
}
void extend_reach(Reach reach) {
  for (Store& store : pending)
    if (has_reached_this_thread(store) && store.reach < reach) store.reach = reach;
}
void make_released_visible() { perform_where(has_reached_this_thread); }

bool block_barrier(bool vote) { return pass(current->home->barrier, vote, "a barrier of the block"); }
bool warp_barrier(bool vote) {
  return pass(current->home->warps[current->thread.x / 32], vote, "a barrier of the warp");
}

char* make_memory(size_t nbytes) { return take(nbytes); }

void* dynamic_shared() { return current->home->dynamic; }

void* dynamic_shared_of(unsigned block, const void* here) {
  return current->launch->blocks[block].dynamic + (static_cast<const char*>(here) - current->home->dynamic);
}

void* static_shared(const void* key, size_t nbytes) {
  Block& block = *current->home;
  const auto [place, is_new] = block.places.try_emplace(key, block.used);
  if (is_new) block.used += (nbytes + alignment - 1) / alignment * alignment;
  if (block.used > static_shared_nbytes) std::abort();
  return block.statics + place->second;
}

void release_next_kernel() {
  if (current->released) return;
  current->released = true;
  ++current->launch->released;
  start_what_may(current->launch->stream);
}

bool has_released() { return current->released; }

void wait_for_previous_kernel() {
  const Waiting waiting("the end of the kernel before");
  while (current->previous && !current->previous->complete) wait_for(current->previous->waiting);
}

End run(const std::vector<std::vector<Kernel>>& streams, int ranks, unsigned room, uint64_t seed, uint64_t patience_ns,
        void (*look)()) {
  generator = seed;
  pending.reserve(most_pending);
  runnable.reserve(1 << 16);
  sleeping.reserve(1 << 16);
  if (__tsan_get_current_fiber) scheduler_observer = __tsan_get_current_fiber();
  launches.resize(streams.size());
  for (size_t s = 0; s < streams.size(); ++s) {
    for (const Kernel& kernel : streams[s]) launches[s].push_back({&kernel, s, launches[s].size()});
    incomplete += streams[s].size();
  }
  for (int rank = 0; rank < ranks; ++rank) gpus.push_back({random(20'000), room});
  for (Gpu& gpu : gpus) gpu.begun.reserve(1 << 10);
  for (size_t s = 0; s < streams.size(); ++s) start_what_may(s);
  const auto is_patient = [&] {
    const uint64_t pause = std::max<uint64_t>(longest_pause, runnable.size() + sleeping.size());
    return steps - last_event <= patience_ns / step_ns + loads_of_looks * pause;
  };
  for (steps = 0; steps < most_steps && is_patient(); ++steps) {
    perhaps_freeze_a_rank();
    look();
    if (chance(2)) perform_one();
    Fiber* fiber = pick();
    if (fiber == nullptr) {
      if (incomplete == 0) return complete;
      if (sleeping.empty() && pending.empty()) return stuck;
      if (!sleeping.empty()) steps = std::max(steps, sleeping.front().wakes - 1);
      continue;
    }
    if (const uint64_t until = gpus[fiber->rank].frozen_until; until > steps) {
      sleep_until(fiber, until);
      continue;
    }
    resume(fiber);
    if (fiber->ended) end(fiber);
  }
  return endless;
}

void note(Step::Kind kind, const char* what, const void* address, uint32_t nbytes, uint64_t low, uint64_t high) {
  if (!are_noted || (not_noted.begin <= address && address < not_noted.end)) return;
  const Step step{kind, what, address, nbytes, {low, high}, steps, 1};
  const auto as_now = [&](const Step& older) {
    return older.what == what && older.address == address && older.nbytes == nbytes && older.value[0] == low &&
           older.value[1] == high;
  };
  constexpr uint32_t most = Thread::most_steps;
  const uint32_t next = current->steps_noted;
  for (uint32_t back = 1; back <= most && kind == Step::load; ++back) {
    Step& older = current->steps[(next + most - back) % most];
    if (older.kind != Step::load) break;
    if (!as_now(older)) continue;
    older.number = steps;
    ++older.times;
    return;
  }
  current->steps[current->steps_noted++ % most] = step;
}

std::string last_steps() {
  std::ostringstream text;
  for (const Fiber* fiber : all_fibers) {
    const Kernel& kernel = *fiber->launch->kernel;
    const Step& last = fiber->steps[(fiber->steps_noted + Thread::most_steps - 1) % Thread::most_steps];
    for (const Step& step : fiber->steps) {
      if (kernel.call < 0 || step.kind == Step::none) continue;
      const bool waits = step.kind == Step::wait && fiber->waits && &step == &last;
      text << fiber->rank << ' ' << fiber->stream << ' ' << kernel.call << ' ' << fiber->block.x << ' ' << waits << ' '
           << step.kind << ' ' << step.nbytes << ' ' << step.value[0] << ' ' << step.value[1] << ' '
           << reinterpret_cast<uintptr_t>(step.address) << '\t' << name_of_shared(*fiber, step.address) << '\t'
           << step.what << '\t' << fiber->thread.x << ' ' << step.number << ' ' << step.times << '\n';
    }
  }
  return text.str();
}

}  // namespace simulator
