// How lanes find a bucket's largest value together, and how words of codes and scales move, in all layouts.
#pragma once
#include "device/wire/codec.cuh"

constexpr u32 all_lanes = 0xffffffffu;
DEVICE int lane() { return threadIdx.x % 32; }

enum Largest { magnitudes, values };

template <class T, Largest what>
DEVICE u32 larger_of(u32 a, u32 b) {
  return what == magnitudes ? larger_magnitude(T{}, a, b) : larger(T{}, a, b);
}

// The larger of `mine` and of the value `sent` by lane `lane() ^ mask`.
template <class T, Largest what>
DEVICE u32 largest_of_lanes(u32 mine, u32 sent, int mask) {
  return larger_of<T, what>(mine, __shfl_xor_sync(all_lanes, sent, mask));
}

// Four neighbouring lanes each have a word of four rows. Lane l gets the largest of row l % 4.
template <class T, Largest what>
DEVICE u32 largest_of_four_lanes(const u32 (&value)[4]) {
  const bool upper = lane() & 2, odd = lane() & 1;
  const u32 first = largest_of_lanes<T, what>(upper ? value[2] : value[0], upper ? value[0] : value[2], 2);
  const u32 second = largest_of_lanes<T, what>(upper ? value[3] : value[1], upper ? value[1] : value[3], 2);
  return largest_of_lanes<T, what>(odd ? second : first, odd ? first : second, 1);
}

template <class T, Largest what>
DEVICE float largest_of_word(u32 word) {
  float v[2];
  T::unpack(word, v);
  for (int e = 1; e < elements_per_word<T>; ++e)
    v[0] = __uint_as_float(larger_of<fp32, what>(__float_as_uint(v[0]), __float_as_uint(v[e])));
  return v[0];
}

// Calls `visit(address, words)` for `Count` words in pieces of 4, 2 and 1. Word w lies `pitch` x w after `at`. A
// piece's words are neighbours, and lanes' pieces follow each other; with lane = 0 in all lanes they share one.
template <int Count, class Word, class Visit>
DEVICE void visit_pieces(char* at, int pitch, int lane, Word (&word)[Count], Visit visit) {
  constexpr int two = Count / 4 * 4, one = Count / 2 * 2;
#pragma unroll
  for (int w = 0; w < two; w += 4) visit(reinterpret_cast<Words<4>*>(at + pitch * w) + lane, word + w);
  if constexpr (Count & 2) visit(reinterpret_cast<Words<2>*>(at + pitch * two) + lane, word + two);
  if constexpr (Count & 1) visit(reinterpret_cast<Words<1>*>(at + pitch * one) + lane, word + one);
}

// Visitors with ordinary accesses.
struct Store {
  template <int Count>
  DEVICE void operator()(Words<Count>* address, const u32* words) const {
    Words<Count> piece;
#pragma unroll
    for (int w = 0; w < Count; ++w) piece.word[w] = words[w];
    *address = piece;
  }
};

struct Load {
  template <int Count>
  DEVICE void operator()(const Words<Count>* address, u32* words) const {
    const Words<Count> piece = *address;
    for (int w = 0; w < Count; ++w) words[w] = piece.word[w];
  }
};
