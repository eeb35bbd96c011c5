"""Mistakes in the scales of e4m3 operands: of a matmul alone, summed tiles, skinny matmuls and gathered rows."""

from __future__ import annotations

from graphar.plan.algorithms import Algorithm
from graphar.plan.tiles import MatmulTile, SkinnyTile
from tests.host.products import BLOCKS, FP32, GATHER, REDUCE, ROWS, Kind, Products, RandomData, alone

TWO, ONE = MatmulTile(64, 128, 2), MatmulTile(128, 192, 2)  # accumulators of blocks
FEW, MANY = SkinnyTile(8, 2), SkinnyTile(64, 2, cluster=2)  # the same
NEXT = """    Products{multiplier, a, row, column}.multiply(at, sums, scales);
    has_tile = find_tile();
"""
QUEUED = "multiplier.queue_place(operands, at, it.sums, 0);"
GOES_ON = "multiplier.queue_place(operands, at, it.sums, at.use + at.place);"
WAIT = "    wait_for_all_but_last_products(it.sums);\n    multiplier.release(it.place);\n"
LAST = "    multiplier.finish(it.sums, it.place);\n    scales.add(it.scales, it.sums, totals);\n"
TAKE = """        of[half][i] = __fmul_rn(of_row, __shfl_sync(0xffffffff, loaded[odd], 16 + i));
    }
    load_next(odd);
  }
"""
ADD = """
  DEVICE void add(const OfBlock&, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i)
      totals[i] = __fmaf_rn(sums[i], of[i / 2 % 2][2 * i / width], totals[i]);
  }
"""
LOADED = "    load_next(0);\n    load_next(1);\n"
MULTIPLIED = "__fmul_rn(__fmul_rn(total, of_a), of_w)"
ADDED = "totals[i] = __fmaf_rn(sums[i], scale, totals[i]);"
ARRIVED = "      ring.filled[at.place].wait(at.use);\n"
SCALED = "device/matmul/scaled_products.cuh"
FOUND = "        walk.locate(row, column);\n"


def of_tiles(scales):
    return Products(REDUCE, (Kind(MatmulTile(128, 64, 2, whole=True), scales=scales),), 4)


def skinny(tile, scales):
    return Products(Algorithm.MATMUL_ONE_SHOT, (Kind(tile, scales=scales),), 2)


def gathered(scales, sanitizer="plain"):
    return Products(GATHER, (Kind(MatmulTile(64, 64, 2), scales=scales),), 3, sanitizer)


