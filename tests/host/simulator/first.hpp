// What each program's kernels.cpp begins with, which is compiled once for all: the twin, and with it the standard headers,
// which the kernels' macros would change.
#include "device/ptx/ptx.cuh"
