"""Which way a call of a communicator takes: the shape of its kernel, and the reason in words."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphar.errors import UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.numerics.norms import OPS as NORM_OPS
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import NORM_ROW_PACKS, PACK_NBYTES, Algorithm, Shape, largest_nbytes
from graphar.plan.chooser import (
    choose,
    choose_for_parts,
    choose_norm,
    choose_quantized,
    choose_quantized_scatter,
    expected_quantized_us,
    expected_us,
    serving,
    why_not_quantized,
    why_too_large,
)
from graphar.plan.explanation import Explanation
from graphar.runtime import prefetch
from graphar.runtime.catalogue import (
    BYTE,
    CLUSTERS,
    DIRECT_OPERANDS,
    EPILOGUE_KERNELS,
    MAX_RANKS,
    TYPE_NAMES,
    element_types,
)

if TYPE_CHECKING:
    from graphar.communicator import Communicator
    from graphar.numerics.epilogues.epilogue import Form

FALLBACK = Shape(Algorithm.FALLBACK, 0, 0)
HIERARCHICAL = Shape(Algorithm.HIERARCHICAL, 0, 0)
_PIPELINED_NBYTES = 1 << 20  # from here on few blocks do it by two_shot_pipelined, which pipelines what each has to do
_NORMS = (Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT)
_WITH_EPILOGUE = tuple([Algorithm(name) for name in EPILOGUE_KERNELS])
_DIRECTLY = {"input": "straight from the symmetric inputs", "output": "straight into the symmetric output"}


def choose_call(
    communicator: Communicator,
    op: str,
    counts: int | tuple[int, ...],
    x: torch.Tensor,
    algorithm: str,
    way: Codec | tuple | None,
    blocks: int | None,
) -> tuple[Shape, dict[str, object]]:
    """The shape of any call like the one with ``x``, and what the fallback for it is given besides its tensors.

    Args:
        op: as graphar.fallback names it.
        counts: the elements of each rank's part, or of the whole tensor where the op has no parts.
        way: the codec, or else the symmetric operands of an all-reduce, behind its epilogue if it has one.
    """
    match op:
        case "allreduce":
            shape = choose_allreduce(communicator, x, algorithm, way, blocks)[0]
            return shape, {"hierarchy": communicator.hierarchy} if shape is HIERARCHICAL else {}
        case "prefetching_allreduce":  # by a shape that does not, where it cannot
            shape = choose_allreduce(communicator, x, algorithm, way, blocks)[0]
            can = prefetch.pays(shape.algorithm, x.numel() * x.element_size()) and communicator._runner.can_prefetch()
            return prefetch.prefetching(shape) if can else shape, {}
        case "epilogue_allreduce":
            return choose_with_epilogue(communicator, x, algorithm, *way, blocks)[0], {"form": way[0]}
        case "epilogue_reducescatter":
            shape = choose_parts(communicator, "reducescatter", x, counts)
            return replace(shape, epilogue=way[0]), {"form": way[0], "counts": counts}
        case "epilogue_allreduce_residual_rmsnorm":
            return choose_norm(communicator.world_size, x, way[0], communicator._runner.has_clusters()), {}
        case "quantized_allreduce":
            shape = choose_quantized_allreduce(communicator, x, algorithm, way)[0]
            if shape is HIERARCHICAL:
                return shape, {"hierarchy": communicator.hierarchy, "codec": way}
            return shape, {"codec": way, "calls": communicator._quantized_calls}
        case "quantized_reducescatter":
            shape = choose_quantized_parts(communicator, x, counts, way)
            return shape, {"codec": way, "calls": communicator._quantized_calls, "counts": counts}
        case _:
            return choose_parts(communicator, op, x, counts), {"counts": counts}


def why_no_kernel(world_size: int, x: torch.Tensor, op: str) -> str:
    """Why no kernel serves ``op`` with tensors like ``x`` between so many ranks, or nothing."""
    if world_size == 1:
        return "one rank has nothing to add"
    if x.device.type == "cpu":
        return "the tensor is on the CPU"
    if op != "allgather" and x.dtype not in TYPE_NAMES:
        return f"no kernel adds {x.dtype}"
    return f"kernels serve at most {MAX_RANKS} ranks, not {world_size}" if world_size > MAX_RANKS else ""


def choose_allreduce(
    communicator: Communicator,
    x: torch.Tensor,
    algorithm: str,
    symmetric: tuple[str, ...] | None,
    blocks: int | None = None,
) -> tuple[Shape, str]:
    """The shape of an all-reduce and the reason for it; UnsupportedError where ``algorithm`` cannot serve it.

    Args:
        symmetric: its symmetric operands, see SymmetricTensors.operands; None: there are no symmetric tensors.
        blocks: the most there may be; "auto" then takes what needs few.
    """
    nbytes = x.numel() * x.element_size()
    if algorithm == Algorithm.FALLBACK.value:
        return FALLBACK, "asked for"
    if algorithm == Algorithm.HIERARCHICAL.value:
        return _choose_hierarchical(communicator, x)
    problem = communicator._why_no_kernel(x)
    asked = None if algorithm == "auto" else Algorithm(algorithm)
    if asked and not problem:
        problem = why_too_large(asked, communicator.world_size, nbytes)
        if x.dtype not in element_types(asked.value):
            problem = f"it has no kernel for {x.dtype}"
        elif not problem and not asked.exact:
            problem = communicator._runner.why_no_multicast()
    if problem:
        return _without_kernel(algorithm, problem)
    if blocks and nbytes >= _PIPELINED_NBYTES:
        asked = asked or Algorithm.TWO_SHOT_PIPELINED
    shape, table = choose(communicator._table, communicator.world_size, nbytes, asked)
    why = "asked for, shaped" if asked else "the fastest"
    reason = f"{why} by table {table!r} for {communicator.world_size} ranks and {nbytes} bytes"
    operand = DIRECT_OPERANDS.get(shape.algorithm)
    if symmetric and operand in symmetric:
        return replace(shape, direct=True), f"{reason}, {_DIRECTLY[operand]}"
    return shape, reason


def _choose_hierarchical(communicator: Communicator, x: torch.Tensor, codec: Codec | None = None) -> tuple[Shape, str]:
    if communicator.world_size == 1:
        return FALLBACK, "one rank has nothing to add"
    if codec and (codec.feedback or codec.rounding == "stochastic"):
        kind = "a residual" if codec.feedback else "stochastic rounding"
        raise UnsupportedError(f"allreduce: hierarchical cannot serve this call: it rounds sums, without {kind}")
    reason = communicator.hierarchy.set_up(x)
    return HIERARCHICAL, f"{reason}; across hosts {codec.bits_per_element:g} bits an element" if codec else reason


def choose_with_epilogue(
    communicator: Communicator,
    x: torch.Tensor,
    algorithm: str,
    form: Form,
    symmetric: tuple[str, ...] | None,
    blocks: int | None = None,
) -> tuple[Shape, str]:
    """As :func:`choose_allreduce`, with an epilogue."""
    if algorithm not in ("auto", Algorithm.FALLBACK.value, *EPILOGUE_KERNELS):
        raise UnsupportedError(f"allreduce: {algorithm} has no kernel with an epilogue; {EPILOGUE_KERNELS} have")
    shape, reason = choose_allreduce(communicator, x, algorithm, symmetric, blocks)
    if shape.algorithm is not Algorithm.FALLBACK and shape.algorithm not in _WITH_EPILOGUE:  # by a table
        reason = f"{shape.algorithm.value}, {reason}, has no kernel with an epilogue"
        shape, _ = choose_allreduce(communicator, x, Algorithm.TWO_SHOT_PIPELINED.value, symmetric)
    return replace(shape, epilogue=form), f"{reason}; with the epilogue {form.text}"


def choose_quantized_allreduce(
    communicator: Communicator, x: torch.Tensor, algorithm: str, codec: Codec
) -> tuple[Shape, str]:
    """As :func:`choose_allreduce`, with ``codec`` on the wire."""
    if algorithm == Algorithm.FALLBACK.value:
        return FALLBACK, "asked for"
    if algorithm == Algorithm.HIERARCHICAL.value:
        return _choose_hierarchical(communicator, x, codec)
    world_size, nbytes = communicator.world_size, x.numel() * x.element_size()
    asked = None if algorithm == "auto" else Algorithm(algorithm)
    problem = communicator._why_no_kernel(x)
    if asked and not problem:
        problem = why_not_quantized(asked, codec, world_size, nbytes)
    if problem:
        return _without_kernel(algorithm, problem)
    if not x.numel():
        return FALLBACK, "an empty tensor has no tile"
    saved = 8 * x.element_size() / codec.bits_per_element
    wire = f"{codec.bits_per_element:g} bits an element on the wire, {saved:.2g} times fewer than {x.dtype}"
    shape = choose_quantized(codec, world_size, x.numel(), x.element_size(), asked)
    return shape, f"{wire}, for {world_size} ranks and {nbytes} bytes"


def norm_rows(communicator: Communicator, x: torch.Tensor) -> int:
    """How many rows of ``x`` a launch of allreduce_residual_rmsnorm takes at most; 0: none has a kernel."""
    row_nbytes = x.shape[-1] * x.element_size()
    if communicator._why_no_kernel(x) or not has_norm_kernel(row_nbytes):
        return 0
    return largest_nbytes(Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT, communicator.world_size) // row_nbytes


def has_norm_kernel(row_nbytes: int) -> bool:
    """Whether kernels norm rows of so many bytes."""
    return row_nbytes % PACK_NBYTES == 0 and row_nbytes <= NORM_ROW_PACKS * PACK_NBYTES


def algorithms_of(codec: Codec, op: str) -> list[Algorithm]:
    """What `auto` takes for ``op`` with ``codec``, of any size; nothing for an op without codecs."""
    every = [algorithm for algorithm in Algorithm if algorithm.op == f"quantized_{op}"]
    return [algorithm for algorithm in every if not why_not_quantized(algorithm, codec, 2, 0)]


def _without_kernel(algorithm: str, problem: str) -> tuple[Shape, str]:
    if algorithm != "auto":
        raise UnsupportedError(f"allreduce: {algorithm} cannot serve this call: {problem}")
    return FALLBACK, problem


def choose_parts(communicator: Communicator, op: str, x: torch.Tensor, counts: tuple[int, ...]) -> Shape:
    """The shape of a reduce-scatter or all-gather whose ranks' parts have ``counts`` elements."""
    if communicator._why_no_kernel(x, op):
        return FALLBACK
    return choose_for_parts(op, max(counts) * x.element_size())


