"""Functions for matmuls whose products are summed: with an all-reduce, or with a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.numerics import leaf_tree, partitions
from graphar.numerics.epilogues.epilogue import AppliedEpilogue
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import matmul_operands, options
from graphar.ops.matmul_operands import Scaled
from graphar.ops.register import is_plain
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name


@dataclass(eq=False)
class Arguments(options.Coded, options.Multiplied):
    """The arguments of matmuls whose products are summed."""

    bias: options.Tensors = ()
    num_partitions: int | None = None
    scaled_dtype: torch.dtype | None = None  # of the result, with scales


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_fused(
    op: str, a, w, bias, codec, epilogue, group: Group, given: Arguments
) -> tuple[str, bool, list[torch.Tensor]]:
    """Checks a fused matmul. Returns the communicator's name, whether it has lists, and the biases.

    There are no biases if an epilogue adds them.
    """
    partition = given.partition
    if given.timeout_s is not None:
        call_checks.check_timeout(op, given.timeout_s)
    in_list = isinstance(a, (list, tuple))
    name = engine_name(group, op, alone=partition == TP_INVARIANT and not in_list)
    options.check_together(op, codec, epilogue)
    if partition in (partitions.BATCH_INVARIANT, TP_INVARIANT) and codec is not None:
        raise ValueError(f"{op}: takes a codec or partition={partition!r}, not both")
    matmul_operands.check(op, a, w, bias, Scaled(given.scales, given.scaled_dtype), partition)
    return name, in_list, [] if bias is None or epilogue is not None else list(bias) if in_list else [bias]


def check_leaves(op: str, engine: Engine, a: Sequence[torch.Tensor], w, given) -> None:
    """Raises ValueError if a call is to be tensor-parallel invariant, and its ranks have no whole leaves of K."""
    if given.partition != TP_INVARIANT:
        return
    leaf_tree.check_ranks(op, engine.world_size)
    # Processes compare their columns when they sum.
    leaf_tree.check_operands(op, a if engine.devices else list(a) * engine.world_size)


def is_plain_fused(a: torch.Tensor, w: torch.Tensor, given: Arguments) -> bool:
    return all(map(is_plain, (a, w, *given.bias, *given.scales))) and not options.needs_gradient(given.tensors)


def sum_like(a: torch.Tensor, w: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a meta tensor with the shape and dtype of the sum."""
    return torch.empty((*a.shape[:-1], w.shape[0]), dtype=dtype or a.dtype, device="meta")


# ---- calls ----------------------------------------------------------------------------------------------------------


def run(op: str, engine: Engine, a, w, outs, given, parts: Sequence[int], followed: AppliedEpilogue | None):
    """Writes sums of products into the tensors of ``outs``, which are contiguous.

    ``parts`` are the rows of the result that each rank sums.
    """
    columns = w[0].shape[0]
    if given.codec:
        call_checks.check_quantized_call(op, given.codec, "auto", outs[0])
    if not sum(parts) or not columns:
        return None
    how = {"partition": given.partition, "num_partitions": given.num_partitions}
    how["constant_weight"] = getattr(given, "constant_weight", False)
    scales = getattr(given, "scales", ())  # rank by rank: of a, of w
    if scales:
        how["scales"] = matmul_operands.format_of(op, a, w, scales)
    work = Product(op, tuple(parts), columns, bool(given.bias), given.codec, followed and followed.form, **how)
    ranks = []
    for rank, (x, weight, out) in enumerate(zip(a, w, outs, strict=True)):
        more = [given.bias[rank].resolve_neg().contiguous()] if given.bias else []  # kernels read raw memory
        more += followed.inputs[rank].tensors if followed else []
        numbers = tuple(followed.inputs[rank].scalars) if followed else ()
        ranks.append(Operands((x, weight, *scales[2 * rank : 2 * rank + 2], *more), (out,), numbers))
    return engine.run(Call.of(work, outs[0], timeout_s=given.timeout_s), ranks), ranks
