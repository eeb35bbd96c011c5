// The host's twin of cuda_src/device/ptx/multimem.cuh: the switch's arithmetic over the ranks' memory, in rank order.
//
// Accesses by a multicast address and by a rank's own address have different views (sources/views.hpp), so
// ThreadSanitizer reports two of them without a fence between.
#pragma once
#include "device/pack.cuh"

namespace twin {
inline const bool has_aliases = simulator::add_view(simulator::alias);

inline Pack* on_rank(int rank, const Pack* address) {
  const auto offset = reinterpret_cast<const char*>(address) - simulator::multicast.base;
  return reinterpret_cast<Pack*>(simulator::multicast.scratch[rank] + offset);
}
}  // namespace twin

template <class T>
inline Pack multimem_load_sum(T, const Pack* address) {
  constexpr int E = elements_per_word<T>;
  Pack sum;
  for (int w = 0; w < 4; ++w) {
    float total[E] = {};
    for (size_t rank = 0; rank < simulator::multicast.scratch.size(); ++rank) {
      float v[E];
      T::unpack(twin::load_as(simulator::view(simulator::alias), &twin::on_rank(rank, address)->word[w]), v);
      for (int e = 0; e < E; ++e) total[e] = rank ? total[e] + v[e] : v[e];
    }
    sum.word[w] = T::round(total);
    twin::after_access();
  }
  twin::note(simulator::Step::load, "multimem_load_sum", address, sum);
  return sum;
}

inline void multimem_store(Pack* address, const Pack& p) {
  twin::note(simulator::Step::store, "multimem_store", address, p);
  for (size_t rank = 0; rank < simulator::multicast.scratch.size(); ++rank) {
    twin::copy_as(nullptr, simulator::view(simulator::alias), twin::on_rank(rank, address), &p, sizeof p);
    twin::after_access();
  }
}

inline void fence_aliases() {
  simulator::fence(simulator::generic, simulator::alias);
  simulator::fence(simulator::alias, simulator::generic);
  twin::after_access();
}
