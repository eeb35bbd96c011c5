// alltoall_push: every rank pushes each peer its part of the input, in chunks that flags announce.
//
//   rank r: input, part for p        ---> slots on every peer p     nbytes of these parts sent
//           input, part for r        -> output, part of r
//           slots of every peer p    -> output, part of p
//
// As allgather_push, with another part for each peer. Parts may lie in runs, so that dimensions are permuted on the way
// (parts.cuh). The steps, and why no slot is overwritten early, are in push_pipeline.cuh, (12). Wins above the sizes of
// alltoall_flagged, and serves ranks that know the sizes of their own parts alone:
//
// The number of steps must be the same on all ranks. Without a.most, the first chunk of every block brings a header in the
// last pack of its slot: the packs of the largest part that the sender knows, and what stands for the two parts between
// both ranks. The second chunk is always sent, so that each rank has all headers, and with them the largest part of all,
// before it decides on the third one.
#include "device/parts.cuh"
#include "device/sync/push_pipeline.cuh"

template <class T, int N>
struct AlltoallPush {
  const ExchangeArguments& a;
  const Call& call;
  u64 most = 0;  // packs of the largest part
  u32 first_step = 0;
  bool failed = false;

  __device__ AlltoallPush(const ExchangeArguments& arguments, const Call& of) : a(arguments), call(of) {
    most = pack_count<T>(a.most);
#pragma unroll
    for (int r = 0; r < N; ++r) most = max(most, pack_count<T>(max(a.sent[r], a.count[r])));
  }

  // (28)
  __device__ __forceinline__ u32 hold() { return ::hold(most); }

  __device__ bool has_header(u32 k) const { return k == 0 && a.most == 0; }
  __device__ bool has_chunk(u32 k) const {
    return !failed && ((k < 2 && a.most == 0) || u64(k) * gridDim.x * a.chunk < most);
  }
  __device__ bool has_step(u32 k) const { return k == 0 || has_chunk(k - 1); }

  // Where chunk k of this block begins in every part, in packs.
  __device__ u64 chunk(u32 k) const { return (u64(k) * gridDim.x + blockIdx.x) * a.chunk; }

  __device__ Pack* slot(int hop, u32 k, int from) const { return push_slot<N>(a, hop, first_step + k, from); }

  // How many packs chunk k of this block has in a part.
  __device__ u32 count(u32 k, u64 nbytes) const {
    const u64 packs = pack_count<T>(nbytes);
    return packs > chunk(k) ? min(packs - chunk(k), u64(a.chunk)) : 0;
  }

  __device__ void send(u32 k) const {
    constexpr u32 ahead = N <= 3 ? 2 : 1;  // packs of each part that a thread loads before it sends the first
    if (has_header(k) && threadIdx.x > 0 && threadIdx.x < N) {
      const u32 peer = (a.rank + threadIdx.x) % N;
      const Pack header = {{a.sent_words[peer], a.received_words[peer], u32(most), u32(most >> 32)}};
      slot(threadIdx.x, k, a.rank)[a.capacity - 1] = header;
    }
    u32 n[N], longest = 0;
#pragma unroll
    for (int hop = 0; hop < N; ++hop) longest = max(longest, n[hop] = count(k, a.sent[(a.rank + hop) % N]));
    for (u32 j = threadIdx.x; j < longest; j += ahead * blockDim.x) {
      Pack mine[ahead][N] = {};
#pragma unroll
      for (u32 i = 0; i < ahead; ++i)
#pragma unroll
        for (int hop = 0; hop < N; ++hop)
          if (j + i * blockDim.x < n[hop])
            mine[i][hop] = input_for<T>(a, (a.rank + hop) % N).load(chunk(k) + j + i * blockDim.x);
#pragma unroll
      for (u32 i = 0; i < ahead; ++i) {
        const u32 at = j + i * blockDim.x;
#pragma unroll
        for (int hop = 1; hop < N; ++hop)
          if (at < n[hop]) slot(hop, k, a.rank)[at] = mine[i][hop];
        if (at < n[0]) output_of<T>(a, a.rank).store(chunk(k) + at, mine[i][0]);
      }
    }
  }

  // Takes the largest part of all, and compares what each peer sends and receives.
  __device__ void read_headers() {
#pragma unroll 1
    for (int hop = 1; hop < N; ++hop) {
      const u32 peer = (a.rank + hop) % N;
      const Pack header = slot(0, 0, peer)[a.capacity - 1];
      most = max(most, u64(header.word[3]) << 32 | header.word[2]);
      const bool as_sent = header.word[0] == a.received_words[peer];
      if (as_sent && header.word[1] == a.sent_words[peer]) continue;
      failed = true;
      const u32 expected = as_sent ? a.sent_words[peer] : a.received_words[peer];
      if (threadIdx.x == 0) report(a, disagreed, call.epoch, peer, expected, header.word[as_sent]);
    }
  }

  __device__ void receive(u32 k) {
    constexpr u32 ahead = N <= 3 ? 2 : 1;
    if (has_header(k)) read_headers();
    if (failed) return;
    u32 n[N - 1];
#pragma unroll
    for (int hop = 1; hop < N; ++hop) n[hop - 1] = count(k, a.count[(a.rank + hop) % N]);
    for (u32 j = threadIdx.x; j < a.chunk; j += ahead * blockDim.x) {
      Pack part[ahead][N - 1] = {};
#pragma unroll
      for (u32 i = 0; i < ahead; ++i)
#pragma unroll
        for (int hop = 1; hop < N; ++hop)
          if (j + i * blockDim.x < n[hop - 1])
            part[i][hop - 1] = slot(0, k, (a.rank + hop) % N)[j + i * blockDim.x];
#pragma unroll
      for (u32 i = 0; i < ahead; ++i)
#pragma unroll
        for (int hop = 1; hop < N; ++hop)
          if (j + i * blockDim.x < n[hop - 1])
            output_of<T>(a, (a.rank + hop) % N).store(chunk(k) + j + i * blockDim.x, part[i][hop - 1]);
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 2) alltoall_push(const __grid_constant__ ExchangeArguments a) {
  run_push_pipeline<N, AlltoallPush<T, N>, true>(a);
}
