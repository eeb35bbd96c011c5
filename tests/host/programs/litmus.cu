// Litmus tests of the twins: an access, an instruction, and an access by another thread. The names say which
// instruction lies between, and tests/host/test_litmus.py which of them order the two.
#include "device/arguments.cuh"
#include "device/ptx/tensor_map.cuh"
#include "device/ptx/wgmma.cuh"

struct LitmusStorage {
  u32 words[32 * 4];
  Mbarrier mbarrier;
};

// By all threads of a warp, in shared memory: `pass` lies between a store by the first lane and loads by all.
struct Nothing {
  static void pass(Mbarrier&) {}
};
struct Vote {
  static void pass(Mbarrier&) { __any_sync(0xffffffff, 0); }
};
struct Shuffle {
  static void pass(Mbarrier&) { __shfl_sync(0xffffffff, 0u, 0); }
};
struct WarpBarrier {
  static void pass(Mbarrier&) { __syncwarp(); }
};
struct BlockBarrier {
  static void pass(Mbarrier&) { __syncthreads(); }
};
struct BlockVote {
  static void pass(Mbarrier&) { __syncthreads_or(0); }
};
struct ClusterMbarriers {
  static void pass(Mbarrier&) { sync_cluster_mbarriers(); }
};
struct ClusterBarrier {
  static void pass(Mbarrier&) {
    arrive_at_cluster();
    wait_for_cluster();
  }
};
struct ProductWait {
  static void pass(Mbarrier&) { wait_for_all_but_last_products(); }
};
struct Arrival {
  static void pass(Mbarrier& mbarrier) {
    if (threadIdx.x == 0) mbarrier.arrive();
    mbarrier.wait(0);
  }
};
struct RelaxedArrival {
  static void pass(Mbarrier& mbarrier) {
    if (threadIdx.x == 0) mbarrier.arrive_at(block_in_cluster());
    mbarrier.wait(0);
  }
};
struct ClusterWait {
  static bool ended(const Mbarrier& mbarrier) { return mbarrier.try_wait_for_cluster(0); }
};
struct BlockWait {
  static bool ended(const Mbarrier& mbarrier) { return mbarrier.try_wait(0); }
};
template <class Wait>
struct ReleaseTo {
  static void pass(Mbarrier& mbarrier) {
    if (threadIdx.x == 0) mbarrier.release_to(block_in_cluster());
    while (!Wait::ended(mbarrier)) continue;
  }
};

inline LitmusStorage& begin_litmus() {
  auto& shared = *reinterpret_cast<LitmusStorage*>(dynamic_shared_boxes());
  wait_for_previous_kernel();
  if (threadIdx.x == 0) shared.mbarrier.init(1);
  __syncthreads();
  return shared;
}

inline void give(const Arguments& a, u32 v) { static_cast<u32*>(a.output)[blockIdx.x * 32 + threadIdx.x] = v; }

template <class Between>
void store_then_load(Arguments a) {
  auto& shared = begin_litmus();
  if (threadIdx.x == 0) shared.words[0] = 1;
  Between::pass(shared.mbarrier);
  give(a, shared.words[0]);
}

// Each thread loads a word that another one has stored as part of a matrix.
template <class Between>
void matrices_then_load(Arguments a) {
  auto& shared = begin_litmus();
  const u32 ones[4] = {1, 1, 1, 1};
  store_matrices(shared.words + 4 * threadIdx.x, ones);
  Between::pass(shared.mbarrier);
  give(a, shared.words[4 * threadIdx.x]);
}

// A pack that the other block of the cluster stores asynchronously.
template <class Wait>
void store_async_then_load(Arguments a) {
  auto& shared = begin_litmus();
  sync_cluster_mbarriers();
  const u32 other = 1 - block_in_cluster();
  if (threadIdx.x == 0) {
    shared.mbarrier.arrive_and_expect(sizeof(Pack));
    store_async_in_cluster(reinterpret_cast<Pack*>(shared.words), other, {{1, 1, 1, 1}}, shared.mbarrier);
  }
  while (!Wait::ended(shared.mbarrier)) continue;
  give(a, shared.words[threadIdx.x % 4]);
}

// A word that is loaded, and the pack around it that is stored asynchronously afterwards.
struct Fenced {
  static void pass() { fence_async_proxy_shared(); }
};
struct Unfenced {
  static void pass() {}
};
template <class Fence>
void load_then_store_async(Arguments a) {
  auto& shared = begin_litmus();
  if (threadIdx.x == 0) {
    give(a, shared.words[0] == 2 ? 2 : 1);
    Fence::pass();
    shared.mbarrier.arrive_and_expect(sizeof(Pack));
    store_async_in_cluster(reinterpret_cast<Pack*>(shared.words), block_in_cluster(), {{2, 2, 2, 2}}, shared.mbarrier);
  } else {
    give(a, 1);
  }
  shared.mbarrier.wait_for_cluster(0);
}