def choose_quantized_parts(communicator: Communicator, x: torch.Tensor, counts: tuple[int, ...], codec: Codec) -> Shape:
    """As :func:`choose_parts`, for a reduce-scatter with ``codec`` on the wire."""
    if communicator._why_no_kernel(x) or not any(counts):  # nothing has no tile
        return FALLBACK
    return choose_quantized_scatter(codec, communicator.world_size, max(counts))


def needed_kernels(
    communicator: Communicator,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec],
    forms: Sequence[Form],
) -> Iterator[tuple[Algorithm, torch.dtype, bool, Codec | None, Form | None]]:
    """What calls of ``ops`` may need, as Runner.prepare takes it; its arguments are Communicator.prepare's."""
    outputs = {op: output for output, op in NORM_OPS.items()}
    clusters = CLUSTERS if communicator._runner.has_clusters() else (1,)
    for op in ops:
        if op in outputs:
            for algorithm, dtype, cluster in itertools.product(_NORMS, dtypes, clusters):
                yield algorithm, dtype, False, None, RmsNorm(1, cluster, outputs[op])
            continue
        for dtype in [BYTE] if op == "allgather" else dtypes:
            for algorithm in _algorithms_up_to(communicator, max_nbytes, op):
                for direct in _directly_or_not(communicator, algorithm):
                    yield algorithm, dtype, direct, None, None
        for codec in codecs:
            for dtype in dtypes:
                for algorithm in algorithms_of(codec, op):
                    yield algorithm, dtype, False, codec, None
        for form in forms if op != "allgather" else ():
            found = _algorithms_up_to(communicator, max_nbytes, op)
            if op == "allreduce":  # as in choose_with_epilogue
                found = dict.fromkeys(one if one in _WITH_EPILOGUE else Algorithm.TWO_SHOT_PIPELINED for one in found)
            for algorithm in found:
                for direct in _directly_or_not(communicator, algorithm):
                    for dtype in dtypes:
                        yield algorithm, dtype, direct, None, form


