"""Products on the host: matmuls alone, summed over ranks, and of gathered rows, whatever their factors and their order.

Bulk loads and stores of boxes, products and barriers are modelled as PTX documents them, and operand descriptors are
decoded. The operands of a rank lie in one tensor, as programs/products.hpp takes them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphar import reference
from graphar.numerics import fp8_products, leaf_tree
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.fp8_products import BLOCK, FP8, Scales
from graphar.numerics.leaf_tree import LEAF_UNIT, LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, SENTINEL, SIGNAL_PAD_NBYTES, Scratch, gathered_flags
from graphar.plan.tiles import LAYOUTS, MatmulTile, SkinnyTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SCALE_FORMATS, SKINNY_KERNELS, KernelSource
from graphar.simulator.build import Mutation
from graphar.simulator.calls import Drawn, first_epoch
from graphar.simulator.simulation import Call, Outcome, Simulation
from tests.cases import normal
from tests.host.build import UNIT_PACKS, build
from tests.host.cases import differences

UNSCALED, (ROWS, BLOCKS) = "Unscaled", SCALE_FORMATS
GATHER, SCATTER, REDUCE = Algorithm.ALLGATHER_MATMUL, Algorithm.MATMUL_REDUCESCATTER, Algorithm.MATMUL_ALLREDUCE
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # of a matmul alone: Simulation requires one
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CALLS = 4
BOXES, PACKS = 16, 64 * 24  # in a slot of tiles; in one of a skinny matmul
MOST_ROWS, MOST_K = 300, 400  # of a rank whose rows are gathered
GATHERED_PACKS = MOST_ROWS * (-(-MOST_K // 16) + 1)  # a row of e4m3 has at most a pack of scales
MOST_THREADS = {"plain": 1 << 13, "thread": 2200, "address": 1 << 12}  # ThreadSanitizer has 8128: 3 or 4 per thread
MOST_IN_GRIDS = MOST_THREADS | {"thread": 600}  # if a cluster a rank has fewer: its time grows with their square
LARGE_SUMS, LARGE_LEAVES = 2.0**20, 2.0**12  # of products that cancel
EPILOGUE = Pointwise("max(v * scale, c[col]) + f[index] - r[row] + row * 3 - col", (BF16,) * 3, 1)
EPILOGUE_SCALAR = 0.375

# Small tiles, with the fewest stages that are possible, and with one more.
SUMMED_TILES = (
    MatmulTile(64, 64, 2, whole=True),
    MatmulTile(64, 128, 2, 2, whole=True, alternating=True),
    MatmulTile(128, 64, 2, whole=True),
    MatmulTile(128, 192, 2, 2, whole=True),
)
GATHERED_TILES = (
    MatmulTile(64, 64, 2),
    MatmulTile(64, 128, 2, cluster=2),
    MatmulTile(128, 64, 2),
    MatmulTile(128, 160, 2),
    MatmulTile(128, 192, 2, cluster=2),
)
SKINNY_TILES = (SkinnyTile(8, 2), SkinnyTile(16, 3, cluster=2), SkinnyTile(64, 2, cluster=2))


class Integers:
    """Operands, and scales that are powers of two, whose product is exact in whatever order it is added."""

    @staticmethod
    def operand(shape, generator):
        return torch.randint(-8, 9, shape, generator=generator).float()

    @staticmethod
    def scale(shape, generator):
        return 2.0 ** torch.randint(-2, 3, shape, generator=generator)

    @staticmethod
    def bias(n, generator):
        return torch.arange(n).remainder(17) - 8.0

    @staticmethod
    def product(a, w, scales, leaves):
        a, w = a.double(), w.double()
        if scales and scales.format == "blocks":
            a = a * scales.a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
            w = w * scales.w.repeat_interleave(BLOCK, 0)[: len(w)].repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        elif scales:
            a, w = a * scales.a, w * scales.w
        return a @ w.t() + 0.0  # no zero is negative


class RandomData:
    """Operands whose product has the bits of its order, and scales near one."""

    @staticmethod
    def operand(shape, generator):
        return torch.randn(shape, generator=generator)

    @staticmethod
    def scale(shape, generator):
        return torch.rand(shape, generator=generator) + 0.5

    @staticmethod
    def bias(n, generator):
        return torch.randn(n, generator=generator)

    @staticmethod
    def product(a, w, scales, leaves):
        return fp8_products.product(a, w, scales) if scales else leaf_tree.in_leaves(a, w, leaves)


class EveryNumber(RandomData):
    """The same with operands that are any number of e4m3, subnormal ones included."""

    @staticmethod
    def operand(shape, generator):
        numbers = [bits for bits in range(256) if bits & 0x7F != 0x7F]  # all but NaN
        drawn = torch.randint(len(numbers), shape, generator=generator)
        return torch.tensor(numbers, dtype=torch.uint8)[drawn].view(FP8).float()


@dataclass(frozen=True)
class Operands:
    """A rank's rows of A [m, k], its W [n, k] and bias [n], and the scales of e4m3."""

    a: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor
    scales: Scales | None


