"""Models for the benchmarks that run or train a whole model with graphar."""
