// Relaxed stores on their way: visible late and in any order, but for those of one thread to one address.
#pragma once
#include <cstdint>

#include "kept.hpp"
#include "sanitizers.hpp"
#include "scheduler.hpp"

namespace simulator {

template <class Owner>
class Stores {
 public:
  struct Store {
    Owner* owner;
    void* address;
    uint64_t value;
    uint32_t nbytes;
    Reach reach = of_thread;
  };

  Stores() { stores_.reserve(most); }

  bool empty() const { return stores_.empty(); }

  // Replaces a pending store of the same thread to the same address, which nobody will see.
  void add(const Store& store) {
    for (Store& older : stores_)
      if (older.owner == store.owner && older.address == store.address) return void(older = store);
    if (stores_.size() == most) perform_one();
    stores_.push_back(store);
  }

  bool find(const Owner* owner, const void* address, uint64_t& value) const {
    for (const Store& store : stores_)
      if (store.owner == owner && store.address == address) {
        value = store.value;
        return true;
      }
    return false;
  }

  void perform_one() {
    if (!stores_.empty()) perform(random(stores_.size()));
  }

  template <class Choose>
  void perform_where(Choose choose) {
    for (size_t at = 0; at < stores_.size();)
      if (choose(stores_[at]))
        perform(at);
      else
        ++at;
  }

  template <class Visit>
  void visit(Visit visit) {
    for (Store& store : stores_) visit(store);
  }

 private:
  static constexpr size_t most = 256;

  void perform(size_t at) {
    const Store store = stores_[at];
    stores_[at] = stores_.back();
    stores_.pop_back();
    const As as(store.owner->views.of[generic]);
    if (store.nbytes == 4)
      store_relaxed(static_cast<int*>(store.address), int(store.value), __tsan_atomic32_store);
    else
      store_relaxed(static_cast<long long*>(store.address), static_cast<long long>(store.value), __tsan_atomic64_store);
  }

  template <class Word>
  static void store_relaxed(Word* address, Word value, void (*as_observed)(volatile Word*, Word, int)) {
    if (as_observed)
      as_observed(address, value, order_relaxed);
    else
      __atomic_store_n(address, value, __ATOMIC_RELAXED);
  }

  Vector<Store> stores_;
};

}  // namespace simulator
