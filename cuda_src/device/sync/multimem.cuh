// Sums and copies by the NVSwitch: the multimem instructions (sm_90 and newer), and a stand-in for them.
//
// A multicast address stands for one location on every rank: `ld_reduce` returns their sum, `st` stores to all. 16-bit
// types are added in fp32 (.acc::f32). NVIDIA does not document the order of additions, the rounding and a NaN's bits,
// so ranks that load one sum may see different bits. The stand-in adds in rank order and rounds once.
//
// (7) A multicast address and a rank's ordinary one are aliases of one location. PTX orders accesses to aliases only
//     where an alias proxy fence lies on the path from one to the other (its memory consistency model, "proxy-preserved
//     base causality order"). fence_before_signal puts one on every path out of a block: from any thread through a
//     barrier to the fence of thread 0, and from there through the barrier in Signals::send to the release stores. So a
//     block's accesses before it signals precede, by (2), another block's accesses after its wait, whichever address
//     each of them uses. Accesses after the last wait of a call precede, by (1), the fence and the signals of its
//     rank's next call.
#pragma once
#include "device/ptx/multimem.cuh"
#include "device/sync/signal_pad.cuh"

// The last template argument of a multimem kernel. Pack i is the i-th after the signal pad of every rank.
struct Hardware {
  static DEVICE Pack* address(const Arguments& a, u64 i) {
    return reinterpret_cast<Pack*>(a.multicast + sizeof(SignalPad)) + i;
  }

  template <class T, int N>
  static DEVICE Pack ld_reduce(const Arguments& a, u64 i) {
    return multimem_load_sum(T{}, address(a, i));
  }

  template <int N>
  static DEVICE void st(const Arguments& a, u64 i, const Pack& p) {
    multimem_store(address(a, i), p);
  }

  static DEVICE void fence_before_signal() {
    __syncthreads();
    if (threadIdx.x == 0) fence_aliases();
  }
};

// The same by ordinary accesses to every rank's memory, so that tests run these kernels without multicast.
struct StandIn {
  template <class T, int N>
  static DEVICE Pack ld_reduce(const Arguments& a, u64 i) {
    Pack part[N];
    for (int r = 0; r < N; ++r) part[r] = after_signal_pad(a, r)[i];
    return sum_in_rank_order<T, N>(part);
  }

  template <int N>
  static DEVICE void st(const Arguments& a, u64 i, const Pack& p) {
    for (int hop = 1; hop <= N; ++hop) after_signal_pad(a, (a.rank + hop) % N)[i] = p;
  }

  static DEVICE void fence_before_signal() {}
};
