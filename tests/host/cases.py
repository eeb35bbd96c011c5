"""Cases for the host: the kernels of each algorithm, small scratch, and sequences of calls drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graphar import reference
from graphar.numerics.codec_reference import Noise
from graphar.numerics.codecs import FP8, Codec
from graphar.numerics.dtypes import BYTE
from graphar.plan import scratch as layouts
from graphar.plan.algorithms import TUPLE_VARIANT, Algorithm, rows
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, Scratch
from graphar.plan.work import MAX_TENSORS, Exchange
from graphar.runtime.catalogue import KERNELS, KernelSource, kernel_source
from graphar.simulator.calls import Drawn, arguments_of, first_epoch, small
from graphar.simulator.check import mistakes
from graphar.simulator.simulation import Call, Outcome, Simulation
from tests.cases import FLOAT_FILLS, far_apart, in_turns, left_after_scatter
from tests.host.build import TMA_CHANNELS

WORLD_SIZES = (2, 3, 4, 5, 8)
CALLS = 6

_LARGEST_NBYTES = 4096  # of a tensor if the scratch limits it; else twice that
_LARGEST_QUANTIZED_NBYTES = 32 << 10  # a few codec tiles for every rank
_TMA_CHUNKS = 3 * layouts.TMA_DEPTH + 1  # of a channel: its scratch is used several times
# So little scratch that small tensors fill it, wrap around in it, and need many chunks.
SMALL = replace(
    small(_LARGEST_NBYTES // 2, 2),
    reducescatter_nbytes=2 * _LARGEST_NBYTES,
    quantized_nbytes=_LARGEST_QUANTIZED_NBYTES,
    skinny_nbytes=_LARGEST_NBYTES,
    tma_channels=TMA_CHANNELS,
    quantized_chunk_nbytes=2 * 1280,  # two tiles of 8-bit codes, and two fp32 numbers for every 32 elements
    quantized_blocks=4,
    norm_row_packs=130,
    copied_nbytes=1 << 20,
    copied_sum_nbytes=1 << 20,
)
SMALL_ROWS = rows(SMALL)


@dataclass(frozen=True)
class Way:
    """How tests launch the kernels of an algorithm, beside what a launch on GPUs has.

    Attributes:
        threads: threads of a block, by number of ranks. Few, since each thread is simulated.
        chunked: whether a shape has a chunk.
        variants: the variants that may follow one another, in the order in which a program has them.
        in_place: by variant, whether the output may be the input, or hold it as this rank's part of an all-gather.
        codecs: by variant, the codec.
    """

    threads: Callable[[int], Sequence[int]]
    chunked: bool = False
    variants: tuple[str | None, ...] = (None,)
    in_place: tuple[bool, ...] = (True,)
    codecs: tuple[Codec, ...] = ()


def _any(world_size: int) -> Sequence[int]:
    return (1, 3, 8)


def _one_a_peer(world_size: int) -> Sequence[int]:
    return (world_size, 11)  # the first threads signal a peer each


def _groups(world_size: int) -> Sequence[int]:
    return (world_size, 3 * world_size)


def _all_channels(world_size: int) -> Sequence[int]:
    return (layouts.TMA_THREADS // layouts.TMA_CHANNELS * TMA_CHANNELS,)


def _quantized(
    threads: Callable[[int], Sequence[int]], *codecs: Codec, chunked: bool = False, in_place: bool = True
) -> Way:
    variants = tuple(codec.type_name for codec in codecs)
    return Way(threads, chunked, variants, (in_place,) * len(codecs), codecs=codecs)


WAYS = {
    Algorithm.ONE_SHOT_PUSH: Way(_any),
    Algorithm.ONE_SHOT: Way(_one_a_peer),
    Algorithm.TWO_SHOT_PUSH: Way(_groups),
    Algorithm.TWO_SHOT_PIPELINED: Way(_one_a_peer, chunked=True, variants=(None, "direct"), in_place=(True, True)),
    Algorithm.TWO_SHOT_TMA: Way(_all_channels, chunked=True),
    Algorithm.TWO_SHOT_LOSSLESS: Way(lambda world_size: (32, 64), chunked=True),
    Algorithm.MULTIMEM_ONE_SHOT: Way(_one_a_peer, variants=("Hardware", "StandIn"), in_place=(True, True)),
    Algorithm.MULTIMEM_TWO_SHOT: Way(_one_a_peer, variants=("Hardware", "StandIn"), in_place=(True, True)),
    Algorithm.REDUCESCATTER_PUSH: Way(_any, in_place=(False,)),
    Algorithm.ALLGATHER_FLAGGED: Way(_any, variants=(None, TUPLE_VARIANT), in_place=(True, False)),
    Algorithm.ALLGATHER_PUSH: Way(_one_a_peer, chunked=True, variants=(None, TUPLE_VARIANT), in_place=(True, False)),
    Algorithm.ALLTOALL_FLAGGED: Way(_any, in_place=(False,)),
    Algorithm.ALLTOALL_PUSH: Way(_one_a_peer, chunked=True, in_place=(False,)),
    Algorithm.ALLGATHER_LOSSLESS: Way(lambda world_size: (32, 64), chunked=True),
    Algorithm.QUANTIZED_TWO_SHOT_PUSH: _quantized(
        lambda world_size: (32 * world_size,),
        Codec(4),
        Codec(FP8, 128, scale_dtype=torch.float32),
        Codec(3, 1024, "stochastic", feedback=True),
    ),
    Algorithm.QUANTIZED_TWO_SHOT_PIPELINED: _quantized(
        lambda world_size: (32, 64),
        Codec(8),
        Codec(2, 512, "stochastic", "minmax", torch.float32),
        Codec(5, 64, scheme="minmax", feedback=True),
        chunked=True,
    ),
    Algorithm.QUANTIZED_REDUCESCATTER: _quantized(
        lambda world_size: (32, 64),
        Codec(6, 256, "stochastic", feedback=True),
        Codec(8, 64, scheme="minmax", scale_dtype=torch.float32),
        Codec(FP8, 512, "stochastic"),
        chunked=True,
        in_place=False,
    ),
}
ALGORITHMS = KERNELS


def _largest_nbytes(algorithm: Algorithm) -> int:
    return _LARGEST_QUANTIZED_NBYTES if _in_tiles(algorithm) else _LARGEST_NBYTES


def _in_tiles(algorithm: Algorithm) -> bool:
    way = WAYS.get(algorithm)
    return bool(way and way.codecs) or algorithm.row.compresses


def scratch_of(algorithm: Algorithm, world_size: int) -> Scratch:
    """The small scratch of an algorithm."""
    return SMALL_ROWS[algorithm].scratch(world_size)


@dataclass(frozen=True)
class Kernels:
    """The kernels of one program: one for each world size, dtype and variant of an algorithm."""

    algorithm: Algorithm
    world_sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def sources(self) -> tuple[KernelSource, ...]:
        return tuple(
            kernel_source(self.algorithm, dtype, world_size, variant)
            for world_size in self.world_sizes
            for dtype in self.dtypes
            for variant in WAYS[self.algorithm].variants
        )

    def first(self, world_size: int, dtype: torch.dtype) -> int:
        """The index of the first variant with this world size and dtype."""
        at = self.world_sizes.index(world_size) * len(self.dtypes) + self.dtypes.index(dtype)
        return at * len(WAYS[self.algorithm].variants)


def world_sizes_of(algorithm: Algorithm, sanitizer: str) -> tuple[int, ...]:
    """The numbers of ranks whose threads a sanitizer can take. A block of two_shot_tma has 320."""
    most = {"plain": 8, "thread": 5, "address": 8}[sanitizer]
    most = 3 if algorithm is Algorithm.TWO_SHOT_TMA and sanitizer != "plain" else most
    return tuple(size for size in WORLD_SIZES if size <= most)


def dtypes_of(algorithm: Algorithm) -> tuple[torch.dtype, ...]:
    return algorithm.row.dtypes


def draw(algorithm: Algorithm, world_size: int, dtype: torch.dtype, seed: int, calls: int = CALLS) -> Drawn:
    """A sequence of calls that shrink, grow, change grid and alignment."""
    choices = random.Random(f"{algorithm} {world_size} {dtype} {seed}")
    variants = range(len(WAYS[algorithm].variants))
    if not algorithm.exact:
        variants = [choices.choice(variants)]  # a communicator has the switch, or the stand-in
    made = [
        draw_call(algorithm, world_size, dtype, choices.choice(variants), choices, first_epoch(seed) + at)
        for at in range(calls)
    ]
    return Drawn([call for call, _ in made], [results for _, results in made])


def draw_call(
    algorithm: Algorithm, world_size: int, dtype: torch.dtype, variant: int, choices: random.Random, epoch: int
):
    way = WAYS[algorithm]
    needs = scratch_of(algorithm, world_size)
    chunk = choices.choice([1, 2] if _in_tiles(algorithm) else [1, 3, 8]) if way.chunked else 0
    blocks = choices.choice([1, 1, 2, 3]) if algorithm is not Algorithm.TWO_SHOT_TMA else 1
    shape = Config(algorithm, blocks, choices.choice(way.threads(world_size)), min(chunk, needs.capacity))
    offset = choices.choice([0, 0, 16, dtype.itemsize])
    fills = [*FLOAT_FILLS, far_apart, in_turns] if algorithm.row.compresses else FLOAT_FILLS
    common = {"offset": offset, "in_place": way.in_place[variant] and choices.random() < 0.3}
    if way.variants[variant] == TUPLE_VARIANT:
        return _draw_tuple(Call(variant, shape, (), (), (), **common), world_size, choices)
    if algorithm.op == "alltoall":
        return _draw_exchange(Call(variant, shape, (), (), (), **common), world_size, choices)
    whole = algorithm.op == "allreduce"
    if whole:
        counts = (_draw_numel(shape, world_size, dtype, choices),)
    else:
        counts = _draw_counts(algorithm, world_size, dtype, choices)
    if algorithm.op == "allgather":
        most = max(counts)
        floats = algorithm.row.compresses
        xs = _draw_inputs(world_size, most, dtype, choices, fills) if floats else _bytes(world_size, most, choices)
        xs = [x[:count] for x, count in zip(xs, counts, strict=True)]
        parts = [reference.allgather(xs)] * world_size
    elif way.codecs:
        xs = _draw_inputs(world_size, sum(counts), dtype, choices)
        common["seed"] = choices.getrandbits(64)
        feeds_back = way.codecs[variant].feedback
        errors = _draw_inputs(world_size, sum(counts), dtype, choices) if feeds_back else xs
        values = [x + error for x, error in zip(xs, errors, strict=True)] if feeds_back else xs
        coded = values, way.codecs[variant], common["seed"], epoch % (1 << 32)
        if whole:
            parts = [reference.quantized_allreduce(*coded)] * world_size
        else:
            parts = reference.quantized_reducescatter(*coded, sizes=counts)
    else:
        xs = _draw_inputs(world_size, sum(counts), dtype, choices, fills)
        total = reference.allreduce(xs)
        parts = [total] * world_size if whole else list(total.split(counts))
    nbytes = tuple(part.nbytes for part in parts)
    if way.codecs and feeds_back:  # the input is x, and then the errors of earlier calls
        common |= {"feeds_back": True, "errors_at": xs[0].nbytes}
        noises = [Noise(common["seed"], epoch % (1 << 32), rank) for rank in range(world_size)]
        pairs = zip(values, noises, strict=True)
        left = [left_after_scatter(x, way.codecs[variant], noise, counts) for x, noise in pairs]
        stays = parts if common["in_place"] else xs
        parts = [torch.cat(ones) for ones in zip(parts, stays, left, strict=True)]
        xs = [torch.cat(pair) for pair in zip(xs, errors, strict=True)]
    return Call(variant, shape, xs, counts, nbytes, **common), parts


def _draw_tuple(call: Call, world_size: int, choices: random.Random):
    """A call of an all-gather with several tensors. On each rank they follow one another without gaps."""
    row_nbytes = [choices.choice([1, 4, 16, choices.randint(1, 200)]) for _ in range(choices.randint(2, MAX_TENSORS))]
    room = _room(call.shape.algorithm, world_size, BYTE) - MAX_TENSORS * PACK_NBYTES  # whole packs of each tensor
    sizes = _draw_parts(room // sum(row_nbytes), world_size, choices)
    tensors = [_bytes(world_size, max(sizes) * nbytes, choices) for nbytes in row_nbytes]
    of_ranks = [
        [ones[rank][: size * nbytes] for ones, nbytes in zip(tensors, row_nbytes, strict=True)]
        for rank, size in enumerate(sizes)
    ]
    result = torch.cat([one for ones in zip(*of_ranks, strict=True) for one in ones])
    counts = tuple(size * sum(row_nbytes) for size in sizes)
    inputs, nbytes = [torch.cat(ones) for ones in of_ranks], (len(result),) * world_size
    made = replace(call, inputs=inputs, counts=counts, output_nbytes=nbytes, scalars=tuple(map(float, row_nbytes)))
    return made, [result] * world_size


def _draw_exchange(call: Call, world_size: int, choices: random.Random):
    """A call of an all-to-all, of tensors with three dimensions, and elements of some bytes."""
    algorithm, ranks = call.shape.algorithm, range(world_size)
    shape = [*(choices.choice([1, 1, 2, 3]) for _ in range(3)), choices.choice([1, 2, 4, 16, 16, 48])]
    scatter, gather = choices.choice([(0, 0), (0, 0), (1, 1), (1, 2), (2, 1), (0, 2), (2, 0)])
    shape[scatter] = shape[gather] = 1
    room = max(1, _room(algorithm, world_size, BYTE) // math.prod(shape))
    if scatter != gather:  # a part has a length of each
        sends = _draw_parts(choices.randint(1, min(8, room)), world_size, choices)
        receives = _draw_parts(room // max(sends), world_size, choices)
        matrix, known = [sends] * world_size, True
    elif choices.random() < 0.4:
        matrix, known = [(choices.randint(1, room),) * world_size] * world_size, True
        receives = matrix[0]
    else:
        matrix, known = [_draw_parts(room, world_size, choices) for _ in ranks], False
        if choices.random() < 0.5:  # a single part, of which the other ranks know nothing
            sender, receiver = choices.sample(ranks, 2)
            rows = choices.choice([room, choices.randint(1, max(1, room // 8))])
            matrix = [tuple(rows * (to == receiver and rank == sender) for to in ranks) for rank in ranks]
    works = []
    for rank in ranks:
        own = receives if known else tuple(sends[rank] for sends in matrix)
        works.append(Exchange(rank, tuple(shape), (matrix[rank],), (own,), scatter, gather, known))
    xs = [_bytes(1, math.prod(work.shapes(0)[0]), choices)[0].view(work.shapes(0)[0]) for work in works]
    parts = reference.alltoall(xs, scatter, gather, matrix)
    operand = torch.frombuffer(bytearray(b"".join(map(arguments_of, works))), dtype=torch.uint8)
    inputs, nbytes = [x.reshape(-1) for x in xs], tuple(part.nbytes for part in parts)
    return replace(call, inputs=inputs, counts=nbytes, output_nbytes=nbytes, operands=(operand,)), parts


def _draw_numel(shape: Config, world_size: int, dtype: torch.dtype, choices: random.Random) -> int:
    nbytes = SMALL_ROWS[shape.algorithm].limit(world_size) or 2 * _largest_nbytes(shape.algorithm)
    if shape.algorithm is Algorithm.TWO_SHOT_TMA:
        nbytes = _TMA_CHUNKS * TMA_CHANNELS * world_size * shape.chunk * PACK_NBYTES
    largest = nbytes // dtype.itemsize
    return choices.choice([choices.randint(1, 9), choices.randint(1, 200), choices.randint(1, largest), largest])


def _draw_counts(algorithm: Algorithm, world_size: int, dtype: torch.dtype, choices: random.Random) -> tuple[int, ...]:
    return _draw_parts(_room(algorithm, world_size, dtype), world_size, choices)


def _room(algorithm: Algorithm, world_size: int, dtype: torch.dtype) -> int:
    """The elements of the largest part."""
    needs = scratch_of(algorithm, world_size)
    return {
        Algorithm.REDUCESCATTER_PUSH: needs.capacity * PACK_NBYTES // dtype.itemsize,
        Algorithm.ALLGATHER_FLAGGED: needs.capacity // 2 * PACK_NBYTES,
        Algorithm.ALLGATHER_PUSH: _LARGEST_NBYTES,
        Algorithm.ALLTOALL_FLAGGED: needs.capacity // 2 * PACK_NBYTES,
        Algorithm.ALLTOALL_PUSH: _LARGEST_NBYTES // 2,
        Algorithm.QUANTIZED_REDUCESCATTER: _LARGEST_QUANTIZED_NBYTES // world_size,
        Algorithm.ALLGATHER_LOSSLESS: _LARGEST_QUANTIZED_NBYTES // dtype.itemsize,
    }[algorithm]


def _draw_parts(room: int, world_size: int, choices: random.Random) -> tuple[int, ...]:
    equal = choices.randint(1, room)
    if choices.random() < 0.4:
        return (equal,) * world_size
    counts = tuple(
        choices.choice([0, 1, choices.randint(0, min(40, room)), choices.randint(0, room)]) for _ in range(world_size)
    )
    return counts if any(counts) else (equal,) * world_size


def _draw_inputs(
    world_size: int, numel: int, dtype: torch.dtype, choices: random.Random, fills: Sequence = FLOAT_FILLS
) -> list[torch.Tensor]:
    fill, shift = choices.choice(fills), choices.randrange(1000)
    return [fill(rank, numel + shift, dtype)[shift:].contiguous() for rank in range(world_size)]


def _bytes(world_size: int, numel: int, choices: random.Random) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(choices.randrange(1 << 30))
    return [torch.randint(256, (numel,), dtype=BYTE, generator=generator) for _ in range(world_size)]


def simulate(
    program: Path, kernels: Kernels, world_size: int, dtype: torch.dtype, seed: int, calls: Sequence[Call]
) -> list[Outcome]:
    """The outcome of every rank. The seed decides timing, random numbers and the first epoch."""
    needs, first = scratch_of(kernels.algorithm, world_size), kernels.first(world_size, dtype)
    return Simulation(program, kernels.algorithm, world_size, needs, first, seed, first_epoch(seed)).run(calls)


def faults(sequence: Drawn, program: Path, algorithm: Algorithm, world_size: int, first: int, seed: int) -> list[str]:
    """Descriptions of all errors of a sequence whose calls name the kernels of a program from ``first`` on."""
    needs = scratch_of(algorithm, world_size)
    simulation = Simulation(program, algorithm, world_size, needs, first, seed, first_epoch(seed))
    return differences(sequence, simulation.run(sequence.calls))


def differences(sequence: Drawn, outcomes: Sequence[Outcome]) -> list[str]:
    """Descriptions of all errors; empty if there are none."""
    return [one.what for one in mistakes(sequence.expected, outcomes)]
