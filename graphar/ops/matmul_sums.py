"""Functions for matmuls whose products are summed: with an all-reduce, or with a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.matmul import operands
from graphar.numerics import partitions
from graphar.numerics.epilogues.epilogue import AppliedEpilogue
from graphar.ops import options
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.register import for_ranks, is_plain
from graphar.plan import call_checks
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

CUT = "str partition, int? num_partitions"


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_fused(
    op: str, a, w, bias, partition, codec, epilogue, group: Group, timeout_s: float | None
) -> tuple[str, bool, list[torch.Tensor]]:
    """Checks a fused matmul. Returns the communicator's name, whether it has lists, and the biases.

    There are no biases if an epilogue adds them.
    """
    if timeout_s is not None:
        call_checks.check_timeout(op, timeout_s)
    name, in_list = engine_name(group, op), isinstance(a, (list, tuple))
    options.check_together(op, codec, epilogue)
    if partition == partitions.BATCH_INVARIANT and codec is not None:
        raise ValueError(f"{op}: takes a codec or partition={partition!r}, not both")
    operands.check_given(op, a, w, bias)
    return name, in_list, [] if bias is None or epilogue is not None else list(bias) if in_list else [bias]


def is_plain_fused(a: torch.Tensor, w: torch.Tensor, biases: list, followed: options.EpilogueOption) -> bool:
    return is_plain(a) and is_plain(w) and all(map(is_plain, biases)) and not followed.needs_gradient


def sum_like(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor with the shape and dtype of the sum."""
    return torch.empty((*a.shape[:-1], w.shape[0]), dtype=a.dtype, device="meta")


# ---- calls ----------------------------------------------------------------------------------------------------------


def run(op: str, engine: Engine, a, w, outs, given, parts: Sequence[int], followed: AppliedEpilogue | None):
    """Writes sums of products into the tensors of ``outs``, which are contiguous.

    ``parts`` are the rows of the result that each rank sums.
    """
    columns = w[0].shape[0]
    if given.codec:
        call_checks.check_quantized_call(op, given.codec, "auto", a[0])
    if not sum(parts) or not columns:
        return None
    how = {"partition": given.partition, "num_partitions": given.num_partitions}
    how["constant_weight"] = getattr(given, "constant_weight", False)
    work = Product(op, tuple(parts), columns, bool(given.bias), given.codec, followed and followed.form, **how)
    prefetch = getattr(given, "prefetch", ())
    ranks = []
    for rank, (x, weight, out) in enumerate(zip(a, w, outs, strict=True)):
        more = [given.bias[rank].resolve_neg().contiguous()] if given.bias else []  # kernels read raw memory
        more += followed.inputs[rank].tensors if followed else [prefetch[rank]] if prefetch else []
        numbers = tuple(followed.inputs[rank].scalars) if followed else ()
        ranks.append(Operands((x, weight, *more), (out,), numbers))
    return engine.run(Call.of(work, a[0], timeout_s=given.timeout_s), ranks), ranks


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients_of_products(ctx, of_products, a, w) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from the gradient of its product; None if not needed."""
    needed = [one if isinstance(one, (list, tuple)) else [one] for one in ctx.needs_input_grad[:2]]
    of_a = [
        (operands.flat(gradient) @ weight).view(x.shape) if wanted else None
        for gradient, x, weight, wanted in zip(of_products, a, w, needed[0], strict=True)
    ]
    of_w = [
        operands.flat(gradient).t() @ operands.flat(x) if wanted else None
        for gradient, x, wanted in zip(of_products, a, needed[1], strict=True)
    ]
    return of_a, of_w


def gradients_of_parts(ctx, of_parts, a, w, where: dict) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from that of its part of the sum; None if not needed.

    ``where`` are the arguments of the collectives that gather parts.
    """
    needs_a, needs_w = (ctx.in_list or need for need in ctx.needs_input_grad[:2])
    of_a, of_w, wholes = [None] * len(a), [None] * len(w), []
    if needs_a:
        how = {"gathered": needs_w, "partition": partitions.in_backward(ctx.given["partition"])}
        found = for_ranks(ctx, "fused_allgather_matmul", of_parts, [weight.t() for weight in w], **how, **where)
        of_a, wholes = found[::2], found[1::2]
    elif needs_w:
        wholes = for_ranks(ctx, "allgather", of_parts, **where)
    if needs_w:
        of_w = [operands.flat(whole).t() @ operands.flat(x) for whole, x in zip(wholes, a, strict=True)]
    return of_a, of_w


def gradients_of_sums(
    ctx, summing: str, call: dict, gradients, a, w, tensors
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name."""
    of_biases = [
        operands.flat(gradient).sum(0) if wanted else None
        for gradient, wanted in zip(gradients, ctx.needs_input_grad[2], strict=False)
    ]
    linear = torch.nn.functional.linear
    products = [linear(*pair) for pair in zip(a, w, strict=True)] if ctx.given["epilogue"] else []
    of_sums, rest = of_sums_before_epilogue(ctx, summing, call, gradients, products, tensors)
    return of_sums, {"bias": of_biases} | rest
