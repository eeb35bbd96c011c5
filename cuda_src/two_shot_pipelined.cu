// two_shot_pipelined: reduce-scatter and all-gather by pushes, in chunks whose readiness flags announce.
//
//   step k of block b on rank r:
//     1. input chunk k, piece p      ---> scratch[p].scatter[k % depth][b][r]        on every peer p
//     2. wait until every peer has finished step k - 1
//     3. scatter[(k-1) % depth][b] + own piece of chunk k - 1 -> sum -> output
//        sum                         ---> scratch[p].gather[(k-1) % depth][b][r]     on every peer p
//     4. signal every peer: step k is finished
//     5. gather[(k-2) % depth][b][p] -> output, piece p of chunk k - 2
//
// A chunk is N pieces of a.chunk packs, piece p owned by rank p. Block b only meets block b of its peers; other blocks
// fill the links while one waits. The scratch has a fixed size and stays in the L2 cache, whatever the size of the
// tensor. Wins where two_shot_push would need more scratch than it has.
//
// Reuse of the scratch, with depth 3. Step k overwrites scatter[k % 3], last read in the peer's step k - 2, and the wait
// of step k - 1 saw the peer's step k - 2 finished. Its gather[(k-1) % 3] was last read in part 5 of the peer's step
// k - 2, which precedes the signal of its step k - 1, which the wait of step k saw. The last wait of a call, in step
// chunks + 1, sees every peer past part 3 of step `chunks`, its last read of `scatter`; the next call writes `gather`
// only after a wait, which by (1) sees the peer's whole previous call ended.
//
// Direct, where the outputs are symmetric tensors, step k without `gather` and part 5:
//
//     3. scatter[(k-1) % depth][b] + own piece of chunk k - 1 -> sum -> output of every rank, piece r of chunk k - 1
//
// Not too early: chunk k is summed after every peer was seen to have finished step k. By then the peer's kernel has
// waited for those before it, which may have read its output, and has itself read, in part 1, what it sends of its input
// chunk k. Its own piece it reads before it writes it, and nobody else writes there. So the output may be the input.
// Not too late: the last wait of block b, in step chunks + 1, sees every peer past part 3 of step `chunks`, its last
// store into this rank's output; by (2) all those stores are visible here before block b ends, and every block waits so.
// The reuse of `scatter` rests on parts 1 to 4, as above.
#include "device/pack.cuh"
#include "device/signal_pad.cuh"

constexpr int depth = 3;

template <class T, int N, bool Direct>
struct TwoShotPipelined {
  const Arguments& a;
  const Tensor<T> input, output;
  const u64 packs;

  // The packs of `owner` in chunk k of this block.
  __device__ u64 piece(u64 k, u64 owner) const { return ((k * gridDim.x + blockIdx.x) * N + owner) * a.chunk; }

  // Phase 0 is the reduce-scatter, 1 the all-gather. A block's slots are the same ones whatever the grid: those of one
  // phase in a call are never those of the other in the next.
  __device__ Pack* slot(int phase, int on, u64 k, int from) const {
    const u64 index = ((u64(blockIdx.x) * 2 + phase) * depth + k % depth) * N + from;
    return after_signal_pad(a, on) + index * a.capacity;
  }

  __device__ void scatter(u64 k) const {
    for (u64 j = threadIdx.x; j < a.chunk; j += blockDim.x) {
      Pack mine[N - 1];
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const u64 at = piece(k, (a.rank + hop) % N) + j;
        if (at < packs) mine[hop - 1] = input.load(at);
      }
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const int owner = (a.rank + hop) % N;
        if (piece(k, owner) + j < packs) slot(0, owner, k, a.rank)[j] = mine[hop - 1];
      }
    }
  }

  __device__ void reduce(u64 k) const {
    for (u64 j = threadIdx.x; j < a.chunk && piece(k, a.rank) + j < packs; j += blockDim.x) {
      const u64 at = piece(k, a.rank) + j;
      const Pack mine = input.load(at);
      Pack part[N];
#pragma unroll
      for (int r = 0; r < N; ++r) part[r] = r == a.rank ? mine : slot(0, a.rank, k, r)[j];
      const Pack sum = sum_in_rank_order<T, N>(part);
      if constexpr (Direct) {
        output.template store_to_all<N>(a.peer_output, a.rank, at, sum);
      } else {
#pragma unroll
        for (int hop = 1; hop < N; ++hop) slot(1, (a.rank + hop) % N, k, a.rank)[j] = sum;
        output.store(at, sum);
      }
    }
  }

  __device__ void gather(u64 k) const {
    for (u64 j = threadIdx.x; j < a.chunk; j += blockDim.x) {
      Pack part[N - 1];
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const int owner = (a.rank + hop) % N;
        if (piece(k, owner) + j < packs) part[hop - 1] = slot(1, a.rank, k, owner)[j];
      }
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const u64 at = piece(k, (a.rank + hop) % N) + j;
        if (at < packs) output.store(at, part[hop - 1]);
      }
    }
  }
};

template <class T, int N, bool Direct = false>
__global__ void __launch_bounds__(512) two_shot_pipelined(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  const Signals signals(a);
  advance_epoch(a, call);
  const TwoShotPipelined<T, N, Direct> body{a, {a.input, a.numel}, {a.output, a.numel}, pack_count<T>(a.numel)};
  const u64 in_all_blocks = u64(gridDim.x) * N * a.chunk;
  const u64 chunks = (body.packs + in_all_blocks - 1) / in_all_blocks;

  for (u64 k = 0; k < chunks + 2; ++k) {
    if (k < chunks) body.scatter(k);
    if (!signals.wait<N>(a, call, k)) break;
    if (k >= 1 && k <= chunks) body.reduce(k - 1);
    signals.send<N>(a, k + 1);
    if (!Direct && k >= 2) body.gather(k - 2);
  }
  signals.end(a, chunks + 2);
  end_call(a, call);
}
