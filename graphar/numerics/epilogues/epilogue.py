"""The public class Epilogue, and what an epilogue becomes for the tensors of a call."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphar.numerics.dtypes import TYPE_NAMES, fp32
from graphar.numerics.epilogues import syntax
from graphar.numerics.epilogues.code import Corner, Generated, evaluate, generate
from graphar.numerics.epilogues.syntax import Expression, parse
from graphar.numerics.epilogues.tracer import trace

_WINDOW_NUMEL = 1 << 20  # elements evaluated at once, to bound memory: a place takes 8 bytes


class Epilogue:
    """Elementwise work on the fp32 sum of an all-reduce or reduce-scatter, before it is rounded and stored.

    :func:`graphar.fused_allgather_matmul` takes one, too: there it works on the fp32 product.

    ``Epilogue("v * scale + bias[col]", scale=0.5, bias=bias)`` is an expression, with C's syntax. ``v`` is the sum.
    ``row``, ``col`` and ``index`` are the element's place in the tensor, seen as rows of its last dimension. A tensor
    is read at ``[row]``, ``[col]`` or ``[index]``, or at ``[0]`` if it has one element. A name without brackets is a
    number.
    The operators are ``+ - * / < <= > >= == != && || ! ?:``. The functions are abs, sqrt, floor, ceil, trunc, rint,
    relu, hardswish, isnan, max, min, pow, clamp, where, exp, exp2, expm1, log, log2, log1p, sin, cos, tanh, erf, rsqrt,
    sigmoid, silu, gelu, gelu_tanh, softplus, elu, mish, and bf16 and fp16, which round to those types. elu has alpha 1,
    and softplus has beta 1.

    ``Epilogue(lambda v, bias: torch.relu(v + bias), bias=bias)`` is a function of tensors. It is traced into such an
    expression, so it may use pointwise operations, and tensors that broadcast over rows or columns. A function is
    traced once for each combination of its tensors' dtypes and broadcasting. Reuse the function object, and pass
    varying values by name.

    Arguments are passed by name: at most four tensors of bf16, fp16 or fp32, on the device of ``x``, and at most four
    numbers. Changing a number costs no compilation. In a call with a list, a tensor is a list with one per device. All
    ranks of an all-reduce must pass equal arguments, since the algorithm decides which rank computes an element. In a
    reduce-scatter each rank passes the tensors of its part, and positions and shapes refer to that part. A tensor that
    has the part's first dimension must have its full length. In an all-gather + matmul each rank passes the tensors of
    its own result.

    Differentiable once, not twice. The backward pass needs the sum, which a second all-reduce of ``x`` in fp32
    computes. An all-gather + matmul is computed again in the dtype of its result. The gradient of an argument comes
    from this rank's gradient only; it is not summed over ranks. ``out`` must share no memory with the tensors.

    Each operation rounds to fp32. ``+ - * /``, sqrt, and operations that only choose or round give the same bits on
    CPUs and GPUs. The functions pow, and exp to mish, differ by about 1e-6 of their value.

    Args:
        what: the expression, or the function.
        arguments: tensors and numbers by name.

    Raises:
        TypeError: ``what`` is neither an expression nor a function, or an argument is neither a tensor nor a number.
        ValueError: the name of an argument is reserved.
    """

    def __init__(self, what: str | Callable[..., torch.Tensor], /, **arguments) -> None:
        if not isinstance(what, str) and not callable(what):
            raise TypeError(f"epilogue: must be an expression or a function, got {type(what).__name__}")
        self.what = what
        self.tensors: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
        self.scalars: dict[str, float] = {}
        for name in sorted(arguments):
            value = arguments[name]
            if name in syntax.RESERVED:
                raise ValueError(f"epilogue: the name {name!r} is taken, give the argument another one")
            if isinstance(value, (torch.Tensor, list, tuple)):
                self.tensors[name] = value
            elif isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                self.scalars[name] = float(value)
            else:
                raise TypeError(f"epilogue: {name} must be a tensor or a number, got {type(value).__name__}")
        # Equal for epilogues that differ only in the values of their arguments.
        self.key = (what, *self.tensors, None, *self.scalars)

    def text(self, x: torch.Tensor, whole: int | None = None) -> str:
        """Returns the expression for sums like ``x``; ValueError if there is none, or an argument is missing.

        A tensor that has the dimension ``whole`` must have it at full length. None: there is no such dimension.
        """
        if isinstance(self.what, str):
            return _text(self.what, tuple(self.tensors), tuple(self.scalars))
        kinds = tuple([(_kind(tensor, x, whole), tensor.dtype) for tensor in self.of_rank(0).arguments()[0]])
        return _traced_text(self.what, x.ndim, tuple(self.tensors), kinds, tuple(self.scalars))

    def traced(self, x: torch.Tensor) -> Epilogue:
        """Returns an epilogue whose function is replaced by its expression for sums like ``x``.

        Communicator.prepare takes only expressions.
        """
        return Epilogue(self.text(x), **self.tensors, **self.scalars)

    def after_bias(
        self, bias: torch.Tensor | Sequence[torch.Tensor], x: torch.Tensor, whole: int | None = None
    ) -> Epilogue:
        """Returns an epilogue that adds ``bias[col]`` to sums like ``x`` first. It takes one more tensor, the bias."""
        text, name = _text_after_bias(self.text(x, whole), tuple(self.tensors), tuple(self.scalars))
        return Epilogue(text, **self.tensors, **self.scalars, **{name: bias})

    def __repr__(self) -> str:
        what = repr(self.what) if isinstance(self.what, str) else getattr(self.what, "__name__", repr(self.what))
        arguments = [f"{name}=<tensor>" for name in self.tensors]
        arguments += [f"{name}={number}" for name, number in self.scalars.items()]
        return f"Epilogue({', '.join([what, *arguments])})"

    def of_rank(self, rank: int) -> Epilogue:
        """Returns an epilogue in which each list of tensors is replaced by the tensor of ``rank``."""
        tensors = {name: x if isinstance(x, torch.Tensor) else x[rank] for name, x in self.tensors.items()}
        return Epilogue(self.what, **tensors, **self.scalars)

    def arguments(self) -> tuple[list, list[float]]:
        """Returns the tensors and the numbers, each sorted by name."""
        return list(self.tensors.values()), list(self.scalars.values())


def as_epilogue(epilogue: Any) -> Epilogue:
    """Returns an :class:`Epilogue` as it is, or makes one without arguments from an expression or a function."""
    return epilogue if isinstance(epilogue, Epilogue) else Epilogue(epilogue)


def _kind(tensor: torch.Tensor, x: torch.Tensor, whole: int | None = None) -> str:
    """Returns how a tensor broadcasts over ``x``: for each of its dimensions "x" for the size of ``x``, or "1".

    The size of ``x`` along ``whole`` does not change the result, so ranks whose parts differ along it get the same
    string.
    """
    if tensor.shape == x.shape:
        return "x" * x.ndim
    missing = x.ndim - tensor.ndim
    letters = ["x" if size != 1 or at == whole else "1" for at, size in enumerate(tensor.shape, missing)]
    if missing < 0 or any(
        letter == "x" and a != b for letter, a, b in zip(letters, tensor.shape, x.shape[missing:], strict=True)
    ):
        raise ValueError(f"epilogue: a tensor of shape {list(tensor.shape)} does not broadcast over {list(x.shape)}")
    return "".join(letters)


def _constant_to_compilers(function: Callable) -> Callable:
    """Caches a function, and does what torch.compiler.assume_constant_result does, without importing the compiler."""
    cached = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def of_constants(*arguments):
        return cached(*arguments)

    of_constants.__dict__["_dynamo_marked_constant"] = True
    return of_constants


@_constant_to_compilers
def _text(what: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> str:
    expression = parse(what)
    if bare := set(expression.scalars) & set(tensors):
        name = min(bare)
        raise ValueError(
            f"epilogue: {what!r}: {name!r} is a tensor; write {name}[col] for an element a column, {name}[row] for one "
            f"a row, {name}[index] for a tensor like x, or {name}[0] for one element"
        )
    if bracketed := set(expression.tensors) & set(scalars):
        raise ValueError(f"epilogue: {what!r}: {min(bracketed)!r} is a number; write {min(bracketed)}")
    for kind, named, passed in (("tensor", expression.tensors, tensors), ("number", expression.scalars, scalars)):
        got = f"got {kind}s {', '.join(passed) or 'none'}"
        if missing := set(named) - set(passed):
            advice = f"pass Epilogue(..., {min(missing)}=...); the sum is v"
            raise ValueError(f"epilogue: {what!r} needs the {kind} {min(missing)!r}, {got}; {advice}")
        if spare := set(passed) - set(named):
            raise ValueError(f"epilogue: {what!r} has no {kind} {min(spare)!r}, {got}")
    return what


@_constant_to_compilers
def _text_after_bias(text: str, tensors: tuple[str, ...], scalars: tuple[str, ...]) -> tuple[str, str]:
    name = "bias"
    while name in (*tensors, *scalars):
        name += "_"
    return syntax.written(parse(re.sub(r"\bv\b", f"(v + {name}[col])", text)).tree), name


_traced_text = _constant_to_compilers(trace)


class EpilogueInputs(NamedTuple):
    """One rank's inputs of an epilogue."""

    tensors: list[torch.Tensor]  # contiguous tensors, sorted by name
    scalars: list[float]  # numbers, sorted by name
    corner: Corner | None = None  # for a panel of a larger tensor: row, col and index are places there


