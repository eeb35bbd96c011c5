"""What makes one matmul of a rank: the interface of the four kinds."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from graphar.errors import Reason
from graphar.product.operands import Step
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import BoundedCache

Enqueue = Callable[[int], object]  # takes a stream's handle, for a caller that has made the device the current one
StepOf = Callable[[tuple[torch.Tensor, ...], torch.Tensor], Step]
_address = torch.Tensor.data_ptr


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
        """Loads its kernel, and returns what launches it on this number of SMs; :meth:`why_not` has no reason."""

    @abstractmethod
    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        """Returns what makes a step that its kernel cannot make, for the reason ``why_not``, or that is on the CPU.

        Raises:
            UnsupportedError: nothing else has the bits that were asked for.
        """

    def bind_all(self, panels: Sequence[Sequence[tuple[Step, int]]]) -> list[list[Enqueue]]:
        """Returns what makes each panel's steps on a GPU, each on its number of SMs: all by its kernel, or none."""
        steps = [step for panel in panels for step, _ in panel]
        if why_not := next(filter(None, map(self.why_not, steps)), None):
            return [[self.instead(step, sms, why_not) for step, sms in panel] for panel in panels]
        return [[self.bind(step, sms) for step, sms in panel] for panel in panels]

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
        """Returns a function of a later call's inputs that returns their product.

        The tensors of later calls differ from those of ``example`` in their addresses only. ``step_of`` makes a step of
        the inputs and the result. The device must be current.
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
