"""Hypothesis strategies for calls of any op, shape, dtype, layout and order, and the check of their bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

import graphar
from graphar.plan.algorithms import Algorithm
from tests.cases import ALL_DTYPES, FLOAT_FILLS, KERNEL_DTYPES, LAYOUTS, integers, lay_out, same_bits
from tests.gpu import fits

ONLY_MOVED = (torch.bool, torch.complex64, torch.float8_e4m3fn)  # dtypes of all-gathers


@dataclass(frozen=True)
class Call:
    """One call of all ranks.

    Attributes:
        op: its name.
        shapes: of each rank's tensor.
        dtype: of all of them.
        fill: what makes a rank's data.
        seed: of the data.
        axis: of reducescatter and allgather.
        algorithm: of allreduce.
        layout: how the inputs lie in memory.
        out: the layout of an all-reduce's outputs. "x": the inputs are the outputs. None: new tensors.
    """

    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    fill: Callable
    seed: int
    axis: int = 0
    algorithm: str = "auto"
    layout: str = "contiguous"
    out: str | None = None


def lengths(most: int) -> st.SearchStrategy[int]:
    """Numbers of elements: any, and often those around a pack, a line and a block's share."""
    return st.integers(0, most) | st.sampled_from([n for n in (0, 1, 7, 8, 9, 63, 65, 8191, 8193) if n <= most])


@st.composite
def calls(draw, world_size: int, algorithms: Sequence[str], most: int) -> Call:
    """One call. An all-reduce asks for one of ``algorithms``. A tensor has about ``most`` elements at most.

    If none of the algorithms serves all dtypes, the call is an all-reduce of a dtype and size that they serve.
    """
    general = not {"auto", "fallback"}.isdisjoint(algorithms)
    op = draw(st.sampled_from(["allreduce", "reducescatter", "allgather"] if general else ["allreduce"]))
    dtypes = ALL_DTYPES if general else [one for one in KERNEL_DTYPES if _some_kernel(algorithms, one)]
    dtype = draw(st.sampled_from([*dtypes, *(ONLY_MOVED if op == "allgather" else ())]))
    floats = dtype.is_floating_point and dtype not in (torch.float64, *ONLY_MOVED)
    data = draw(st.sampled_from(FLOAT_FILLS if floats else [integers])), draw(st.integers(0, 9))
    beside = draw(st.lists(st.integers(1, 5), max_size=2))
    axis = draw(st.integers(0, len(beside)))

    def shape_of(length: int) -> tuple[int, ...]:
        return (*beside[:axis], length, *beside[axis:])

    layout = draw(st.sampled_from(LAYOUTS))
    if op == "allgather":
        each = draw(st.lists(lengths(most // 16), min_size=world_size, max_size=world_size))
        return Call(op, tuple(map(shape_of, each)), dtype, *data, axis, layout=layout)
    call = Call(op, (shape_of(draw(lengths(most // 8))),) * world_size, dtype, *data, axis, layout=layout)
    if op == "reducescatter":
        return call
    numel = torch.Size(call.shapes[0]).numel()
    able = [one for one in algorithms if one in ("auto", "fallback") or _serves(one, world_size, numel, dtype)]
    out = draw(st.sampled_from([None, "x", *LAYOUTS]))
    return replace(call, algorithm=draw(st.sampled_from(able)), out=out)


def _some_kernel(algorithms: list[str], dtype: torch.dtype) -> bool:
    return any(dtype in Algorithm(one).row.dtypes for one in algorithms)


def _serves(algorithm: str, world_size: int, numel: int, dtype: torch.dtype) -> bool:
    return world_size > 1 and dtype in KERNEL_DTYPES and fits(algorithm, world_size, numel, dtype)


def make_and_check(call: Call, communicator: graphar.Communicator) -> None:
    """Makes the call in this process; asserts that every rank got the specification's bits, and inputs stayed."""
    shapes = [torch.Size(shape) for shape in call.shapes]
    parts = [call.fill(8 * call.seed + rank, one.numel(), call.dtype).view(one) for rank, one in enumerate(shapes)]
    xs = [lay_out(part.to(device), call.layout) for part, device in zip(parts, communicator.devices, strict=True)]
    in_place = call.out == "x"
    match call.op:
        case "allreduce":
            outs = xs if in_place else call.out and [lay_out(torch.zeros_like(x), call.out) for x in xs]
            ys = communicator.allreduce(xs, out=outs, algorithm=call.algorithm)
            expected = [graphar.reference.allreduce(parts)] * len(parts)
        case "reducescatter":
            ys = communicator.reducescatter(xs, axis=call.axis)
            expected = graphar.reference.reducescatter(parts, call.axis)
        case "allgather":
            ys = communicator.allgather(xs, axis=call.axis)
            expected = [graphar.reference.allgather(parts, call.axis)] * len(parts)
    communicator.synchronize()
    for rank, (y, one) in enumerate(zip(ys, expected, strict=True)):
        assert same_bits(y.cpu(), one) == 0, f"rank {rank}"
    for rank, (x, part) in enumerate(zip(xs, parts, strict=True)):
        assert in_place or same_bits(x.cpu(), part) == 0, f"the input of rank {rank}"
