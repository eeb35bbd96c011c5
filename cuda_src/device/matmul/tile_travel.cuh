// The forms in which warpgroup tiles (warpgroup_tile.cuh) travel. As elements:
//
//   partial   a box in the order of registers: a consumer's thread writes what the same thread of its owner's reads. In
//             fp32, to be added as a tree (leaf_tree.cuh), it takes two places
//   finished  a box as the copy engine stores it into the output: rows of 128 bytes, swizzled
//
// As a codec's codes:
//
//   run j of a consumer's thread    row j / 2 * 8, columns from j % 2 * 32 on: two of each 8, which four lanes share
//   bucket, 32 or 64 of a row       a run of each of four lanes, or two
//   box, partial or finished        words 0 .. 3 of all 128 threads | words 4 .. 7 of all threads | ... | scales of all
//                                   threads: thread i has the scale of the four lanes' bucket in run i % 4
//
// Partial sums are rounded to T before they are coded, and finished sums are not. So codes and values have the bits
// that quantized_two_shot_*.cu give with the same codec for a matmul's result, where rows begin with a bucket.
#pragma once
#include "device/matmul/pipeline.cuh"
#include "device/matmul/warpgroup_tile.cuh"
#include "device/wire/codec.cuh"

constexpr u32 fp32_places = 2;  // of a partial box in fp32: MATMUL_PARTIAL_PLACES in graphar/plan/scratch.py

// Finished sums are of type T. Partial ones are rounded to `Sent`, and added in an order.
template <class T, class Sent = T, class Order = RankOrder>
struct AsElements {
  static constexpr bool coded = false;
  static constexpr u32 places = elements_per_word<Sent> == 1 ? fp32_places : 1;  // of a partial box
  static constexpr u32 partial_nbytes = places * box_nbytes, finished_nbytes = box_nbytes;  // of a box on its way
  static constexpr int packs = 4 * places;  // of a thread, in a box
  static constexpr int numel = elements_per_pack<Sent>;

  template <int Count>
  __device__ static Pack pack_of(const float (&sums)[Count], int i) {
    Pack p;
    for (int w = 0; w < 4; ++w) {
      const float* const from = sums + numel * i + elements_per_word<Sent> * w;
      if constexpr (elements_per_word<Sent> == 1)
        p.word[w] = word_of_sum(*from);
      else
        p.word[w] = Sent::round(from);
    }
    return p;
  }

  // By a consumer's threads: puts each partial box to `place(box)`, then calls `staged(box)`.
  template <int Boxes, int Count, class Place, class Staged>
  __device__ static void stage(const float (&sums)[Count], const Place& place, const Staged& staged) {
#pragma unroll
    for (int box = 0; box < Boxes; ++box) {
      Pack* const to = reinterpret_cast<Pack*>(place(box)) + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < packs; ++i) to[128 * i] = pack_of(sums, packs * box + i);
      staged(box);
    }
  }

  // Rounds the sums and adds all ranks' sums, box by box.
  template <int N, class Tile>
  __device__ static void add_partials(const MatmulArguments& m, const Arguments& a, const WarpgroupTile& tile,
                                      float (&sums)[Tile::columns / 2]) {
    constexpr int U = N <= 4 && Tile::columns < 256 ? 4 : 2;  // packs of each rank that a thread has in flight
    const Pack* from[N];
#pragma unroll
    for (int r = 0; r < N; ++r)
      from[r] =
          reinterpret_cast<const Pack*>(TileExchange<N>{a}.place(a.rank, r, tile.box * places)) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < packs * Tile::boxes; i += U) {
      if (tile.column + i / packs * 64 >= m.n) break;
      Pack part[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < N; ++r) part[u][r] = r == a.rank ? pack_of(sums, i + u) : from[r][128 * (i + u)];
#pragma unroll
      for (int u = 0; u < U; ++u)
        for (int w = 0; w < 4; ++w) {
          float total[numel / 4];
          Order::template add<Sent, N>(part[u], w, total);
          for (int e = 0; e < numel / 4; ++e) sums[numel * (i + u) + numel / 4 * w + e] = total[e];
        }
    }
  }

  // By a warp: copies a finished box to the output, U chunks of every fourth row at once: as many as registers allow.
  __device__ static void write(const MatmulArguments& m, const Box& box, const char* place) {
    constexpr int U = 8 / places;
    const u32 lane = threadIdx.x % 32, column = lane % 8 * 8, pitch = m.n / 8;
    const Pack* const from = reinterpret_cast<const Pack*>(place);
    Pack* const to = reinterpret_cast<Pack*>(box.output) + column / 8;
    const u32 rows = column < box.columns ? box.rows : 0;
#pragma unroll 1
    for (u32 first = lane / 8; first < 64; first += 4 * U) {
      Pack chunk[U];
#pragma unroll
      for (u32 u = 0; u < U; ++u) {
        const u32 row = first + 4 * u;
        chunk[u] = from[row * 8 + (lane % 8 ^ row % 8)];
      }
#pragma unroll
      for (u32 u = 0; u < U; ++u)
        if (first + 4 * u < rows) to[u64(first + 4 * u) * pitch] = chunk[u];
    }
  }
};

