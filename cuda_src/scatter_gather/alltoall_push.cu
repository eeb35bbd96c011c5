// alltoall_push: every rank pushes each peer its part of the input, in chunks that flags announce.
//
//   rank r: input, part for p        ---> slots on every peer p     nbytes of these parts sent
//           input, part for r        -> output, part of r
//           slots of every peer p    -> output, part of p
//
// As allgather_push, with another part for each peer. Parts may lie in runs (parts.cuh). Ranks may know the sizes of
// their own parts alone, without a.most. Each block's first chunk then has a header in the last pack of its slot: the
// packs of the sender's largest part, and what stands for the two parts between both ranks. A rank reads them before it
// decides on the second chunk, unless a part of its own has one: then before the third.
#include "device/parts.cuh"
#include "device/sync/push_pipeline.cuh"

template <class T, int N>
struct AlltoallPush {
  static constexpr u32 ahead = 4;  // packs that a thread loads before it stores the first
  const ExchangeArguments& a;
  const Call& call;
  u32 most = 1;  // packs of the largest part, fewer than 2^31; 0: what a peer sends or receives is another part
  u32 first_step = 0;

  __device__ AlltoallPush(const ExchangeArguments& arguments, const Call& of) : a(arguments), call(of) {
    most = max(most, u32(pack_count<T>(a.most)));
    if (a.most == 0)
      for (int r = 0; r < N; ++r) most = max(most, max(packs(a.sends[r]), packs(a.receives[r])));
  }

  DEVICE u32 hold() { return ::hold(most); }  // (16)

  __device__ bool has_header(u32 k) const { return k == 0 && a.most == 0; }
  __device__ bool has_chunk(u32 k) const { return most != 0 && k * gridDim.x * a.chunk < most; }
  __device__ bool asks_first() const { return a.most == 0 && most <= gridDim.x * a.chunk; }
  __device__ bool has_step(u32 k) const { return k == 0 || has_chunk(k - 1); }

  __device__ static u32 packs(const Runs& part) { return pack_count<T>(part.nbytes); }
  __device__ Pack* slot(int hop, u32 k, int from) const { return push_slot<N>(a, hop, first_step + k, from); }

  // A pack of chunk k of this block, in the part for or from the rank `hop` after this one: the next peers' first.
  struct Item {
    const ExchangeArguments& a;
    u32 hop = 1, at = 0;

    __device__ explicit Item(const ExchangeArguments& arguments) : a(arguments) { advance(threadIdx.x); }
    __device__ void advance(u32 packs) {
      for (at += packs; at >= a.chunk; at -= a.chunk) ++hop;
    }
    __device__ u32 peer() const { return (a.rank + hop) % N; }
    __device__ u32 pack(u32 k) const { return (k * gridDim.x + blockIdx.x) * a.chunk + at; }
  };

  __device__ void send(u32 k) const {
    if (has_header(k) && threadIdx.x > 0 && threadIdx.x < N) {
      const u32 peer = (a.rank + threadIdx.x) % N;
      slot(threadIdx.x, k, a.rank)[a.capacity - 1] = {{a.sent_words[peer], a.received_words[peer], most, 0}};
    }
    Item to(a);
    for (Item from(a); from.hop <= N;) {  // N: the part that stays here
      Pack mine[ahead] = {};
      for (u32 i = 0; i < ahead; ++i, from.advance(blockDim.x))
        if (from.hop <= N && from.pack(k) < packs(a.sends[from.peer()]))
          mine[i] = input_for<T>(a, from.peer()).load(from.pack(k));
      for (u32 i = 0; i < ahead; ++i, to.advance(blockDim.x)) {
        if (to.hop > N || to.pack(k) >= packs(a.sends[to.peer()])) continue;
        if (to.hop < N)
          slot(to.hop, k, a.rank)[to.at] = mine[i];
        else
          output_of<T>(a, a.rank).store(to.pack(k), mine[i]);
      }
    }
  }

  // Takes the largest part of all, and compares the parts between each peer and this rank with what the peer says.
  __device__ void read_headers() {
#pragma unroll 1
    for (u32 hop = 1; hop < N; ++hop) {
      const u32 peer = (a.rank + hop) % N;
      const Pack header = slot(0, 0, peer)[a.capacity - 1];
      const bool as_sent = header.word[0] == a.received_words[peer];
      if (as_sent && header.word[1] == a.sent_words[peer]) {
        most = max(most, header.word[2]);
        continue;
      }
      const u32 own = as_sent ? a.sent_words[peer] : a.received_words[peer];
      if (threadIdx.x == 0) report(a, disagreed, call.epoch, peer, own, as_sent ? header.word[1] : header.word[0]);
      most = 0;
      return;
    }
  }

  __device__ void receive(u32 k) {
    if (has_header(k)) read_headers();
    if (most == 0) return;
    Item to(a);
    for (Item from(a); from.hop < N;) {
      Pack part[ahead] = {};
      for (u32 i = 0; i < ahead; ++i, from.advance(blockDim.x))
        if (from.hop < N && from.pack(k) < packs(a.receives[from.peer()]))
          part[i] = slot(0, k, from.peer())[from.at];
      for (u32 i = 0; i < ahead; ++i, to.advance(blockDim.x))
        if (to.hop < N && to.pack(k) < packs(a.receives[to.peer()]))
          output_of<T>(a, to.peer()).store(to.pack(k), part[i]);
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 2) alltoall_push(const __grid_constant__ ExchangeArguments a) {
  run_push_pipeline<N, AlltoallPush<T, N>, true, true>(a);
}
