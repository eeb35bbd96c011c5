// Which of a program's mistakes is made: the number at the end of the name with which it was started.
#pragma once
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace mistakes {
inline const int chosen = [] {
  const char* dash = std::strrchr(program_invocation_name, '-');
  return dash ? std::atoi(dash + 1) : 0;
}();
}  // namespace mistakes
