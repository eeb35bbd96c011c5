"""How methods are timed and verified: ranks, timing, verification, and the sweep of all-reduces."""
