"""graphar.explain: which algorithm an all-reduce takes, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, overload

import torch

from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops.sums import allreduce
from graphar.plan.algorithms import AllReduceAlgorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Explanation
from graphar.plan.work import Sum
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group
from graphar.runtime.watch.hook import watching


@overload
def explain(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: Group = None,
    *,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    algorithm: AllReduceAlgorithm = "auto",
    codec: Codec | CodecName | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Explanation: ...
@overload
def explain(x: Callable[..., object], *operands: Any, **options: Any) -> Explanation: ...
def explain(x, *operands, **options):
    """Returns the algorithm and grid that ``allreduce(x, group, ...)`` takes, the reason, and the expected time.

    ``explain(op, *operands, **options)`` explains the call ``op(*operands, **options)`` of another of graphar's ops,
    such as ``explain(graphar.fused_matmul_allreduce, a, w)``, without an expected time. It is collective, and makes
    the call's plan, which loads its kernels, but sends nothing.

    The time comes from the tuning table, and is missing if it was not measured. With a codec that a kernel supports,
    the answer also has the bits of an element on the wire and, if measured, the time of the exact all-reduce. With an
    epilogue, it has the expression that the kernel computes. The first call of a communicator is collective.

    Args:
        x: this rank's tensor, or a list with one for each device of this process. Its values are not read. Or an op.
        operands: the ``group`` of the all-reduce, or the operands of the op.
        options: ``group``, ``out``, ``algorithm``, ``codec`` and ``epilogue``, as :func:`graphar.allreduce` takes them;
            or the options of the op.

    Returns:
        The algorithm, its grid, the expected time and the reason. Printing it gives a sentence.

    Raises:
        TypeError, ValueError: an argument breaks a rule.
        UnsupportedError: ``algorithm`` cannot serve this call.
    """
    call = partial(x, *operands, **options) if callable(x) else partial(allreduce, x, *operands, **options)
    with watching(_explain):
        try:
            call()
        except _Explained as end:
            return end.args[0]
    raise ValueError(f"explain: {getattr(x, '__name__', x)} made no call of graphar's with these tensors")


class _Explained(Exception):
    """Ends the call that is explained, before anything is sent. It has the explanation."""


def _explain(engine: Engine, call: Call, ranks: Sequence[Operands]) -> NoReturn:
    """A sink that ends a call before it is made. An all-reduce needs no plan. Other plans know their matmuls."""
    if isinstance(call.work, Sum):
        raise _Explained(engine.explain(call, ranks[0].inputs[0]))
    plan = engine.plan(call, ranks)
    nbytes = plan.config.algorithm.row.scratch_nbytes(engine.world_size)
    raise _Explained(replace(plan.explain(ranks[0]), scratch_nbytes=nbytes))
