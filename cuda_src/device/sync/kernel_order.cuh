// How the kernels of a rank follow one another, and leave room for those of another communicator.
#pragma once
#include "device/arguments.cuh"

// (1) Kernels of one communicator and algorithm run one after another: each begins with wait_for_previous_kernel, which
//     makes the kernels before it complete and visible even where this one was launched early. All threads wait before
//     they send, so whatever a peer receives from call e + 1 was sent after all blocks of this rank's call e had ended.

// First of all. It reads an argument of each of the first three lines before it waits, so that they are in the constant
// cache when a small call needs them.
__device__ __forceinline__ void wait_for_previous_kernel(const Arguments& a) {
  wait_for_previous_kernel(a.counters, a.ring[0], a.peer_counters[0]);
}

// (18) Two communicators. Ranks may launch kernels of two communicators in different orders. Then one rank's kernel may
//     wait for a peer's that is queued behind the other communicator's, and so on around. All of them make progress:
//     - One block is enough, of a grid in clusters one cluster. A block exchanges data with the blocks of its index
//       alone, and blocks start in the order of their indices, so on all ranks the first unfinished blocks are on their
//       GPUs or will be. Where K differs between the ranks of a matmul, tiles may differ, and then this does not hold:
//       (10) in warpgroup_tile.cuh.
//     - Kernels of half SMs find room for a block. __launch_bounds__ asks for two blocks of up to 512 threads on an SM,
//       and a grid has fewer blocks than there are SMs. Such a kernel releases the next one after it has waited for the
//       previous one, so at most two of a communicator are on a GPU, one of them waiting for the other. If both are of
//       half SMs, they are fewer blocks than there are halves. If the second takes whole SMs, it leaves a half beside
//       each block of the first.
//     - Kernels of whole SMs release no other while they wait for ranks, and their grids leave an SM free, those of
//       clusters two clusters' SMs. So another communicator's kernels of half SMs go on beside them and end, and of two
//       kernels of whole SMs the second has free SMs; of a kernel in clusters and one without, the one without has.
//       Where both communicators' kernels wait for whole SMs, those of half SMs before them end first.
//     - Clusters of norms (rms_norm.cuh) find room beside kernels of half SMs, but none on a single free SM, whatever
//       its registers (H200). So it is the kernel of whole SMs that goes on: such a norm, alone of its communicator
//       until it waits for no rank, has at most half of each SM but one.
