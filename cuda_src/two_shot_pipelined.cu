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
// Rank p owns shard p; block b handles part b of every shard, in chunks of equal size, at most a.chunk packs of a shard.
// Block b only meets block b of its peers; other blocks fill the links while one waits. The scratch has a fixed size,
// whatever the size of the tensor. Wins where two_shot_push would need more scratch than it has. The epilogue, if there
// is one, is part of the sum in 3.
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
#include "device/epilogue.cuh"
#include "device/signal_pad.cuh"

constexpr u32 depth = 3;

template <class T, int N, bool Direct, class Expression>
struct TwoShotPipelined {
  const Arguments& a;
  const Tensor<T> input, output;
  const u64 packs;
  const u64 shard;  // packs of one owner
  const u64 share;  // of these, in one block
  const u32 chunks;
  const u32 length;  // packs in a chunk

  __device__ explicit TwoShotPipelined(const Arguments& arguments)
      : a(arguments),
        input(a.input, a.numel),
        output(a.output, a.numel),
        packs(pack_count<T>(a.numel)),
        shard(packs_a_part(packs, N)),
        share(packs_a_part(shard, gridDim.x)),
        chunks((share + a.chunk - 1) / a.chunk),
        length(packs_a_part(share, chunks)) {}

  // Where chunk k of `owner` begins, and how many packs it has: fewer, or none, at the end of a share or shard.
  __device__ u64 begin(u32 k, u64 owner) const { return owner * shard + blockIdx.x * share + u64(k) * length; }
  __device__ u32 count(u32 k, u64 owner) const {
    const u64 from = begin(k, owner);
    const u64 to = min(min(from + length, owner * shard + (blockIdx.x + 1) * share), min((owner + 1) * shard, packs));
    return to > from ? to - from : 0;
  }

  // Phase 0 is the reduce-scatter, 1 the all-gather. A block's slots are the same ones whatever the grid: those of one
  // phase in a call are never those of the other in the next.
  __device__ Pack* slot(int phase, int on, u32 k, int from) const {
    const u64 index = ((u64(blockIdx.x) * 2 + phase) * depth + k % depth) * N + from;
    return after_signal_pad(a, on) + index * a.capacity;
  }

  // One pack of chunk k from each of the other owners to where `write` puts it. All N - 1 are read first.
  template <class Read, class Write>
  __device__ void for_each_other_owner(u32 k, Read read, Write write) const {
    u32 n[N - 1];
#pragma unroll
    for (int hop = 1; hop < N; ++hop) n[hop - 1] = count(k, (a.rank + hop) % N);
    for (u32 j = threadIdx.x; j < length; j += blockDim.x) {
      Pack p[N - 1];
#pragma unroll
      for (int hop = 1; hop < N; ++hop)
        if (j < n[hop - 1]) p[hop - 1] = read((a.rank + hop) % N, j);
#pragma unroll
      for (int hop = 1; hop < N; ++hop)
        if (j < n[hop - 1]) write((a.rank + hop) % N, j, p[hop - 1]);
    }
  }

  __device__ void scatter(u32 k) const {
    for_each_other_owner(
        k, [&](int owner, u32 j) { return input.load(begin(k, owner) + j); },
        [&](int owner, u32 j, const Pack& p) { slot(0, owner, k, a.rank)[j] = p; });
  }

  __device__ void reduce(u32 k) const {
    const u64 first = begin(k, a.rank);
    const u32 n = count(k, a.rank);
    for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
      const Epilogue<T, Expression> epilogue(a, first + j);
      const Pack mine = input.load(first + j);
      Pack part[N];
#pragma unroll
      for (int r = 0; r < N; ++r) part[r] = r == a.rank ? mine : slot(0, a.rank, k, r)[j];
      const Pack sum = sum_in_rank_order<T, N>(part, epilogue);
      if constexpr (Direct) {
        output.template store_to_all<N>(a.peer_output, a.rank, first + j, sum);
      } else {
#pragma unroll
        for (int hop = 1; hop < N; ++hop) slot(1, (a.rank + hop) % N, k, a.rank)[j] = sum;
        output.store(first + j, sum);
      }
    }
  }

  __device__ void gather(u32 k) const {
    for_each_other_owner(
        k, [&](int owner, u32 j) { return slot(1, a.rank, k, owner)[j]; },
        [&](int owner, u32 j, const Pack& p) { output.store(begin(k, owner) + j, p); });
  }
};

template <class T, int N, bool Direct = false, class Expression = Identity>
__global__ void __launch_bounds__(512) two_shot_pipelined(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const TwoShotPipelined<T, N, Direct, Expression> body(a);
  const u32 chunks = body.chunks;

  for (u32 k = 0; k < chunks + 2; ++k) {
    if (k < chunks) body.scatter(k);
    if (!signals.wait<N>(a, call, k)) break;
    if (k >= 1 && k <= chunks) body.reduce(k - 1);
    signals.send<N>(a, k + 1);
    if (!Direct && k >= 2) body.gather(k - 2);
  }
  signals.end(a, chunks + 2);
  end_call(a, call);
}
