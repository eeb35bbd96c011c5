// Memory that is never freed: ThreadSanitizer takes an allocation or a deallocation for an access to the memory.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace simulator {

inline void* map(size_t nbytes) {
  void* it = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (it == MAP_FAILED) std::abort();
  return it;
}

inline char* take(size_t nbytes) {
  constexpr size_t chunk_nbytes = size_t(1) << 30;
  static char *next = nullptr, *end = nullptr;
  nbytes = (nbytes + 15) / 16 * 16;
  if (next == nullptr || nbytes > size_t(end - next)) {
    const size_t size = nbytes > chunk_nbytes ? nbytes : chunk_nbytes;
    next = static_cast<char*>(map(size));
    end = next + size;
  }
  return std::exchange(next, next + nbytes);
}

// Pages with nothing near them, so that an access far out of bounds is none to other data.
inline char* take_apart(size_t nbytes) {
  constexpr size_t page = 4096, gap_nbytes = size_t(64) << 20;
  const size_t room = (nbytes + page - 1) / page * page;
  char* const whole = static_cast<char*>(map(room + 2 * gap_nbytes));
  mprotect(whole, gap_nbytes, PROT_NONE);
  mprotect(whole + gap_nbytes + room, gap_nbytes, PROT_NONE);
  return whole + gap_nbytes;
}

template <class T>
struct Kept {
  using value_type = T;
  Kept() = default;
  template <class U>
  Kept(const Kept<U>&) {}
  T* allocate(size_t n) { return reinterpret_cast<T*>(take(n * sizeof(T))); }
  void deallocate(T*, size_t) {}
  bool operator==(const Kept&) const = default;
};

template <class T>
using Vector = std::vector<T, Kept<T>>;

template <class Key, class T>
using Map = std::map<Key, T, std::less<>, Kept<std::pair<const Key, T>>>;

}  // namespace simulator
