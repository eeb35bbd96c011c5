// The host's twin of cuda_src/device/tma.cuh: bulk copies that are carried out later, and mbarriers that count them.
//
// Not modelled: the two proxies. A fence between them does nothing here, so one that is missing is not noticed.
#pragma once
#include "ptx.cuh"

class Mbarrier {
 public:
  void init(u32 arrivals) {
    arrivals_ = pending_ = arrivals;
    transactions_ = ended_ = 0;
    order_.fetch_add(1, std::memory_order_release);
    after_access();
  }

  void arrive() { count(1, 0); }
  void arrive_and_expect(u32 nbytes) { count(1, nbytes); }
  void complete(u32 nbytes) { count(0, -nbytes); }

  bool try_wait(u32 phase) const {
    const bool has_ended = (ended_ & 1) != (phase & 1);
    if (has_ended) order_.load(std::memory_order_acquire);
    after_load();
    return has_ended;
  }

 private:
  // Between two steps a thread runs alone, so the members need no order among themselves.
  void count(u32 arrivals, u32 nbytes) {
    order_.fetch_add(1, std::memory_order_acq_rel);
    transactions_ += nbytes;
    pending_ -= arrivals;
    if (pending_ == 0 && transactions_ == 0) {
      pending_ = arrivals_.load(std::memory_order_relaxed);
      ++ended_;
    }
    after_access();
  }

  struct Relaxed : std::atomic<u32> {
    using std::atomic<u32>::operator=;
    operator u32() const { return load(std::memory_order_relaxed); }
    u32 operator=(u32 v) { return store(v, std::memory_order_relaxed), v; }
    u32 operator+=(u32 v) { return fetch_add(v, std::memory_order_relaxed) + v; }
    u32 operator-=(u32 v) { return fetch_sub(v, std::memory_order_relaxed) - v; }
    u32 operator++() { return *this += 1; }
  };
  Relaxed arrivals_, pending_, transactions_, ended_;
  mutable std::atomic<u32> order_;
};

inline void bulk_load(void* shared, const void* global, u32 nbytes, Mbarrier& loaded) {
  const auto complete = [](void* mbarrier, u32 n) { static_cast<Mbarrier*>(mbarrier)->complete(n); };
  simulator::self().copies.push_back({simulator::Copy::bulk_load, shared, global, nbytes, 0, &loaded, complete});
  after_access();
}

inline void bulk_store(void* global, const void* shared, u32 nbytes) {
  simulator::self().copies.push_back({simulator::Copy::bulk_store, global, shared, nbytes, 0, nullptr, nullptr});
  after_access();
}

inline void wait_for_bulk_stores() {
  carry_out_where([](const simulator::Copy& copy) { return copy.kind == simulator::Copy::bulk_store; });
  after_access();
}

inline void fence_async_proxy_shared() { after_access(); }
inline void fence_async_proxy_global() { after_access(); }
