"""What users pass as an epilogue, and how it meets a tensor."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphar.numerics.epilogues.code import ELEMENTS, Generated, Whole, Window, evaluate, generate
from graphar.numerics.epilogues.syntax import (
    RESERVED,
    SUBSCRIPTS,
    Apply,
    Expression,
    Name,
    Operand,
    parse,
    replaced,
    written,
)
from graphar.runtime.arguments import EpilogueArguments
from graphar.runtime.catalogue import KernelSource, kernel_source

LIKE_X = "like x"  # the kind of a tensor that has its shape
_WINDOW_NUMEL = 1 << 20  # of what is evaluated at once, where places are numbers of 8 bytes


class Epilogue:
    """Elementwise work on the fp32 sum of an all-reduce or reduce-scatter, before it is rounded and stored.

    ``Epilogue("v * scale + bias[col]", scale=0.5, bias=bias)`` is an expression as in C. ``v`` is the sum; ``row``,
    ``col`` and ``index`` are the element's place in the tensor, seen as rows of its last dimension; ``bias[col]`` is an
    element of a tensor, which is read at ``[row]``, ``[col]``, ``[index]``, or ``[0]`` where it has but one. Besides
    there are ``+ - * / < <= > >= == != && || ! ?:``, and abs, sqrt, floor, ceil, trunc, rint, relu, isnan, max, min,
    pow, clamp, exp, exp2, expm1, log, log2, log1p, sin, cos, tanh, erf, rsqrt, sigmoid, silu, gelu, gelu_tanh, and bf16
    and fp16, which round to those types.

    ``Epilogue(lambda v, bias: torch.relu(v + bias), bias=bias)`` is a function of tensors, which is traced into such an
    expression: of pointwise operations, and tensors that broadcast over rows or columns. It is traced once for a
    function and its tensors' kinds, so keep it, and pass by name what varies.

    Arguments are passed by name: at most four tensors of bf16, fp16 or fp32, on the device of ``x``, and at most four
    numbers, which cost no compilation when they change. In a call with a list, a tensor is a list of one a device.
    Every rank passes the same: which rank computes an element is up to the algorithm. In a reduce-scatter each rank
    passes those of its own part, whose places and shape count; tensors that have its first dimension have all of it.

    Differentiable, once: the gradient needs the sum, which a second all-reduce makes again, of ``x`` in fp32. That of
    an argument is of this rank alone. ``out`` must share no memory with the tensors.

    Each operation rounds to fp32; ``+ - * /``, sqrt and all that only chooses or rounds gives the same bits on CPUs and
    GPUs. The functions from exp to gelu_tanh differ by some 1e-6 of their value.

    Args:
        what: the expression, or the function.
        arguments: tensors and numbers by name.

    Raises:
        TypeError, ValueError: neither, or an argument is of a kind that epilogues do not take.
    """

    def __init__(self, what: str | Callable[..., torch.Tensor], /, **arguments) -> None:
        if not isinstance(what, str) and not callable(what):
            raise TypeError(f"epilogue: must be an expression or a function, got {type(what).__name__}")
        self.what = what
        self.tensors: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
        self.scalars: dict[str, float] = {}
        for name in sorted(arguments):
            value = arguments[name]
            if name in RESERVED:
                raise ValueError(f"epilogue: the name {name!r} is taken, give the argument another one")
            if isinstance(value, (torch.Tensor, list, tuple)):
                self.tensors[name] = value
            elif isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                self.scalars[name] = float(value)
            else:
                raise TypeError(f"epilogue: {name} must be a tensor or a number, got {type(value).__name__}")

    def text(self, x: torch.Tensor, whole: int | None = None) -> str:
        """The expression for sums like ``x``; a ValueError says what cannot be one, or which argument is missing.

        ``whole`` is a dimension that tensors do not broadcast over, where they have it.
        """
        if isinstance(self.what, str):
            return _text(self.what, tuple(self.tensors), tuple(self.scalars))
        kinds = tuple([(_kind(one, x, whole), one.dtype) for one in self.of_rank(0).tensors.values()])
        return _traced_text(self.what, x.ndim, tuple(self.tensors), kinds, tuple(self.scalars))

    def traced(self, x: torch.Tensor) -> Epilogue:
        """This one with, in place of its function, the expression for sums like ``x``: for Communicator.prepare."""
        return Epilogue(self.text(x), **self.tensors, **self.scalars)

    def after_bias(
        self, bias: torch.Tensor | Sequence[torch.Tensor], x: torch.Tensor, whole: int | None = None
    ) -> Epilogue:
        """This one of sums to which ``bias`` has been added, an element a column: a tensor more.

        ``x`` and ``whole`` are as for :meth:`text`.
        """
        text, name = _text_after_bias(self.text(x, whole), tuple(self.tensors), tuple(self.scalars))
        return Epilogue(text, **self.tensors, **self.scalars, **{name: bias})

    def of_rank(self, rank: int) -> Epilogue:
        """One of whose tensors those that are lists are the rank's own."""
        tensors = {name: one if isinstance(one, torch.Tensor) else one[rank] for name, one in self.tensors.items()}
        return Epilogue(self.what, **tensors, **self.scalars)

    def arguments(self) -> tuple[list, list[float]]:
        """Tensors and numbers, in the order of their names."""
        return list(self.tensors.values()), list(self.scalars.values())


