// allgather_push: every rank pushes its input to every peer, in chunks that flags announce.
//
//   rank r: input                    ---> slots on every peer p     (N - 1) x nbytes sent
//           input                    -> output, part r
//           slots of every peer p    -> output, part p
//
// The second half of a two-shot. Any bits may travel, so flags tell what has arrived. Parts may differ in size and
// begin at any byte. Steps and slots: (12) in push_pipeline.cuh. Wins above the sizes of allgather_flagged.
#include "device/parts.cuh"
#include "device/sync/push_pipeline.cuh"

// Args is Arguments or TupleArguments.
template <class T, int N, class Args>
struct AllgatherPush {
  const Args& a;
  u64 most = 0;  // packs of the largest part
  u32 first_step = 0;

  __device__ AllgatherPush(const Args& arguments, const Call&) : a(arguments) {
    for (int r = 0; r < N; ++r) most = max(most, pack_count<T>(a.count[r]));
  }

  DEVICE u32 hold() { return ::hold(most); }  // (16)

  __device__ bool has_chunk(u32 k) const { return u64(k) * gridDim.x * a.chunk < most; }
  __device__ bool has_step(u32 k) const { return k == 0 || has_chunk(k - 1); }

  // Where chunk k of this block begins in every part, in packs.
  __device__ u64 chunk(u32 k) const { return (u64(k) * gridDim.x + blockIdx.x) * a.chunk; }

  __device__ Pack* slot(int hop, u32 k, int from) const { return push_slot<N>(a, hop, first_step + k, from); }

  // How many packs chunk k of this block has in the part of a rank.
  __device__ u32 count(u32 k, int rank) const {
    const u64 packs = pack_count<T>(a.count[rank]);
    return packs > chunk(k) ? min(packs - chunk(k), u64(a.chunk)) : 0;
  }

  __device__ void send(u32 k) const {
    constexpr u32 ahead = N <= 4 ? 2 : 1;  // packs that a thread loads before it sends the first
    const auto input = input_of<T>(a), output = output_of<T>(a, a.rank);
    const u32 n = count(k, a.rank);
    for (u32 j = threadIdx.x; j < n; j += ahead * blockDim.x) {
      Pack mine[ahead] = {};
      for (u32 i = 0; i < ahead; ++i)
        if (j + i * blockDim.x < n) mine[i] = input.load(chunk(k) + j + i * blockDim.x);
      for (u32 i = 0; i < ahead; ++i) {
        const u32 at = j + i * blockDim.x;
        if (at >= n) break;
        for (int hop = 1; hop < N; ++hop) slot(hop, k, a.rank)[at] = mine[i];
        output.store(chunk(k) + at, mine[i]);
      }
    }
  }

  __device__ void receive(u32 k) const {
    constexpr u32 ahead = N <= 3 ? 2 : 1;
    u32 n[N - 1];
    for (int hop = 1; hop < N; ++hop) n[hop - 1] = count(k, (a.rank + hop) % N);
    for (u32 j = threadIdx.x; j < a.chunk; j += ahead * blockDim.x) {
      Pack part[ahead][N - 1] = {};
      for (u32 i = 0; i < ahead; ++i)
        for (int hop = 1; hop < N; ++hop)
          if (j + i * blockDim.x < n[hop - 1])
            part[i][hop - 1] = slot(0, k, (a.rank + hop) % N)[j + i * blockDim.x];
      for (u32 i = 0; i < ahead; ++i)
        for (int hop = 1; hop < N; ++hop)
          if (j + i * blockDim.x < n[hop - 1])
            output_of<T>(a, (a.rank + hop) % N).store(chunk(k) + j + i * blockDim.x, part[i][hop - 1]);
    }
  }
};

template <class T, int N, class Args = Arguments>
__global__ void __launch_bounds__(512, 2) allgather_push(const __grid_constant__ Args a) {
  run_push_pipeline<N, AllgatherPush<T, N, Args>, true>(a);
}
