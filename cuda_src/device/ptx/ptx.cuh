// PTX instructions, each behind a function named for what it does. Only this folder contains asm. This file has the
// instructions that all kernels use.
#pragma once

// Of a function that runs on the GPU and is inlined.
#define DEVICE __device__ __forceinline__

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// 4, 8 or 16 bytes that move as one access.
template <int Count>
struct alignas(4 * Count) Words {
  u32 word[Count];
};

// 16 bytes: the unit of every transfer.
using Pack = Words<4>;

// 16 bytes that move as two accesses of 8. Neither is ever torn.
struct alignas(16) Pair {
  u64 half[2];
};

// By any thread: a relaxed load of system scope, for words with readiness in themselves. It orders nothing else, so the
// compiler may move other accesses across. 16 bytes of words may arrive torn, 8 bytes of one number do not.
DEVICE Pack load_relaxed_sys(const Pack* address) {
  Pack p;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
               : "l"(address));
  return p;
}

// By any thread: a relaxed store of system scope. It orders nothing else, and may arrive torn as above.
DEVICE void store_relaxed_sys(Pack* address, const Pack& p) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(p.word[0]), "r"(p.word[1]),
               "r"(p.word[2]), "r"(p.word[3]));
}

DEVICE Words<1> load_relaxed_sys(const Words<1>* address) {
  Words<1> v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v.word[0]) : "l"(address));
  return v;
}

DEVICE Words<2> load_relaxed_sys(const Words<2>* address) {
  Words<2> v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(address));
  return v;
}

DEVICE void store_relaxed_sys(Words<1>* address, const Words<1>& v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v.word[0]));
}

DEVICE void store_relaxed_sys(Words<2>* address, const Words<2>& v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(v.word[0]), "r"(v.word[1]));
}

DEVICE Pair load_relaxed_sys(const Pair* address) {
  Pair p;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(p.half[0]), "=l"(p.half[1]) : "l"(address));
  return p;
}

DEVICE void store_relaxed_sys(Pair* address, const Pair& p) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(p.half[0]), "l"(p.half[1]));
}

DEVICE u64 load_relaxed_sys(const u64* address) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}

DEVICE void store_relaxed_sys(u64* address, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v));
}

// By any thread: an acquire load of system scope. If it sees what a release store wrote, this thread sees all that came
// before that store, on any GPU.
DEVICE u32 load_acquire_sys(const u32* address) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// By any thread: a release store of system scope. Publishes this thread's earlier accesses, and those that a barrier
// orders before it, to whoever acquires the value.
DEVICE void store_release_sys(u32* address, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

DEVICE u64 load_acquire_sys(const u64* address) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// By any thread: store_release_sys, a release store of system scope, under a predicate. A branch around the fence and
// the store would take 80 ns longer.
DEVICE void store_release_sys_if(bool condition, u64* address, u64 v) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n @p st.release.sys.global.u64 [%0], %1;\n}" ::"l"(address), "l"(v),
      "r"(u32(condition))
      : "memory");
}

// By any thread: a relaxed load of gpu scope, of what threads of this GPU write.
DEVICE u32 load_relaxed_gpu(const u32* address) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

DEVICE u64 load_relaxed_gpu(const u64* address) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

// By any thread: a relaxed store of gpu scope.
DEVICE void store_relaxed_gpu(u32* address, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// By any thread: a relaxed atomic exchange of gpu scope. Returns the old value.
DEVICE u32 exchange_relaxed_gpu(u32* address, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(v) : "memory");
  return old;
}

// By any thread: a relaxed atomic addition of gpu scope. Returns the old value.
DEVICE u32 add_relaxed_gpu(u32* address, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(v) : "memory");
  return old;
}

// By any thread: a relaxed atomic addition of block scope, in shared memory. Returns the old value.
DEVICE u32 add_relaxed_cta(u32* address, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(u32(__cvta_generic_to_shared(address))), "r"(v)
               : "memory");
  return old;
}

// (6) A copy is an ordinary weak load and store that the hardware finishes later. It reads through the generic proxy
//     and not before it is issued, so it is ordered as a load at the same point would be: after the wait of (2) it sees
//     the data that the peers signalled. It bypasses the L1 cache. After wait_for_copies its write is visible to the
//     thread that issued it; another would need a barrier as well. A thread reuses only places that it has read itself.