// Partial sums that travel in fp32, and are added as a tree.
template <class T>
using AsPartials = AsElements<T, fp32, TreeOrder>;

// A thread's codes, and the scale of the bucket of its run `lane() % 4`.
template <class C>
struct CodedBox {
  u32 code[C::bits];
  u32 scale;
};

// The same with the scales of its four runs.
template <class C>
struct ReceivedBox {
  u32 code[C::bits];
  float scale[4];

  DEVICE void decode(int j, float (&v)[run_numel], bool add = false) const { C::decode(code, j, scale[j], 0, v, add); }
};

template <class T, class C>
struct AsCodes {
  static_assert(C::scheme == absmax && C::rounding == nearest && !C::feedback && C::bucket <= 64);
  using Scale = typename C::Scale;
  static constexpr bool coded = true;
  static constexpr u32 codes_nbytes = 128 * sizeof(u32) * C::bits;
  static constexpr u32 places = 1;  // of a partial box
  static constexpr u32 partial_nbytes = codes_nbytes + 128 * sizeof(typename Scale::Storage);  // of a box on its way
  static constexpr u32 finished_nbytes = partial_nbytes;

  // The index of element e of run j among a thread's sums.
  __device__ static constexpr int index_of(int box, int j, int e) {
    return 32 * box + (j % 2 * 4 + e / 2) * 4 + j / 2 * 2 + e % 2;
  }

  // By all lanes: rounds boxes from `first` on to `From` and encodes them, together, so that one's shuffles overlap.
  template <class From, int Boxes, int Count>
  DEVICE static void encode(const float (&sums)[Count], int first, CodedBox<C> (&coded)[Boxes]) {
    constexpr int E = elements_per_word<From>;
    float v[Boxes][4][run_numel], inverse[Boxes];
    u32 largest[Boxes][4];
    for (int box = 0; box < Boxes; ++box)
      for (int j = 0; j < 4; ++j)
        for (int e = 0; e < run_numel; e += E) {
          const u32 word = From::round(sums + index_of(first + box, j, e));
          largest[box][j] = e == 0 ? word : larger_magnitude(From{}, largest[box][j], word);
          // Unpacked here and not later: otherwise the compiler keeps the sums as words in other registers, and copies
          // them from and to the accumulators of the tensor cores.
          From::unpack(word, v[box][j] + e);
        }
    for (int box = 0; box < Boxes; ++box) {
      u32 of_bucket = largest_of_four_lanes<From, magnitudes>(largest[box]);
      if constexpr (C::bucket == 64) of_bucket = largest_of_lanes<From, magnitudes>(of_bucket, of_bucket, 1);
      const typename C::Range mine = C::range(largest_of_word<From, magnitudes>(of_bucket), 0);
      coded[box] = {{}, mine.scale};
      inverse[box] = mine.inverse;
    }
    for (int j = 0; j < 4; ++j)
      for (int box = 0; box < Boxes; ++box) {
        const float of_run = __shfl_sync(all_lanes, inverse[box], j, 4);
        if (of_run == 0)  // NaN and infinities must not reach the words of other runs
          for (int e = 0; e < run_numel; ++e) v[box][j][e] = 0;
        const u32 random[4] = {};
        C::Code::template encode<C::scheme, C::rounding>(v[box][j], of_run, random, j, coded[box].code);
      }
  }

  DEVICE static ReceivedBox<C> as_received(const CodedBox<C>& coded) {
    ReceivedBox<C> received;
    for (int w = 0; w < C::bits; ++w) received.code[w] = coded.code[w];
    for (int j = 0; j < 4; ++j) received.scale[j] = number(Scale{}, __shfl_sync(all_lanes, coded.scale, j, 4));
    return received;
  }

  // Puts each box to `place(box)`, then calls `staged(box)`.
  template <int Boxes, class Place, class Staged>
  DEVICE static void put_all(const CodedBox<C> (&coded)[Boxes], const Place& place, const Staged& staged) {
    const u32 thread = threadIdx.x % 128;
    for (int box = 0; box < Boxes; ++box) {
      visit_pieces(place(box), 128 * sizeof(u32), thread, coded[box].code, Store{});
      reinterpret_cast<typename Scale::Storage*>(place(box) + codes_nbytes)[thread] = coded[box].scale;
      staged(box);
    }
  }

  DEVICE static ReceivedBox<C> get(char* place, u32 thread) {
    constexpr int in_word = 4 / sizeof(typename Scale::Storage);
    ReceivedBox<C> received;
    u32 scales[4 / in_word];
    visit_pieces(place, 128 * sizeof(u32), thread, received.code, Load{});
    visit_pieces(place + codes_nbytes + thread / 4 * sizeof(scales), 0, 0, scales, Load{});
    for (int j = 0; j < 4; ++j) {
      const u32 word = scales[j / in_word];
      received.scale[j] = number(Scale{}, in_word == 1 ? word : j % 2 ? word >> 16 : word & 0xffff);
    }
    return received;
  }

