"""What watches calls: profiles, counts, and the ranges of NVTX and of torch's profiler."""
