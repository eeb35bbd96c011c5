"""The interface of epilogues to plans and kernels."""

from __future__ import annotations

from typing import Protocol

from graphar.numerics.epilogues.code import Generated


class Form(Protocol):
    """An epilogue without the values of its inputs. Kernels are compiled and plans are made for a form.

    Two classes implement it: :class:`graphar.numerics.epilogues.epilogue.Pointwise` and
    :class:`graphar.numerics.norms.RmsNorm`. A third, :class:`graphar.plan.tensor_tuple.TensorTuple`, is no epilogue:
    its inputs are the tensors of an all-gather. Forms are immutable and hashable.

    Attributes:
        text: the form in words, equal on all ranks.
        columns: columns of the tensor; at least 1.
        cluster: thread blocks that share a row.
        kernel: a string that tells the form's kernels from other kernels of the same algorithm.
        variant: the template argument of a hand-written kernel; None if ``generated`` has the code.
        generated: the code that the kernel is compiled with; None if ``variant`` names a kernel.
    """

    @property
    def text(self) -> str: ...
    @property
    def columns(self) -> int: ...
    @property
    def cluster(self) -> int: ...
    @property
    def kernel(self) -> str: ...
    @property
    def variant(self) -> str | None: ...
    @property
    def generated(self) -> Generated | None: ...
