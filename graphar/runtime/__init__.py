"""Compiling, loading and launching kernels, and the memory that ranks share."""
