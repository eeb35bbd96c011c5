// sum_of_parts of N parts that lie in one tensor, with a gap of so many bytes after each.
#include "copies/sum_of_parts.cu"

template <class T, int N, int Gap>
void one_sum_of_parts(Arguments a) {
  for (int r = 0; r < N; ++r)
    a.peer_input[r] = static_cast<const char*>(a.input) + r * (a.numel * sizeof(typename T::Storage) + Gap);
  sum_of_parts<T, N>(a);
}