// By any thread: begins to copy one pack from global to shared memory. Weak, and ordered as a load here would be (6).
DEVICE void copy_async(Pack* shared, const Pack* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}

// By any thread: ends a group of this thread's copies, which may be empty. Orders no access.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// By any thread: waits until all but the last `Pending` groups of this thread are complete. Their weak stores are then
// visible to this thread alone, to others behind a barrier (6).
template <int Pending>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// By any thread: the block's dynamic shared memory, of Scratch.shared_nbytes. Not initialised.
DEVICE Pack* dynamic_shared() {
  extern __shared__ Pack packs[];
  return packs;
}

// By any thread: one T of the block in shared memory, the same for every call with this T. Not initialised.
template <class T>
DEVICE T& static_shared() {
  __shared__ T it;
  return it;
}

// By all threads of a warp: tells the compiler that all threads of the warp have the same value.
DEVICE u32 same_in_warp(u32 v) { return __shfl_sync(0xffffffff, v, 0); }

// By all threads of a warp: the same value. The compiler no longer knows how it was computed.
DEVICE u32 held(u32 v) { return __shfl_sync(0xffffffff, v, threadIdx.x % 32); }

// By all threads of a warp: true in one of them. From sm_90 on. The compiler then knows that a single thread continues.
DEVICE bool elected() {
  u32 here;
  asm volatile("{\n\t.reg .pred p;\n\telect.sync _|p, 0xffffffff;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(here));
  return here;
}

// Internal: the index of this block in its cluster.
DEVICE u32 block_in_cluster() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// (23) This barrier orders nothing but the initialisation of mbarriers, which may then be used in all blocks of the
//      cluster, also by copies. Its arrival is relaxed: PTX orders no ordinary access before it, and in machine code
//      nothing stands between a store and the arrival. So another warp may read the old word, in the same block too.
//      fence.mbarrier_init makes an exception for these initialisations. Threads that have stored anything else meet
//      at __syncthreads before they come here, which orders the store within its block and costs one BAR.SYNC. An
//      arrival that releases would be a MEMBAR.ALL.GPU of every thread.

// Internal: the barrier of (23).
DEVICE void sync_cluster_mbarriers() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n\tbarrier.cluster.arrive.relaxed.aligned;\n\t"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Internal: __syncthreads for all blocks of the cluster, in two halves. After the first all run, and have their memory.
DEVICE void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
// Internal: its second half.
DEVICE void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Internal: stores to the address `here` of another block's shared memory. An arrival and a wait at the cluster order
// it before the other block's reads.
DEVICE void store_in_cluster(float* here, u32 block, float v) {
  const u32 own = u32(__cvta_generic_to_shared(here));
  asm volatile(
      "{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\tst.shared::cluster.f32 [there], %2;\n\t}" ::
          "r"(own), "r"(block), "f"(v)
      : "memory");
}

// Internal: waits until every kernel before this one in the stream is complete and its writes are visible. Before sm_90
// no kernel is launched early, and this and the next two functions do nothing.
DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Internal: the same, once a word has been computed: (16) in kernel_order.cuh. A block has threads, so it always waits,
// but ptxas does not know that.
DEVICE void wait_for_previous_kernel(u32 computed) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred p;\n\t.reg .b32 v;\n\tmov.u32 v, %%ntid.x;\n\tor.b32 v, v, %0;\n\tsetp.ne.u32 p, v, 0;\n\t"
      "@p griddepcontrol.wait;\n\t}" ::"r"(computed)
      : "memory");
#endif
}

// By all threads of the block, after wait_for_previous_kernel: lets the next kernel in the stream be launched. Orders
// no access. That kernel waits, with the function above, before it touches memory. This kernel calls it after its own
// wait, so that no third kernel is launched: (18) in kernel_order.cuh.
DEVICE void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By any thread: the GPU's clock in ns. Orders no access.
DEVICE u64 global_time_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// By any thread: two elements in a word, the first in its lower half: to nearest even, or infinity; any NaN is 0x7fff.
DEVICE u32 bf16x2_from_floats(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// By any thread: the same of fp16.
DEVICE u32 fp16x2_from_floats(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

// By any thread: the two elements of such a word.
DEVICE void floats_from_fp16x2(u32 v, float& low, float& high) {
  asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.f32.f16 %0, l;\n\tcvt.f32.f16 %1, h;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(v));
}
