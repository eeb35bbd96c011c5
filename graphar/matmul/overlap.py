"""A matmul, panel by panel, and the sum of each over the ranks: while one panel is summed, the next is multiplied.

    the caller's stream    multiply 0 | sum 0       | sum 1       | sum 2
    another one                       | multiply 1  | multiply 2  |

The sums are calls of one communicator on one stream, and follow each other as any such calls do: one touches scratch
and epochs only once the one before has ended, whatever the other stream does. Each panel has memory of its own and
changes streams once, by an event. A multiplication waits for no sum, so for no other rank: it ends, and gives its SMs
back, also where a sum waits for them. What follows on the caller's stream follows the other one, also after an error.

What is multiplied beside a sum leaves it some SMs, if the matmul is graphar's own; torch's takes what it gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar import reference
from graphar.communicator import Communicator
from graphar.numerics.epilogues.epilogue import AppliedEpilogue
from graphar.numerics.partitions import Panel, length
from graphar.runtime.availability import missing_software

_OWN_ROWS = range(64, 2048)  # with which graphar's matmul is not slower than torch's, on an H200 with all SMs


@dataclass(frozen=True)
class Beside:
    """How a sum runs beside a multiplication: by which algorithm, as graphar.allreduce takes it, in how many blocks.

    With 24, two_shot_pipelined moves 95 % of what it does with all SMs, on four H200s.
    """

    algorithm: str = "auto"
    blocks: int = 24


BESIDE = Beside()


@dataclass(frozen=True)
class Operands:
    """One rank's: ``a`` [M, K], ``w`` [N, K] and perhaps ``bias`` [N]; ``out`` takes its result, without gaps.

    ``prefetch`` is what an all-reduce may bring into L2 at the end, or None.
    """

    a: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    prefetch: torch.Tensor | None = None


def allreduce(
    ranks: Communicator,
    members: Sequence[Operands],
    panels: Sequence[Panel],
    codec: str,
    timeout_s: float | None,
    beside: Beside = BESIDE,
    epilogue: AppliedEpilogue | None = None,
) -> None:
    """Writes what graphar.reference.fused_matmul_allreduce gives into every ``out`` [M, N]. Collective.

    Args:
        members: those of this process's ranks.
        panels: of C, which together are all of it; each is summed by a call of its own, in their order.
        codec: the text of what is on the wire, or nothing.
        beside: how sums run beside a multiplication; its algorithm is for exact all-reduces.
        epilogue: what is done to the sums, without a codec and a bias; bound for ``out``.
    """
    products = [[_place(one, panels, panel, 0, panel.shape) for one in members] for panel in panels]

    def sum_panel(at: int, beside: Beside | None) -> None:
        algorithm, blocks = (beside.algorithm, beside.blocks) if beside else ("auto", None)
        sums = _widened(members, products[at])
        both = sums if ranks.devices else sums[0]
        if epilogue:
            corners = [(panels[at].rows[0].start, panels[at].columns.start)] * len(members)
            here = epilogue.in_panel(length(panels[at].columns), corners)
            ranks.run_with_epilogue(
                "allreduce", both, both, sums[0].numel(), *here, algorithm, timeout_s, blocks=blocks
            )
        else:
            is_last = at == len(panels) - 1 and members[0].prefetch is not None and not codec
            following = (
                ([one.prefetch for one in members] if ranks.devices else members[0].prefetch) if is_last else None
            )
            ranks.run_allreduce(both, both, algorithm, timeout_s, codec, blocks, following)
        for one, total in zip(members, sums, strict=True):
            _take(one, total, _rows_of_out(panels, panels[at], 0), panels[at].columns)

    _multiply_and_sum(members, panels, products, sum_panel, beside)


def reducescatter(
    ranks: Communicator,
    members: Sequence[Operands],
    panels: Sequence[Panel],
    codec: str,
    timeout_s: float | None,
    beside: Beside = BESIDE,
    epilogue: AppliedEpilogue | None = None,
) -> None:
    """Writes each rank's rows of what :func:`allreduce` gives into its ``out``. Collective.

    Args:
        panels: with a slice of every rank's rows; the others as there.
    """
    owners = range(ranks.world_size) if ranks.devices else [ranks.rank]
    products = [[one.out.new_empty(panel.shape) for one in members] for panel in panels]

    def sum_panel(at: int, beside: Beside | None) -> None:
        panel, parts = panels[at], _widened(members, products[at])
        columns = length(panel.columns)
        counts = tuple([length(rows) * columns for rows in panel.rows])
        sums = [
            _place(one, panels, panel, owner, (length(panel.rows[owner]), columns), part.dtype)
            for one, owner, part in zip(members, owners, parts, strict=True)
        ]
        both = (parts, sums) if ranks.devices else (parts[0], sums[0])
        blocks = beside.blocks if beside else None
        if epilogue:
            corners = [(_rows_of_out(panels, panel, owner).start, panel.columns.start) for owner in owners]
            here = epilogue.in_panel(columns, corners)
            ranks.run_with_epilogue("reducescatter", *both, counts, *here, "auto", timeout_s, blocks=blocks)
        else:
            ranks.run_parts("reducescatter", *both, counts, timeout_s, 0, codec, blocks)
        for one, owner, total in zip(members, owners, sums, strict=True):
            _take(one, total, _rows_of_out(panels, panel, owner), panel.columns)

    _multiply_and_sum(members, panels, products, sum_panel, beside)


def products(members: Sequence[Operands]) -> list[torch.Tensor]:
    """Each rank's ``a @ w.T``, multiplied as one panel is: [M, N], not empty."""
    panel = Panel((slice(0, len(members[0].a)),), slice(0, len(members[0].w)))
    made = [one.a.new_empty(panel.shape) for one in members]
    multiplies = [_bind(one, [panel], [product], 0) for one, product in zip(members, made, strict=True)]
    for multiply in multiplies:
        multiply(0)
    return made


