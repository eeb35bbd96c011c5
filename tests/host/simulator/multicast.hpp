// What a multicast address stands for: `base`, which nobody may touch, for the same offset in every rank's scratch.
#pragma once
#include <vector>

struct Multicast {
  char* base;
  std::vector<char*> scratch;
};
inline Multicast multicast;