def draw_scales(form: str, m: int, n: int, k: int, data, choices: random.Random, generator) -> Scales | None:
    """Scales of a format, in one layout or the other. Those of rows may be a number for the whole tensor."""
    if form == UNSCALED:
        return None
    shapes = ((m, -(-k // BLOCK)), (-(-n // BLOCK), -(-k // BLOCK))) if form == BLOCKS else ((m, 1), (n, 1))
    found = []
    for shape, rows in zip(shapes, (m, n), strict=True):
        one_number = form == ROWS and choices.random() < 0.2
        scale = data.scale((1, 1) if one_number else shape, generator)
        scale = scale.t().contiguous().t() if choices.random() < 0.5 else scale
        found.append(scale.expand(rows, 1) if one_number else scale)
    return Scales("blocks" if form == BLOCKS else "rows", *found)


def aligned_rows(values: torch.Tensor) -> torch.Tensor:
    """The rows, padded with NaN to a multiple of 16 bytes as the kernels require."""
    (rows, columns), unit = values.shape, 16 // values.dtype.itemsize
    padded = torch.full((rows, -(-columns // unit) * unit), float("nan"), dtype=values.dtype)
    padded[:, :columns] = values
    return padded.view(-1)


def packed(own: Operands, m: int, layout: str = "by_rows", *, with_bias=False, **sizes: int) -> torch.Tensor:
    """The bytes of a rank's sizes and operands. ``sizes`` are further members of Sizes in programs/products.hpp."""
    names = ("group_rows", "first_tile", "end_tile", "constant", "held", "wants_rows")
    (n, k), scales, words = own.w.shape, [own.scales.a, own.scales.w] if own.scales else [], [0] * 5
    in_memory = [one.as_strided((one.untyped_storage().nbytes() // 4,), (1,), 0) for one in scales]
    if own.scales:  # a column that a scale has but once has no stride
        words = [
            len(in_memory[0]),
            *(s for one in scales for s in (one.stride(0), one.stride(1) * (own.scales.format == "blocks"))),
        ]
    header = torch.tensor([m, n, k, with_bias, *(sizes.get(name, 0) for name in names), *words, 0])
    matrices = own.a, own.w if layout == "by_rows" else own.w.t(), own.bias.view(1, n)
    return torch.cat([one.view(torch.uint8) for one in (header, *map(aligned_rows, matrices), *in_memory)])


@dataclass(frozen=True)
class Kind:
    """A kernel of a program: its tile, the layout of its weight, the scales of e4m3; of a matmul alone, both dtypes."""

    tile: MatmulTile | SkinnyTile
    layout: str = "by_rows"
    scales: str = UNSCALED
    dtype: torch.dtype = BF16
    result: torch.dtype = BF16

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.tile.blocks if isinstance(self.tile, MatmulTile) else self.tile.cluster


def kinds_of(
    tiles: Sequence, layouts: Sequence[str] = LAYOUTS, scales: Sequence[str] = (UNSCALED,)
) -> tuple[Kind, ...]:
    """All kinds of tiles. A weight with scales lies by rows."""
    layouts = layouts if scales == (UNSCALED,) else ("by_rows",)
    return tuple(
        Kind(tile, *more) for tile in tiles for more in itertools.product(layouts, scales) if more[0] in tile.layouts
    )


@dataclass(frozen=True)
class Products:
    """The kernels of one program, and calls of them.

    Attributes:
        algorithm: of ranks; None: matmuls of one rank alone.
        kinds: the kernels.
        world_size: ranks.
        sanitizer: one of SANITIZERS.
        then: what follows the product: an epilogue, or a codec on the wire.
        data: how operands are drawn: Integers, RandomData or EveryNumber. None: integers, but for sums whose partials
            have the bits of an order.
        calls: in a row.
        keeps_promise: whether weights that are called constant are; else the kernel before writes them.
    """

    algorithm: Algorithm | None
    kinds: tuple[Kind, ...]
    world_size: int = 1
    sanitizer: str = "plain"
    then: Pointwise | Codec | None = None
    data: Any = None
    calls: int = CALLS
    keeps_promise: bool = True

    @property
    def dtype(self) -> torch.dtype:
        """Of the results of ranks."""
        return FP16 if self.world_size == 2 else BF16

    @property
    def is_skinny(self) -> bool:
        return self.algorithm in SKINNY_KERNELS

    @property
    def fitting(self) -> tuple[Kind, ...]:
        """The kinds of which this program has room for the threads of all ranks."""
        most = MOST_THREADS[self.sanitizer]
        return tuple(kind for kind in self.kinds if self.world_size * kind.blocks * kind.tile.threads <= most)

    def program(self, mutation: Mutation | None = None):
        form = self.then if isinstance(self.then, Pointwise) else None
        file, text = f"one_{self.algorithm or 'matmul'}", form.generated.text if form else ""
        names = [f"{file}<{', '.join(self._template(kind, form))}>" for kind in self.fitting]
        return build(tuple(KernelSource(f"{file}.cu", one, generated=text) for one in names), self.sanitizer, mutation)

    def _template(self, kind: Kind, form: Pointwise | None) -> list[str]:
        if self.algorithm is None:
            return [TYPE_NAMES[kind.dtype], str(kind.tile), kind.layout, kind.scales, TYPE_NAMES[kind.result]]
        element = TYPE_NAMES[self.dtype]
        given = [element, str(self.world_size), str(kind.tile), kind.layout, kind.scales]
        follow = form.generated.name if form else "Identity"
        if isinstance(self.then, Codec):
            return [*given, follow, f"AsCodes<{element}, {self.then.type_name}>"]
        if kind.tile.partials and not self.is_skinny:
            return [*given, follow, f"AsPartials<{element}>"]
        return [*given, follow] if form else given

    def scratch(self) -> Scratch:
        shared_nbytes = max(kind.tile.shared_nbytes for kind in self.kinds) + 2048
        if self.algorithm is None:
            return Scratch(0, 128, 0, shared_nbytes)
        if self.is_skinny:
            return Scratch(PACKS, 2 * self.world_size * PACKS * PACK_NBYTES, SENTINEL, shared_nbytes)
        if self.algorithm is GATHER:
            slot = 4 * gathered_flags(GATHERED_PACKS, UNIT_PACKS) + 16 * GATHERED_PACKS
            return Scratch(GATHERED_PACKS, SIGNAL_PAD_NBYTES + 128 + (self.world_size - 1) * slot, 0, shared_nbytes)
        area = (self.world_size - 1) * BOXES * (4 + 8192)
        return Scratch(BOXES, SIGNAL_PAD_NBYTES + (1 + (self.algorithm is REDUCE)) * area, 0, shared_nbytes)

    def draw(self, choices: random.Random, calls: int, first: int = 0) -> Drawn:
        """Calls of all kinds in turn, and what each rank must get."""
        kinds = range(len(self.fitting))
        drawn = [self._draw_call(choices, kinds[number % len(kinds)]) for number in range(first, first + calls)]
        return Drawn([call for call, _ in drawn], [results for _, results in drawn])

    def run(self, calls: Sequence[Call], seed: int, mutation: Mutation | None = None, **options) -> list[Outcome]:
        """The outcome of every rank. ``options`` go to Simulation."""
        algorithm = self.algorithm or OF_ANY_KIND
        given = self.program(mutation), algorithm, self.world_size, self.scratch(), 0, seed, first_epoch(seed)
        return Simulation(*given, **options).run(calls)

    def faults(self, seed: int, mutation: Mutation | None = None, **of_call) -> list[str]:
        """Descriptions of all errors after some calls in a row. ``of_call`` changes each of them."""
        choices = random.Random(f"{self.algorithm} {self.world_size} {seed}")
        drawn = self.draw(choices, self.calls, seed * self.calls)
        return differences(drawn, self.run([replace(call, **of_call) for call in drawn.calls], seed, mutation))

    def _draw_call(self, choices: random.Random, number: int) -> tuple[Call, list[torch.Tensor]]:
        kind, generator = self.fitting[number], torch.Generator().manual_seed(choices.getrandbits(32))
        counts, n = self._draw_sizes(kind, choices)
        m, with_bias = sum(counts), choices.random() < 0.5 and not isinstance(self.then, Pointwise)
        with_bias = with_bias and not (self.algorithm is None and kind.result == FP32)
        ranks = self._draw_operands(kind, counts, n, choices, generator)
        results, beside = self._results(kind, ranks, counts, with_bias)
        wants_rows = self.algorithm is GATHER and choices.random() < 0.5
        if wants_rows:
            results = [torch.cat([one, *_gathered(ranks)]) for one in map(_bytes, results)]
        order = self._draw_order(kind, m, n, choices)
        inputs = []
        for own in ranks:
            constant = self.is_skinny and choices.random() < 0.5
            flags = {"constant": constant, "held": constant and self.keeps_promise, "wants_rows": wants_rows}
            inputs.append(packed(own, m, kind.layout, with_bias=with_bias, **order, **flags))
        results = [_bytes(one) for one in results]
        blocks = self._draw_blocks(kind, choices)
        call = Call(
            number,
            Config(self.algorithm or OF_ANY_KIND, blocks[0], kind.tile.threads),
            inputs,
            (len(inputs[0]),) if self.algorithm is None else (m * n,) if self.is_skinny else tuple(counts),
            tuple(one.nbytes for one in results),
            blocks=blocks,
            cluster=kind.blocks,
            **beside,
        )
        return call, results

    def _draw_sizes(self, kind: Kind, choices: random.Random) -> tuple[list[int], int]:
        """The rows of each rank's part, or of the whole, and the columns."""
        tile, share = kind.tile, 1 if self.sanitizer == "plain" and self.world_size < 8 else 2
        if self.algorithm is None:
            m, n = (choices.randint(1, int(most / share)) for most in (2.5 * self._height(kind), 2 * tile.columns + 70))
            return [m], -(-n // STORE_COLUMNS) * STORE_COLUMNS
        if self.is_skinny:
            m = choices.choice([1, tile.rows, choices.randint(1, tile.rows)])
            return [m], STORE_COLUMNS * choices.randint(1, min(PACKS // (2 if tile.partials else 1) // m, 30))
        most = (MOST_ROWS if self.algorithm is GATHER else 150) // share
        counts = [choices.choice([0, 1, 64, choices.randint(1, most)]) for _ in range(self.world_size)]
        counts[choices.randrange(self.world_size)] = choices.randint(1, most)
        if self.algorithm is GATHER:
            return counts, STORE_COLUMNS * choices.randint(1, 30 // share)
        columns = 64 * ((8 if tile.partials else 12) // share // -(-max(counts) // 64))
        unit = self.then.bucket_size if isinstance(self.then, Codec) else STORE_COLUMNS
        return counts, unit * choices.randint(1, max(1, columns // unit))

    def _data(self, kind: Kind):
        is_exact = self.algorithm in (None, GATHER) or (kind.scales == UNSCALED and not kind.tile.partials)
        return self.data or (Integers if is_exact else RandomData)

    def _most_k(self, kind: Kind) -> int:
        if self.algorithm is GATHER:
            return 150 if kind.scales == UNSCALED else MOST_K
        return (150 if kind.scales == UNSCALED else 450) * (1 if self.algorithm or self.sanitizer == "thread" else 2)

    def _height(self, kind: Kind) -> int:
        return kind.tile.rows * kind.tile.cluster

    def _draw_order(self, kind: Kind, m: int, n: int, choices: random.Random) -> dict[str, int]:
        """In which order tiles are walked, and which of them."""
        if self.algorithm is not None:
            return {"group_rows": choices.randint(1, 3)}
        rows = -(-m // self._height(kind))
        end = rows * -(-n // kind.tile.columns)
        return {"group_rows": choices.randint(1, rows), "end_tile": end}

    def _draw_blocks(self, kind: Kind, choices: random.Random) -> tuple[int, ...]:
        """The blocks of each rank's grid, in whole clusters. Ranks differ, as GPUs may differ in their SMs."""
        of_threads = MOST_IN_GRIDS[self.sanitizer] // (self.world_size * kind.tile.threads * kind.blocks)
        grids = max(1, min(2 if self.algorithm else 3, of_threads))
        first = choices.randrange(grids)
        return tuple(((first + rank) % grids + 1) * kind.blocks for rank in range(self.world_size))

    def _draw_operands(self, kind: Kind, counts, n: int, choices: random.Random, generator) -> list[Operands]:
        """Operands of each rank. Of sums from three ranks on, those of two ranks or leaves cancel.

        They are so large that a sum with them rounds, so another order of addition gives another result.
        """
        form, data, tile = kind.scales, self._data(kind), kind.tile
        dtype = kind.dtype if self.algorithm is None else self.dtype
        rows = counts if self.algorithm is GATHER else [sum(counts)] * self.world_size
        in_leaves, ranks = tile.leaves > 1 or tile.partials, []
        lengths = [1, 1, 2] if self.sanitizer == "plain" else [1]
        k = LEAF_UNIT * tile.leaves * choices.choice(lengths) if in_leaves else choices.randint(1, self._most_k(kind))
        for m in rows:
            if self.algorithm is not GATHER and not in_leaves:
                k = choices.randint(1, self._most_k(kind))
            a, w = (data.operand((count, k), generator) for count in (m, n))
            scales = draw_scales(form, m, n, k, data, choices, generator)
            ranks.append(Operands(a, w, data.bias(n, generator), scales))
        if self.algorithm not in (None, GATHER) and form == UNSCALED:
            _cancel(ranks, tile.leaves if data is RandomData else 0, choices)
        bias = ranks[0].bias if self.algorithm is not GATHER else None
        result = kind.result if self.algorithm is None and kind.result != FP32 else dtype
        return [
            Operands(
                *(one.to(FP8 if form != UNSCALED else dtype) for one in (own.a, own.w)),
                (own.bias if bias is None else bias).to(result),
                own.scales,
            )
            for own in ranks
        ]

    def _results(self, kind: Kind, ranks: list[Operands], counts, with_bias: bool):
        """What each rank must get, and what else of a call follows from it: an epilogue's operands."""
        dtype = kind.result if self.algorithm is None else self.dtype
        if self.algorithm is GATHER:
            totals = [self._of_gathered(kind, own, ranks) for own in ranks]
        elif self.algorithm is None:
            totals = [self._data(kind).product(ranks[0].a, ranks[0].w, ranks[0].scales, kind.tile.leaves)]
        else:
            totals = [self._sum(kind, ranks, counts)]
        if kind.tile.partials and not self.then:
            a, w = zip(*((own.a, own.w) for own in ranks), strict=True)
            bias = ranks[0].bias if with_bias else None
            totals, with_bias = [reference.fused_matmul_allreduce(a, w, bias, tp_invariant=True)], False
        if with_bias:
            totals = [total + own.bias.to(total.dtype) for total, own in zip(totals, ranks, strict=False)]
        if self.algorithm is SCATTER:
            totals = list(totals[0].split(counts))
        elif len(totals) < self.world_size:
            totals = totals * self.world_size
        beside = {}
        if isinstance(self.then, Pointwise):
            m, n = sum(counts), len(ranks[0].w)
            tensors = [normal(at, size, dtype) for at, size in enumerate((n, m * n, m))]
            beside = {"operands": tuple(tensors), "scalars": (EPILOGUE_SCALAR,), "columns": n}
            form, given = replace(self.then, columns=n), EpilogueInputs(tensors, [EPILOGUE_SCALAR])
            totals = [form.apply(one.float().reshape(-1), given, 0, one.numel()).view_as(one) for one in totals]
        return [total.to(dtype) for total in totals], beside

    def _of_gathered(self, kind: Kind, own: Operands, ranks: list[Operands]) -> torch.Tensor:
        scales = own.scales and Scales(own.scales.format, torch.cat([one.scales.a for one in ranks]), own.scales.w)
        return self._data(kind).product(torch.cat([one.a for one in ranks]), own.w, scales, kind.tile.leaves)

    def _sum(self, kind: Kind, ranks: list[Operands], counts) -> torch.Tensor:
        """The sum of the ranks' partials: as a tree, with a codec, or in the order of ranks."""
        leaves = kind.tile.leaves
        if kind.tile.partials:
            return leaf_tree.tree_sum([leaf_tree.in_leaves(own.a, own.w, leaves) for own in ranks])
        multiply = self._data(kind).product
        partials = [multiply(own.a, own.w, own.scales, leaves).to(self.dtype).float() for own in ranks]
        if isinstance(self.then, Codec) and self.algorithm is SCATTER:
            return torch.cat(reference.quantized_reducescatter(partials, self.then, sizes=counts))
        if isinstance(self.then, Codec):
            return reference.quantized_allreduce(partials, self.then)
        total = torch.full_like(partials[0], -0.0)
        for one in partials:
            total += one
        return total


def alone(tile: MatmulTile, scales: str = UNSCALED, result: torch.dtype = BF16, **more) -> Products:
    """A matmul of one rank with this tile."""
    return Products(None, (Kind(tile, scales=scales, result=result),), **more)


def partial_tiles(world_size: int) -> tuple[MatmulTile, ...]:
    sizes = ((64, 64, 2), (64, 128, 2, 2), (128, 64, 2), (128, 128, 2))
    return tuple(MatmulTile(*size, whole=True, leaves=LEAVES // world_size, partials=True) for size in sizes)


def partial_skinny_tiles(world_size: int) -> tuple[SkinnyTile, ...]:
    """With one of rounded packs, which use the same scratch."""
    return SKINNY_TILES[0], *(replace(one, leaves=LEAVES // world_size, partials=True) for one in SKINNY_TILES)


def of_ranks(algorithm: Algorithm, world_size: int, sanitizer: str = "plain") -> Products:
    """The kernels of an algorithm with 16-bit operands and partials that are rounded."""
    tiles = SKINNY_TILES if algorithm in SKINNY_KERNELS else GATHERED_TILES if algorithm is GATHER else SUMMED_TILES
    return Products(algorithm, kinds_of(tiles), world_size, sanitizer)


def _cancel(ranks: list[Operands], leaves: int, choices: random.Random) -> None:
    """Makes the products of two of the ranks' leaves large and each other's negatives; 0 leaves: of ranks from 3 on."""
    if leaves == 0:
        if len(ranks) > 2:
            own = ranks[1]
            ranks[1], ranks[-1] = (replace(own, w=own.w * by) for by in (LARGE_SUMS, -LARGE_SUMS))
        return
    nodes = [part for own in ranks for part in zip(own.a.chunk(leaves, 1), own.w.chunk(leaves, 1), strict=True)]
    (a, w), (other_a, other_w) = choices.sample(nodes, 2)
    other_a.copy_(a)
    other_w.copy_(w * -LARGE_LEAVES)
    w.mul_(LARGE_LEAVES)


def _bytes(one: torch.Tensor) -> torch.Tensor:
    return one.contiguous().view(-1).view(torch.uint8)


def _gathered(ranks: Sequence[Operands]) -> list[torch.Tensor]:
    """The gathered rows, padded, and their scales."""
    rows = aligned_rows(torch.cat([own.a for own in ranks]))
    scales = [torch.cat([own.scales.a for own in ranks])] if ranks[0].scales else []
    return [_bytes(rows), *map(_bytes, scales)]
