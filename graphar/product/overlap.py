"""A matmul in panels, overlapped with their sums over ranks: while one panel is summed, the next is multiplied.

    the caller's stream    multiply 0 | sum 0       | sum 1       | sum 2
    side stream                       | multiply 1  | multiply 2  |

The sums are calls of one communicator on one stream, so each begins after the one before has ended. Each panel has its
own memory, and passes from one stream to the other once, by an event. A multiplication never waits for a sum, and so
never for another rank. It therefore ends, and frees its SMs for a sum that waits for them. At the end, also after an
error, the caller's stream waits for the side stream.

A sum that runs beside a multiplication has few blocks. graphar's matmul leaves these SMs free; torch's matmul does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphar import reference
from graphar.errors import UnsupportedError
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.partitions import Panel, length
from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import MatmulChoice, choose_matmul, fastest_tile
from graphar.plan.policy import TileCost
from graphar.plan.work import Parts, Product, Sum
from graphar.product import gemm, scaled_sums
from graphar.product.operands import MatmulOperands, flat
from graphar.product.tensor_maps import aligned_copy, matrix_of
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.engine import Engine


@dataclass(frozen=True)
class Beside:
    """How a sum runs beside a multiplication."""

    algorithm: str = "auto"  # the ``algorithm`` of graphar.allreduce
    blocks: int | None = None  # the most blocks of the sum's grid; None: the tuning table's number


@dataclass(frozen=True)
class Panels:
    """How a product is multiplied and summed: in which panels, and by which sums.

    Attributes:
        work: a Product with the sum of its products.
        panels: a partition of C; each panel is summed by a call of its own, in this order. For a reduce-scatter a panel
            has a slice of every rank's rows.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the engine's.
        beside: how sums run beside a multiplication; its algorithm must be one of exact all-reduces.
        only_own: whether graphar's matmul alone may multiply. UnsupportedError if it cannot.
    """

    work: Product
    panels: Sequence[Panel]
    timeout_s: float | None = None
    beside: Beside = Beside()
    only_own: bool = False

    def allreduce(self, engine: Engine, members: Sequence[MatmulOperands]) -> None:
        """Writes the result of graphar.reference.fused_matmul_allreduce into every ``out`` [M, N]. Collective."""
        work, panels = self.work, self.panels
        products = [[_place(one, panels, panel, 0, panel.shape) for one in members] for panel in panels]

        def sum_panel(at: int, limit: Beside | None) -> None:
            sums, columns, corner = _widened(members, products[at]), panels[at].columns, None
            prefetches = at == len(panels) - 1 and members[0].prefetch is not None and not work.codec
            if work.epilogue:
                corner, prefetches = (panels[at].rows[0].start, columns.start, work.epilogue.columns), False
            call = Call.of(
                Sum(sums[0].numel(), work.codec, self._epilogue(columns), beside=work.beside),
                sums[0],
                algorithm=limit.algorithm if limit else "auto",
                timeout_s=self.timeout_s,
                symmetric=() if work.codec else engine.symmetric_sides(sums, sums),
                blocks=limit.blocks if limit else None,
                prefetches=prefetches,
            )
            more = [(one.prefetch,) if prefetches else one.tensors for one in members]
            ranks = [
                Operands((total, *rest), (total,), one.numbers, corner)
                for one, total, rest in zip(members, sums, more, strict=True)
            ]
            engine.plan(call, ranks).run(ranks)
            for one, total in zip(members, sums, strict=True):
                _take(one, total, _rows_of_out(panels, panels[at], 0), columns)

        self._multiply_and_sum(engine, members, products, sum_panel)

    def reducescatter(self, engine: Engine, members: Sequence[MatmulOperands]) -> None:
        """Writes each rank's rows of the sum into its ``out``: graphar.reference.fused_matmul_reducescatter.

        Collective. The algorithm of ``beside`` is ignored.
        """
        owners = range(engine.world_size) if engine.devices else [engine.rank]
        work, panels = self.work, self.panels
        products = [[one.out.new_empty(panel.shape) for one in members] for panel in panels]

        def sum_panel(at: int, limit: Beside | None) -> None:
            panel, parts = panels[at], _widened(members, products[at])
            columns = length(panel.columns)
            counts = tuple([length(rows) * columns for rows in panel.rows])
            ranks = []
            for one, owner, part in zip(members, owners, parts, strict=True):
                total = _place(one, panels, panel, owner, (length(panel.rows[owner]), columns), part.dtype)
                corner = None
                if work.epilogue:
                    first = _rows_of_out(panels, panel, owner).start
                    corner = (first, panel.columns.start, work.epilogue.columns)
                ranks.append(Operands((part, *one.tensors), (total,), one.numbers, corner))
            epilogue = self._epilogue(panel.columns)
            summed = Parts("reducescatter", counts, work.codec, epilogue, beside=work.beside)
            call = Call.of(summed, parts[0], timeout_s=self.timeout_s, blocks=limit.blocks if limit else None)
            engine.plan(call, ranks).run(ranks)
            for one, owner, own in zip(members, owners, ranks, strict=True):
                _take(one, own.outputs[0], _rows_of_out(panels, panel, owner), panel.columns)

        self._multiply_and_sum(engine, members, products, sum_panel)

    def _epilogue(self, columns: slice) -> Pointwise | None:
        """Returns the epilogue of a panel with these columns."""
        return self.work.epilogue and replace(self.work.epilogue, columns=length(columns))

    def _multiply_and_sum(
        self,
        engine: Engine,
        members: Sequence[MatmulOperands],
        products: Sequence[Sequence[torch.Tensor]],
        sum_panel: Callable[[int, Beside | None], None],
    ) -> None:
        """Multiplies and sums the panels in turn, on the caller's stream and on the side stream."""
        beside = replace(self.beside, blocks=self.beside.blocks or engine.table.beside.blocks)
        by_member = zip(members, zip(*products, strict=True), strict=True)
        multiplies = [_bind(engine, one, self.panels, mine, beside.blocks, self.only_own) for one, mine in by_member]
        last = len(self.panels) - 1
        if last == 0 or not members[0].a.is_cuda:
            for at in range(len(self.panels)):
                for multiply in multiplies:
                    multiply(at)
                sum_panel(at, None)
            return
        streams = [streams_of(one.a.device) for one in members]
        try:
            for at in range(len(self.panels)):
                for multiply, (main, side) in zip(multiplies, streams, strict=True):
                    with torch.cuda.stream(side if at else main):
                        multiply(at)
                    # The caller's stream waits for the panel. The side stream starts after the first multiplication.
                    if at:
                        main.wait_stream(side)
                    else:
                        side.wait_stream(main)
                sum_panel(at, beside if at < last else None)
        finally:
            for main, side in streams:
                main.wait_stream(side)


