// Bulk copies of two-dimensional boxes, described by a tensor map (sm_90 and newer). (5) in tma.cuh holds for them.
//
// Elements of a box outside the matrix are loaded as zeros, which count as loaded bytes, and not stored. Boxes are 128
// bytes wide and swizzled: 16 bytes, chunk c of row r, lie at chunk c ^ r % 8. They begin at multiples of 1024.
#pragma once
#include "device/ptx/tma.cuh"

// A matrix in global memory, and its boxes, as tensor_maps.py of the package makes it. A __grid_constant__ parameter.
struct alignas(128) TensorMap {
  u64 word[16];
};

DEVICE void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Loads the box whose first element is in column x and row y of the matrix.
DEVICE void tensor_load(void* shared, const TensorMap& map, u32 x, u32 y, Mbarrier& loaded) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&loaded))
      : "memory");
}

// The same into every block of the cluster whose bit is set in `blocks`, at the addresses of `shared` and `loaded`.
DEVICE void tensor_load(void* shared, const TensorMap& map, u32 x, u32 y, Mbarrier& loaded, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&loaded)), "h"(blocks)
      : "memory");
}

DEVICE void tensor_store(const TensorMap& map, u32 x, u32 y, const void* shared) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(shared_address(shared))
               : "memory");
}

// Ends a group of this thread's stores.
DEVICE void commit_bulk_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the sources of all but the last `Pending` groups may be overwritten, written to their place or not.
template <int Pending>
DEVICE void wait_for_bulk_sources() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// The block's dynamic shared memory, aligned for boxes.
DEVICE char* dynamic_shared_boxes() {
  extern __shared__ __align__(1024) char boxes[];
  return boxes;
}
