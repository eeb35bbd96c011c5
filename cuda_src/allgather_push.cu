// allgather_push: every rank pushes its input to every peer, in chunks that flags announce.
//
//   step k of block b on rank r:
//     1. chunk k of input  ---> scratch[p].slot[b][k % depth][r]        on every peer p     (N - 1) x nbytes sent
//                          ---> output, part r
//     2. signal every peer: step k is sent
//     3. wait until every peer has sent step k - 1
//     4. slot[b][(k-1) % depth][p] -> output, part p, chunk k - 1
//
// The second half of a two-shot. Any bits may travel, so none can mean 'not yet', and flags tell what has arrived. Parts
// may differ in size and begin at any byte. Block b only meets block b of its peers; other blocks fill the links while
// one waits. The scratch has a fixed size and stays in the L2 cache, whatever the size of the tensor.
//
// Reuse of the slots, with depth 4. A block numbers its steps on from call to call, and a slot's place depends on block,
// step and source alone, so calls with other grids and sizes go on in one sequence. Step s overwrites what step s - 4
// brought to the peer. Before it, this rank has seen the peer's signal of step s - 2: in part 3 of the step before, or,
// at the begin of a call, in the last wait of the previous one. By (2) and, between calls, (1) the peer sent that after
// part 4 of its step s - 3, its last read of what step s - 4 had brought. Steps may wrap: 2^32 is a multiple of 4.
#include "device/pack.cuh"
#include "device/signal_pad.cuh"

constexpr u32 depth = 4;

template <class T, int N>
struct AllgatherPush {
  const Arguments& a;
  const u32 first_step;

  // Where chunk k of this block begins in every part, in packs.
  __device__ u64 chunk(u32 k) const { return (u64(k) * gridDim.x + blockIdx.x) * a.chunk; }

  __device__ Pack* slot(int on, u32 k, int from) const {
    const u32 index = (blockIdx.x * depth + (first_step + k) % depth) * N + from;
    return after_signal_pad(a, on) + u64(index) * a.capacity;
  }

  __device__ void scatter(u32 k) const {
    const Tensor<T> input(a.input, a.count[a.rank]), output = part_of<T>(a.output, a, a.rank);
    const u64 packs = pack_count<T>(a.count[a.rank]);
    for (u64 j = threadIdx.x; j < a.chunk && chunk(k) + j < packs; j += blockDim.x) {
      const Pack mine = input.load(chunk(k) + j);
#pragma unroll
      for (int hop = 1; hop < N; ++hop) slot((a.rank + hop) % N, k, a.rank)[j] = mine;
      output.store(chunk(k) + j, mine);
    }
  }

  __device__ void gather(u32 k) const {
    for (u64 j = threadIdx.x; j < a.chunk; j += blockDim.x) {
      const u64 at = chunk(k) + j;
      Pack part[N - 1];
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const int peer = (a.rank + hop) % N;
        if (at < pack_count<T>(a.count[peer])) part[hop - 1] = slot(a.rank, k, peer)[j];
      }
#pragma unroll
      for (int hop = 1; hop < N; ++hop) {
        const int peer = (a.rank + hop) % N;
        if (at < pack_count<T>(a.count[peer])) part_of<T>(a.output, a, peer).store(at, part[hop - 1]);
      }
    }
  }
};

// One block an SM will do: with registers for two, what has 8 ranks spills.
template <class T, int N>
__global__ void __launch_bounds__(1024, 1) allgather_push(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const AllgatherPush<T, N> body{a, signals.first_step()};
  u64 most = 0;
#pragma unroll
  for (int r = 0; r < N; ++r) most = max(most, pack_count<T>(a.count[r]));
  const auto is_step = [&](u32 k) { return u64(k) * gridDim.x * a.chunk < most; };

  u32 k = 0;
  for (; k == 0 || is_step(k - 1); ++k) {
    if (is_step(k)) {
      body.scatter(k);
      signals.send<N>(a, k + 1);
    }
    if (k == 0) continue;
    if (!signals.wait<N>(a, call, k)) break;
    body.gather(k - 1);
  }
  signals.end(a, k - 1);
  end_call(a, call);
}