def products(engine: Engine, members: Sequence[MatmulOperands], only_own: bool = False) -> list[torch.Tensor]:
    """Returns each rank's ``a @ w.T``, [M, N], by the same kernel as a single panel. M and N are not 0."""
    panel = single_panel(members[0])
    made = [one.a.new_empty(panel.shape, dtype=one.out.dtype) for one in members]
    pairs = zip(members, made, strict=True)
    multiplies = [_bind(engine, one, [panel], [product], 0, only_own) for one, product in pairs]
    for multiply in multiplies:
        multiply(0)
    return made


def single_panel(one: MatmulOperands) -> Panel:
    """Returns the panel that is all of a product."""
    return Panel((slice(0, len(one.a)),), slice(0, len(one.w)))


# ---- where panels and their sums lie --------------------------------------------------------------------------------


def _rows_of_out(panels: Sequence[Panel], panel: Panel, owner: int) -> slice:
    """Returns the rows of ``owner``'s result that hold its rows of a panel."""
    first, rows = panels[0].rows[owner].start, panel.rows[owner]
    return slice(rows.start - first, rows.stop - first)


def _place(
    one: MatmulOperands,
    panels: Sequence[Panel],
    panel: Panel,
    owner: int,
    shape: tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns a contiguous tensor for a panel: a view of ``out`` if the panel is contiguous there and has no bias.

    A view of a misaligned ``out`` would give the panel to torch's matmul, and so other bits.
    """
    if one.bias is None and shape[1] == one.out.shape[1] and one.out.data_ptr() % 16 == 0:
        return one.out[_rows_of_out(panels, panel, owner)]
    return one.out.new_empty(shape, dtype=dtype)


def _widened(members: Sequence[MatmulOperands], products: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.widened(product, one.bias) for one, product in zip(members, products, strict=True)]


def _take(one: MatmulOperands, total: torch.Tensor, rows: slice, columns: slice) -> None:
    """Adds the bias to a sum and copies it to ``out``, unless it already lies there."""
    if one.bias is not None:
        total = reference.with_bias(total, one.bias[columns], one.out.dtype)
    place = one.out[rows, columns]
    if total.data_ptr() != place.data_ptr():
        place.copy_(total)


# ---- in which order, on which streams -------------------------------------------------------------------------------


def streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns the caller's stream on a device, and its side stream."""
    main = torch.cuda.current_stream(device)
    return main, _side_stream(device, main.cuda_stream)


@functools.lru_cache(maxsize=256)
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """Returns the side stream of the caller's stream ``main``.

    Callers do not share one: a stream under capture and another stream may not wait for each other.
    """
    return torch.cuda.Stream(device)


# ---- products -------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One matmul: ``out = a @ w.T``."""

    a: torch.Tensor
    w: torch.Tensor
    out: torch.Tensor


def _bind(
    engine: Engine,
    one: MatmulOperands,
    panels: Sequence[Panel],
    products: Sequence[torch.Tensor],
    blocks: int,
    only_own: bool,
) -> Callable[[int], None]:
    """Returns a function of a panel's number that multiplies the panel into its product, on the current stream."""
    if one.scales:
        rows = [_joined(panel.rows) for panel in panels]
        return scaled_sums.bind(one, panels, rows, products, blocks, only_own)
    if only_own:
        one = _aligned(one)
    elif not one.a.is_cuda:
        whole = reference.matmul(one.a, one.w)  # smaller matmuls would give other bits
        return lambda at: _copy_rows(whole[:, panels[at].columns], panels[at], products[at])
    steps = _steps(one, panels, products)
    why_not = _why_not_own(steps) if only_own else ""
    if why_not and one.a.shape[1]:
        raise UnsupportedError(f"matmul: no batch-invariant kernel: {why_not}")
    if why_not or not (only_own or _choose(engine, one, steps).own):
        return lambda at: _multiply_by_torch(steps[at])
    sms, cost = launcher.sm_count(one.a.device.index), engine.table.matmul.cost
    few = max(sms - blocks, 1)
    # Load all kernels before the first launch: loading beside a kernel that waits for other ranks could hang.
    bound = [[_bind_own(cost, step, few if at else sms) for step in mine] for at, mine in enumerate(steps)]

    def multiply(at: int) -> None:
        with torch.cuda.device(one.a.device):
            stream = torch.cuda.current_stream().cuda_stream
            for enqueue in bound[at]:
                enqueue(stream)

    return multiply


def _bind_own(cost: TileCost, step: Step, sms: int) -> Callable[[int], None]:
    tile = fastest_tile(cost, *step.out.shape, step.a.shape[1], sms, gemm.layout_of(step.w))
    return gemm.bind(*step, sms=sms, tile=tile)


def product_like(
    engine: Engine, one: MatmulOperands, only_own: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function of ``a`` and ``w`` that returns ``a @ w.T``, for calls with tensors like one rank's operands.

    Their tensors differ from the given ones in their addresses only. The product is a single panel, and has the bits of
    :func:`products`. The device must be current.
    """
    if not choose(engine, one, [single_panel(one)], only_own).own:
        return torch.nn.functional.linear  # has the bits of torch.mm, and takes one call where views take four
    sms, cost = launcher.sm_count(one.a.device.index), engine.table.matmul.cost
    bound: BoundedCache[Callable[[int], None]] = BoundedCache()

    def multiply(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        product = a.new_empty((*a.shape[:-1], len(w)))
        key = a.data_ptr(), w.data_ptr(), product.data_ptr()
        enqueue = bound.get(key)
        if enqueue is None:
            step = Step(flat(a), w, flat(product))
            if gemm.why_not(*step):  # its addresses are not aligned as the others are
                return products(engine, [MatmulOperands(step.a, w, None, step.out)], only_own)[0].view_as(product)
            enqueue = bound.keep(key, _bind_own(cost, step, sms))
        enqueue(torch.cuda.current_stream().cuda_stream)
        return product

    return multiply


def choose(engine: Engine, one: MatmulOperands, panels: Sequence[Panel], only_own: bool) -> MatmulChoice:
    """Returns whose matmul multiplies a rank's operands, and why."""
    if one.scales:
        return scaled_sums.choose(one)
    if only_own:
        return MatmulChoice(True, "graphar's matmul, which is batch invariant")
    return _choose(engine, one, _steps(one, panels, [one.a.new_empty(panel.shape) for panel in panels]))


def _choose(engine: Engine, one: MatmulOperands, steps: Sequence[Sequence[Step]]) -> MatmulChoice:
    """Returns whose matmul makes these steps of each panel, and why.

    Ranks with different K may take different ones: only products are exchanged.
    """
    sms = launcher.sm_count(one.a.device.index)
    choice = choose_matmul(engine.table.matmul, len(one.a), len(one.w), one.a.shape[1], sms, len(steps))
    why_not = _why_not_own(steps) if choice.own else ""
    return MatmulChoice(False, f"torch's matmul: {why_not}") if why_not else choice


def _steps(one: MatmulOperands, panels: Sequence[Panel], products: Sequence[torch.Tensor]) -> list[list[Step]]:
    """Returns the matmuls of each panel."""
    steps = []
    for panel, product in zip(panels, products, strict=True):
        adjacent = _joined(panel.rows)
        parts = zip(adjacent, product.split([length(rows) for rows in adjacent]), strict=True)
        steps.append([Step(one.a[rows], one.w[panel.columns], part) for rows, part in parts if part.numel()])
    return steps


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Returns the parts, in which neighbours that follow each other without a gap have become one."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _aligned(one: MatmulOperands) -> Operands:
    """Returns the operands with copies of those that graphar's matmul cannot load where they lie."""
    a = one.a if matrix_of(one.a) else aligned_copy(one.a)
    w = one.w if matrix_of(one.w) or matrix_of(one.w.t()) else aligned_copy(one.w)
    return replace(one, a=a, w=w)


def _why_not_own(steps: Sequence[Sequence[Step]]) -> str:
    """Returns why graphar's matmul cannot multiply all panels, or an empty string."""
    return _missing_software() or next(filter(None, (gemm.why_not(*step) for mine in steps for step in mine)), "")


def _multiply_by_torch(steps: Sequence[Step]) -> None:
    for a, w, product in steps:
        torch.mm(a, w.t(), out=product)


def _copy_rows(columns: torch.Tensor, panel: Panel, product: torch.Tensor) -> None:
    torch.cat([columns[rows] for rows in panel.rows], out=product)


@functools.cache
def _missing_software() -> str:
    """Returns which software graphar's matmul lacks, or an empty string."""
    return missing_software()
