"""graphar.fused_allgather_matmul: the rows of all ranks, gathered and multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from graphar import reference
from graphar.matmul import allgather_matmul as kernels
from graphar.matmul import operands
from graphar.matmul.allgather_matmul import Gathering
from graphar.ops import options, parts
from graphar.ops.register import Op, for_ranks, is_plain
from graphar.plan import checks
from graphar.plan.call import Call
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name

NAME = "fused_allgather_matmul"
PARTITIONS = ("auto", "tiles", "none")


@overload
def fused_allgather_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gathered: Literal[False] = False,
    sizes: Sequence[int] | None = None,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> torch.Tensor: ...
@overload
def fused_allgather_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gathered: Literal[True],
    sizes: Sequence[int] | None = None,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fused_allgather_matmul(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    gathered: Literal[False] = False,
    sizes: None = None,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> list[torch.Tensor]: ...
@overload
def fused_allgather_matmul(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    gathered: Literal[True],
    sizes: None = None,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
def fused_allgather_matmul(
    a, w, *, bias=None, gathered=False, sizes=None, partition="auto", group=None, timeout_s=None
):
    """Returns ``allgather(a) @ w.T + bias``: the product of the rows of all ranks with this rank's weight.

    It is a column-parallel layer whose input is divided between ranks by rows, as in sequence parallelism. While the
    rows of the other ranks arrive, this rank's own rows are multiplied.
    ``graphar.reference.fused_allgather_matmul`` is the specification, except for the order in which a product is
    accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable: the gradient of ``a`` is a :func:`fused_matmul_reducescatter`. For the gradient of ``w`` the rows
    are gathered again, so that no rank has to keep them.

    Args:
        a: this rank's rows [M_r, ..., K], bf16, fp16, fp32 or fp64, or a list with one for each device of this process.
            Shapes are equal on all ranks but for M_r, which may be 0.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. N may differ between ranks. The transpose of a
            [K, N] tensor is not copied.
        bias: this rank's [N], which is added before rounding; for lists a list, one a device.
        gathered: whether to return the gathered rows as well, for example to multiply them with further weights.
        sizes: M_r of every rank, in rank order. None: all have this rank's M_r. Not for a list.
        partition: "tiles": one kernel gathers and multiplies, for bf16 and fp16 on sm_90; other calls run as
            "none". "none": gather, then multiply. "auto": "tiles" or "none", by the tuning table.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [sum of M_r, ..., N], for a list one a device. With ``gathered``, a pair of this and the
        gathered rows [sum of M_r, ..., K].

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if timeout_s is not None:
        checks.check_timeout(NAME, timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{NAME}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    name, in_list = engine_name(group, NAME), isinstance(a, (list, tuple))
    _check_operands(a, w, bias)
    if in_list:
        if sizes is not None:
            raise ValueError(f"{NAME}: sizes is for calls with one tensor; omit it for a list")
        rank, sizes = -1, [len(x) for x in a]
    else:
        rank, world_size = parts.place(group)
        sizes = (
            [len(a)] * world_size if sizes is None else checks.check_sizes(NAME, sizes, world_size, rank, len(a), "a")
        )
    biases = [] if bias is None else list(bias) if in_list else [bias]
    plain = not in_list and all(map(is_plain, (a, w, *biases)))
    found = OP(a, w, biases, name, rank, sizes, partition, bool(gathered), timeout_s, [], plain=plain)
    products, rows = (found[::2], found[1::2]) if in_list else found
    return (products, rows) if gathered else products


def _check_operands(a: object, w: object, bias: object) -> None:
    if not isinstance(a, (list, tuple)):
        operands.check_operands(NAME, a, w, bias)
        operands.check_has_rows(NAME, a)
        return
    operands.check_operand_lists(NAME, a, w, bias, rows_differ=True)
    operands.check_has_rows(NAME, a[0])


def _fake(a, w, given) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = sum(given.sizes)
    return [
        (
            x.new_empty((rows, *x.shape[1:-1], weight.shape[0])),
            x.new_empty((rows, *x.shape[1:]) if given.gathered else (0,)),
        )
        for x, weight in zip(a, w, strict=True)
    ]


def _run(engine: Engine, a, w, given) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns for each rank the product, and the gathered rows or an empty tensor."""
    outs = _fake(a, w, given)
    in_one, rows = a[0].shape[1:-1].numel(), sum(given.sizes) * a[0].shape[1:-1].numel()
    if not rows:
        return outs
    members = [
        Gathering(
            operands.flat(x),
            weight,
            given.bias[at] if given.bias else None,
            operands.flat(product),
            operands.flat(gathered) if given.gathered else None,
        )
        for at, (x, weight, (product, gathered)) in enumerate(zip(a, w, outs, strict=True))
    ]
    if kernels.takes(engine, given.partition, members[0].a, rows):
        kernels.run(engine, members, [size * in_one for size in given.sizes], given.timeout_s)
        return outs
    wholes = [rows_of_all for _, rows_of_all in outs]
    if not given.gathered:
        wholes = [x.new_empty((sum(given.sizes), *x.shape[1:])) for x in a]
    _gather(engine, a, wholes, given)
    for one, whole in zip(members, wholes, strict=True):
        _multiply(one, operands.flat(whole))
    return outs


def _gather(engine: Engine, a, wholes, given) -> None:
    """Writes the rows of all ranks into every tensor of ``wholes``."""
    rows = [x.contiguous() for x in a]
    call = Call.of("allgather", rows[0], parts.counts_of(rows[0], given.sizes), timeout_s=given.timeout_s)
    engine.run(call, as_taken(engine, rows), as_taken(engine, wholes))


def _multiply(one: Gathering, whole: torch.Tensor) -> None:
    """Writes the product of gathered rows into ``out``: on the CPU as the specification does, else by torch."""
    if not whole.is_cuda:
        one.out.copy_(reference.linear(whole, one.w, one.bias))
    elif one.bias is None:
        torch.mm(whole, one.w.t(), out=one.out)
    else:
        torch.addmm(one.bias, whole, one.w.t(), out=one.out)


def _check(engine: Engine, a, w, given) -> None:
    parts.check_place(NAME, engine, given)
    parts.check_lengths(NAME, given.sizes, [len(x) for x in a], parts.own_sizes(given))


def _backward(ctx, gradients):
    """Returns the gradients: of ``a`` by a reduce-scatter, and of ``w`` from rows that are gathered again."""
    where = {name: ctx.given[name] for name in ("communicator", "rank", "sizes", "timeout_s")}
    (a, w), _ = OP.saved(ctx)
    # A list call's gradients are those of its flat list of results.
    pairs = list(zip(gradients[::2], gradients[1::2], strict=True)) if ctx.in_list else gradients
    of_products = [operands.flat(one[0]) for one in pairs]
    of_a, of_w = [None] * len(a), [None] * len(w)
    if ctx.in_list or ctx.needs_input_grad[0]:
        of_a = _of_rows(ctx, pairs, w, where)
    if ctx.in_list or ctx.needs_input_grad[1]:
        wholes = map(operands.flat, for_ranks(ctx, "allgather", a, **where))
        of_w = [of_one.t() @ whole for of_one, whole in zip(of_products, wholes, strict=True)]
    wanted = ctx.needs_input_grad[2]
    of_biases = [of_one.sum(0) if need else None for of_one, need in zip(of_products, wanted, strict=False)]
    return of_a, of_w, {"bias": of_biases}


def _of_rows(ctx, pairs, w, where: dict) -> list[torch.Tensor]:
    if not ctx.given["gathered"]:
        products, transposed = [one for one, _ in pairs], [x.t() for x in w]
        cut = {"partition": ctx.given["partition"]}
        return for_ranks(ctx, "fused_matmul_reducescatter", products, transposed, **cut, **where)
    totals = [of_product @ weight + of_rows for (of_product, of_rows), weight in zip(pairs, w, strict=True)]
    return for_ranks(ctx, "reducescatter", totals, **where)


OP = Op(
    NAME,
    ["a", "w"],
    f"Tensor[] bias, str communicator, int rank, SymInt[] sizes, str partition, bool gathered, float? timeout_s, "
    f"{options.AFTER}",
    _run,
    _fake,
    check=_check,
    backward=_backward,
    returns="Tensor[]",
)
