"""Process groups and ranks: rendezvous, comparison of calls, and collectives without graphar's kernels."""
