"""graphar's own matmul, and matmuls whose kernels sum over ranks."""
