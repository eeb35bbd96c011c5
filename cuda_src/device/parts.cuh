// The parts of an all-gather as packs: of one tensor, or of several that travel as one part.
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
