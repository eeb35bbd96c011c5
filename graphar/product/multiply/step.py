"""One matmul of a rank, and what can make it.

by_torch    torch's matmul; on the CPU the specification
own         graphar's matmul of 16-bit operands
scaled      graphar's matmul of e4m3 operands
leaves      graphar's matmul in an order that depends on nothing but K: in the order of K, or in leaves
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from graphar.errors import Reason
from graphar.numerics.fp8_products import Scales
from graphar.numerics.partitions import Panel, length
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import BoundedCache

Enqueue = Callable[[int], object]  # takes a stream's handle, for a caller that has made the device the current one
StepOf = Callable[[tuple[torch.Tensor, ...], torch.Tensor], "Step"]
_address = torch.Tensor.data_ptr


class Step(NamedTuple):
    """One matmul: ``out = a @ w.T + bias``."""

    a: torch.Tensor  # [M, K]
    w: torch.Tensor  # [N, K]
    out: torch.Tensor  # [M, N], of the dtype to which results are rounded
    scales: Scales | None = None  # of e4m3 operands
    bias: torch.Tensor | None = None  # [N], for results that are rounded

    def in_panel(self, panel: Panel, product: torch.Tensor) -> list[Step]:
        """Returns the steps, without a bias, that make a panel of the result: one for rows that follow each other."""
        rows, columns = _joined(panel.rows), panel.columns
        parts = zip(rows, product.split([length(one) for one in rows]), strict=True)
        return [self._part(one, columns, part) for one, part in parts if part.numel()]

    def _part(self, rows: slice, columns: slice, out: torch.Tensor) -> Step:
        of = self.scales and Scales(self.scales.in_blocks, self.scales.a[rows], self.scales.w[columns])
        return Step(self.a[rows], self.w[columns], out, of)


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Returns the parts, in which neighbours that follow each other without a gap have become one."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


class Multiply(ABC):
    """What makes steps."""

    @property
    def beyond(self) -> str:
        """What makes steps that its kernel cannot make, in words; an empty string if nothing does."""
        return ""

    @abstractmethod
    def why_not(self, step: Step) -> Reason | None:
        """Returns why its kernel cannot make a step."""

    @abstractmethod
    def bind(self, step: Step, sms: int) -> Enqueue:
        """Returns what launches its kernel on so many SMs. It loads the kernel; :meth:`why_not` has no reason."""

    @abstractmethod
    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        """Returns what makes a step that its kernel cannot make, for the reason ``why_not``, or that is on the CPU.

        Raises:
            UnsupportedError: nothing else has the bits that were asked for.
        """

    def bind_all(self, panels: Sequence[Sequence[tuple[Step, int]]]) -> list[list[Enqueue]]:
        """Returns what makes the steps of each panel on a GPU, on so many SMs: all of them by its kernel, or none."""
        steps = [step for mine in panels for step, _ in mine]
        if why_not := next(filter(None, map(self.why_not, steps)), None):
            return [[self.instead(step, sms, why_not) for step, sms in mine] for mine in panels]
        return [[self.bind(step, sms) for step, sms in mine] for mine in panels]

    def make(self, step: Step) -> None:
        """Makes one step, on the current stream of its device."""
        if not step.out.numel():
            return
        if not step.a.is_cuda:
            self.instead(step, 0, "on the CPU")(0)
            return
        ((enqueue,),) = self.bind_all([[(step, launcher.sm_count(step.a.device.index))]])
        with torch.cuda.device(step.a.device):
            enqueue(torch.cuda.current_stream().cuda_stream)

    def repeating(self, example: Step, step_of: StepOf, sms: int) -> Callable[..., torch.Tensor]:
        """Returns a function of a product's inputs that returns it, as calls that are like an earlier one need it.

        Their tensors differ from those of ``example`` in their addresses only. ``step_of`` makes a step of the inputs
        and the result. The device must be current.
        """
        columns, dtype, bound = len(example.w), example.out.dtype, BoundedCache[Enqueue]()

        def multiply(*inputs: torch.Tensor) -> torch.Tensor:
            a = inputs[0]
            out = a.new_empty((*a.shape[:-1], columns), dtype=dtype)
            key = (*map(_address, inputs), out.data_ptr())
            enqueue = bound.get(key)
            if enqueue is None:
                step = step_of(inputs, out)
                why_not = self.why_not(step)  # its addresses may not be aligned as the others are
                enqueue = self.instead(step, sms, why_not) if why_not else bound.keep(key, self.bind(step, sms))
            enqueue(torch.cuda.current_stream().cuda_stream)
            return out

        return multiply


@functools.cache
def lacks_software() -> Reason | None:
    """Returns which software graphar's matmul lacks."""
    return missing_software()
