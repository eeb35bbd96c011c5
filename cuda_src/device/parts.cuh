// The parts of an all-gather or an all-to-all as packs: of one tensor, of several that travel as one part, or in runs.
#pragma once
#include "device/pack.cuh"

// Internal: rows of several tensors. The last pack of each tensor is padded, so every tensor begins at a pack of the
// part.
template <class T>
struct PartOfTuple {
  const TupleArguments& a;
  const void* const* tensors;
  u64 first_row, rows;

  __device__ __forceinline__ u32 hold() { return 0; }

  __device__ __forceinline__ Pack load(u64 i) const {
    const Tensor<T> tensor = tensor_of(i);
    return tensor.load(i);
  }

  __device__ __forceinline__ void store(u64 i, const Pack& p) const {
    const Tensor<T> tensor = tensor_of(i);
    tensor.store(i, p);
  }

  // The rows of the tensor that has pack i; i becomes the pack's index in them.
  __device__ __forceinline__ Tensor<T> tensor_of(u64& i) const {
#pragma unroll 1
    for (u32 t = 0;; ++t) {
      const u64 nbytes = rows * a.row_nbytes[t], packs = pack_count<T>(nbytes);
      if (i < packs || t + 1 == max_tensors)
        return {static_cast<const char*>(tensors[t]) + first_row * a.row_nbytes[t], nbytes};
      i -= packs;
    }
  }
};

// By any thread: what this rank sends in an all-gather. For accesses by Tensor.
template <class T>
__device__ __forceinline__ Tensor<T> input_of(const Arguments& a) {
  return {a.input, a.count[a.rank]};
}

// Internal: the same of several tensors.
template <class T>
__device__ __forceinline__ PartOfTuple<T> input_of(const TupleArguments& a) {
  return {a, a.inputs, 0, a.rows[a.rank]};
}

// By any thread: where the part of `rank` goes, in this rank's result of an all-gather.
template <class T>
__device__ __forceinline__ Tensor<T> output_of(const Arguments& a, int rank) {
  return part_of<T>(a.output, a, rank);
}

// Internal: the same of several tensors.
template <class T>
__device__ __forceinline__ PartOfTuple<T> output_of(const TupleArguments& a, int rank) {
  return {a, a.outputs, a.first_row[rank], a.rows[rank]};
}

// Internal: a part of an all-to-all, of bytes. It lies in runs, with a gap behind each, where a dimension that is not the
// first one is divided or joined. Packs of whole runs move as 16 bytes, others byte by byte, out of line.
template <class T>
struct PartInRuns {
  Tensor<T> together;  // the part as if no gaps were there; `whole` is of the part with them
  u64 run, gap;

  __device__ __forceinline__ PartInRuns(const void* begin, u64 nbytes, u64 bytes_of_run, u64 pitch)
      : together(begin, nbytes), run(bytes_of_run), gap(bytes_of_run < nbytes ? pitch - bytes_of_run : 0) {
    static_assert(sizeof(typename T::Storage) == 1, "runs are of bytes");
    if (gap != 0 && (run | gap) % sizeof(Pack) != 0) together.whole = 0;
  }

  __device__ __forceinline__ Pack load(u64 i) const {
    if (gap == 0) return together.load(i);
    return i < together.whole ? *place(i) : load_bytes(*this, i);
  }

  __device__ __forceinline__ void store(u64 i, const Pack& p) const {
    if (gap == 0)
      together.store(i, p);
    else if (i < together.whole)
      *place(i) = p;
    else
      store_bytes(*this, i, p);
  }

  // Where pack i of whole runs lies. A part has fewer than 2^32 packs.
  __device__ __forceinline__ Pack* place(u64 i) const {
    return reinterpret_cast<Pack*>(together.base + i * sizeof(Pack) + u32(i) / u32(run / sizeof(Pack)) * gap);
  }

  // The bytes of pack i, one after another.
  struct Bytes {
    const PartInRuns& part;
    typename T::Storage* at;
    u64 left;  // of the run

    __device__ __forceinline__ Bytes(const PartInRuns& whole_part, u64 i) : part(whole_part) {
      const u64 first = i * sizeof(Pack), row = first / part.run;
      at = part.together.base + first + row * part.gap;
      left = part.run - (first - row * part.run);
    }

    __device__ __forceinline__ typename T::Storage* next() {
      if (left == 0) at += part.gap, left = part.run;
      --left;
      return at++;
    }
  };

  static __device__ __noinline__ Pack load_bytes(const PartInRuns& part, u64 i) {
    Pack p = {};
    Bytes bytes(part, i);
#pragma unroll
    for (int e = 0; e < sizeof(Pack); ++e)
      if (e < part.together.elements_of(i)) p.word[e / 4] |= u32(*bytes.next()) << e % 4 * 8;
    return p;
  }

  static __device__ __noinline__ void store_bytes(const PartInRuns& part, u64 i, Pack p) {
    Bytes bytes(part, i);
#pragma unroll
    for (int e = 0; e < sizeof(Pack); ++e)
      if (e < part.together.elements_of(i)) *bytes.next() = p.word[e / 4] >> e % 4 * 8;
  }
};

// Internal: what this rank sends to `rank` in an all-to-all.
template <class T>
__device__ __forceinline__ PartInRuns<T> input_for(const ExchangeArguments& a, int rank) {
  return {static_cast<const char*>(a.input) + a.input_begin[rank], a.sent[rank], a.input_run[rank], a.input_pitch};
}

// Internal: where the part from `rank` goes, in this rank's result of an all-to-all.
template <class T>
__device__ __forceinline__ PartInRuns<T> output_of(const ExchangeArguments& a, int rank) {
  return {static_cast<const char*>(a.output) + a.begin[rank], a.count[rank], a.output_run[rank], a.output_pitch};
}
