// The host's twin of cuda_src/device/ptx/tma.cuh: bulk copies that are carried out later, and mbarriers that count them.
//
// The async proxy has a view for shared memory and one for global memory (sources/views.hpp), so ThreadSanitizer
// reports a copy that no fence precedes.
#pragma once
#include "device/ptx/ptx.cuh"

// The block's dynamic shared memory from a multiple of 1024 on, whose address the tensor cores know as 1024.
inline char* dynamic_shared_boxes() {
  const u64 begin = reinterpret_cast<u64>(dynamic_shared());
  char* const boxes = reinterpret_cast<char*>((begin + 1023) / 1024 * 1024);
  twin::shared_of_blocks[twin::block_of_all()].store(boxes, std::memory_order_relaxed);
  return boxes;
}

inline u32 shared_address(const void* p) { return static_cast<const char*>(p) - dynamic_shared_boxes() + 1024; }

namespace twin {
// Only programs that make bulk copies have these views, since views cost time.
template <class Program = void>
const bool has_async_proxy =
    simulator::add_view(simulator::async_shared) && simulator::add_view(simulator::async_global);

// The address in another block of the cluster that corresponds to `p` in this one.
inline char* shared_of_block(u32 block, const void* p) {
  return shared_of_blocks[first_of_cluster() + block].load(std::memory_order_relaxed) + (shared_address(p) - 1024);
}

inline void issue_load(void* shared, const void* from, u32 nbytes, simulator::View read, void* loaded,
                       void (*complete)(const simulator::Copy& copy)) {
  simulator::self().copies.push_back({.kind = simulator::Copy::bulk_load,
                                      .to = shared,
                                      .from = from,
                                      .nbytes = nbytes,
                                      .read = read,
                                      .written = simulator::async_shared,
                                      .mbarrier = loaded,
                                      .complete = complete});
}

inline void issue_store(void* global, const void* from, u32 nbytes,
                        void (*complete)(const simulator::Copy& copy) = nullptr) {
  simulator::self().copies.push_back({.kind = simulator::Copy::bulk_store,
                                      .to = global,
                                      .from = from,
                                      .nbytes = nbytes,
                                      .read = simulator::async_shared,
                                      .written = simulator::async_global,
                                      .group = simulator::self().copy_groups,
                                      .complete = complete});
}
}  // namespace twin

class Mbarrier {
 public:
  void init(u32 arrivals) {
    twin::copy_as(nullptr, simulator::view(simulator::inits), &arrivals_, &arrivals, sizeof arrivals);
    simulator::fence(simulator::inits, simulator::generic);
    pending_ = arrivals;
    transactions_ = ended_ = 0;
    twin::after_access();
  }

  void arrive() { arrive_and_expect(0); }

  void arrive_and_expect(u32 nbytes) {
    twin::release(order_[ended_ % 2]);
    count(1, nbytes);
    twin::after_access();
  }

  // Arrives at the corresponding mbarrier of another block of the cluster. The arrival is relaxed. It tells copies that
  // the products of this warp have read their operands, which cannot come after the reaction to the arrival.
  void arrive_at(u32 block) {
    Mbarrier& there = *reinterpret_cast<Mbarrier*>(twin::shared_of_block(block, this));
    simulator::release_view(&there.order_[there.ended_ % 2], simulator::products, simulator::async_shared);
    there.count(1, 0);
    twin::after_access();
  }

  void release_to(u32 block) {
    Mbarrier& there = *reinterpret_cast<Mbarrier*>(twin::shared_of_block(block, this));
    twin::release(there.order_of_cluster_[there.ended_ % 2]);
    there.count(1, 0);
    twin::after_access();
  }

  bool try_wait_for_cluster(u32 phase) const {
    const bool has_ended = try_wait(phase);
    if (has_ended) twin::acquire(order_of_cluster_[phase % 2]);
    return has_ended;
  }

  // Acquires no release by a thread of another block. The bytes of copies it sees nevertheless.
  bool try_wait(u32 phase) const {
    const bool has_ended = arrivals_ && (ended_ & 1) != (phase & 1);
    if (has_ended) twin::acquire(order_[phase % 2]);
    simulator::note(simulator::Step::load, has_ended ? "an ended try_wait" : "try_wait", this);
    twin::after_load();
    return has_ended;
  }