def as_epilogue(epilogue: object) -> Epilogue:
    """An :class:`Epilogue`, or one without arguments of an expression or a function."""
    return epilogue if isinstance(epilogue, Epilogue) else Epilogue(epilogue)


def _kind(tensor: torch.Tensor, x: torch.Tensor, whole: int | None = None) -> str:
    """How a tensor broadcasts over ``x``: for each dimension "x" for its size, or "1"; LIKE_X where none differs.

    The size of ``x`` along ``whole`` does not matter: ranks whose parts differ in it get the same kind.
    """
    if tensor.shape == x.shape:
        return LIKE_X
    missing = x.ndim - tensor.ndim
    sizes = tuple(x.shape)[max(0, missing) :]
    at_whole = None if whole is None else whole - missing
    if missing < 0 or any(
        a != b and (a != 1 or at == at_whole) for at, (a, b) in enumerate(zip(tensor.shape, sizes, strict=True))
    ):
        raise ValueError(f"epilogue: a tensor of shape {list(tensor.shape)} does not broadcast over {list(x.shape)}")
    return "".join(["x" if a != 1 or at == at_whole else "1" for at, a in enumerate(tensor.shape)])


def _constant_to_compilers(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result, which would import the whole compiler for it."""
    function._dynamo_marked_constant = True
    return function


@_constant_to_compilers
def _text(what: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> str:
    return _checked_text(what, tensors, scalars)


@functools.lru_cache(maxsize=1024)
def _checked_text(what: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> str:
    found = parse(what)
    for kind, named, given in (("tensor", found.tensors, tensors), ("number", found.scalars, scalars)):
        if named != given:
            missing, spare = sorted(set(named) - set(given)), sorted(set(given) - set(named))
            wrong = f"needs the {kind} {missing[0]!r}" if missing else f"has no {kind} {spare[0]!r}"
            raise ValueError(f"epilogue: {what!r} {wrong}, got {kind}s {', '.join(given) or 'none'}")
    return what


@_constant_to_compilers
def _text_after_bias(text: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> tuple[str, str]:
    name = "bias"
    while name in (*tensors, *scalars):
        name += "_"
    v = Name("v")
    return written(replaced(parse(text).tree, v, Apply("+", (v, Operand(name, "col"))))), name


@_constant_to_compilers
def _traced_text(what: Callable, ndim: int, tensors: tuple, kinds: tuple, scalars: tuple) -> str:
    from graphar.numerics.epilogues.tracer import trace  # it takes its time, and few need it

    return trace(what, ndim, tensors, kinds, scalars)


# ---- in a call ------------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """What one rank passes: tensors and numbers in the order of their names; tensors have no gaps.

    Attributes:
        corner: where the sums lie in the tensor whose places are meant, if that is a larger one: their first row and
            column, and that tensor's columns.
    """

    tensors: list[torch.Tensor]
    scalars: list[float]
    corner: tuple[int, int, int] | None = None

    def put(self, arguments: EpilogueArguments) -> None:
        """Writes them into what a kernel is given, which knows its columns."""
        for at, tensor in enumerate(self.tensors):
            arguments.tensor[at] = tensor.data_ptr()
        for at, scalar in enumerate(self.scalars):
            arguments.scalar[at] = scalar
        arguments.first_row, arguments.first_col, arguments.pitch = self.corner or (0, 0, arguments.columns)


@dataclass(frozen=True)
class Form:
    """An epilogue but for its arguments' values: what its kernel is compiled for, and a plan is made for.

    Attributes:
        text: the expression.
        dtypes: of its tensors, sorted by name.
        columns: of the tensor it is for; at least 1.
    """

    text: str
    dtypes: tuple[torch.dtype, ...]
    columns: int
    cluster = 1  # blocks of its kernels

    @property
    def expression(self) -> Expression:
        return parse(self.text)

    @property
    def generated(self) -> Generated:
        return generate(self.text, self.dtypes)

    @property
    def kernel(self) -> str:
        """What tells its kernels from others of their algorithm."""
        return self.generated.name

    def source(self, algorithm: str, dtype: torch.dtype, world_size: int, variant: str | None) -> KernelSource:
        return kernel_source(algorithm, dtype, world_size, variant, self.generated)

    def apply(self, total: torch.Tensor, operands: Operands, first: int, numel: int) -> torch.Tensor:
        """What becomes of fp32 sums, those of the elements from ``first`` on of a tensor of ``numel``; fp32, too."""
        result = torch.empty_like(total)
        for start in range(0, total.numel(), _WINDOW_NUMEL):
            v = total[start : start + _WINDOW_NUMEL]
            window = Window(first + start, v.numel(), self.columns, numel, v.device, operands.corner)
            result[start : start + _WINDOW_NUMEL] = evaluate(
                self.expression, v, operands.tensors, operands.scalars, window
            )
        return result

    def apply_whole(self, total: torch.Tensor, operands: Operands) -> torch.Tensor:
        """As :meth:`apply` for a whole tensor, differentiable."""
        if not total.numel():
            return total
        rows = total.numel() // self.columns
        there = Whole(rows, self.columns, total.device)
        v = total.reshape(rows, self.columns)
        return evaluate(self.expression, v, operands.tensors, operands.scalars, there).reshape(total.shape)


def bind(
    op: str, text: str, x: torch.Tensor, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
) -> tuple[Form, Operands]:
    """The form of an epilogue for tensors like ``x``, and one rank's operands.

    Raises:
        ValueError: ``x`` has a dtype that kernels do not add, or an argument does not fit it.
    """
    given = tuple([(one.dtype, one.numel(), one.device) for one in tensors])
    form = _form(op, text, x.shape, x.dtype, x.device, given, len(scalars))
    own = [one.resolve_neg().contiguous() for one in tensors]  # kernels read memory as it is
    return form, Operands(own, [ctypes.c_float(one).value for one in scalars])


@functools.lru_cache(maxsize=4096)
def _form(
    op: str, text: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, given: tuple, scalars: int
) -> Form:
    if dtype not in ELEMENTS:
        raise ValueError(f"{op}: an epilogue works on sums of bfloat16, float16 and float32, got a tensor of {dtype}")
    found = parse(text)
    if (len(given), scalars) != (len(found.tensors), len(found.scalars)):
        raise ValueError(f"{op}: {text!r} takes tensors {found.tensors} and numbers {found.scalars}")
    numels = {}
    for name, (one_dtype, numel, one_device) in zip(found.tensors, given, strict=True):
        if one_dtype not in ELEMENTS:
            raise ValueError(f"{op}: {name} must be bfloat16, float16 or float32, got {one_dtype}")
        if one_device != device:
            raise ValueError(f"{op}: {name} must be on the device of x, {device}, got {one_device}")
        numels[name] = numel
    columns = shape[-1] if shape else 1
    wanted = dict(zip(SUBSCRIPTS, (shape[:-1].numel(), columns, shape.numel(), 1), strict=True))
    for one in found.operands:
        if numels[one.name] != wanted[one.subscript]:
            needs = f"{one} needs {wanted[one.subscript]} element(s) for x of shape {list(shape)}"
            raise ValueError(f"{op}: {needs}, {one.name} has {numels[one.name]}")
    return Form(text, tuple(one_dtype for one_dtype, _, _ in given), max(1, columns))


class AppliedEpilogue(NamedTuple):
    """An epilogue in one call: its form, and the operands of each rank of this process."""

    form: Form
    operands: list[Operands]

    def in_panel(self, columns: int, corners: Sequence[tuple[int, int]]) -> AppliedEpilogue:
        """For a part of the tensor with so many columns, which begins at each rank's row and column."""
        own = [
            one._replace(corner=(*corner, self.form.columns))
            for one, corner in zip(self.operands, corners, strict=True)
        ]
        return AppliedEpilogue(replace(self.form, columns=columns), own)


def form_to_prepare(epilogue: object) -> Form:
    """What a kernel is compiled for, of an epilogue whose sums have yet to come."""
    epilogue = as_epilogue(epilogue)
    if not isinstance(epilogue.what, str):
        raise ValueError("prepare: a function is traced for sums like the ones to come: give epilogue.traced(x)")
    dtypes = tuple([one.dtype for one in epilogue.of_rank(0).tensors.values()])
    if unknown := set(dtypes) - set(ELEMENTS):
        raise ValueError(f"prepare: the tensors of an epilogue must be bfloat16, float16 or float32, got {unknown}")
    return Form(_text(epilogue.what, tuple(epilogue.tensors), tuple(epilogue.scalars)), dtypes, columns=1)
