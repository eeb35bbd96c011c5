"""python -m graphar doctor: what this machine has, what keeps graphar from its best here, and what to do about it."""
