// two_shot_pipelined: reduce-scatter and all-gather by pushes, in chunks that flags announce.
//
//   rank r: input, shard p         ---> slots of the reduce-scatter on rank p   (N - 1) / N x nbytes sent
//           slots of all ranks     -> sum of shard r, epilogue -> output
//           sum of shard r         ---> slots of the all-gather on every peer   (N - 1) / N x nbytes sent, of Out
//           slots of every peer p  -> output, shard p
//   direct: sum of shard r         ---> output of every rank, a symmetric tensor, instead of the last two lines
//
// Wins where two_shot_push would need more scratch than it has.
#include "device/epilogue.cuh"
#include "device/sync/two_shot_pipeline.cuh"

// With Direct, part 3 of a step stores the sum into all outputs and there is no part 5. The output may be the input.
//
// (14) Not too early: chunk k is summed after every peer was seen to have finished step k. By (13) the kernels before
//     the peer's, which may have read its output, are over then. The peer has itself read, in part 1, what it sends of
//     its input chunk k. It reads its own piece before it writes it, and nobody else writes there. Not too late: the
//     last wait of block b, in step chunks + 1, sees every peer past part 3 of step `chunks`, its last store into this
//     rank's output. By (2) all those stores are visible here before block b ends, and every block waits.
template <class T, int N, bool Direct, class Expression, class Order, class Out>
struct TwoShotPipelined {
  static constexpr bool gathers = !Direct;
  using Sum = PackOf<T, Out>;
  const Arguments& a;
  const Tensor<T> input;
  const Tensor<Out, Sum> output;
  Chunks<u64, line, N> chunks;

  __device__ TwoShotPipelined(const Arguments& arguments, const Call&)
      : a(arguments), input(a.input, a.numel), output(a.output, a.numel), chunks(a, pack_count<T>(a.numel)) {}

  __device__ int owner(int hop) const { return (a.rank + hop) % N; }

  // Reads one P of chunk k from each of the other owners, by their distance, and then passes all of them to `write`.
  template <class P, class Read, class Write>
  __device__ void for_each_other_owner(u32 k, Read read, Write write) const {
    const u32 n = chunks.most(k);
    for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
      P p[N - 1] = {};
      for (int hop = 1; hop < N; ++hop)
        if (chunks.begin(k, owner(hop)) + j < chunks.total) p[hop - 1] = read(hop, j);
      for (int hop = 1; hop < N; ++hop)
        if (chunks.begin(k, owner(hop)) + j < chunks.total) write(hop, j, p[hop - 1]);
    }
  }

  __device__ void scatter(u32 k) const {
    for_each_other_owner<Pack>(
        k, [&](int hop, u32 j) { return input.load(chunks.begin(k, owner(hop)) + j); },
        [&](int hop, u32 j, const Pack& p) { *pipeline_slot<N>(a, scattered, hop, k, a.rank, j) = p; });
  }

  __device__ void reduce(u32 k) const {
    const u64 first = chunks.begin(k, a.rank);
    const u32 n = chunks.count(k, a.rank);
    for (u32 j = threadIdx.x; j < n; j += blockDim.x) {
      const Epilogue<T, Expression> epilogue(a, first + j);
      const Pack mine = input.load(first + j);
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = r == a.rank ? mine : *pipeline_slot<N>(a, scattered, 0, k, r, j);
      const Sum sum = sum_in_order<T, N, Order, Out>(part, epilogue);
      if constexpr (Direct) {
        output.template store_to_all<N>(a.peer_output, a.rank, first + j, sum);
      } else {
        for (int hop = 1; hop < N; ++hop) *pipeline_slot<N, Sum>(a, reduced, hop, k, a.rank, j) = sum;
        output.store(first + j, sum);
      }
    }
  }

  __device__ void gather(u32 k) const {
    for_each_other_owner<Sum>(
        k, [&](int hop, u32 j) { return *pipeline_slot<N, Sum>(a, reduced, 0, k, owner(hop), j); },
        [&](int hop, u32 j, const Sum& p) { output.store(chunks.begin(k, owner(hop)) + j, p); });
  }
};

template <class T, int N, bool Direct = false, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) two_shot_pipelined(const __grid_constant__ Arguments a) {
  run_two_shot_pipeline<N, TwoShotPipelined<T, N, Direct, Expression, Order, Out>, true>(a);
}