def _directly_or_not(communicator: Communicator, algorithm: Algorithm) -> tuple[bool, ...]:
    return (False, True) if communicator._symmetric and algorithm in DIRECT_OPERANDS else (False,)


def _algorithms_up_to(communicator: Communicator, max_nbytes: int | None, op: str) -> list[Algorithm]:
    """What `auto` takes for any size up to ``max_nbytes``, also in few blocks, beside other work."""
    if op != "allreduce":
        return [algorithm for algorithm in Algorithm if algorithm.op == op]
    rows = serving(communicator._table, communicator.world_size).rows[communicator.world_size]
    limits = [math.inf if row["max_nbytes"] is None else row["max_nbytes"] for row in rows]
    last = bisect_left(limits, math.inf if max_nbytes is None else max_nbytes)
    found = [Algorithm(row["algorithm"]) for row in rows[: last + 1]]
    beside = [Algorithm.TWO_SHOT_PIPELINED] if max_nbytes is None or max_nbytes >= _PIPELINED_NBYTES else []
    return list(dict.fromkeys(found + beside))


def explain(
    communicator: Communicator,
    x,
    algorithm: str,
    symmetric: tuple[str, ...] | None,
    codec: Codec | None,
    form: Form | None = None,
) -> Explanation:
    """What graphar.explain says; ``x`` is the call's tensor, or list of them."""
    first = x if communicator.devices is None else x[0]
    if form:
        shape, reason = choose_with_epilogue(communicator, first, algorithm, form, symmetric)
    elif codec:
        shape, reason = choose_quantized_allreduce(communicator, first, algorithm, codec)
    else:
        shape, reason = choose_allreduce(communicator, first, algorithm, symmetric)
    stand_in = "stand-in for " if communicator._multimem_stand_in and not shape.algorithm.exact else ""
    expected = exact = None
    if algorithm == "auto" and shape.algorithm is not Algorithm.FALLBACK and not shape.direct and not form:
        table, world_size = communicator._table, communicator.world_size
        expected = expected_us(table, world_size, first.numel() * first.element_size())
        if codec:
            exact, expected = expected, expected_quantized_us(table, codec, world_size, first.numel())
    return Explanation(stand_in + shape.algorithm.value, shape.blocks, shape.threads, reason, expected, exact)
