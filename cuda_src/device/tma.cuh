// Bulk copies (TMA), which one thread issues and the copy engine carries out, and the mbarriers it announces loads on.
// sm_90 and newer. Addresses are aligned to 16 bytes and sizes are multiples of 16.
//
// (5) Bulk copies access memory through the async proxy, everything else through the generic one. Two rules join them:
//     - Once a wait for a copy has returned, the copy's writes are visible to that thread through either proxy: completion
//       implies a fence between the two. So they count as the thread's own, and a barrier and a release store (2) publish
//       them, also those in a peer's memory. (The wait that is content with the reads, `.read`, would not do.)
//     - A copy reads or overwrites what ordinary accesses have touched only after one of the fences below, which comes
//       after those accesses in the order of barriers and acquires that leads from them to the copy.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// An mbarrier in shared memory. Its phases are counted from 0; a phase ends with its last arrival and its last byte.
// try_wait compares only the parity of a phase: phase k + 1 may not end before every wait for k has returned.
class Mbarrier {
 public:
  // By one thread; the others use it after a barrier, and copies after fence_async_proxy_shared as well.
  __device__ __forceinline__ void init(u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }

  // Releases what this thread has done, and seen done, to those who wait.
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }

  // Arrives at the mbarrier that lies here in another block of the cluster, or in this one. Releases nothing: it tells
  // that this thread has finished reading.
  __device__ __forceinline__ void arrive_at(u32 block) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(this)),
        "r"(block)
        : "memory");
  }

  // The phase shall also wait for that many bytes of bulk loads.
  __device__ __forceinline__ void arrive_and_expect(u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(nbytes)
                 : "memory");
  }

  // Whether a phase has ended; sleeps a little while it has not.
  __device__ __forceinline__ bool try_wait(u32 phase) const {
    u32 ended;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(shared_address(this)), "r"(phase & 1)
        : "memory");
    return ended;
  }

 private:
  u64 state_;
};

__device__ __forceinline__ void bulk_load(void* shared, const void* global, u32 nbytes, Mbarrier& loaded) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(nbytes), "r"(shared_address(&loaded))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, u32 nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(nbytes)
               : "memory");
}

// Until every bulk store of this thread is complete; its sources may be overwritten then.
__device__ __forceinline__ void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
}

// Between ordinary accesses and copies, of shared memory or of global.
__device__ __forceinline__ void fence_async_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Brings global memory of this GPU into its L2 cache, some time later; a hint, which older chips do without.
__device__ __forceinline__ void prefetch_to_l2(const void* from, u32 nbytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(nbytes));
#endif
}
