"""Choosing the algorithm and grid of a call: pure functions of the call and of measured tables. Uses no GPU."""
