"""An algorithm from outside the package, as a user loads it: a kernel beside tests/runtime, and a row."""

from functools import partial
from pathlib import Path

import graphar
from graphar.plan import algorithms
from graphar.plan.algorithms import Algorithm
from graphar.runtime.compiler import source_directory

FOLDER = Path(__file__).parent / "runtime" / "outside"
PUSHED_SUM = FOLDER / "pushed_sum.cu"
MAX_NBYTES = 1 << 20


def slots(world_size: int) -> graphar.Scratch:
    """The scratch of pushed_sum: two copies of a slot for every rank, armed with sentinels."""
    return graphar.Scratch.of_slots(2 * world_size, MAX_NBYTES, fill=0xFF)


def load(source: Path = PUSHED_SUM, **row) -> Algorithm:
    return graphar.load_algorithm(source, **({"op": "allreduce", "scratch": slots, "max_nbytes": MAX_NBYTES} | row))


def unload(algorithm: Algorithm) -> None:
    del algorithms.NAMED[algorithm.op][algorithm], algorithms.ROWS[algorithm]


def forget_loaded(monkeypatch) -> None:
    """Forgets, at the end of a test, the algorithms that it loads."""
    monkeypatch.setattr(algorithms, "ROWS", dict(algorithms.ROWS))
    for op, named in algorithms.NAMED.items():
        monkeypatch.setitem(algorithms.NAMED, op, dict(named))


def load_own(world_sizes=(2, 3, 4)) -> dict[str, Algorithm]:
    """By op, a kernel of graphar's own that is loaded as if it came from outside."""
    files = {
        "allreduce": ("allreduce/one_shot_push.cu", 0xFF, 1),
        "reducescatter": ("scatter_gather/reducescatter_push.cu", 0xFF, 1),
        "allgather": ("scatter_gather/allgather_flagged.cu", 0, 2),  # a flag beside each word
    }
    return {
        op: graphar.load_algorithm(
            source_directory() / file,
            op=op,
            scratch=partial(_own_slots, widening=widening, fill=fill),
            max_nbytes=MAX_NBYTES,
            world_sizes=world_sizes,
        )
        for op, (file, fill, widening) in files.items()
    }


def _own_slots(world_size: int, widening: int, fill: int) -> graphar.Scratch:
    return graphar.Scratch.of_slots(2 * world_size, widening * MAX_NBYTES, fill=fill)
