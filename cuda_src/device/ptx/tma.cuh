// Bulk copies (TMA) by one thread, and their mbarriers (sm_90 and newer). Addresses and sizes are multiples of 16.
//
// (5) Bulk copies access memory through the async proxy, all else through the generic proxy. Two rules join them:
//     - Once a wait for a copy has returned, the copy's writes are visible to that thread through either proxy:
//       completion implies a fence between the two. So they count as the thread's own writes. A barrier and a release
//       store (2) publish them, also in a peer's memory. A wait for the reads alone, `.read`, does not suffice.
//     - A copy may read or overwrite memory that ordinary accesses have touched only after one of the fences below. The
//       fence comes after those accesses in the order of barriers and acquires that leads from them to the copy.
#pragma once
#include "device/ptx/ptx.cuh"

DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// An mbarrier in shared memory. Phases are counted from 0. A phase ends with its last arrival and its last byte.
// try_wait compares only the parity of a phase: phase k + 1 must not end before every wait for k has returned.
class Mbarrier {
 public:
  // By one thread. Other threads use it after a barrier, and copies after fence_async_proxy_shared as well.
  DEVICE void init(u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }

  // Releases this thread's writes, and those it has seen, to the threads that wait.
  DEVICE void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }

  // Arrives at the mbarrier at this address in a block of the cluster: this thread has finished reading. No release.
  DEVICE void arrive_at(u32 block) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(this)),
        "r"(block)
        : "memory");
  }

  // The same, and releases as `arrive` does, to threads of that block that wait for the cluster.
  DEVICE void release_to(u32 block) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n\t}" ::"r"(shared_address(this)),
        "r"(block)
        : "memory");
  }

  // Arrives, and makes the phase wait for `nbytes` of bulk loads.
  DEVICE void arrive_and_expect(u32 nbytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(nbytes)
                 : "memory");
  }

  // Whether a phase has ended. Sleeps for a short time if it has not.
  DEVICE bool try_wait(u32 phase) const {
    u32 ended;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(shared_address(this)), "r"(phase & 1)
        : "memory");
    return ended;
  }

  // The same, and acquires what threads of other blocks have released or stored asynchronously.
  DEVICE bool try_wait_for_cluster(u32 phase) const {
    u32 ended;
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(ended)
        : "r"(shared_address(this)), "r"(phase & 1)
        : "memory");
    return ended;
  }

  // Waits until a phase has ended.
  DEVICE void wait(u32 phase) const {
    while (!try_wait(phase)) continue;
  }
  DEVICE void wait_for_cluster(u32 phase) const {
    while (!try_wait_for_cluster(phase)) continue;
  }

 private:
  u64 state_;
};

DEVICE void bulk_load(void* shared, const void* global, u32 nbytes, Mbarrier& loaded) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(nbytes), "r"(shared_address(&loaded))
               : "memory");
}

DEVICE void bulk_store(void* global, const void* shared, u32 nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(nbytes)
               : "memory");
}

// Stores a pack later, at the address of `here` in a block of the cluster, whose mbarrier at the address of `stored`
// counts the bytes. The store is ordered as a copy is: it may overwrite what ordinary accesses have touched only after
// a fence, and is visible after a wait for the cluster at the mbarrier. It releases no other access.
DEVICE void store_async_in_cluster(Pack* here, u32 block, const Pack& p, Mbarrier& stored) {
  asm volatile(
      "{\n\t.reg .b32 there, counts;\n\tmapa.shared::cluster.u32 there, %0, %2;\n\t"
      "mapa.shared::cluster.u32 counts, %1, %2;\n\t"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3, %4, %5, %6}, [counts];\n\t}" ::
          "r"(shared_address(here)),
      "r"(shared_address(&stored)), "r"(block), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3])
      : "memory");
}

// Waits until every bulk store of this thread is complete.
DEVICE void wait_for_bulk_stores() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group 0;" ::: "memory");
}

// Fences between ordinary accesses and copies, for shared or global memory.
DEVICE void fence_async_proxy_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
