// The host's twin of cuda_src/device/ptx/ptx.cuh: the same functions with the same meaning, for g++, on sources/.
//
// Ordered accesses are the host's atomics of that order. By them alone ThreadSanitizer knows the order of accesses.
// Relaxed stores become visible late, word by word and in any order. Asynchronous copies are carried out late, too.
//
// What kernels do not call is in the namespace twin: a kernel may use its names.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "sanitizers.hpp"
#include "scheduler.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define DEVICE inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx simulator::self().thread
#define blockIdx simulator::self().block
#define blockDim simulator::self().block_dim
#define gridDim simulator::self().grid_dim

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

template <int Count>
struct alignas(4 * Count) Words {
  u32 word[Count];
};

using Pack = Words<4>;

struct alignas(16) Pair {
  u64 half[2];
};

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}

template <class T>
inline T& static_shared() {
  return *static_cast<T*>(simulator::static_shared(&typeid(T), sizeof(T)));
}

namespace twin {
template <class Word>
inline Word load_as(simulator::Observer observer, const Word* address) {
  const simulator::As as(observer);
  return *address;
}

// Copies elements of 2 bytes. ThreadSanitizer is told of them at once, unless nobody is named: each change of the
// observer takes longer than an access.
[[gnu::no_sanitize("thread")]] inline void copy_as(simulator::Observer reader, simulator::Observer writer, void* to,
                                                   const void* from, u32 nbytes) {
  if (const simulator::As as(reader); reader) __tsan_read_range(from, nbytes);
  if (const simulator::As as(writer); writer) __tsan_write_range(to, nbytes);
  for (u32 i = 0; i < nbytes / 2; ++i) static_cast<u16*>(to)[i] = static_cast<const u16*>(from)[i];
}

inline void carry_out(size_t at) {
  auto& copies = simulator::self().copies;
  const simulator::Copy copy = copies[at];
  copies.erase(copies.begin() + at);
  copy_as(simulator::view(copy.read), simulator::view(copy.written), copy.to, copy.from, copy.nbytes);
  if (copy.complete) copy.complete(copy);
}

template <class Choose>
inline void carry_out_where(Choose choose) {
  auto& copies = simulator::self().copies;
  for (size_t i = 0; i < copies.size();)
    if (choose(copies[i]))
      carry_out(i);
    else
      ++i;
}

// Sometimes carries out one of the copies under way.
inline void pump() {
  const size_t count = simulator::self().copies.size();
  if (count && simulator::random(4) == 0) carry_out(simulator::random(count));
}

inline void after_access() {
  pump();
  simulator::step();
}

inline void after_load() {
  pump();
  simulator::step_after_load();
}

inline void (*look_at_poll)() = nullptr;  // called at each poll of a thread that waits for a peer

inline void release(std::atomic<u32>& word, simulator::Reach reach = simulator::of_block) {
  simulator::extend_reach(reach);
  word.fetch_add(1, std::memory_order_release);
  simulator::release_views(&word);
}

inline void acquire(const std::atomic<u32>& word) {
  word.load(std::memory_order_acquire);
  simulator::acquire_views(&word);
}

// Shows ThreadSanitizer the order of a barrier: each thread releases on entry and acquires on exit. Two words
// alternate, so that a slow thread does not acquire what a fast one releases at the next barrier.
struct OrderOfBlock {
  std::atomic<u32> words[2];
};
struct OrderOfWarps {
  std::atomic<u32> words[32][2];
};

constexpr u32 most_blocks = 1024;  // of all ranks, where a kernel has clusters or warpgroups
inline u32 cluster_size() { return simulator::launched().cluster; }
inline std::atomic<char*> shared_of_blocks[most_blocks];

inline u32 block_of_all() {
  if (gridDim.x > most_blocks / 8) std::abort();
  return simulator::self().rank * (most_blocks / 8) + blockIdx.x;
}

inline u32 first_of_cluster() { return block_of_all() - blockIdx.x % cluster_size(); }

// Waits until `all` threads have arrived at a barrier, which only counts up, and acquires what they have released.
inline void wait_for_arrivals(const std::atomic<u32>& word, u32 all) {
  const simulator::Waiting waiting("a barrier of the cluster, or of some warps");
  while (int(word.load(std::memory_order_relaxed) - all) < 0) after_load();
  acquire(word);
}

// `number` counts the barriers of a kernel from 0. Two words alternate as above.
inline std::atomic<u32>& arrivals_at_cluster(u32 number) {
  static std::atomic<u32> words[most_blocks][64][2];  // two a kernel
  return words[first_of_cluster()][simulator::self().kernel][number % 2];
}

// Two turns alternate: a lane that begins a third turn has met all lanes since they read the first.
struct Exchange {
  struct {
    u32 given[2][32];
    u32 turns[32];
  } warps[16];
};

template <class Word, class Choose>
inline Word exchange(Word v, Choose source) {
  auto& warp = static_shared<Exchange>().warps[threadIdx.x / 32];
  const u32 lane = threadIdx.x % 32, turn = warp.turns[lane]++ % 2;
  __atomic_store_n(&warp.given[turn][lane], std::bit_cast<u32>(v), __ATOMIC_RELAXED);
  simulator::warp_barrier(false);
  return std::bit_cast<Word>(__atomic_load_n(&warp.given[turn][source(lane)], __ATOMIC_RELAXED));
}
}  // namespace twin

