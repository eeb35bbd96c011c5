"""Products of e4m3 operands with fp32 scales, which are then summed over ranks.

On sm_90a graphar's scaled matmul multiplies. Elsewhere, and for operands that it cannot load, the specification does:
graphar.numerics.fp8_products. An element depends on its rows and their scales alone, so panels change no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from graphar.errors import UnsupportedError
from graphar.numerics.fp8_products import Scales, checked_scales, rounded_product
from graphar.numerics.partitions import Panel, length
from graphar.plan.matmuls import MatmulChoice
from graphar.product import scaled_gemm
from graphar.product.operands import MatmulOperands, flat, flat_scale
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software


def bind(
    one: MatmulOperands,
    panels: Sequence[Panel],
    rows: Sequence[Sequence[slice]],
    products: Sequence[torch.Tensor],
    blocks: int,
    only_own: bool,
) -> Callable[[int], None]:
    """Returns a function of a panel's number that multiplies the panel into its product, on the current stream.

    Args:
        one: the operands of a rank, with scales.
        panels: the panels; they do not cut ``w`` if scales are of blocks.
        rows: the rows of each panel, in slices that follow each other in its product.
        products: takes the product of each panel.
        blocks: the thread blocks of a sum that runs beside all panels but the first.
        only_own: whether the bits of a row may not depend on the number of rows.

    Raises:
        UnsupportedError: ``only_own``, on a GPU whose kernel does not serve the operands.
    """
    steps = []
    for panel, of_panel, product in zip(panels, rows, products, strict=True):
        parts = product.split([length(part) for part in of_panel])
        columns = panel.columns if len(one.w) != length(panel.columns) else slice(None)
        steps.append([_Step(one, part, columns, out) for part, out in zip(of_panel, parts, strict=True) if out.numel()])
    reason = next(filter(None, (step.why_not() for mine in steps for step in mine)), "")
    if not one.a.is_cuda or reason:
        _check_invariant(one.a, reason, only_own)

        def specified(at: int) -> None:
            for step in steps[at]:
                step.by_specification()

        return specified
    sms = launcher.sm_count(one.a.device.index)
    few = max(sms - blocks, 1)
    # All kernels are loaded before the first launch: loading beside a kernel that waits for other ranks could hang.
    bound = [[step.bind(few if at else sms) for step in mine] for at, mine in enumerate(steps)]

    def multiply(at: int) -> None:
        with torch.cuda.device(one.a.device):
            stream = torch.cuda.current_stream().cuda_stream
            for enqueue in bound[at]:
                enqueue(stream)

    return multiply


class _Step:
    """One scaled matmul, of rows of ``a`` and rows of ``w`` into ``out``."""

    def __init__(self, one: MatmulOperands, rows: slice, columns: slice, out: torch.Tensor) -> None:
        self.a, self.w, self.out = one.a[rows], one.w[columns], out
        self.scales = Scales(one.scales.in_blocks, one.scales.a[rows], one.scales.w[columns])

    def why_not(self) -> str:
        return why_not(self.a, self.w, self.out)

    def bind(self, sms: int) -> Callable[[int], None]:
        return scaled_gemm.bind(self.a, self.w, self.out, self.scales, sms=sms)

    def by_specification(self) -> None:
        self.out.copy_(rounded_product(self.a, self.w, self.scales, self.out.dtype))


def why_not(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> str:
    """Returns why the kernel cannot multiply, or an empty string."""
    return _missing_software() or ("K is 0" if not a.shape[1] else scaled_gemm.why_not(a, w, out))


@functools.cache
def _missing_software() -> str:
    """Returns which software graphar's matmul lacks, or an empty string."""
    return missing_software()


def _check_invariant(a: torch.Tensor, reason: str, only_own: bool) -> None:
    """Raises UnsupportedError if torch's operations would compute what must not depend on the number of rows."""
    if only_own and a.is_cuda and a.shape[1]:
        raise UnsupportedError(f"matmul: no batch-invariant kernel: {reason}")


def choose(one: MatmulOperands) -> MatmulChoice:
    """Returns what multiplies a rank's operands, in words."""
    out = one.out.new_empty(len(one.a), len(one.w))
    if reason := why_not(one.a, one.w, out):
        return MatmulChoice(False, f"torch's operations, as the specification of scaled products: {reason}")
    scales = "blocks" if one.scales.in_blocks else "rows"
    return MatmulChoice(True, f"graphar's scaled matmul of e4m3 operands with scales of {scales}")


def product(
    op: str,
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    only_own: bool = False,
) -> torch.Tensor:
    """Returns the scaled product of one rank's operands of ``op``, plus ``bias``: [..., N], with ``dtype``.

    For ``only_own`` see :func:`bind`.
    """
    rows, made = flat(a), a.new_empty((*a.shape[:-1], len(w)), dtype=dtype)
    scales = checked_scales(op, rows, w, flat_scale(a_scale), w_scale)
    multiply(flat(made), rows, w, scales, bias, only_own)
    return made


def multiply(
    out: torch.Tensor,
    a: torch.Tensor,
    w: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None = None,
    only_own: bool = False,
) -> None:
    """Writes a scaled product, [M, N], on the current stream of its device. For ``only_own`` see :func:`bind`."""
    if not out.numel():
        return
    if reason := why_not(a, w, out):
        _check_invariant(a, reason, only_own)
        out.copy_(rounded_product(a, w, scales, out.dtype, bias))
        return
    enqueue = scaled_gemm.bind(a, w, out, scales, None if bias is None else bias.contiguous())
    with torch.cuda.device(a.device):
        enqueue(torch.cuda.current_stream().cuda_stream)
