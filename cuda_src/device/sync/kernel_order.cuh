// How the kernels of a rank follow one another, and leave room for another communicator's kernels.
#pragma once
#include "device/arguments.cuh"

// (1) Kernels of one communicator and algorithm run one after another: each begins with wait_for_previous_kernel, which
//     makes the kernels before it complete and visible even where this one was launched early. All threads wait before
//     they send, so whatever a peer receives from call e + 1 was sent after all blocks of this rank's call e had ended.

// (26) Before this wait a kernel may set up its own shared memory, and copy constant memory into it. Memory is constant
//     if, as the caller promises, every kernel that writes it has ended before this one starts.
//     - A kernel that is launched early may run beside the one before it in the stream. If that is one of graphar's,
//       all earlier ones have ended, since it releases the next one after its own wait. Another library's kernel may
//       release the next one sooner, and then several may still run. The promise covers all of them.
//     - So what was written is visible when this kernel starts, to copies as well, and they need no fence.
//     - Everything else comes after the wait of the thread that accesses it. Copies of other memory come after the wait
//       and a fence of the thread that issues them (5). In a cluster they may reach a block whose own threads still
//       wait, since the kernel before has then ended for that block as well.
//     Nothing notices a broken promise: the copies may then have the old content.

// (16) A small call is a chain of latencies, into which nothing belongs that touches no memory: indices, addresses,
//     divisions, the kind of a thread's work. A kernel computes these before it waits, and names them in its wait.
//     - They pass through a shuffle, so ptxas cannot compute them again behind the wait, and the wait depends on them,
//       so it does not compute them there in the first place. It would do both.
//     - They come from arguments and from the thread's index in the grid, which are constant while the kernel runs.
//       What a load has returned comes after the wait, but for (26).
//     - The dependence is one that always holds: a wait that names no values waits as well.

// Internal: holds a value that was computed before a wait in a register (16), and returns its bits. A class names what
// it has computed in a member `hold`. An address is one of global memory.
DEVICE u32 hold(u32& v) { return v = held(v); }
DEVICE u32 hold(u64& v) {
  const u32 low = held(u32(v)), high = held(u32(v >> 32));
  v = u64(high) << 32 | low;
  return low | high;
}
DEVICE u32 hold(bool& v) {
  const u32 word = held(v);
  v = word != 0;
  return word;
}
template <class T>
DEVICE u32 hold(T*& p) {
  u64 address = __cvta_generic_to_global(p);
  const u32 bits = hold(address);
  p = reinterpret_cast<T*>(__cvta_global_to_generic(address));
  return bits;
}
template <class T>
DEVICE auto hold(T& object) -> decltype(object.hold()) {
  return object.hold();
}
template <class T, int Count>
DEVICE u32 hold(T (&values)[Count]) {
  u32 bits = 0;
  for (T& value : values) bits |= hold(value);
  return bits;
}

// By all threads of the block, first of all, but for (26) and (16). Waits until the kernels before this one have ended.
// Their writes are then visible to every thread that has waited, as by an acquire of gpu scope (1). `values` are words,
// flags and pointers, and arrays of these, that the kernel has computed from its arguments: they are ready when the
// wait ends (16). It reads an argument of each of the first three lines before it waits, so that they are in the
// constant cache when a small call needs them.
template <class... Values>
DEVICE void wait_for_previous_kernel(const Arguments& a, Values&... values) {
  const auto low_word = [](const void* p) { return u32(reinterpret_cast<u64>(p)); };
  u32 bits = low_word(a.counters) | low_word(a.ring[0]) | low_word(a.peer_counters[0]);
  ((bits |= hold(values)), ...);
  wait_for_previous_kernel(bits);
}

// (18) Several communicators: two, or as many as GRAPHAR_CONCURRENT_COMMUNICATORS declares, g. Ranks may launch their
//     kernels in different orders. Then one rank's kernel may wait for a peer's that finds no room because other
//     communicators' kernels wait there for peers in turn. With room for c communicators on a GPU, and s ranks in each,
//     such a cycle exists if (g - c) s >= g. So there is room for all of them, c = g. What stays free beside g - 1:
//
//       their kernels take     with g = 2                     with g > 2, where a grid has at most a g-th
//       half SMs               a half SM                      of the halves of SMs: as much for the last one
//       whole SMs              an SM                          of the SMs: an SM
//       SMs in clusters        the SMs of two clusters        of the SMs, one a block: 9 SMs, so 2 of one of 8 GPCs
//       clusters of halves     half of each SM but one        of the halves: over half of them, so 8 in some GPC
//
//     - One block is enough, of a grid in clusters one cluster. A block exchanges data with the blocks of its index
//       alone, and blocks start in the order of their indices, so on all ranks the first unfinished blocks are on their
//       GPUs or will be. Where K differs between the ranks of a matmul, tiles may differ, and then this does not hold:
//       (10) in warpgroup_tile.cuh.
//     - Half SMs: __launch_bounds__ asks for two blocks of up to 512 threads on an SM. Such a kernel releases the next
//       one after it has waited for the previous one, so at most two of a communicator are on a GPU, one of them
//       waiting for the other. Of all communicators but one, such pairs leave a half SM (Chip.may_overlap in
//       graphar/plan/policy.py). With g = 2, a kernel of whole SMs leaves a half beside each block of such a kernel.
//     - Whole SMs, in clusters or not, release no other kernel while they wait for ranks. Another communicator's
//       kernels of half SMs go on beside them and end. With g = 2 the second of two kernels without clusters has a free
//       SM, and so has the one without beside one in clusters. Where all communicators' kernels wait for whole SMs,
//       kernels of half SMs before them end first.
//     - Clusters of halves are of norms (rms_norm.cuh). They find room beside kernels of half SMs, but none on a
//       single free SM, whatever its registers (H200). So it is the kernel of whole SMs that goes on beside such a
//       norm, which is alone of its communicator until it waits for no rank.
//     - With g > 2 Chip.shared_blocks and Chip.most_communicators have the numbers.