inline int __syncthreads_or(int vote) {
  auto& order = static_shared<twin::OrderOfBlock>().words[simulator::self().block_barriers++ % 2];
  twin::release(order);
  const bool any = simulator::block_barrier(vote);
  twin::acquire(order);
  return any;
}
inline void __syncthreads() { __syncthreads_or(false); }
inline void __syncwarp() {
  auto& order = static_shared<twin::OrderOfWarps>().words[threadIdx.x / 32][simulator::self().warp_barriers++ % 2];
  twin::release(order, simulator::of_warp);
  simulator::warp_barrier(false);
  twin::acquire(order);
}
// A vote orders no accesses, nor does a shuffle. The lanes only meet.
inline int __any_sync(u32, int vote) { return simulator::warp_barrier(vote); }
inline int __all_sync(u32, int vote) { return !simulator::warp_barrier(!vote); }

inline u32 same_in_warp(u32 v) { return v; }
inline u32 held(u32 v) { return v; }
inline u64 __cvta_generic_to_global(const void* p) { return reinterpret_cast<u64>(p); }
inline void* __cvta_global_to_generic(u64 p) { return reinterpret_cast<void*>(p); }
inline bool elected() { return threadIdx.x % 32 == 5; }  // any one
inline u32 block_in_cluster() { return blockIdx.x % twin::cluster_size(); }

// The arrival is relaxed: of what this thread has done, it releases the initialisation of mbarriers alone.
inline void sync_cluster_mbarriers() {
  static std::atomic<u32> words[twin::most_blocks][64];  // one a kernel
  auto& word = words[twin::first_of_cluster()][simulator::self().kernel];
  simulator::release_view(&word, simulator::inits, simulator::generic);
  simulator::release_view(&word, simulator::inits_for_copies, simulator::async_shared);
  word.fetch_add(1, std::memory_order_relaxed);
  twin::wait_for_arrivals(word, twin::cluster_size() * blockDim.x);
}

inline void arrive_at_cluster() { twin::release(twin::arrivals_at_cluster(simulator::self().cluster_barriers++)); }

inline void wait_for_cluster() {
  const u32 number = simulator::self().cluster_barriers - 1;
  twin::wait_for_arrivals(twin::arrivals_at_cluster(number), (number / 2 + 1) * twin::cluster_size() * blockDim.x);
}

inline void store_in_cluster(float* here, u32 block, float v) {
  const u32 first = blockIdx.x - block_in_cluster();
  *static_cast<float*>(simulator::dynamic_shared_of(first + block, here)) = v;
}

template <class Word>
Word __shfl_xor_sync(u32, Word v, int mask) {
  return twin::exchange(v, [=](u32 lane) { return lane ^ mask; });
}
template <class Word>
Word __shfl_sync(u32, Word v, int source, int width = 32) {
  return twin::exchange(v, [=](u32 lane) { return lane / width * width + source; });
}

namespace twin {
template <class Word>
inline void note(simulator::Step::Kind kind, const char* what, const Word* address, const Word& v) {
  u64 bits[2] = {};
  std::memcpy(bits, &v, min(sizeof v, sizeof bits));
  simulator::note(kind, what, address, sizeof v, bits[0], bits[1]);
}

// Ends a load: notes it, and lets other threads run.
template <class Word>
inline Word loaded(const char* what, const Word* address, const Word& v) {
  note(simulator::Step::load, what, address, v);
  after_load();
  return v;
}

// The same of a store.
template <class Word>
inline void stored(const char* what, const Word* address, const Word& v) {
  note(simulator::Step::store, what, address, v);
  after_access();
}

template <class Word>
inline Word load_word(const Word* address) {
  if (std::uint64_t own; simulator::find_own(address, own)) return Word(own);
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}

// The accesses that a relaxed one is made of: words, or halves of 8 bytes. None is ever torn.
template <class V>
using Part = std::conditional_t<requires(V v) { v.word; }, u32, u64>;

// Visits the parts of a V in a random order. Other threads may run between two of them.
template <class V, class Visit>
inline void visit_parts(Visit visit) {
  constexpr u32 count = sizeof(V) / sizeof(Part<V>);
  if (count == 1) return visit(0);
  const u32 first = simulator::random(count), step = simulator::random(2) ? 1 : count - 1;
  for (u32 i = 0; i < count; ++i) {
    visit((first + i * step) % count);
    if (simulator::random(16) == 0) simulator::step();
  }
}
}  // namespace twin

template <class V>
V load_relaxed_sys(const V* address) {
  using Part = twin::Part<V>;
  V v;
  twin::visit_parts<V>([&](u32 i) {
    reinterpret_cast<Part*>(&v)[i] = twin::load_word(reinterpret_cast<const Part*>(address) + i);
  });
  if (sizeof(V) == 16) twin::look_at_poll();
  return twin::loaded("load_relaxed_sys", address, v);
}

