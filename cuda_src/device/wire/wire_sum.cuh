// The sum over ranks of a tile's values.
#pragma once
#include "device/wire/wire.cuh"

// The number of ranks, out of N, whose codes a warp has in flight at once: as many as registers allow, in batches of
// equal size.
template <class C, int N>
struct Batches {
  static constexpr int fitting = 40 / (C::bits + WireLayout<C>::lane_words);
  static constexpr int most = fitting < 4 ? fitting : 4;
  static constexpr int count = (N + most - 1) / most;
  static constexpr int size = (N + count - 1) / count;
};

// Adds the values from rank `First` and the ranks after it to `total`, in rank order and in fp32. `fetch(first, part)`
// gets the codes of a batch; false when it could not.
template <class C, int N, int First = 0, class Fetch>
__device__ __forceinline__ bool sum_of_parts(const Fetch& fetch, float (&total)[tile_rows][run_numel]) {
  constexpr int size = Batches<C, N>::size, count = N - First < size ? N - First : size;
  Received<C> part[count];
  if (!fetch(First, part)) return false;
  for (int r = 0; r < count; ++r)
    for (int j = 0; j < tile_rows; ++j) part[r].decode(j, total[j], First + r > 0);
  if constexpr (First + count < N)
    return sum_of_parts<C, N, First + count>(fetch, total);
  else
    return true;
}