  // A copy has brought its bytes. Its end implies a fence: threads that wait see them through the generic view, too.
  static void complete(const simulator::Copy& copy) {
    Mbarrier& me = *static_cast<Mbarrier*>(copy.mbarrier);
    me.end(copy, me.order_[me.ended_ % 2]);
  }
  static void complete_in_cluster(const simulator::Copy& copy) {
    Mbarrier& me = *static_cast<Mbarrier*>(copy.mbarrier);
    me.end(copy, me.order_of_cluster_[me.ended_ % 2]);
  }

  void wait(u32 phase) const {
    while (!try_wait(phase)) continue;
  }
  void wait_for_cluster(u32 phase) const {
    while (!try_wait_for_cluster(phase)) continue;
  }

 private:
  void end(const simulator::Copy& copy, std::atomic<u32>& order) {
    simulator::release_views(&order);
    const u32 nbytes = copy.nbytes;
    const simulator::Observer reader = simulator::view(copy.read), writer = simulator::view(copy.written);
    {
      const simulator::As as(reader);
      order.fetch_add(1, std::memory_order_release);
    }
    const simulator::As as(writer);
    order.fetch_add(1, std::memory_order_release);
    count(0, -nbytes);
  }

  // Between two steps a thread runs alone, so the members need no order among themselves.
  void count(u32 arrivals, u32 nbytes) {
    transactions_ += nbytes;
    pending_ -= arrivals;
    if (pending_ == 0 && transactions_ == 0) {
      pending_ = arrivals_;
      ++ended_;
    }
  }

  struct Relaxed : std::atomic<u32> {
    using std::atomic<u32>::operator=;
    operator u32() const { return load(std::memory_order_relaxed); }
    u32 operator=(u32 v) { return store(v, std::memory_order_relaxed), v; }
    u32 operator+=(u32 v) { return fetch_add(v, std::memory_order_relaxed) + v; }
    u32 operator-=(u32 v) { return fetch_sub(v, std::memory_order_relaxed) - v; }
    u32 operator++() { return *this += 1; }
  };
  u32 arrivals_;  // no atomic: a race where the barrier, or a copy's fence, after init is missing
  Relaxed pending_, transactions_, ended_;
  std::atomic<u32> order_[2], order_of_cluster_[2];  // by phase
};

template <class Program = void>
void bulk_load(void* shared, const void* global, u32 nbytes, Mbarrier& loaded) {
  if (!twin::has_async_proxy<Program>) std::abort();
  twin::issue_load(shared, global, nbytes, simulator::async_global, &loaded, Mbarrier::complete);
  simulator::note(simulator::Step::load, "bulk_load", global);
  twin::after_access();
}

template <class Program = void>
void bulk_store(void* global, const void* shared, u32 nbytes) {
  if (!twin::has_async_proxy<Program>) std::abort();
  simulator::look_at_store(global, nbytes);
  twin::issue_store(global, shared, nbytes);
  simulator::note(simulator::Step::store, "bulk_store", global);
  twin::after_access();
}

// A copy of a pack that nobody else sees. Its end releases what the copy does, but only to a wait for the cluster.
inline void store_async_in_cluster(Pack* here, u32 block, const Pack& p, Mbarrier& stored) {
  u32* const kept = reinterpret_cast<u32*>(simulator::make_memory(sizeof(Pack)));
  twin::copy_as(nullptr, simulator::view(simulator::async_shared), kept, &p, sizeof p);
  twin::issue_load(twin::shared_of_block(block, here), kept, sizeof(Pack), simulator::async_shared,
                   twin::shared_of_block(block, &stored), Mbarrier::complete_in_cluster);
  twin::after_access();
}

inline void wait_for_bulk_stores() {
  twin::carry_out_where([](const simulator::Copy& copy) { return copy.kind == simulator::Copy::bulk_store; });
  simulator::fence(simulator::async_shared, simulator::generic);
  simulator::fence(simulator::async_global, simulator::generic);
  twin::after_access();
}

inline void fence_async_proxy_shared() {
  simulator::fence(simulator::generic, simulator::async_shared);
  simulator::fence(simulator::inits, simulator::inits_for_copies);
  twin::after_access();
}

inline void fence_async_proxy_global() {
  simulator::fence(simulator::generic, simulator::async_global);
  twin::after_access();
}