template <class V>
void store_relaxed_sys(V* address, const std::type_identity_t<V>& v) {
  using Part = twin::Part<V>;
  twin::visit_parts<V>([&](u32 i) {
    simulator::post(reinterpret_cast<Part*>(address) + i, reinterpret_cast<const Part*>(&v)[i], sizeof(Part));
  });
  twin::stored("store_relaxed_sys", address, v);
}

template <class Word>
inline Word load_acquire_sys(const Word* address) {
  const Word v = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  simulator::acquire_views(address);
  twin::look_at_poll();
  return twin::loaded("load_acquire_sys", address, v);
}

template <class Word>
inline void store_release_sys(Word* address, std::type_identity_t<Word> v) {
  simulator::make_released_visible();
  simulator::release_views(address);
  __atomic_store_n(address, v, __ATOMIC_RELEASE);
  twin::stored("store_release_sys", address, v);
}

inline void store_release_sys_if(bool condition, u64* address, u64 v) {
  if (condition) store_release_sys(address, v);
}

template <class Word>
inline Word load_relaxed_gpu(const Word* address) {
  return twin::loaded("load_relaxed_gpu", address, twin::load_word(address));
}

inline void store_relaxed_gpu(u32* address, u32 v) {
  simulator::post(address, v, 4);
  twin::stored("store_relaxed_gpu", address, v);
}

inline u32 add_relaxed_cta(u32* address, u32 v) {
  const u32 old = __atomic_fetch_add(address, v, __ATOMIC_RELAXED);
  twin::stored("add_relaxed_cta", address, v);
  return old;
}

inline u32 add_relaxed_gpu(u32* address, u32 v) {
  simulator::make_visible_at(address);
  const u32 old = __atomic_fetch_add(address, v, __ATOMIC_RELAXED);
  twin::stored("add_relaxed_gpu", address, v);
  return old;
}

inline u32 exchange_relaxed_gpu(u32* address, u32 v) {
  simulator::make_visible_at(address);
  const u32 old = __atomic_exchange_n(address, v, __ATOMIC_RELAXED);
  twin::stored("exchange_relaxed_gpu", address, v);
  return old;
}

inline void copy_async(Pack* shared, const Pack* global) {
  auto& me = simulator::self();
  me.copies.push_back(
      {.kind = simulator::Copy::async, .to = shared, .from = global, .nbytes = sizeof(Pack), .group = me.copy_groups});
  simulator::note(simulator::Step::load, "copy_async", global);
  twin::after_access();
}

inline void commit_copies() { ++simulator::self().copy_groups; }

template <int Pending>
inline void wait_for_copies() {
  const auto& me = simulator::self();
  twin::carry_out_where([&](const simulator::Copy& copy) {
    return copy.kind == simulator::Copy::async && copy.group + Pending < me.copy_groups;
  });
  twin::after_access();
}

inline Pack* dynamic_shared() { return static_cast<Pack*>(simulator::dynamic_shared()); }

namespace twin {
// The ends of a rank's kernels and the begins of those after them; two words alternate, as for barriers.
inline std::atomic<u32> order_of_kernels[8][2];

inline void end_of_thread() {
  carry_out_where([](const simulator::Copy&) { return true; });
  simulator::make_own_visible();
  release(order_of_kernels[simulator::self().rank][simulator::self().kernel % 2]);
}
}  // namespace twin

inline void wait_for_previous_kernel(u32 = 0) {
  if (!simulator::launched().waits) return;
  simulator::wait_for_previous_kernel();
  twin::acquire(twin::order_of_kernels[simulator::self().rank][(simulator::self().kernel + 1) % 2]);
}

inline void release_next_kernel() { simulator::release_next_kernel(); }
inline u64 global_time_ns() { return simulator::now_ns(); }

// An addition on the GPU turns any NaN into this one, while the host's addition keeps a payload. Kernels read the bits
// of sums only.
inline u32 __float_as_uint(float v) { return std::isnan(v) ? 0x7fffffffu : std::bit_cast<u32>(v); }
inline float __uint_as_float(u32 v) { return std::bit_cast<float>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }  // -ffp-contract=off, as for everything here
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __ull2float_rn(u64 v) { return float(v); }
inline float rsqrtf(float a) { return 1 / std::sqrt(a); }

namespace twin {
inline u32 bf16_from_float(float v) {
  if (std::isnan(v)) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline u32 fp16_from_float(float v) {
  return std::isnan(v) ? 0x7fff : std::bit_cast<u16>(static_cast<_Float16>(v));
}
}  // namespace twin

inline u32 bf16x2_from_floats(float low, float high) {
  return twin::bf16_from_float(low) | twin::bf16_from_float(high) << 16;
}
inline u32 fp16x2_from_floats(float low, float high) {
  return twin::fp16_from_float(low) | twin::fp16_from_float(high) << 16;
}

inline void floats_from_fp16x2(u32 v, float& low, float& high) {
  low = std::bit_cast<_Float16>(u16(v));
  high = std::bit_cast<_Float16>(u16(v >> 16));
}