# ---- where panels and their sums lie --------------------------------------------------------------------------------


def _rows_of_out(panels: Sequence[Panel], panel: Panel, owner: int) -> slice:
    """Where the rows of a panel that are ``owner``'s lie in its result."""
    first, rows = panels[0].rows[owner].start, panel.rows[owner]
    return slice(rows.start - first, rows.stop - first)


def _place(
    one: Operands,
    panels: Sequence[Panel],
    panel: Panel,
    owner: int,
    shape: tuple[int, int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Room without gaps: in the result where it has some and nothing is to be added, or else elsewhere."""
    if one.bias is None and shape[1] == one.out.shape[1]:
        return one.out[_rows_of_out(panels, panel, owner)]
    return one.out.new_empty(shape, dtype=dtype)


def _widened(members: Sequence[Operands], products: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.widened(product, one.bias) for one, product in zip(members, products, strict=True)]


def _take(one: Operands, total: torch.Tensor, rows: slice, columns: slice) -> None:
    """Puts a sum where it belongs, unless it lies there."""
    if one.bias is not None:
        total = reference.with_bias(total, one.bias[columns], one.out.dtype)
    elif length(columns) == one.out.shape[1]:
        return
    one.out[rows, columns] = total


# ---- in which order, on which streams -------------------------------------------------------------------------------


def _multiply_and_sum(
    members: Sequence[Operands],
    panels: Sequence[Panel],
    products: Sequence[Sequence[torch.Tensor]],
    sum_panel: Callable[[int, Beside | None], None],
    beside: Beside,
) -> None:
    by_member = list(zip(*products, strict=True))
    multiplies = [_bind(one, panels, mine, beside.blocks) for one, mine in zip(members, by_member, strict=True)]
    last = len(panels) - 1
    if last == 0 or not members[0].a.is_cuda:
        for at in range(len(panels)):
            for multiply in multiplies:
                multiply(at)
            sum_panel(at, None)
        return
    streams = [_streams(one.a.device) for one in members]
    try:
        for at in range(len(panels)):
            for multiply, (main, side) in zip(multiplies, streams, strict=True):
                with torch.cuda.stream(side if at else main):
                    multiply(at)
                # From here on this stream has the panel, and, after the first, the other one the next.
                if at:
                    main.wait_stream(side)
                else:
                    side.wait_stream(main)
            sum_panel(at, beside if at < last else None)
    finally:
        for main, side in streams:
            main.wait_stream(side)


def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The caller's on a device, and the one beside it."""
    main = torch.cuda.current_stream(device)
    return main, _side_stream(device, main.cuda_stream)


@functools.lru_cache(maxsize=256)
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """One for each stream of callers: of two that are captured, or one of them, neither may wait for the other."""
    return torch.cuda.Stream(device)


# ---- products -------------------------------------------------------------------------------------------------------


def _bind(
    one: Operands, panels: Sequence[Panel], products: Sequence[torch.Tensor], blocks: int
) -> Callable[[int], None]:
    """A function of a panel's number that multiplies it into its product, on the current stream."""
    if not one.a.is_cuda:
        whole = reference.matmul(one.a, one.w)  # its bits would not be those of smaller ones
        return lambda at: _copy_rows(whole[:, panels[at].columns], panels[at], products[at])
    steps = [list(_steps(one, panel, product)) for panel, product in zip(panels, products, strict=True)]
    # Beside a sum it is graphar's from 64 rows on, and then for the first panel too: one matmul, whatever the cut.
    rows = len(one.a)
    own = rows in _OWN_ROWS or (len(panels) > 1 and rows >= _OWN_ROWS.start)
    gemm = _own_matmul() if own else None
    if gemm is None or any(gemm.why_not(*step) for mine in steps for step in mine):
        return lambda at: _multiply_by_torch(steps[at])
    few = max(gemm.sm_count(one.a.device.index) - blocks, 1)
    # All before the first is launched: a kernel that is loaded beside one that waits for other ranks could hang.
    bound = [[gemm.bind(*step, sms=few if at else None) for step in mine] for at, mine in enumerate(steps)]

    def multiply(at: int) -> None:
        with torch.cuda.device(one.a.device):
            stream = torch.cuda.current_stream().cuda_stream
            for enqueue in bound[at]:
                enqueue(stream)

    return multiply


def _steps(one: Operands, panel: Panel, product: torch.Tensor):
    """The matmuls that make a panel: their two operands, and where the result goes."""
    for rows, part in zip(panel.rows, product.split([length(rows) for rows in panel.rows]), strict=True):
        if part.numel():
            yield one.a[rows], one.w[panel.columns], part


def _multiply_by_torch(steps) -> None:
    for a, w, product in steps:
        torch.mm(a, w.t(), out=product)


def _copy_rows(columns: torch.Tensor, panel: Panel, product: torch.Tensor) -> None:
    torch.cat([columns[rows] for rows in panel.rows], out=product)


@functools.cache
def _own_matmul():
    """graphar.matmul, where what it needs is installed."""
    if missing_software():
        return None
    from graphar.matmul import gemm

    return gemm
