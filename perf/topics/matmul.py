"""`python -m perf matmul`: times graphar's matmul kernel with each of its tiles, and torch.mm, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from graphar.plan import matmuls
from graphar.plan.tiles import MATMUL_TILES, MatmulTile
from graphar.plan.tune import WEIGHTS
from graphar.product import gemm
from graphar.runtime import launcher
from graphar.runtime.user_tables import find_table
from perf import products
from perf.harness import verify
from perf.md import NOT_SERVED, number, table, time_cell, time_table
from perf.ratios import best, ratio
from perf.report import Arguments, Choice, Deciles, Section

SHAPES: tuple[products.Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS for m in products.MANY_ROWS)
SOME = "64x8192x2048 512x5120x8192 2048x6144x4096 4096x8192x2048 8192x8192x7168"

TORCH = "torch.mm"
OWN = "graphar:"  # followed by the name of a tile
WAVE = "at least one wave"


def name_of(tile: MatmulTile) -> str:
    """Returns a tile's rows x columns x stages, and the blocks of its cluster, such as "128x128x6c2"."""
    cluster = f"c{tile.cluster}" if tile.cluster > 1 else ""
    return f"{tile.rows}x{tile.columns}x{tile.stages}{cluster}"


TILES = {f"{OWN}{name_of(tile)}": tile for tile in MATMUL_TILES}


@dataclass(frozen=True)
class MatmulRow(products.ProductRow):
    """One tile, or torch. All tiles must have the same bits.

    Attributes:
        is_taken: whether it is the tile that graphar takes by default.
        is_auto: whether "auto" multiplies by it before a sum: the tile taken, or torch.mm.
        sms: the number of SMs of the GPU.
    """

    is_taken: bool
    is_auto: bool
    sms: int


def tiles(case: products.Case) -> list[MatmulRow]:
    return [row for row in case.values() if row.is_own]


def taken(case: products.Case) -> MatmulRow | None:
    return next((row for row in tiles(case) if row.is_taken), None)


def auto(case: products.Case) -> MatmulRow | None:
    return next((row for row in case.values() if row.is_auto), None)


def better(case: products.Case) -> MatmulRow | None:
    """Returns the faster of torch's row and the tile taken; None unless both were measured and are correct."""
    both = taken(case), case.get(TORCH)
    return None if ratio(*both) is None else best(both[::-1])


def has_wave(case: products.Case) -> bool:
    """Whether the result has at least as many tiles of WAVE_TILE x WAVE_TILE as the GPU has SMs."""
    row = next(iter(case.values()))
    return matmuls.fills_wave(row.m, row.n, row.sms)


def tile_of(row: MatmulRow | None) -> str:
    """Returns the name of a row's tile, or torch.mm."""
    return NOT_SERVED if row is None else row.method.removeprefix(OWN)


TAKEN_OF_TORCH, TAKEN_OF_BEST = "taken/torch", "taken/best"


@dataclass
class Matmul(products.Products):
    rows: list[MatmulRow] = field(default_factory=list)

    order: ClassVar[int] = 6
    arguments: ClassVar[Arguments] = products.run_with(SOME, "64x8192x2048 4096x8192x2048")
    shapes: ClassVar = SHAPES
    columns: ClassVar = {TORCH: "torch"} | {method: name_of(tile) for method, tile in TILES.items()}
    ratios: ClassVar[dict[str, Callable[[products.Case], products.Pair]]] = {
        TAKEN_OF_TORCH: lambda case: (taken(case), case.get(TORCH)),
        "best/torch": lambda case: (best(tiles(case)), case.get(TORCH)),
        TAKEN_OF_BEST: lambda case: (taken(case), best(tiles(case))),
        "auto/better": lambda case: (auto(case), better(case)),
    }
    heading: ClassVar[str] = "The tile taken, the best tile and torch"
    subject: ClassVar[str] = "graphar's time of a matmul / torch's"

    @classmethod
    def why_not(cls, operands: products.ProductOperands) -> str | None:
        return gemm.why_not(operands.a, operands.weight(0), operands.out)

    @classmethod
    def multiply(cls, method: str, operands: products.ProductOperands, call: int) -> None:
        if method == TORCH:
            torch.mm(operands.a, operands.weight(call).t(), out=operands.out)
        else:
            gemm.matmul(operands.a, operands.weight(call), operands.out, tile=TILES[method])

    @classmethod
    def judge(cls, operands: products.ProductOperands, call: int) -> products.IsWrong:
        """The bits of a result do not depend on the tile, so all tiles are compared with the first."""
        value, magnitude = products.exact(operands.a, operands.weight(call))
        bits: Tensor | None = None

        def is_wrong(method: str) -> Tensor:
            nonlocal bits
            limit = products.limit_of(operands.a.shape[1], value, magnitude, may_split=method == TORCH)
            bad = verify.exceeds(operands.out, value, limit)
            if method in TILES:
                bits = operands.out.clone() if bits is None else bits
                bad |= verify.differs(operands.out, bits)
            return bad

        return is_wrong

    @classmethod
    def make_row(cls, method: str, shape: products.Shape, time_us: Deciles, wrong: int) -> MatmulRow:
        device, tile = torch.cuda.current_device(), TILES.get(method)  # None: torch's
        sms = launcher.sm_count(device)
        default = gemm.default_tile(device, *shape, sms)
        policy = find_table(torch.cuda.get_device_name(device)).matmul
        of_auto = default if matmuls.choose_matmul(policy, *shape, sms).own else None
        return MatmulRow(method, *shape, time_us, wrong, tile == default, tile == of_auto, sms)

    def line(self, row: MatmulRow) -> str:
        return super().line(row) + (", taken" if row.is_taken else "") + (", auto" if row.is_auto else "")

    def grouped(self) -> dict[str, dict[products.Shape, products.Case]]:
        """Returns all cases, and the cases of at least one wave if there are others."""
        cases = self.cases()
        waves = {shape: case for shape, case in cases.items() if has_wave(case)}
        return {"": cases} | ({f" of {WAVE}": waves} if len(waves) < len(cases) else {})

    def findings(self) -> list[str]:
        loss = self.loss_of_auto()
        of_auto = [f"The time of `auto` / the faster of torch's and graphar's is at most {loss}."] if loss else []
        return super().findings() + of_auto

    def sections(self) -> list[Section]:
        cases = self.cases().items()
        every = {products.words_of(shape): {tile_of(row): row for row in tiles(case)} for shape, case in cases}
        return [*super().sections(), Section("Every tile", [time_table("M x N x K", every)])] if every else []

    def losses(self) -> list[tuple[str, Choice]]:
        pairs = {products.words_of(shape): (auto(case), better(case)) for shape, case in self.cases().items()}
        return [(shape, Choice(*both)) for shape, both in pairs.items() if ratio(*both) is not None]

    def comparison(self) -> str:
        lines = []
        for shape, case in self.cases().items():
            row, fastest = taken(case), best(tiles(case))
            cells = [products.words_of(shape), time_cell(case.get(TORCH)), tile_of(row), time_cell(row)]
            cells += [tile_of(fastest), time_cell(fastest), tile_of(auto(case)), *self.ratio_cells(case)]
            lines.append(
                [*cells, number(products.flops(shape) / row.median / 1e6) if row and not row.wrong else NOT_SERVED]
            )
        times = ["torch (us)", "taken", "taken (us)", "best", "best (us)", "auto"]
        return table(["M x N x K", *times, *self.ratios, "taken (TFLOP/s)"], lines)
