// The host's twin of cuda_src/device/multimem_ptx.cuh: the switch's arithmetic over the ranks' memory, in rank order.
//
// Not modelled: aliases. A multicast address and a rank's own one are the same memory here without a fence.
#pragma once
#include "pack.cuh"

// What a multicast address stands for: `base`, which nobody may touch, for the same offset in every rank's scratch.
struct Multicast {
  char* base;
  std::vector<char*> scratch;
};
inline Multicast multicast;

inline Pack* on_rank(int rank, const Pack* address) {
  return reinterpret_cast<Pack*>(multicast.scratch[rank] + (reinterpret_cast<const char*>(address) - multicast.base));
}

template <class T>
inline Pack multimem_load_sum(T, const Pack* address) {
  constexpr int E = elements_per_word<T>;
  float total[4][E];
  for (size_t rank = 0; rank < multicast.scratch.size(); ++rank) {
    const Pack part = *on_rank(rank, address);
    for (int w = 0; w < 4; ++w) {
      float v[E];
      T::unpack(part.word[w], v);
      for (int e = 0; e < E; ++e) total[w][e] = rank ? total[w][e] + v[e] : v[e];
    }
  }
  Pack sum;
  for (int w = 0; w < 4; ++w) sum.word[w] = T::round(total[w]);
  after_access();
  return sum;
}

inline void multimem_store(Pack* address, const Pack& p) {
  for (size_t rank = 0; rank < multicast.scratch.size(); ++rank) *on_rank(rank, address) = p;
  after_access();
}

inline void fence_aliases() { after_access(); }
