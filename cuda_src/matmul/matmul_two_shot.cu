// matmul_two_shot: what matmul_one_shot computes, in two hops. Each rank sums every N-th row of a block's packs.
//
//   warpgroup            packs ---> scratch[p].slot[parity][this rank]      on the rank p that sums them
//   then all threads     scratch[this rank].slot[parity][0 .. N-1] -> sum, + bias -> output
//                        sum   ---> scratch[p].slot[parity][this rank]      on every peer p
//                        scratch[this rank].slot[parity][p] -> output       sums of every peer p
//
// Sends 2 / N of the bytes of matmul_one_shot, and wins for larger results. A pack's owner and place in a slot depend
// on its row and column alone, so ranks may differ in tiles and grids. A sum of 8 columns goes to the place of the
// first of two packs of 4 in fp32. A block sends all packs before it waits, and all sums before it waits for a peer's.
#include "device/matmul/skinny.cuh"

template <class T, int N, class Tile, OperandLayout W, class Scales = Unscaled>
__global__ void __launch_bounds__(512, 1)
    matmul_two_shot(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap a_map,
                    const __grid_constant__ typename Scales::Arguments m, const __grid_constant__ Arguments a) {
  const auto send = [&](u32 parity, const ResultPack<Tile::pack_columns>& at, const Pack& p) {
    push(a, (at.template owner<N>() + N - a.rank) % N, (parity * N + a.rank) * a.capacity + at.in_result(m), p);
  };
  using Operand = typename Scales::template Operand<T>;
  const Call& call = multiply_skinny<Operand, Tile, W, T, Scales>(w_map, a_map, m, a, send);
  const Tensor<T> output(a.output, u64(m.m) * m.n);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  const auto sum_and_send = [&](const ResultPack<8>& at) {
    if (at.owner<N>() != a.rank) return true;
    Pack sum;
    if (!receive_sum<T, N, Tile>(m, a, call, slots, at, sum)) return false;
    const u32 place = slots + a.rank * a.capacity + at.in_result<Tile::pack_columns>(m);
    for (int peer = 1; peer < N; ++peer) push(a, peer, place, sum);
    output.store(at.in_result(m), sum);
    return true;
  };
  const auto take_sum = [&](const ResultPack<8>& at) {
    const u32 owner = at.owner<N>();
    if (owner == a.rank) return true;
    Pack sum[1];
    if (!receive(a, call, owner, slots + owner * a.capacity + at.in_result<Tile::pack_columns>(m), sum)) return false;
    output.store(at.in_result(m), sum[0]);
    return true;
  };
  if (!call.aborted && visit_packs<Tile>(m, sum_and_send)) visit_packs<Tile>(m, take_sum);
  end_call(a, call);
}
