// matmul: C[M, N] = A[M, K] * W^T + bias, where W is [N, K] as torch.nn.Linear stores it, or that transposed, [K, N].
//
//   a block walks tiles of C; a ring of places in its shared memory holds the next 64 of K of both operands:
//     producer, one thread     A, W --TMA--> ring[i % stages], announces `filled`
//     consumer, 64 rows each   ring[i % stages] --wgmma--> fp32 sums in registers, announces `emptied`
//                              sums --round--> boxes of 64 x 64 in shared memory --Store--> where they belong
//   with a cluster of blocks: they have tiles below each other, and each loads a part of W for all of them.
//
// The producer runs ahead, over the ends of tiles, so that the loads of the next tile travel while one is stored. A grid
// of any size walks all tiles: how many SMs it takes is the caller's choice. Products are added in the order of K,
// whatever the tile, so the bits of C depend on A and W alone. Ordering of the ring: (9) in wgmma.cuh.
#include "device/matmul_pipeline.cuh"

// Finished boxes go to this rank's C.
template <class T>
struct LocalStore {
  const MatmulArguments& a;
  const TensorMap& c;

  // This thread's sums of a tile whose first column is `column`, before they are rounded.
  template <int Count>
  __device__ void finish(u32 column, float (&sums)[Count]) const {
    if (a.bias == nullptr) return;
    const auto* bias = static_cast<const typename T::Storage*>(a.bias);
#pragma unroll
    for (int i = 0; i < Count; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const u32 at = column + 2 * i + threadIdx.x % 4 * 2 + j;
        float b[2];
        T::unpack(at < a.n ? bias[at] : 0, b);
        sums[i + j] += b[0];
        sums[i + 2 + j] += b[0];
      }
    }
  }

  // By one thread: a box that all threads have written and fenced.
  __device__ void send(u32 row, u32 column, const char* box) const {
    tensor_store(c, column, row, box);
    commit_bulk_stores();
  }
};

template <class T, class Tile, Layout W, template <class> class Store>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
           const __grid_constant__ TensorMap c_map, const __grid_constant__ MatmulArguments a) {
  const Ring<Tile> ring;
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(w_map);
    prefetch(c_map);
    ring.init();
  }
  if constexpr (Tile::cluster == 1)
    __syncthreads();
  else
    sync_cluster_mbarriers();
  wait_for_previous_kernel();
  const u32 warpgroup = same_in_warp(threadIdx.x / 128);
  if (warpgroup == 0) {
    if constexpr (Tile::consumers == 2) shrink_registers<40>();
    if (threadIdx.x < 32 && elected()) {
      fence_async_proxy_global();  // the kernel before may have written A
      Producer<Tile, W>{a, a_map, w_map, ring}.run();
    }
  } else {
    if constexpr (Tile::consumers == 2) grow_registers<232>();
    Consumer<T, Tile, W, Store<T>>{a, ring, {a, c_map}, warpgroup - 1}.run();
  }
}