@dataclass(frozen=True)
class Pointwise:
    """An elementwise epilogue without the values of its tensors and numbers.

    Kernels are compiled and plans are made for it. It is immutable and hashable.
    """

    text: str  # the expression
    dtypes: tuple[torch.dtype, ...]  # the dtypes of its tensors, sorted by name
    columns: int  # columns of the tensor that the epilogue is for; at least 1

    @property
    def expression(self) -> Expression:
        return parse(self.text)

    @property
    def words(self) -> str:
        """The expression, and the dtypes of its tensors: what ranks agree on."""
        return f"{self.text} of {', '.join(map(str, self.dtypes))}" if self.dtypes else self.text

    @property
    def generated(self) -> Generated:
        return generate(self.text, self.dtypes)

    def apply(self, total: torch.Tensor, inputs: EpilogueInputs, first: int, numel: int) -> torch.Tensor:
        """Returns the fp32 values for the fp32 sums ``total``, from element ``first`` of a tensor of ``numel`` on."""
        result = torch.empty_like(total)
        for start in range(0, total.numel(), _WINDOW_NUMEL):
            window = slice(start, start + _WINDOW_NUMEL)
            result[window] = self._apply_window(total[window], inputs, first + start, numel)
        return result

    def _apply_window(self, v: torch.Tensor, inputs: EpilogueInputs, first: int, numel: int) -> torch.Tensor:
        # Past the tensor's end its last element is repeated.
        index, columns = torch.arange(first, first + v.numel(), device=v.device).clamp_(max=numel - 1), self.columns
        if inputs.corner is not None:
            row, column, whole_columns = inputs.corner
            index = (index // columns + row) * whole_columns + index % columns + column
            columns = whole_columns

        places = {"row": lambda: index // columns, "col": lambda: index % columns, "index": lambda: index}

        def read(x: torch.Tensor, subscript: str) -> torch.Tensor:
            return x.reshape(-1) if subscript == "0" else x.reshape(-1)[places[subscript]()]

        return evaluate(self.expression, v, inputs.tensors, inputs.scalars, places, read)

    def apply_whole(self, total: torch.Tensor, inputs: EpilogueInputs) -> torch.Tensor:
        """Returns the epilogue's values, in fp32, for all sums of a tensor. Differentiable."""
        if not total.numel():
            return total
        rows, columns = total.numel() // self.columns, self.columns
        row, col = (torch.arange(count, device=total.device) for count in (rows, columns))
        places = {"row": lambda: row[:, None], "col": lambda: col, "index": lambda: row[:, None] * columns + col}

        shapes = {"row": (rows, 1), "col": (1, columns), "index": (rows, columns), "0": (1, 1)}

        def read(x: torch.Tensor, subscript: str) -> torch.Tensor:
            return x.reshape(shapes[subscript])  # it broadcasts: then its gradient is a sum over rows or columns

        v = total.reshape(rows, columns)
        values = evaluate(self.expression, v, inputs.tensors, inputs.scalars, places, read)
        return values.reshape(total.shape)


def bind(
    op: str, text: str, x: torch.Tensor, tensors: Sequence[torch.Tensor], scalars: Sequence[float]
) -> tuple[Pointwise, EpilogueInputs]:
    """Returns the form of an expression for results like ``x``, and one rank's inputs, which are sorted by name.

    ValueError, which names ``op``, if kernels do not sum the dtype of ``x``, or an argument does not fit ``x`` or the
    expression.
    """
    properties = tuple([(tensor.dtype, tensor.numel(), tensor.device) for tensor in tensors])
    form = _form(op, text, x.shape, x.dtype, x.device, properties, len(scalars))
    readable = [tensor.resolve_neg().contiguous() for tensor in tensors]  # kernels read raw memory
    return form, EpilogueInputs(readable, list(map(fp32, scalars)))


@functools.lru_cache(maxsize=4096)
def _form(
    op: str, text: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, properties: tuple, scalars: int
) -> Pointwise:
    if dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: an epilogue works on sums of bfloat16, float16 and float32, got a tensor of {dtype}")
    expression = parse(text)
    if (len(properties), scalars) != (len(expression.tensors), len(expression.scalars)):
        raise ValueError(f"{op}: {text!r} takes tensors {expression.tensors} and numbers {expression.scalars}")
    numels = {}
    for name, (of_tensor, numel, its_device) in zip(expression.tensors, properties, strict=True):
        if of_tensor not in TYPE_NAMES:
            raise ValueError(f"{op}: {name} must be bfloat16, float16 or float32, got {of_tensor}")
        if its_device != device:
            raise ValueError(f"{op}: {name} must be on the device of x, {device}, got {its_device}")
        numels[name] = numel
    columns = shape[-1] if shape else 1
    wanted: dict[str, int] = dict(zip(syntax.SUBSCRIPTS, (shape[:-1].numel(), columns, shape.numel(), 1), strict=True))
    for operand in expression.operands:
        if numels[operand.name] != wanted[operand.subscript]:
            needs = f"{operand} needs {wanted[operand.subscript]} element(s) for x of shape {list(shape)}"
            raise ValueError(f"{op}: {needs}, {operand.name} has {numels[operand.name]}")
    return Pointwise(text, tuple(of_tensor for of_tensor, _, _ in properties), max(1, columns))


class AppliedEpilogue(NamedTuple):
    """The epilogue of one call: its form, and the inputs of each rank of this process."""

    form: Pointwise
    inputs: list[EpilogueInputs]


def form_to_prepare(epilogue: object) -> Pointwise:
    """Returns the form that Communicator.prepare compiles kernels for, before any call.

    ValueError if the epilogue is a function, or a tensor has another dtype than bf16, fp16 and fp32.
    """
    epilogue = as_epilogue(epilogue)
    if not isinstance(epilogue.what, str):
        raise ValueError(
            "prepare: an epilogue must be an expression, got a function; pass epilogue.traced(x), with x like the sums"
        )
    dtypes = tuple([tensor.dtype for tensor in epilogue.of_rank(0).arguments()[0]])
    if unknown := set(dtypes) - set(TYPE_NAMES):
        raise ValueError(f"prepare: the tensors of an epilogue must be bfloat16, float16 or float32, got {unknown}")
    return Pointwise(_text(epilogue.what, tuple(epilogue.tensors), tuple(epilogue.scalars)), dtypes, columns=1)
