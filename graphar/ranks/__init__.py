"""Who takes part: meeting, comparing calls, and collectives without graphar's kernels."""
