"""Garbage collections that take less of a test's time. A process whose ranks are forks of it imports this last."""

import gc


def collect_seldom() -> None:
    """Has collections leave out what exists now, and come more seldom: they take a sixth of a compilation else."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


collect_seldom()
