"""Which way a call of a communicator takes: the shape of its kernel, and the reason in words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphar.algorithms import Algorithm, Shape
from graphar.chooser import (
    choose,
    choose_for_parts,
    choose_quantized,
    choose_quantized_scatter,
    expected_quantized_us,
    expected_us,
    why_not_quantized,
    why_too_large,
)
from graphar.codecs import Codec
from graphar.errors import UnsupportedError
from graphar.explanation import Explanation
from graphar.kernels import DIRECT_OPERANDS, element_types

if TYPE_CHECKING:
    from graphar.communicator import Communicator

FALLBACK = Shape(Algorithm.FALLBACK, 0, 0)
_PIPELINED_NBYTES = 1 << 20  # from here on few blocks do it by two_shot_pipelined, which pipelines what each has to do
_DIRECTLY = {"input": "straight from the symmetric inputs", "output": "straight into the symmetric output"}


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
    if blocks and x.numel() * x.element_size() >= _PIPELINED_NBYTES:
        asked = asked or Algorithm.TWO_SHOT_PIPELINED
    shape, table = choose(communicator._table, communicator.world_size, nbytes, asked)
    why = "asked for, shaped" if asked else "the fastest"
    reason = f"{why} by table {table!r} for {communicator.world_size} ranks and {nbytes} bytes"
    operand = DIRECT_OPERANDS.get(shape.algorithm)
    if symmetric and operand in symmetric:
        return replace(shape, direct=True), f"{reason}, {_DIRECTLY[operand]}"
    return shape, reason


def algorithms_up_to(communicator: Communicator, max_nbytes: int | None, op: str) -> list[Algorithm]:
    """What `auto` takes for any size up to ``max_nbytes``."""
    if op != "allreduce":
        return [algorithm for algorithm in Algorithm if algorithm.op == op]
    sizes = [1 << power for power in range(4, 42)]
    if max_nbytes is not None:
        sizes = [n for n in sizes if n < max_nbytes] + [max_nbytes]
    table, world_size = communicator._table, communicator.world_size
    return list(dict.fromkeys(choose(table, world_size, n)[0].algorithm for n in sizes))


def choose_quantized_allreduce(
    communicator: Communicator, x: torch.Tensor, algorithm: str, codec: Codec
) -> tuple[Shape, str]:
    """As :func:`choose_allreduce`, with ``codec`` on the wire."""
    if algorithm == Algorithm.FALLBACK.value:
        return FALLBACK, "asked for"
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


def explain(
    communicator: Communicator, x, algorithm: str, symmetric: tuple[str, ...] | None, codec: Codec | None
) -> Explanation:
    """What graphar.explain says; ``x`` is the call's tensor, or list of them."""
    first = x if communicator.devices is None else x[0]
    if codec:
        shape, reason = choose_quantized_allreduce(communicator, first, algorithm, codec)
    else:
        shape, reason = choose_allreduce(communicator, first, algorithm, symmetric)
    stand_in = "stand-in for " if communicator._multimem_stand_in and not shape.algorithm.exact else ""
    expected = exact = None
    if algorithm == "auto" and shape.algorithm is not Algorithm.FALLBACK and not shape.direct:
        table, world_size = communicator._table, communicator.world_size
        expected = expected_us(table, world_size, first.numel() * first.element_size())
        if codec:
            exact, expected = expected, expected_quantized_us(table, codec, world_size, first.numel())
    return Explanation(stand_in + shape.algorithm.value, shape.blocks, shape.threads, reason, expected, exact)