// An mbarrier that is new, used by another thread.
template <class Between>
void init_then_wait(Arguments a) {
  auto& shared = *reinterpret_cast<LitmusStorage*>(dynamic_shared_boxes());
  wait_for_previous_kernel();
  if (threadIdx.x == 0) shared.mbarrier.init(32);
  Between::pass(shared.mbarrier);
  shared.mbarrier.arrive();
  shared.mbarrier.wait(0);
  give(a, 1);
}

// By two blocks, in global memory: the threads of the first store words, `tell` sets a flag for the words of the
// first `tellers`, and the second block loads these once it sees the flag. So many words are stored that some are late.
constexpr u32 told_words = 8;  // of a thread
struct Atomic {
  static constexpr u32 tellers = 1;
  static void tell(u32* flag, Mbarrier&) {
    if (threadIdx.x == 0) add_relaxed_gpu(flag, 1);
  }
};
struct Release {
  static constexpr u32 tellers = 32;
};
struct ReleaseAfterVote : Release {
  static void tell(u32* flag, Mbarrier&) {
    __any_sync(0xffffffff, 0);
    if (threadIdx.x == 0) store_release_sys(flag, 1);
  }
};
struct ReleaseAfterWarpBarrier : Release {
  static void tell(u32* flag, Mbarrier&) {
    __syncwarp();
    if (threadIdx.x == 0) store_release_sys(flag, 1);
  }
};
struct ReleaseAfterBlockBarrier : Release {
  static void tell(u32* flag, Mbarrier&) {
    __syncthreads();
    if (threadIdx.x == 0) store_release_sys(flag, 1);
  }
};
struct ReleaseAfterArrival : Release {
  static void tell(u32* flag, Mbarrier& mbarrier) {
    __syncwarp();
    if (threadIdx.x == 7) mbarrier.arrive();
    if (threadIdx.x != 0) return;
    mbarrier.wait(0);
    store_release_sys(flag, 1);
  }
};

template <class Way>
void tell(Arguments a) {
  auto& shared = begin_litmus();
  u32 *const words = reinterpret_cast<u32*>(a.scratch[0]), *const flag = words + told_words * 32;
  u32 all = 1;
  if (blockIdx.x == 0) {
    for (u32 i = 0; i < told_words; ++i) store_relaxed_gpu(words + i * 32 + threadIdx.x, 1);
    Way::tell(flag, shared.mbarrier);
    while (load_acquire_sys(flag + 1) == 0) continue;  // a thread that ends has no late stores
  } else {
    while (load_acquire_sys(flag) == 0) continue;
    for (u32 i = 0; i < told_words; ++i) all &= load_relaxed_gpu(words + i * 32 + threadIdx.x % Way::tellers);
    __syncthreads();
    if (threadIdx.x == 0) store_release_sys(flag + 1, 1);
  }
  give(a, all);
}

// By one thread: a bulk store, a wait, and a load of the destination.
struct SourceWait {
  static void pass() {
    commit_bulk_stores();
    wait_for_bulk_sources<0>();
  }
};
struct StoreWait {
  static void pass() { wait_for_bulk_stores(); }
};
struct SourceWaitWithoutCommit {
  static void pass() { wait_for_bulk_sources<0>(); }
};

template <class Wait>
void bulk_store_then_load(Arguments a) {
  auto& shared = begin_litmus();
  u32 loaded = 1;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 4; ++i) shared.words[i] = 1;
    fence_async_proxy_shared();
    fence_async_proxy_global();
    bulk_store(a.scratch[0], shared.words, sizeof(Pack));
    Wait::pass();
    loaded = *reinterpret_cast<const u32*>(a.scratch[0]);
  }
  give(a, loaded);
}

// The source of a bulk store, overwritten after a wait.
template <class Wait>
void bulk_store_then_overwrite(Arguments a) {
  auto& shared = begin_litmus();
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 4; ++i) shared.words[i] = 1;
    fence_async_proxy_shared();
    fence_async_proxy_global();
    commit_bulk_stores();
    bulk_store(a.scratch[0], shared.words, sizeof(Pack));
    Wait::pass();
    for (u32 i = 0; i < 4; ++i) shared.words[i] = 2;
    wait_for_bulk_stores();
    give(a, *reinterpret_cast<const u32*>(a.scratch[0]));
  } else {
    give(a, 1);
  }
}
