// allgather_push: every rank pushes its input to every peer, in chunks that flags announce.
//
//   rank r: input                    ---> slots on every peer p     (N - 1) x nbytes sent
//           input                    -> output, part r
//           slots of every peer p    -> output, part p
//
// The second half of a two-shot. Any bits may travel, so none can mean 'not yet', and flags tell what has arrived.
// Parts may differ in size and begin at any byte. The steps, and why no slot is overwritten early, are in
// push_pipeline.cuh, (12). Wins above the sizes of allgather_flagged, which sends twice the bytes.
#include "device/sync/push_pipeline.cuh"

template <class T, int N>
struct AllgatherPush {
  const Arguments& a;
  const u32 first_step;
  u64 most = 0;  // packs of the largest part

  __device__ AllgatherPush(const Arguments& arguments, const Call&, u32 step) : a(arguments), first_step(step) {
#pragma unroll
    for (int r = 0; r < N; ++r) most = max(most, pack_count<T>(a.count[r]));
  }

  __device__ bool has_chunk(u32 k) const { return u64(k) * gridDim.x * a.chunk < most; }
  __device__ bool has_step(u32 k) const { return k == 0 || has_chunk(k - 1); }

  // Where chunk k of this block begins in every part, in packs.
  __device__ u64 chunk(u32 k) const { return (u64(k) * gridDim.x + blockIdx.x) * a.chunk; }

  __device__ Pack* slot(int on, u32 k, int from) const { return pipeline_slot<N>(a, on, first_step + k, from); }

  __device__ void send(u32 k) const {
    const Tensor<T> input(a.input, a.count[a.rank]), output = part_of<T>(a.output, a, a.rank);
    const u64 packs = pack_count<T>(a.count[a.rank]);
    for (u64 j = threadIdx.x; j < a.chunk && chunk(k) + j < packs; j += blockDim.x) {
      const Pack mine = input.load(chunk(k) + j);
#pragma unroll
      for (int hop = 1; hop < N; ++hop) slot((a.rank + hop) % N, k, a.rank)[j] = mine;
      output.store(chunk(k) + j, mine);
    }
  }

  __device__ void receive(u32 k) const {
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

// One block an SM is enough. With registers for two, the kernel of 8 ranks spills.
template <class T, int N>
__global__ void __launch_bounds__(1024, 1) allgather_push(const __grid_constant__ Arguments a) {
  run_push_pipeline<N, AllgatherPush<T, N>>(a);
}
