"""The arguments that ops have in their schemas, and the checks of options that ops share.

Codecs and epilogues are texts in a schema: a graph can hold texts, and no compiler traces them. The inputs of an
epilogue are in the order of their names; in a call with a list, rank by rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from graphar.numerics.codecs import Codec, as_codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import AppliedEpilogue, as_epilogue, bind
from graphar.plan.call import Operands
from graphar.runtime.checks import tensor_checks

T = TypeVar("T", torch.Tensor, list[torch.Tensor])  # of this rank, or one for each device of this process
Tensors = Sequence[torch.Tensor]
Numbers = Sequence[float]
Lengths = Sequence[int]


class Arguments:
    """The arguments of a call after its tensors. An op has those that it names, which are in its schema.

    Here are all of them, each with its value if it is not used. To read one that the op does not have raises
    AttributeError. Losses have numerics.softmax.Terms.
    """

    communicator: str = ""
    timeout_s: float | None = None
    after: Tensors = ()  # results of earlier collectives, so that a compiled graph keeps the order; not read
    rank: int = -1  # where ranks have parts along a dimension: see parts.py
    sizes: Lengths = ()
    axis: int = 0
    scatter_dim: int = 0
    gather_dim: int = 0
    known: bool = True  # as plan.work.Exchange has it
    algorithm: str = "auto"
    epilogue: str = ""
    tensors: Tensors = ()
    scalars: Numbers = ()
    codec: str = ""
    order: str = "rank"  # of a sum; with "tree" its result may have another dtype
    out_dtype: torch.dtype | None = None
    more: Tensors = ()  # rank by rank, the tensors of a tuple after the first
    eps: float = 1e-6
    weight_offset: float = 0.0
    output: str = "like_input"  # one of numerics.norms.NORM_OUTPUTS
    scales: Tensors = ()  # rank by rank: of a and of w in e4m3; or of the normed rows, for "static_fp8"
    partition: str = "auto"
    bias: Tensors = ()
    num_partitions: int | None = None
    scaled_dtype: torch.dtype | None = None  # of the result of a matmul with scales
    # Whether skinny kernels may load w while the kernel before runs: (26) in cuda_src/device/sync/kernel_order.cuh.
    constant_weight: bool = False
    gathered: bool = False
    vocab_size: int = 0  # 0: all columns count
    result: str = "none"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    temperature: float = 1.0
    entropy: bool = False
    top1: bool = False
    overwrite: bool = False  # whether the backward pass writes into the logits' memory

    def __init__(self, named: Mapping[str, Any]) -> None:
        vars(self).update(named)


def _of_schema(kind: str) -> str:
    name = kind.removesuffix(" | None")
    names = {"torch.dtype": "ScalarType", "Tensors": "Tensor[]", "Numbers": "float[]", "Lengths": "SymInt[]"}
    return names.get(name, name) + "?" * (name != kind)


KINDS = {name: _of_schema(kind) for name, kind in Arguments.__annotations__.items()}  # the types in a schema
DEFAULTS: dict[str, Any] = {name: vars(Arguments)[name] for name in KINDS}
for _name in DEFAULTS:
    delattr(Arguments, _name)  # so that only an op's own can be read
EVERY = ("communicator", "timeout_s", "after")  # what every op has
IN_PARTS = ("rank", "sizes")  # of an op whose ranks have parts along a dimension
FOLLOWED = ("epilogue", "tensors", "scalars")  # of an op that takes an epilogue


REMOVED = {  # options of earlier versions, and what to do
    "prefetch": "leave it out, since it made calls at most 1 % faster",
    "debug": "leave it out, since ranks always compare their calls",
    "constant_weight": "declare it by graphar.enable(constant_weights=True), or of a graphar.nn.RowParallelLinear",
    "order": "partition='tp_invariant' of the fused matmuls adds as a tree",
    "out_dtype": "partition='tp_invariant' of the fused matmuls adds as a tree",
}


def check_removed(op: str, names: Iterable[str]) -> None:
    """Raises TypeError for the first unknown argument. The error of a removed option says what to do instead."""
    for name in names:
        if name in REMOVED:
            raise TypeError(f"{op}: {name}= was removed: {REMOVED[name]}")
        raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")


def check_together(op: str, codec: object, epilogue: object, residual: object = None) -> None:
    if residual is not None and codec is None and epilogue is None:
        raise ValueError(f"{op}: residual= holds the rounding errors of a codec, and needs codec=")
    if epilogue is not None and (codec is not None or residual is not None):
        raise ValueError(f"{op}: takes a codec or an epilogue, not both")


def by_rank(op: str, **values: Any) -> list[tuple]:
    """Returns the values of each rank: the given ones, or if the first is a list the n-th of every list."""
    (first, xs), *others = values.items()
    if not isinstance(xs, (list, tuple)):
        return [tuple(values.values())]
    for name, of_ranks in others:
        tensor_checks.check_one_each(op, name, of_ranks, xs, first)
    return list(zip(*values.values(), strict=True))


def check_input(op: str, x: Any, name: str = "x") -> None:
    """Raises unless ``x`` is a tensor of a dtype that graphar sums, or a list with one for each rank."""
    if isinstance(x, (list, tuple)):
        tensor_checks.check_list(op, x)
    else:
        tensor_checks.check_tensor(op, name, x)


def check_rows(op: str, name: str, x: torch.Tensor) -> None:
    """Raises ValueError unless ``x`` has a dtype of 16 bits or fp32, and columns."""
    check_float(op, name, x)
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{op}: {name} must have columns, got the shape {list(x.shape)}")


def check_float(op: str, name: str, x: torch.Tensor, of: str = "") -> None:
    """Raises ValueError unless ``x`` has a dtype of 16 bits or fp32. ``of`` says in which calls it must."""
    if x.dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: {of}{name} must be bfloat16, float16 or float32, got {x.dtype}")


def check_beside(
    op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], x: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raises unless ``tensor`` has ``shape``, the device of ``x``, and ``dtype``, or if that is None the dtype of x."""
    tensor_checks.check_tensor(op, name, tensor)
    dtype = dtype or x.dtype
    if (tuple(tensor.shape), tensor.dtype, tensor.device) != (tuple(shape), dtype, x.device):
        got = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{op}: {name} must be {list(shape)} {dtype} on {x.device}, got {got}")


