// Multicast addresses: an offset from `base` stands for this offset in every rank's scratch. Nobody may access `base`.
#pragma once
#include <vector>

struct Multicast {
  char* base;
  std::vector<char*> scratch;
};
inline Multicast multicast;
