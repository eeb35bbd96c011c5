"""Calls that follow one another, drawn from a seed: their sizes, grids, alignment and data."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.partitions import split
from graphar.plan.config import Config
from graphar.plan.row import Row
from graphar.plan.work import Exchange
from graphar.runtime.arguments import Arguments, ExchangeArguments
from graphar.simulator.simulation import Call
from graphar.simulator.subject import Subject

FEWEST_CALLS = 4  # so that each slot is used twice
FIRST_EPOCHS = (0, 5, (1 << 32) - 4)
_LARGE_BLOCK = 256  # threads: one such block takes as long as several others


def first_epoch(seed: int) -> int:
    """Returns how many calls were made before those of a simulation; the epochs of every third seed wrap."""
    return FIRST_EPOCHS[seed % len(FIRST_EPOCHS)]


@dataclass(frozen=True)
class Drawn:
    """Calls, and the bytes that each rank must get from each call."""

    calls: list[Call]
    expected: list[list[torch.Tensor]]  # by call and rank
    op: str = ""

    def terms(self, call: int, rank: int) -> Sequence[torch.Tensor]:
        """Returns the tensors whose sum is a rank's result of a call; of a gather none."""
        inputs = self.calls[call].inputs
        if self.op == "reducescatter":
            return [x.split(list(self.calls[call].counts))[rank] for x in inputs]
        return inputs if self.op == "allreduce" else ()


def draw(subject: Subject, row: Row, world_size: int, dtype: torch.dtype, numels: Sequence[int], seed: int) -> Drawn:
    """Returns calls of all sizes in an order of the seed, with other grids and alignment each.

    ``row`` has the scratch, and ``numels`` are the elements of a tensor, or of the largest rank's part.
    """
    choices = random.Random(f"{subject.algorithm.kernel_name} {world_size} {dtype} {seed}")
    sizes = list(numels) * -(-FEWEST_CALLS // len(numels))
    choices.shuffle(sizes)
    variants = range(len(subject.variants))
    if not subject.algorithm.exact:
        variants = [choices.choice(variants)]  # a communicator has the switch, or the stand-in
    made = [_draw_call(subject, row, world_size, dtype, numel, choices.choice(variants), choices) for numel in sizes]
    return Drawn([call for call, _ in made], [results for _, results in made], row.op)


def _draw_call(
    subject: Subject, row: Row, world_size: int, dtype: torch.dtype, numel: int, variant: int, choices: random.Random
) -> tuple[Call, list[torch.Tensor]]:
    scratch = row.scratch(world_size)
    # Few, since each thread is simulated.
    threads = row.only_threads or (choices.choice([32, 64]) if row.compresses else world_size * choices.choice([1, 3]))
    blocks = 1 if threads >= _LARGE_BLOCK else choices.choice([1, 1, 2, 3])
    chunk = min(choices.choice([1, 2] if row.compresses else [1, 3, 8]), scratch.capacity) if row.chunked else 0
    shape = Config(subject.algorithm, min(blocks, row.max_blocks), threads, chunk)
    if row.op == "allreduce":
        counts = (numel,)
    elif row.op == "reducescatter" and row.specification:  # it gets no counts: those of torch.tensor_split
        counts = tuple(split(world_size * numel - choices.randrange(world_size), world_size))
    else:
        counts = _draw_counts(world_size, numel, choices)
    sent = counts if row.op == "allgather" else (sum(counts),) * world_size
    xs = _draw_inputs(sent, dtype, choices)
    results = list(subject.specification(xs, counts))
    if subject.moves_bytes:
        xs, counts = [x.view(BYTE) for x in xs], tuple(count * dtype.itemsize for count in counts)
    call = Call(
        variant,
        shape,
        xs,
        counts,
        tuple(result.nbytes for result in results),
        offset=choices.choice([0, 0, 16, dtype.itemsize]),
        in_place=variant == 0 and row.op not in ("reducescatter", "alltoall") and choices.random() < 0.3,
        operands=(_draw_exchange(counts, choices),) if row.op == "alltoall" else (),
    )
    return call, results


def _draw_exchange(counts: tuple[int, ...], choices: random.Random) -> torch.Tensor:
    """Returns the ranks' own arguments of an all-to-all in which each sends parts of ``counts`` bytes."""
    known, ranks = choices.random() < 0.5, len(counts)
    works = [Exchange(rank, (1,), (counts,), ((n,) * ranks,), known=known) for rank, n in enumerate(counts)]
    return torch.frombuffer(bytearray(b"".join(map(arguments_of, works))), dtype=BYTE)


def arguments_of(work: Exchange) -> bytes:
    """Returns a rank's own arguments of an all-to-all of bytes. Parts of other lengths have other words."""
    arguments, rank = ExchangeArguments(), work.rank
    arguments.describe(work, 0, 1)
    for peer, (sent, received) in enumerate(zip(work.sends[0], work.receives[0], strict=True)):
        arguments.sent_words[peer] = 1 + hash((rank, peer, sent)) % (1 << 31)
        arguments.received_words[peer] = 1 + hash((peer, rank, received)) % (1 << 31)
    return bytes(arguments)[ctypes.sizeof(Arguments) :]


def _draw_counts(world_size: int, numel: int, choices: random.Random) -> tuple[int, ...]:
    """Returns the elements of each rank's part: equal ones, or others of which the largest has ``numel``."""
    if choices.random() < 0.4:
        return (numel,) * world_size
    counts = [choices.choice([0, 1, numel, choices.randint(0, numel)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = numel
    return tuple(counts)


def _draw_inputs(counts: Sequence[int], dtype: torch.dtype, choices: random.Random) -> list[torch.Tensor]:
    """Returns the ranks' tensors: small whole numbers, any bits, or words of zeros, of ones and between them."""
    seed = choices.getrandbits(32)
    generator = torch.Generator().manual_seed(seed)
    if choices.random() < 0.5:
        return [torch.randint(-15, 16, (count,), generator=generator).to(dtype) for count in counts]
    values = 256 if seed % 2 else 2
    drawn = [torch.randint(values, (n * dtype.itemsize,), dtype=BYTE, generator=generator) for n in counts]
    return [(x * (255 // (values - 1))).view(dtype) for x in drawn]
