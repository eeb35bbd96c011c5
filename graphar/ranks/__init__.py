"""Process groups and ranks: rendezvous, debug comparison of calls, and collectives without graphar's kernels."""
