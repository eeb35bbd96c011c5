// matmul_one_shot: the sum over all ranks of A * W^T, plus a bias, on every rank, for few rows of A; operands as in
// matmul.cu. A block, for 64 columns of the result at a time:
//
//   loader, one thread   W, A --TMA--> ring[i % stages]
//   warpgroup            ring[i % stages] --wgmma--> fp32 sums --round--> packs of 8 columns of a row
//                        packs -> scratch[p].slot[parity][this rank]   on every rank p
//   then all threads     scratch[this rank].slot[parity][0 .. N-1] -> sum, + bias -> output
//
// Weights come from memory as fast as it gives them, and one hop follows, as in one_shot_push.cu, whose packs these
// are. All that a block owes its peers it sends before it waits for any. The next kernel is let in once the last
// weights are under way: if it is such a one, it has its first weights in L2 when this one ends. The bits are those of a
// matmul whose result is then all-reduced, and the bias added before the sum is rounded. Ordering between ranks: (3)
// and (4) in sentinel.cuh.
#include "device/matmul_tokens.cuh"
#include "device/sentinel.cuh"

// By the warpgroup. Its first warp has the call for all threads of the block.
template <class T, int N, class Tile, Layout W>
__device__ __forceinline__ void multiply_and_push(const Ring<Tile>& ring, const MatmulArguments& m, const Arguments& a,
                                                  Call& call) {
  if (same_in_warp(threadIdx.x / 32) == 0) {
    Call read = begin_call(a);
    read_epoch(a, read);
    if (!read.aborted) advance_epoch_in_warp(a, read);
    if (threadIdx.x == 0) call = read;
  }
  const Multiplier<T, Tile, by_rows, W> multiplier{m, ring, 0};
  Position<Tile> at;
  for (TokenWalk<Tile> walk{m}; walk.more(); walk.next()) {
    float sums[Tile::columns / 2];
    multiplier.multiply(at, sums);
    sync_warpgroup(1);  // the box of the tile before has been read, and the call is known
    round_tokens<T>(sums, ring.staging);
    sync_warpgroup(1);
    if (call.aborted) continue;
    const u32 slot = ((call.epoch & 1) * N + a.rank) * a.capacity;
    for (u32 i = threadIdx.x; i < 8 * m.m; i += 128) {
      const TokenPack pack(i, walk.column);
      if (pack.column < m.n) push_to_all<N>(a, slot + pack.in_result(m), pack.in_box(ring.staging));
    }
  }
}

// By all threads, as far as the peers' packs come in time.
template <class T, int N, class Tile>
__device__ __forceinline__ void receive_and_sum(const MatmulArguments& m, const Arguments& a, const Call& call) {
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (TokenWalk<Tile> walk{m}; walk.more(); walk.next())
    for (u32 i = threadIdx.x; i < 8 * m.m; i += blockDim.x) {
      const TokenPack pack(i, walk.column);
      if (pack.column >= m.n) continue;
      const TokenBias<T> bias(m, pack.column);
      Pack part[N];
      if (!receive(a, call, 0, slots + pack.in_result(m), part)) return;
      output.store(pack.in_result(m), sum_in_rank_order<T, N>(part, bias));
    }
}

// Two blocks fit on an SM: this kernel's and the next one's.
template <class T, int N, class Tile, Layout W>
__global__ void __launch_bounds__(288, 2)
    matmul_one_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ MatmulArguments m, const __grid_constant__ Arguments a) {
  const Ring<Tile> ring;
  const TokenLoader<Tile, W> loader{m, w_map, a_map, ring};
  Call& call = static_shared<Call>();
  const u32 warp = same_in_warp(threadIdx.x / 32);
  if (warp == 4) loader.prefetch_weights();
  if (threadIdx.x == 0) {
    prefetch(w_map);
    prefetch(a_map);
    ring.init();
  }
  if constexpr (Tile::cluster == 1)
    __syncthreads();
  else
    sync_cluster_mbarriers();
  wait_for_previous_kernel();
  if (warp < 4) {
    multiply_and_push<T, N, Tile, W>(ring, m, a, call);
  } else if (warp == 4 && elected()) {
    fence_async_proxy_global();  // the kernel before may have written A, or W
    loader.run();
  }
  __syncthreads();
  if (!call.aborted) receive_and_sum<T, N, Tile>(m, a, call);
  end_call(a, call);
}
