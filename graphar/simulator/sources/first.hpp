// The precompiled header of each program's kernels.cpp: the twin and the standard headers. It comes before the kernels'
// macros, which would change the standard headers.
#include "device/ptx/ptx.cuh"
