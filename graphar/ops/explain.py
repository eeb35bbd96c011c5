"""graphar.explain: which algorithm an all-reduce takes, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue, bind
from graphar.ops import options
from graphar.ops.register import check_input, check_output
from graphar.plan import call_checks
from graphar.plan.call import Call
from graphar.plan.explanation import Explanation
from graphar.plan.work import Sum
from graphar.runtime.engine import planned
from graphar.runtime.registry import Group, engine_name, engine_of_devices, engine_of_group

NAME = "explain"


@overload
def explain(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: Group = None,
    *,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    algorithm: str = "auto",
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    order: str = "rank",
    out_dtype: torch.dtype | None = None,
) -> Explanation: ...
@overload
def explain(x: Callable[..., object], *operands: Any, **options: Any) -> Explanation: ...
def explain(x, group=None, *more, out=None, algorithm="auto", codec=None, epilogue=None, **options):
    """Returns the algorithm and grid that ``allreduce(x, group, ...)`` takes, the reason, and the expected time.

    ``explain(op, *operands, **options)`` explains the call ``op(*operands, **options)`` of another of graphar's ops,
    such as ``explain(graphar.fused_matmul_allreduce, a, w)``, without an expected time. It is collective, and makes
    the call's plan, which loads its kernels, but sends nothing.

    The time comes from the tuning table, and is missing if it was not measured. With a codec that a kernel supports,
    the answer also has the bits of an element on the wire and, if measured, the time of the exact all-reduce. With an
    epilogue, it has the expression that the kernel computes. The first call of a communicator is collective.

    Args:
        x: this rank's tensor, or a list with one for each device of this process. Its values are not read. Or an op.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: the tensor that the call would write into, or None.
        algorithm: "auto", the name of an all-reduce in :class:`graphar.Algorithm`, or one from
            :func:`graphar.load_algorithm`.
        codec: a :class:`graphar.Codec`, the name of one, or None.
        epilogue: a :class:`graphar.Epilogue`, an expression, a function without arguments, or None.
        options: ``order`` and ``out_dtype`` of the all-reduce, or further options of the op.

    Returns:
        The algorithm, its grid, the expected time and the reason. Printing it gives a sentence.

    Raises:
        TypeError, ValueError: an argument breaks a rule.
        UnsupportedError: ``algorithm`` cannot serve this call.
    """
    how = {"out": out, "algorithm": algorithm, "codec": codec, "epilogue": epilogue}
    if not callable(x):
        return _of_sum(x, group, *more, **how, **options)
    given = {name: one for name, one in how.items() if one is not None and one != "auto"}
    return _of_op(x, () if group is None else (group, *more), given | options)


def _of_op(op: Callable, operands: tuple, given: dict) -> Explanation:
    with planned() as explanations:
        op(*operands, **given)
    if not explanations:
        raise ValueError(f"{NAME}: {getattr(op, '__name__', op)} made no call of graphar's with these tensors")
    return explanations[0]


def _of_sum(
    x, group: Group = None, *, out=None, algorithm="auto", codec=None, epilogue=None, order="rank", out_dtype=None
) -> Explanation:
    options.check_together(NAME, codec, epilogue)
    if codec is None:
        call_checks.check_call(NAME, algorithm, None)
    name, in_list = engine_name(group, NAME), isinstance(x, (list, tuple))
    check_input(NAME, x)
    if out is not None:
        check_output(NAME, x, out, dtype=out_dtype)
    first = x[0] if in_list else x
    out_dtype = options.order_option(NAME, order, out_dtype, first, codec)
    text = "" if codec is None else call_checks.check_quantized_call(NAME, codec, algorithm, first).text
    form = None
    if epilogue is not None:
        wanted = options.epilogue_option(NAME, epilogue, first, len(x) if in_list else None)
        own = wanted.tensors[: len(wanted.tensors) // (len(x) if in_list else 1)]  # the first rank's
        form, _ = bind(NAME, wanted.text, first, own, wanted.scalars)
    devices = tuple([one.device for one in x]) if in_list else ()
    engine = engine_of_devices(name, devices, NAME) if in_list else engine_of_group(name, NAME)
    if order == "tree":
        leaf_tree.check_ranks(NAME, engine.world_size)
    work = Sum(first.numel(), text, form, order=order, out_dtype=out_dtype)
    sides = () if text else engine.symmetric_sides(x, out)
    call = Call.of(work, first, algorithm=algorithm, symmetric=sides)
    return engine.explain(call, first)
