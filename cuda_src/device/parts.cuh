// The parts of an all-gather or an all-to-all as packs: of one tensor, of several that travel as one part, or in runs.
#pragma once
#include "device/pack.cuh"

// Internal: rows of several tensors. Each begins at a pack of the part: the last pack of a tensor is padded.
template <class T>
struct PartOfTuple {
  const TupleArguments& a;
  const void* const* tensors;
  u64 first_row, rows;

  DEVICE u32 hold() { return 0; }

  DEVICE Pack load(u64 i) const {
    const Tensor<T> tensor = tensor_of(i);
    return tensor.load(i);
  }

  DEVICE void store(u64 i, const Pack& p) const {
    const Tensor<T> tensor = tensor_of(i);
    tensor.store(i, p);
  }

  // The rows of the tensor that has pack i; i becomes the pack's index in them.
  DEVICE Tensor<T> tensor_of(u64& i) const {
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
DEVICE Tensor<T> input_of(const Arguments& a) {
  return {a.input, a.count[a.rank]};
}

// Internal: the same of several tensors.
template <class T>
DEVICE PartOfTuple<T> input_of(const TupleArguments& a) {
  return {a, a.inputs, 0, a.rows[a.rank]};
}

// By any thread: where the part of `rank` goes, in this rank's result of an all-gather.
template <class T>
DEVICE Tensor<T> output_of(const Arguments& a, int rank) {
  return part_of<T>(a.output, a, rank);
}

// Internal: the same of several tensors.
template <class T>
DEVICE PartOfTuple<T> output_of(const TupleArguments& a, int rank) {
  return {a, a.outputs, a.first_row[rank], a.rows[rank]};
}

// Internal: the bytes of pack i of a part of an all-to-all, at most 16, which lie in runs.
struct BytesInRuns {
  char* at;
  u32 count;
  u64 left, run, gap;  // bytes left of this run

  DEVICE BytesInRuns(const void* tensor, const Runs& part, u32 i) : run(part.run), gap(part.gap) {
    const u64 first = u64(i) * sizeof(Pack), row = gap == 0 ? 0 : first / run;
    at = static_cast<char*>(const_cast<void*>(tensor)) + part.begin + first + row * gap;
    count = first < part.nbytes ? min(part.nbytes - first, u64(sizeof(Pack))) : 0;
    left = gap == 0 ? count : run - (first - row * run);
  }

  DEVICE char* next() {
    if (left == 0) at += gap, left = run;
    --left;
    return at++;
  }
};

// Internal: the loads of packs that are not whole runs of aligned ones.
template <class T>
__device__ __noinline__ Pack load_in_runs(const void* tensor, const Runs& part, u32 i) {
  BytesInRuns bytes(tensor, part, i);
  if (part.gap == 0) return Tensor<T>::load_elements(bytes.at, bytes.count);
  Pack p = {};
  for (int e = 0; e < sizeof(Pack); ++e)
    if (e < bytes.count) p.word[e / 4] |= u32(static_cast<unsigned char>(*bytes.next())) << e % 4 * 8;
  return p;
}

// Internal: their stores.
template <class T>
__device__ __noinline__ void store_in_runs(void* tensor, const Runs& part, u32 i, Pack p) {
  BytesInRuns bytes(tensor, part, i);
  if (part.gap == 0) return Tensor<T>::store_elements(reinterpret_cast<typename T::Storage*>(bytes.at), bytes.count, p);
  for (int e = 0; e < sizeof(Pack); ++e)
    if (e < bytes.count) *bytes.next() = p.word[e / 4] >> e % 4 * 8;
}

// Internal: a part of an all-to-all, of T of one byte. It lies in runs, with a gap behind each, where a dimension that
// is not the first one is divided or joined. Packs of whole runs move as 16 bytes, others byte by byte, out of line.
template <class T>
struct PartInRuns {
  static_assert(sizeof(typename T::Storage) == 1, "runs are of bytes");
  char* tensor;
  const Runs& part;

  DEVICE u64 packs() const { return pack_count<T>(part.nbytes); }

  DEVICE Pack load(u32 i) const { return is_whole(i) ? *place(i) : load_in_runs<T>(tensor, part, i); }

  DEVICE void store(u32 i, const Pack& p) const {
    if (is_whole(i))
      *place(i) = p;
    else
      store_in_runs<T>(tensor, part, i, p);
  }

  DEVICE bool is_whole(u32 i) const { return i < part.whole && reinterpret_cast<u64>(tensor) % sizeof(Pack) == 0; }

  // Where pack i of whole runs lies. A part has fewer than 2^32 packs.
  DEVICE Pack* place(u32 i) const {
    const u64 gaps = part.gap == 0 ? 0 : i / part.run_packs * part.gap;
    return reinterpret_cast<Pack*>(tensor + part.begin + u64(i) * sizeof(Pack) + gaps);
  }
};

// Internal: what this rank sends to `rank` in an all-to-all.
template <class T>
DEVICE PartInRuns<T> input_for(const ExchangeArguments& a, int rank) {
  return {static_cast<char*>(const_cast<void*>(a.input)), a.sends[rank]};
}

// Internal: where the part from `rank` goes, in this rank's result of an all-to-all.
template <class T>
DEVICE PartInRuns<T> output_of(const ExchangeArguments& a, int rank) {
  return {static_cast<char*>(a.output), a.receives[rank]};
}
