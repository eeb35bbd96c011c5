// The kernels that a program has, in the order in which a case numbers them; tests/host/build.py writes their list.
#pragma once
#include "device/arguments.cuh"

extern void (*const kernels[])(Arguments);
