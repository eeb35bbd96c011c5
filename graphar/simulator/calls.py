"""What is simulated: an algorithm, and calls of it that follow one another, drawn from a seed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.numerics.partitions import split
from graphar.plan.algorithms import TUPLE_VARIANT, Algorithm, is_from_outside, kernels_that, rows
from graphar.plan.config import Config
from graphar.plan.row import Row
from graphar.plan.scratch import PACK_NBYTES, Sizes
from graphar.plan.work import Exchange
from graphar.runtime.arguments import Arguments, ExchangeArguments
from graphar.runtime.catalogue import KernelSource, kernel_source
from graphar.simulator.simulation import Call

FEWEST_CALLS = 4  # so that each slot is used twice
FIRST_EPOCHS = (0, 5, (1 << 32) - 4)
_LARGE_BLOCK = 256  # threads: one such block takes as long as several others

# A function from the ranks' tensors and the elements of each rank's part to the ranks' results.
Specification = Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[torch.Tensor]]

_SPECIFICATIONS: dict[str, Specification] = {
    "allreduce": lambda xs, counts: [reference.allreduce(xs)] * len(xs),
    "reducescatter": lambda xs, counts: reference.allreduce(xs).split(list(counts)),
    "allgather": lambda xs, counts: [reference.allgather(xs)] * len(xs),
    "alltoall": lambda xs, counts: reference.alltoall(xs, sizes=[counts] * len(xs)),
}
ALGORITHMS = kernels_that(lambda row: row.op in _SPECIFICATIONS and not row.takes_codec)


def small(part_nbytes: int, parts: int) -> Sizes:
    """Returns sizes of scratch that a tensor fills, so that slots are used again and chunks are many.

    The tensor has ``parts`` parts. The largest has ``part_nbytes``.
    """
    nbytes = -(-part_nbytes * parts // PACK_NBYTES) * PACK_NBYTES
    return Sizes(
        pushed_nbytes=nbytes,
        pushed_nbytes_of_two=nbytes,
        one_shot_nbytes=nbytes,
        two_shot_nbytes=nbytes,
        pipeline_chunk=8,
        pipeline_blocks=4,
        tma_channel_nbytes=4096,
        lossless_chunk=2,
        reducescatter_nbytes=nbytes,
        allgather_flagged_nbytes=part_nbytes,
        allgather_chunk=8,
        allgather_blocks=4,
    )


@dataclass(frozen=True)
class Subject:
    """An algorithm to be simulated."""

    algorithm: Algorithm  # which
    variants: tuple[str | None, ...]  # the variants of its kernel, the usual one first
    specification: Specification  # what every rank must get

    def row(self, numel: int, dtype: torch.dtype, world_size: int) -> Row:
        """Returns the row with scratch that a tensor of ``numel`` elements fills, or one whose largest part has them.

        An algorithm from outside keeps its own.
        """
        if self.algorithm.row.digest:
            return self.algorithm.row
        parts = 1 if self.algorithm.op == "allreduce" else world_size
        return rows(small(numel * dtype.itemsize, parts))[self.algorithm]

    def fitting(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> list[int]:
        """Returns the elements of a tensor, or of the largest part, that the algorithm takes."""
        limit = self.algorithm.row.limit(world_size) if self.algorithm.row.digest else None
        return [numel for numel in numels if limit is None or numel * dtype.itemsize <= limit]

    def takes(self, dtype: torch.dtype) -> bool:
        return self.moves_bytes or dtype in self.algorithm.row.dtypes

    @property
    def moves_bytes(self) -> bool:
        """Whether the kernel is the same for all dtypes."""
        return self.algorithm.row.dtypes == (BYTE,)

    def sources(self, world_size: int, dtype: torch.dtype) -> tuple[KernelSource, ...]:
        """Returns the kernels of all variants."""
        element = BYTE if self.moves_bytes else dtype
        return tuple(kernel_source(self.algorithm, element, world_size, variant) for variant in self.variants)


def find(name: str | Algorithm) -> Subject:
    """Returns the algorithm of a name. ValueError without one, or if the simulator has no cases for it."""
    if not is_from_outside(name) and name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, or be loaded; got {str(name)!r}")
    algorithm = Algorithm(name)
    variants = tuple(variant for variant in algorithm.row.variants if variant != TUPLE_VARIANT)
    return Subject(algorithm, variants, _specification_of(algorithm.row))


def _specification_of(row: Row) -> Specification:
    """Returns an algorithm's own specification, which one from outside may have, or its op's."""
    specification = row.specification
    if specification is None:
        return _SPECIFICATIONS[row.op]

    def specify(xs: Sequence[torch.Tensor], counts: Sequence[int]) -> Sequence[torch.Tensor]:
        results = specification([x.clone() for x in xs])  # it may overwrite its arguments
        return [results] * len(xs) if isinstance(results, torch.Tensor) else results

    return specify


def first_epoch(seed: int) -> int:
    """Returns how many calls were made before a simulation; the epochs of every third seed wrap."""
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
    elif row.op == "reducescatter" and row.specification:  # it gets no counts, and splits as torch.tensor_split
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
    """Returns the elements of each rank's part: equal ones, or others. The largest has ``numel``."""
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