  // By a consumer's threads: codes partial boxes for their owner.
  template <int Boxes, int Count, class Place, class Staged>
  __device__ static void stage(const float (&sums)[Count], const Place& place, const Staged& staged) {
    CodedBox<C> coded[Boxes];
    encode<T>(sums, 0, coded);
    put_all(coded, place, staged);
  }

  // The same for finished sums, for all other ranks. Writes the values that the codes decode to into `output(box)`.
  template <int Boxes, int Count, class Output, class Place, class Staged>
  __device__ static void stage_sum(const MatmulArguments& m, const float (&sums)[Count], const Output& output,
                                   const Place& place, const Staged& staged) {
    CodedBox<C> coded[Boxes];
    encode<fp32>(sums, 0, coded);
    put_all(coded, place, staged);
#pragma unroll
    for (int box = 0; box < Boxes; ++box) write_values(m, output(box), threadIdx.x % 128, as_received(coded[box]));
  }

  // Codes the sums and adds the values of all ranks' codes, in rank order, box by box.
  template <int N, class Tile>
  __device__ static void add_partials(const MatmulArguments& m, const Arguments& a, const WarpgroupTile& tile,
                                      float (&sums)[Tile::columns / 2]) {
    constexpr int most = N < 4 ? N : 4;  // ranks whose codes a thread has in flight
#pragma unroll
    for (int box = 0; box < Tile::boxes; ++box) {
      if (tile.column + 64 * box >= m.n) break;
      CodedBox<C> coded[1];
      encode<T>(sums, box, coded);
      const ReceivedBox<C> own = as_received(coded[0]);
#pragma unroll
      for (int first = 0; first < N; first += most) {
        ReceivedBox<C> part[most];
#pragma unroll
        for (int r = first; r < first + most && r < N; ++r) {
          // Chosen word by word: a choice between two whole structs would go by address, and take local memory.
          ReceivedBox<C> sent = {};
          if (r != a.rank) sent = get(TileExchange<N>{a}.place(a.rank, r, tile.box + box), threadIdx.x % 128);
          for (int w = 0; w < C::bits; ++w) part[r - first].code[w] = r == a.rank ? own.code[w] : sent.code[w];
          for (int j = 0; j < 4; ++j) part[r - first].scale[j] = r == a.rank ? own.scale[j] : sent.scale[j];
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float v[run_numel];
          for (int e = 0; e < run_numel; ++e) v[e] = first > 0 ? sums[index_of(box, j, e)] : 0;
          for (int r = first; r < first + most && r < N; ++r) part[r - first].decode(j, v, r > 0);
          for (int e = 0; e < run_numel; ++e) sums[index_of(box, j, e)] = v[e];
        }
      }
    }
  }

  // By a warp: decodes a finished box from `place` into the output.
  __device__ static void write(const MatmulArguments& m, const Box& box, char* place) {
    constexpr u32 U = 2;  // consumer threads whose codes a lane has in flight
#pragma unroll 1
    for (u32 first = lane(); first < 128; first += 32 * U) {
      ReceivedBox<C> part[U];
      for (u32 u = 0; u < U; ++u) part[u] = get(place, first + 32 * u);
#pragma unroll
      for (u32 u = 0; u < U; ++u) write_values(m, box, first + 32 * u, part[u]);
    }
  }

  // Decodes a thread's codes of a box, adds the bias, and rounds into the output. A lane and its neighbour have 8 bytes
  // of a row in each 8 columns. Of two such groups of columns the even lane stores the first, the odd lane the second.
  __device__ static void write_values(const MatmulArguments& m, const Box& box, u32 thread,
                                      const ReceivedBox<C>& from) {
    const u32 odd = thread % 2, column = thread % 4 * 2;
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = thread / 32 * 16 + half * 8 + thread % 32 / 4;
      u32 word[8];
      for (u32 j = 0; j < 2; ++j) {
        float v[run_numel];
        from.decode(half * 2 + j, v);
        for (u32 i = 0; i < 4; ++i) {
          add_bias_to_pair(m, box, j * 32 + i * 8 + column, v + 2 * i);
          word[j * 4 + i] = T::round(v + 2 * i);
        }
      }
      for (u32 i = 0; i < 8; i += 2) {
        const u32 got = __shfl_xor_sync(all_lanes, odd ? word[i] : word[i + 1], 1);
        const u32 both[2] = {odd ? got : word[i], odd ? word[i + 1] : got};
        const u32 first = (i + odd) * 8 + column / 4 * 4;
        u16* const to = box.output + u64(row) * m.n + first;
        if (row < box.rows && first < box.columns) Store{}(reinterpret_cast<Words<2>*>(to), both);
      }
    }
  }

  DEVICE static void add_bias_to_pair(const MatmulArguments& m, const Box& box, u32 column, float* v) {
    if (m.bias == nullptr || column >= box.columns) return;
    const auto* const bias = static_cast<const typename T::Storage*>(m.bias) + box.column + column;
    float b[2];
    T::unpack(u32(bias[0]) | u32(bias[1]) << 16, b);
    v[0] += b[0];
    v[1] += b[1];
  }
};