# Random data tell an order of additions, and where a scale is multiplied.
MISTAKES = {
    alone(TWO, ROWS, FP32): {
        "scales of the row eight above": ("of_a(mine + 8 * half)", "of_a(mine + 0 * half)"),
        "scales of the columns of another thread": ("threadIdx.x % 4 * 2 + pair", "threadIdx.x % 2 * 2 + pair"),
        "scales of the first tile's columns": ("row : column) + i", "row : 0 * column) + i"),
        "a block that goes on from the sums of the one before": (QUEUED, GOES_ON),
        "totals that go on from the tile before": ("totals[i] = 0;", "totals[i] = at.use ? totals[i] : 0;"),
        "a last block left out": ("      if (block < blocks) {", "      if (false) {"),
        "a place given back before its products are complete": (
            WAIT,
            "".join(reversed(WAIT.splitlines(keepends=True))),
        ),
        "a block added before its products are complete": (WAIT, "    multiplier.release(it.place);\n"),
    },
    alone(TWO, BLOCKS, FP32): {
        "a block's scale of the row eight above": ("row + 8 * half)", "row + 0 * half)"),
        "a block's scales of the rows of another warp": ("threadIdx.x / 32 % 4 * 16;", "threadIdx.x / 32 % 2 * 16;"),
        "scales of the next tile": (NEXT, "".join(reversed(NEXT.splitlines(keepends=True)))),
        "the first tile's scales for all": (
            "    Products{multiplier, a, row, column}.load(scales);\n",
            "    if (row + column == 0) Products{multiplier, a, row, column}.load(scales);\n",
        ),
        "the scale of a row for that of weights": ("16 + i)", "15 + i)"),
        "scales of the block before": ("    next += stride;", "    if (left % 2) next += 2 * stride;"),
        "weights' scales a row's stride apart": ("stride = a.w_scale_block;", "stride = a.a_scale_block;"),
        "scales of the next block but one": (
            TAKE,
            """        (void)of_row;
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
            "add_all_but_last(even, scales, 0, totals);\n        queue",
            "add_all_but_last(even, scales, 1, totals);\n        queue",
        ),
        "the last block's scales used again": (
            "add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 1, totals);",
            "add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 0, totals);",
        ),
    },
    alone(ONE, ROWS, FP32): {
        "scales of the rows of another warpgroup": (SCALED, "64 * Tile::warpgroup(index)", "64 * (index ^ 1)"),
        "the first 32 columns' scales for all": ("of_lane[pair / 8]", "of_lane[0]"),
        "scales of rows of the next tile": (NEXT, "".join(reversed(NEXT.splitlines(keepends=True)))),
        "an only accumulator that goes on from the block before": (QUEUED, GOES_ON),
        "a last block added before its products are complete": (
            LAST,
            "    scales.add(it.scales, it.sums, totals);\n    multiplier.finish(it.sums, it.place);\n",
        ),
    },
    alone(ONE, BLOCKS, FP32): {
        "a tile in the place of the next one": (
            "tiles.store(c, sums, first_row, first_column);",
            "tiles.store(c, sums, 0 * first_row + row, 0 * first_column + column);",
        ),
        "scales of weights a block of columns off": (
            "min(lane - 16, count - 1) * width",
            "min(lane - 16, count - 1) * 128",
        ),
        "scales of weights in blocks of 64": ("block_rows = 128;", "block_rows = 64;"),
        "the first scale of weights for all columns": ("16 + i)", "16)"),
        "the first block's scales for all": ("    next += stride;", ""),
        "an only accumulator with the scales of the block before": (
            "add_last(only, scales, 1, totals);",
            "add_last(only, scales, 0, totals);",
        ),
    },
    alone(ONE, ROWS, FP32, data=RandomData): {
        "promotion left out: a single sum in the tensor core": (
            "for (u32 block = 0; block < blocks; block += step) {\n        queue(only, block);\n",
            "for (u32 block = 0; block < blocks; ++block) {\n"
            "        multiplier.queue_place(operands, at, only.sums, block);\n"
            "        multiplier.finish(only.sums, at.place);\n        at.next();\n"
            "        if (block + 1 == blocks) scales.add(only.scales, only.sums, totals);\n        continue;\n",
        )
    },
    alone(TWO, ROWS, FP32, data=RandomData): {
        "scales of rows multiplied with each other first": (MULTIPLIED, "__fmul_rn(total, __fmul_rn(of_a, of_w))"),
        "blocks added from the last one on": (
            "        add_all_but_last(even, scales, 0, totals);\n        add_last(odd, scales, 1, totals);",
            "        add_last(odd, scales, 1, totals);\n        multiplier.release(even.place);\n"
            "        scales.add(even.scales, even.sums, totals);",
        ),
    },
    alone(TWO, BLOCKS, FP32, data=RandomData): {
        "a block rounded before it is added": (
            "__fmaf_rn(sums[i], of[i / 2 % 2][2 * i / width], totals[i]);",
            "__fadd_rn(__fmul_rn(sums[i], of[i / 2 % 2][2 * i / width]), totals[i]);",
        )
    },
    alone(ONE, BLOCKS, FP32, data=RandomData): {
        "a block multiplied by one scale after the other": (
            TAKE + ADD,
            """        of[half][i] = __shfl_sync(0xffffffff, loaded[odd], 16 + i);
      of_rows[half] = of_row;
    }
    load_next(odd);
  }
  float of_rows[2];
  DEVICE void add(const OfBlock&, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
    for (int i = 0; i < Tile::columns / 2; ++i)
      totals[i] = __fmaf_rn(__fmul_rn(sums[i], of_rows[i / 2 % 2]), of[i / 2 % 2][2 * i / width], totals[i]);
  }
""",
        )
    },
    alone(TWO, BLOCKS, FP32, sanitizer="address"): {
        "scales of a block that is not there": ("    if (left == 0) return;\n", "")
    },
    of_tiles(ROWS): {
        "scales of rows that are counted from the owner's first": (FOUND, FOUND.replace("locate", "locate_in_part")),
        "scales of the tile's first columns": (FOUND, FOUND + "        column = 0;\n"),
        "own rows without scales": (
            "    scales.multiply(totals);\n",
            "    if (row < u32(a.m) / 2) scales.multiply(totals);\n",
        ),
        "scales that multiply a rounded partial": (
            MULTIPLIED,
            MULTIPLIED.replace("total", "__uint_as_float(__float_as_uint(total) & 0xffff0000u)"),
        ),
    },
    of_tiles(BLOCKS): {
        "scales of blocks of rows that are counted from the owner's first": (
            FOUND,
            FOUND.replace("locate", "locate_in_part"),
        ),
        "scales of blocks of the first columns": (FOUND, FOUND + "        column = 0;\n"),
        "scales of the block before": (LOADED, LOADED.replace("load_next(0);", "load_next(0);\n    next -= stride;")),
    },
    skinny(FEW, ROWS): {
        "scales of the row of W eight above": ("of_w(mine + 8 * half)", "of_w(mine + 0 * half)"),
        "scales of the first tile's rows of W": ("row : column) + i", "0 * row : column) + i"),
        "scales of another row of A": ("threadIdx.x % 4 * 2 + pair % 2", "threadIdx.x % 2 * 2 + pair % 2"),
        "a scale of A in place of one of W": (
            "return a.w_scale[min(row, a.n - 1) * a.w_scale_row];",
            "return a.a_scale[min(row, a.m - 1) * a.a_scale_row];",
        ),
        "scales that multiply a rounded partial": (
            MULTIPLIED,
            MULTIPLIED.replace("total", "__uint_as_float(__float_as_uint(total) & 0xffffe000u)"),
        ),
        "totals that go on from the tile before": ("totals[i] = 0;", "totals[i] = at.use ? totals[i] : 0;"),
        "a last block left out": ("      if (block < blocks) {", "      if (false) {"),
        "steps of as many columns of K as 16-bit operands have": ("k += depth_of<T>;", "k += tile_depth;"),
        "scales read before the kernel before has written them": (
            "  wait_for_previous_kernel(a);\n",
            "  if (warp >= 4) wait_for_previous_kernel(a);\n",
        ),
    },
    skinny(MANY, ROWS): {
        "the first 32 rows' scales for all": ("of_lane[pair / 8]", "of_lane[0]"),
        "the scales of A and of W multiplied with each other first": (
            MULTIPLIED,
            "__fmul_rn(total, __fmul_rn(of_a, of_w))",
        ),
        "the scale of W multiplied before that of A": (MULTIPLIED, "__fmul_rn(__fmul_rn(total, of_w), of_a)"),
    },
    skinny(FEW, BLOCKS): {
        "the scales of the block before": (
            "scales.load_block(it.scales, block);",
            "scales.load_block(it.scales, block ? block - 1 : 0);",
        ),
        "scales of W in blocks of 64 rows": ("min(row, a.n - 1) / block_rows", "min(row, a.n - 1) / 64"),
        "a block added before its products are complete": ("    wait_for_all_but_last_products(it.sums);\n", ""),
    },
    skinny(MANY, BLOCKS): {
        "a row of A's first scale for all of K": ("+ block * a.a_scale_block", "+ (block & 0) * a.a_scale_block"),
        "a block rounded before it is added": (ADDED, "totals[i] = __fadd_rn(__fmul_rn(sums[i], scale), totals[i]);"),
        "a block multiplied by one scale after the other": (
            ADDED,
            "totals[i] = __fmaf_rn(__fmul_rn(sums[i], of_a), scales.of_w, scale * 0 + totals[i]);",
        ),
        "promotion left out: blocks that go on from the sums of the one before": (
            QUEUED,
            QUEUED.replace("0)", "block)"),
        ),
        "a last block added before its products are complete": (
            LAST,
            "".join(reversed(LAST.splitlines(keepends=True))),
        ),
    },
    gathered(BLOCKS): {
        "a peer's scales loaded before its rows have come": (ARRIVED, ""),
        "scales of the first rows for those of a later unit": (
            "m.a_scale[(row + i / of_row) * m.a_scale_row",
            "m.a_scale[(i / of_row) * m.a_scale_row",
        ),
        "a peer's scales with the strides of the own ones": ("      of_owner.a_scale_block = 1;\n", ""),
        "a peer's scales gathered in the place of the own ones": (
            "gathered_scales(from)[i] =",
            "gathered_scales(a.rank)[i] =",
        ),
    },
    gathered(ROWS, sanitizer="thread"): {"a peer's scales of rows loaded before its rows have come": (ARRIVED, "")},
    gathered(BLOCKS, sanitizer="thread"): {
        "scales announced before all threads have stored them": (
            "send_scales(unit);\n      __syncwarp();\n",
            "send_scales(unit);\n",
        ),
        "flags set before the scales are sent": (
            "      if constexpr (scaled) send_scales(unit);\n      __syncwarp();\n"
            "      if (lane < N && lane != a.rank) store_release_sys(flag(lane, a.rank, unit), flag_value(call));\n",
            "      __syncwarp();\n"
            "      if (lane < N && lane != a.rank) store_release_sys(flag(lane, a.rank, unit), flag_value(call));\n"
            "      if constexpr (scaled) send_scales(unit);\n",
        ),
    },
    gathered(ROWS): {
        "scales that are not sent": ("if constexpr (scaled) send_scales(unit);", ""),
        "the scales of another rank's rows": ("rows.of_rows(tile.owner)", "rows.of_rows(a.rank)"),
        "scales of every row in the first row's place": (
            "scales((a.rank + hop) % N, a.rank)[first + i] = scale",
            "scales((a.rank + hop) % N, a.rank)[i] = scale",
        ),
        "scales over the last rows of a slot": (
            "(slot(to, from) + a.count[from] * row_packs)",
            "(slot(to, from) + (a.count[from] - 1) * row_packs)",
        ),
        "own scales that are not gathered": (
            "      if (a.output != nullptr) gathered_scales(a.rank)[first + i] = scale;\n",
            "",
        ),
    },
    gathered(BLOCKS, sanitizer="address"): {
        "rows of all ranks as the limit of a rank's scales": ("    of_owner.m = a.count[from];\n", "")
    },
}
