"""The matmul of e4m3 operands with scales, executed on the host: exact results of integers, and the specified bits.

tests/matmul/test_scaled_matmul_gpu.py tests what needs a GPU.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.fp8_products import BLOCK, FP8, Scales, product
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.plan.tiles import MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SCALE_FORMATS, KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.host.build import build, known
from tests.host.matmul_operands import aligned_rows, wrong_elements
from tests.host.mutant import notices

pytestmark = pytest.mark.host

# Small tiles, with the fewest stages that are possible and with one more. The last ones have one accumulator of blocks.
TILES = (
    MatmulTile(64, 64, 2),
    MatmulTile(64, 128, 3, cluster=2),
    MatmulTile(128, 128, 2),
    MatmulTile(128, 192, 2),
    MatmulTile(128, 192, 3, cluster=2),
)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
SEEDS = {"plain": 5, "thread": 1, "address": 2}
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
MOST_SEEDS = 12  # until a mistake is noticed


def kinds_of(tile):
    """Of a tile: dtype of the result, and format of the scales."""
    return [(tile, result, form) for result, form in itertools.product(RESULTS, SCALE_FORMATS)]


def program_of(kinds, sanitizer, mutation=None):
    names = [f"one_scaled_matmul<{tile}, {TYPE_NAMES[result]}, {form}>" for tile, result, form in kinds]
    return build(tuple(KernelSource("one_scaled_matmul.cu", name) for name in names), sanitizer, mutation)


class Integers:
    """Operands, and scales that are powers of two, whose product is exact in whatever order it is added."""

    @staticmethod
    def operand(shape, generator):
        return torch.randint(-8, 9, shape, generator=generator).float().to(FP8)

    @staticmethod
    def scale(shape, generator):
        return 2.0 ** torch.randint(-2, 3, shape, generator=generator)

    @staticmethod
    def product(a, w, scales):
        of_a, of_w = scales.a.double(), scales.w.double()
        if scales.in_blocks:
            of_a = of_a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
            of_w = of_w.repeat_interleave(BLOCK, 0)[: len(w)].repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        return (a.double() * of_a) @ (w.double() * of_w).t()


class RandomData:
    """Operands and scales whose product has the bits of its order, and which are near one."""

    @staticmethod
    def operand(shape, generator):
        return torch.randn(shape, generator=generator).to(FP8)

    @staticmethod
    def scale(shape, generator):
        return torch.rand(shape, generator=generator) + 0.5

    product = staticmethod(product)


class EveryNumber(RandomData):
    """The same with operands that are any number of e4m3, subnormal ones included."""

    @staticmethod
    def operand(shape, generator):
        numbers = [bits for bits in range(256) if bits & 0x7F != 0x7F]  # all but NaN
        drawn = torch.randint(len(numbers), shape, generator=generator)
        return torch.tensor(numbers, dtype=torch.uint8)[drawn].view(FP8)


def scales_of(form, m, n, k, data, choices, generator):
    """Scales of a format, in one layout or the other. Those of rows may be a number for the whole tensor."""
    blocks = -(-k // BLOCK)
    in_blocks = form == "BlockScales"
    shapes = ((m, blocks), (-(-n // BLOCK), blocks)) if in_blocks else ((m, 1), (n, 1))
    found = []
    for shape, rows in zip(shapes, (m, n), strict=True):
        one_number = not in_blocks and choices.random() < 0.2
        scale = data.scale((1, 1) if one_number else shape, generator)
        scale = scale.t().contiguous().t() if choices.random() < 0.5 else scale
        found.append(scale.expand(rows, 1) if one_number else scale)
    return Scales(in_blocks, *found)


def stored(scale):
    """A scale's numbers in the order of memory."""
    return scale.as_strided((scale.untyped_storage().nbytes() // 4,), (1,), 0)


def wrong_bytes(program, index: int, kind, seed: int, largest: float = 1.0, data=Integers, **of_call) -> int:
    """How many elements and guards are wrong after one matmul. The seed decides its size; ``largest`` scales it."""
    tile, result, form = kind
    choices = random.Random(f"{kind} {seed}")
    height = tile.rows * tile.cluster
    m, n = (choices.randint(1, int(most * largest)) for most in (2.5 * height, 2 * tile.columns + 70))
    n, k, rows = -(-n // STORE_COLUMNS) * STORE_COLUMNS, choices.randint(1, int(900 * largest)), -(-m // height)
    generator = torch.Generator().manual_seed(seed)
    a, w = (data.operand((count, k), generator) for count in (m, n))
    with_bias = result != torch.float32 and choices.random() < 0.5
    bias = torch.randint(-8, 9, (1, n), generator=generator).to(torch.float16 if result.itemsize > 2 else result)
    scales = scales_of(form, m, n, k, data, choices, generator)
    # A column that a scale has but once has no stride.
    strides = [s for one in (scales.a, scales.w) for s in (one.stride(0), one.stride(1) * scales.in_blocks)]
    in_memory = [stored(scales.a), stored(scales.w)]
    sizes = [m, n, k, choices.randrange(rows), choices.randint(1, rows), with_bias, len(in_memory[0]), *strides, 0]
    parts = [torch.tensor(sizes), *map(aligned_rows, (a, w, bias)), *in_memory]
    x = torch.cat([one.view(torch.uint8) for one in parts])
    nbytes = m * n * result.itemsize
    shape = Config(OF_ANY_KIND, tile.blocks * choices.randint(1, 3), tile.threads)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, tile.shared_nbytes + 2048), index, seed)

    (outcome,) = simulation.run([Call(0, shape, [x], (len(x),), (nbytes,), cluster=tile.blocks, **of_call)])

    total = data.product(a, w, scales)
    expected = (total + bias if with_bias else total).to(result)
    return wrong_elements(outcome.results[0], expected) + outcome.broken_guards


every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


@pytest.mark.parametrize("sanitizer", SEEDS)
@every_tile
def test_integers_give_the_exact_result(tile, sanitizer, whole):
    kinds = [kind for kind in kinds_of(tile) if sanitizer == "plain" or kind[1] is torch.bfloat16]
    program = program_of(kinds, sanitizer)

    for seed in range(SEEDS[sanitizer] if whole else min(SEEDS[sanitizer], 2)):
        for index, kind in enumerate(kinds):
            assert wrong_bytes(program, index, kind, seed, 1.0 if sanitizer == "plain" else 0.5) == 0, (kind, seed)


@every_tile
def test_random_data_have_the_bits_of_the_specification(tile):
    kinds = kinds_of(tile)
    program = program_of(kinds, "plain")

    for index, kind in enumerate(kinds):
        assert wrong_bytes(program, index, kind, 0, data=RandomData) == 0, kind


@pytest.mark.parametrize("form", SCALE_FORMATS)
def test_every_number_of_e4m3_has_the_bits_of_the_specification(form):
    kind = (TILES[0], torch.float32, form)

    assert wrong_bytes(program_of([kind], "plain"), 0, kind, 0, data=EveryNumber) == 0


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    kinds = kinds_of(TILES[0])
    program = program_of(kinds, "plain")

    assert any(wrong_bytes(program, 0, kinds[0], seed, waits=False) for seed in range(4))


# ---- negative controls: what is wrong, whose kernel, and the text that makes it so -----------------------------------

FILES = ("device/matmul/scaled_products.cuh", "device/matmul/pipeline.cuh", "matmul/matmul.cu")
NEXT = """    Products{multiplier, a, row, column}.multiply(at, sums, scales);
    found = find_tile();
"""
TWO, ONE = MatmulTile(64, 128, 2), MatmulTile(128, 192, 2)  # accumulators of blocks
QUEUED = "multiplier.queue_place(operands, at, it.sums, 0);"
GOES_ON = "multiplier.queue_place(operands, at, it.sums, at.use + at.place);"
WAIT = "    wait_for_all_but_last_products(it.sums);\n    multiplier.release(it.place);\n"
LAST = "    multiplier.finish(it.sums, it.place);\n    add(it, scales, totals);\n"
TAKE = """          of[half][i] = __fmul_rn(of_row, __shfl_sync(0xffffffff, loaded[odd], 16 + i));
      }
      load_next(odd);
    }
"""
ADD = """
    __device__ __forceinline__ float add(int i, float sum, float total) const {
      return __fmaf_rn(sum, of[i / 2 % 2][2 * i / width], total);
    }
"""
MUTANTS_OF_INTEGERS = {
    "scales of the row eight above": (TWO, "RowScales", "min(mine + 8 * half,", "min(mine + 0 * half,"),
    "a block's scale of the row eight above": (TWO, "BlockScales", "row + 8 * half)", "row + 0 * half)"),
    "scales of the rows of another warpgroup": (ONE, "RowScales", "64 * Tile::warpgroup(index)", "64 * (index ^ 1)"),
    "a block's scales of the rows of another warp": (
        TWO,
        "BlockScales",
        "threadIdx.x / 32 % 4 * 16;",
        "threadIdx.x / 32 % 2 * 16;",
    ),
    "scales of the columns of another thread": (
        TWO,
        "RowScales",
        "threadIdx.x % 4 * 2 + pair",
        "threadIdx.x % 2 * 2 + pair",
    ),
    "the first 32 columns' scales for all": (ONE, "RowScales", "of_column[pair / 8]", "of_column[0]"),
    "scales of the first tile's columns": (TWO, "RowScales", "min(column + 32 * i", "min(0 * column + 32 * i"),
    "scales of the next tile": (TWO, "BlockScales", NEXT, "".join(reversed(NEXT.splitlines(keepends=True)))),
    "scales of rows of the next tile": (ONE, "RowScales", NEXT, "".join(reversed(NEXT.splitlines(keepends=True)))),
    "the first tile's scales for all": (
        TWO,
        "BlockScales",
        "    Products{multiplier, a, row, column}.load(scales);\n",
        "    if (row + column == 0) Products{multiplier, a, row, column}.load(scales);\n",
    ),
    "a tile in the place of the next one": (
        ONE,
        "BlockScales",
        "tiles.store(c, sums, first_row, first_column);",
        "tiles.store(c, sums, 0 * first_row + row, 0 * first_column + column);",
    ),
    "scales of weights a block of columns off": (
        ONE,
        "BlockScales",
        "min(lane - 16, count - 1) * width",
        "min(lane - 16, count - 1) * 128",
    ),
    "scales of weights in blocks of 64": (ONE, "BlockScales", "rows = 128;", "rows = 64;"),
    "the first scale of weights for all columns": (ONE, "BlockScales", "16 + i)", "16)"),
    "the scale of a row for that of weights": (TWO, "BlockScales", "16 + i)", "15 + i)"),
    "scales of the block before": (
        TWO,
        "BlockScales",
        "      next += stride;",
        "      if (left % 2) next += 2 * stride;",
    ),
    "the first block's scales for all": (ONE, "BlockScales", "      next += stride;", ""),
    "weights' scales a row's stride apart": (
        TWO,
        "BlockScales",
        "stride = a.w_scale_block;",
        "stride = a.a_scale_block;",
    ),
    "scales of the next block but one": (
        TWO,
        "BlockScales",
        TAKE,
        """          (void)of_row;
      }
      load_next(odd);
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < int(count); ++i)
          of[half][i] = __fmul_rn(__shfl_sync(0xffffffff, loaded[odd], row + 8 * half),
                                  __shfl_sync(0xffffffff, loaded[odd], 16 + i));
    }
""",
    ),
    "the scales of even and odd blocks exchanged": (
        TWO,
        "BlockScales",
        "add_all_but_last(even, scales, 0, totals);\n        queue",
        "add_all_but_last(even, scales, 1, totals);\n        queue",
    ),
    "the last block's scales used again": (
        TWO,
        "BlockScales",
        "add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 1, totals);",
        "add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 0, totals);",
    ),
    "an only accumulator with the scales of the block before": (
        ONE,
        "BlockScales",
        "add_last(only, scales, 1, totals);",
        "add_last(only, scales, 0, totals);",
    ),
    "a block that goes on from the sums of the one before": (TWO, "RowScales", QUEUED, GOES_ON),
    "an only accumulator that goes on from the block before": (
        ONE,
        "RowScales",
        QUEUED,
        GOES_ON,
    ),
    "totals that go on from the tile before": (
        TWO,
        "RowScales",
        "totals[i] = 0;",
        "totals[i] = at.use ? totals[i] : 0;",
    ),
    "a last block left out": (TWO, "RowScales", "      if (block < blocks) {", "      if (false) {"),
    "a place given back before its products are complete": (
        TWO,
        "RowScales",
        WAIT,
        "".join(reversed(WAIT.splitlines(keepends=True))),
    ),
    "a block added before its products are complete": (
        TWO,
        "RowScales",
        WAIT,
        "    multiplier.release(it.place);\n",
    ),
    "a last block added before its products are complete": (
        ONE,
        "RowScales",
        LAST,
        "    add(it, scales, totals);\n    multiplier.finish(it.sums, it.place);\n",
    ),
}
# Random data tell an order of additions, and where a scale is multiplied.
MUTANTS_OF_ORDER = {
    "promotion left out: a single sum in the tensor core": (
        ONE,
        "RowScales",
        "for (u32 block = 0; block < blocks; block += 2) {\n        queue(operands, at, only);\n",
        "for (u32 block = 0; block < blocks; ++block) {\n"
        "        multiplier.queue_place(operands, at, only.sums, block);\n"
        "        multiplier.finish(only.sums, at.place);\n        at.next();\n"
        "        if (block + 1 == blocks) add(only, scales, totals);\n        continue;\n",
    ),
    "scales of rows multiplied with each other first": (
        TWO,
        "RowScales",
        "__fmul_rn(__fmul_rn(total, of_row[half]), scale)",
        "__fmul_rn(total, __fmul_rn(of_row[half], scale))",
    ),
    "a block rounded before it is added": (
        TWO,
        "BlockScales",
        "return __fmaf_rn(sum, of[i / 2 % 2][2 * i / width], total);",
        "return __fadd_rn(__fmul_rn(sum, of[i / 2 % 2][2 * i / width]), total);",
    ),
    "a block multiplied by one scale after the other": (
        ONE,
        "BlockScales",
        TAKE + ADD,
        """          of[half][i] = __shfl_sync(0xffffffff, loaded[odd], 16 + i);
        of_rows[half] = of_row;
      }
      load_next(odd);
    }
    float of_rows[2];
    __device__ __forceinline__ float add(int i, float sum, float total) const {
      return __fmaf_rn(__fmul_rn(sum, of_rows[i / 2 % 2]), of[i / 2 % 2][2 * i / width], total);
    }
""",
    ),
    "blocks added from the last one on": (
        TWO,
        "RowScales",
        "        add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 1, totals);",
        "        add_last(odd, scales, 1, totals);\n        multiplier.release(even.place);\n"
        "        add(even, scales, totals);",
    ),
}


def notices_of(tile, form, old, new, data=Integers, result=torch.float32, sanitizer="plain"):
    """Whether a run with one of the seeds is wrong once ``new`` stands in place of ``old``."""
    kind = (tile, result, form)
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    program = program_of([kind], sanitizer, Mutation(file, old, new))
    return any(notices(lambda seed=seed: wrong_bytes(program, 0, kind, seed, data=data)) for seed in range(MOST_SEEDS))


known(FILES, MUTANTS_OF_INTEGERS, MUTANTS_OF_ORDER)


@pytest.mark.parametrize("mistake", MUTANTS_OF_INTEGERS)
def test_a_mistake_is_noticed(mistake):
    assert notices_of(*MUTANTS_OF_INTEGERS[mistake])


@pytest.mark.parametrize("mistake", MUTANTS_OF_ORDER)
def test_another_order_is_noticed(mistake):
    assert notices_of(*MUTANTS_OF_ORDER[mistake], data=RandomData)


def test_loads_of_scales_of_a_block_that_is_not_there_are_noticed():
    assert notices_of(TWO, "BlockScales", "      if (left == 0) return;\n", "", sanitizer="address")