def check_result(op: str, out: Any, shape: Sequence[int], dtype: torch.dtype, sources: Sequence[torch.Tensor]) -> None:
    """Raises unless ``out`` can take a rank's result of its ``sources``. Whether they share memory is checked later."""
    tensor_checks.check_strided(op, "out", out)
    wanted = {"shape": torch.Size(shape), "dtype": dtype, "device": sources[0].device}
    tensor_checks.check_destination(op, "out", out, wanted, "result", sources)


def check_number(op: str, name: str, number: object, least: float = -math.inf) -> float:
    # Comparisons, because torch.compile does not trace math.isfinite.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not -math.inf < number < math.inf:
        raise ValueError(f"{op}: {name} must be a finite number, got {number!r}")
    if number < least:
        raise ValueError(f"{op}: {name} must be at least {least:g}, got {number!r}")
    return float(number) + 0.0  # -0.0 becomes 0.0, which has the same plan


def codec_option(op: str, codec: Codec | str | None, residual: object = None) -> str:
    """Returns the text of a codec, or "". The op checks the text later, in code that a compiler does not trace."""
    if codec is None:
        return ""
    if isinstance(codec, str) and "feedback" not in codec:
        return codec
    checked = as_codec(op, codec)
    if residual is None and checked.feedback:
        raise ValueError(f"{op}: a codec with feedback=True needs a residual, which allreduce and reducescatter take")
    return checked.text


def epilogue_option(
    op: str, epilogue: object, like: torch.Tensor, ranks: int | None, whole: int | None = None, bias=None
) -> dict[str, Any]:
    """Returns the arguments in a schema of an epilogue for sums like ``like``, to which a ``bias`` is added first.

    ``ranks`` is the length of a list call's lists, or None. ``whole`` is a dimension of ``like`` that is a rank's part:
    a tensor with that dimension must have it at full length.
    """
    if epilogue is None:
        return {}
    wanted = as_epilogue(epilogue)
    if bias is not None:
        wanted = wanted.after_bias(bias, like, whole)
    text = wanted.text(like, whole)
    tensors, scalars = wanted.arguments()
    if ranks is None and not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ValueError(f"{op}: with one tensor, an epilogue's tensors are tensors, not lists")
    if ranks is not None:
        if any(isinstance(of_ranks, torch.Tensor) or len(of_ranks) != ranks for of_ranks in tensors):
            raise ValueError(f"{op}: with a list, an epilogue's tensors are lists of {ranks}, one a device")
        tensors = [of_ranks[rank] for rank in range(ranks) for of_ranks in tensors]
    for tensor in tensors:
        tensor_checks.check_local(op, "an epilogue's tensor", tensor)
    return {"epilogue": text, "tensors": tensors, "scalars": scalars}


def applied(op: str, arguments: Arguments, outs: Tensors) -> AppliedEpilogue | None:
    """Returns the epilogue of a call for the ranks' results ``outs``; None if the call has no epilogue."""
    if not arguments.epilogue:
        return None
    tensors, count = arguments.tensors, len(arguments.tensors) // len(outs)
    of_ranks = [tensors[rank * count :][:count] for rank in range(len(outs))]
    bound = [bind(op, arguments.epilogue, *pair, arguments.scalars) for pair in zip(outs, of_ranks, strict=True)]
    if len({form.dtypes for form, _ in bound}) > 1:
        raise ValueError(f"{op}: the tensors of an epilogue must have equal dtypes on all ranks")
    return AppliedEpilogue(bound[0][0], [inputs for _, inputs in bound])


def operands(
    lists: Sequence[Sequence[torch.Tensor]], outs: Sequence[tuple], followed: AppliedEpilogue | None = None
) -> list[Operands]:
    """Returns the operands of each rank of this process: its tensor of every list, its results, and the epilogue's."""
    ranks = list(zip(*lists, strict=True))
    if not followed:
        return [Operands(of_rank, results) for of_rank, results in zip(ranks, outs, strict=True)]
    return [
        Operands((*of_rank, *more.tensors), results, tuple(more.scalars), more.corner)
        for of_rank, results, more in zip(ranks, outs, followed.inputs, strict=True)
    ]


def check_apart_from_epilogue(op: str, outs: Tensors, tensors: Tensors) -> None:
    """Raises ValueError if ``outs`` share memory with an epilogue's tensors, which kernels read while they store."""
    named = {f"tensor {at} of the epilogue": [tensor] for at, tensor in enumerate(tensors)}
    tensor_checks.check_apart(op, outs, **named)
