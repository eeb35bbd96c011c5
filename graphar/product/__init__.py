"""graphar's matmul kernel, and matmuls whose result is summed over ranks."""
