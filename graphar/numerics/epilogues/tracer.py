"""Traces a Python function of tensors into an expression.

The function is traced to ATen operations, and each of them becomes one or more operations of the expression. It is
traced twice, with two sets of made-up sizes, since the result must not depend on the sizes. The sum is an fp32 tensor,
so operations on it give fp32. Where torch rounds an intermediate result to bf16 or fp16, the expression rounds too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.operations import COMPARISONS, FUNCTIONS
from graphar.numerics.epilogues.syntax import Apply, Name, Node, Operand, number, written

_SIZES = ((7, 11, 13, 17, 19, 23, 29, 31), (8, 12, 14, 18, 20, 24, 30, 32))  # all distinct, and none is 1


def trace(
    function: Callable,
    ndim: int,
    tensors: tuple[str, ...],
    kinds: tuple[tuple[str, torch.dtype], ...],
    scalars: tuple[str, ...],
) -> str:
    """Returns the text of the expression that a function computes; ValueError, which says why, if there is none.

    The function takes the sum ``v`` of ``ndim`` dimensions, tensors and 0-d tensors for the numbers, both by name.
    ``kinds`` says how each tensor broadcasts (``_kind`` in epilogue.py), and its dtype.
    """
    if ndim > len(_SIZES[0]):
        raise ValueError(f"epilogue: functions are traced for tensors of at most {len(_SIZES[0])} dimensions")
    first, second = (_trace(function, sizes[:ndim], tensors, kinds, scalars) for sizes in _SIZES)
    if first != second:
        raise ValueError("epilogue: what the function computes depends on sizes; pass what it needs as a number")
    return first


def _trace(function: Callable, shape: tuple[int, ...], tensors, kinds, scalars) -> str:
    tracer = _Tracer(shape)
    with _disable_current_modes():
        v = tracer.argument(Name("v"), shape)
        named = {name: tracer.argument(Name(name), ()) for name in scalars}
        for name, (kind, dtype) in zip(tensors, kinds, strict=True):
            sizes = zip(kind, shape[len(shape) - len(kind) :], strict=True)
            named[name] = tracer.argument(name, tuple(1 if letter == "1" else size for letter, size in sizes), dtype)
        try:
            with tracer, _Callers(tracer):
                result = function(v, **named)
        except _Captured:
            raise
        except Exception as error:  # the function may raise anything
            where = f"with {list(shape)} in place of the sum's sizes"
            raise ValueError(f"epilogue: the function cannot be traced, {where}: {error}") from error
    return written(tracer.tree(result))


class _Captured(ValueError):
    """A function uses a tensor that is none of its arguments."""

    def __init__(self, x: torch.Tensor) -> None:
        super().__init__(
            f"epilogue: the function holds a tensor of its own, of shape {list(x.shape)}; pass it as an argument: "
            "Epilogue(function, name=tensor)"
        )


class _Callers(TorchFunctionMode):
    """Tells a tracer which function of torch's the user calls. Raises _Captured for tensors with values."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and not x.is_meta:
                raise _Captured(x)
        self._tracer.caller = resolve_name(func) or func.__name__
        return func(*args, **(kwargs or {}))


class _Tracer(TorchDispatchMode):
    """Runs ATen operations on tensors without memory. Each result gets a syntax tree; ``shape`` is the sum's.

    An argument tensor that no operation has used yet has its name in place of a tree: views may change its shape.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape, self.caller = shape, ""
        self._trees: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        # Of the first operation without a tree. What the function itself raises comes before it.
        self._refusal: ValueError | None = None

    def argument(self, tree: Node | str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        self._trees[x] = tree
        return x

    def tree(self, result: object) -> Node:
        """Returns the tree of what the function has returned."""
        if self._refusal:
            raise self._refusal
        if not isinstance(result, torch.Tensor):
            raise ValueError("epilogue: the function must return one tensor")
        if tuple(result.shape) != self._shape:
            raise ValueError("epilogue: what the function returns must have the shape of the sum")
        return self._value(result)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        try:
            tree = None if self._refusal else self._operation(str(func).removeprefix("aten."), args, kwargs, result)
        except ValueError as refusal:
            tree, self._refusal = None, refusal
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._trees[x] = tree
        return result

    def _operation(self, name: str, args: tuple, kwargs: dict, result: torch.Tensor) -> Node | str:
        if name in _VIEWS:
            tree = self._known(args[0])
            if name == "expand.default" or result.shape == args[0].shape or isinstance(tree, str):
                return tree
            raise self._unfusable("it gives the sum, or what was computed, another shape")
        rule = RULES.get(name.partition(".")[0])
        if rule is None:
            raise self._unfusable(f"arithmetic, comparisons, casts and these functions can: {_FUSED}")
        if result.dtype not in (*TYPE_NAMES, torch.bool) and name != "scalar_tensor.default":
            raise self._unfusable(f"it gives {result.dtype}; there are bfloat16, float16, float32 and bool")
        tree = applied(rule, args, kwargs, self._value)
        if tree is None:
            raise self._unfusable("not with these arguments")
        return as_stored(tree, result.dtype)

    def _value(self, x: torch.Tensor) -> Node:
        tree = self._known(x)
        return self._operand(tree, x) if isinstance(tree, str) else tree

    def _known(self, x: torch.Tensor) -> Any:
        if x not in self._trees:
            raise _Captured(x)
        return self._trees[x]

    def _operand(self, name: str, x: torch.Tensor) -> Node:
        """Returns the element that an operation reads of an argument ``x``, in the shape that views gave it."""
        sizes = zip(x.shape, x.stride(), strict=True)
        shape = tuple(size if stride else 1 for size, stride in sizes)  # an expanded dimension has the stride 0
        if math.prod(shape) == 1:
            return Operand(name, "0")
        if shape == self._shape:
            return Operand(name, "index")
        if shape[-1] == self._shape[-1] == math.prod(shape):
            return Operand(name, "col")
        if shape == (*self._shape[:-1], 1):
            return Operand(name, "row")
        raise ValueError(f"epilogue: {name} broadcasts over neither the rows nor the columns of the last dimension")

    def _unfusable(self, why: str) -> ValueError:
        return ValueError(f"epilogue: {self.caller} cannot be fused: {why}")


_FUSED = ", ".join(
    sorted({*FUNCTIONS, "celu", "hardsigmoid", "hardtanh", "leaky_relu", "relu6", "selu"} - {"bf16", "fp16"})
)
_TRUTHS = (*COMPARISONS, "&&", "||", "!", "isnan")  # these give 0 or 1
_ONE, _MINUS_ONE, _SLOPE, _THRESHOLD = map(number, (1.0, -1.0, 0.01, 20.0))  # default arguments of torch's functions


def as_stored(tree: Node, dtype: torch.dtype) -> Node:
    """Returns the value that a tensor of ``dtype`` stores: 0 or 1 for bool, and rounded for bf16 and fp16."""
    if dtype == torch.bool:
        return tree if isinstance(tree, Apply) and tree.operation in _TRUTHS else Apply("!=", (tree, number(0.0)))
    return Apply(TYPE_NAMES[dtype], (tree,)) if dtype in (torch.bfloat16, torch.float16) else tree


def applied(rule: Callable[..., Node], args: tuple, kwargs: dict, tree_of: Callable[[Any], Node]) -> Node | None:
    """Returns the tree of one of RULES for an operation's arguments; None if the rule has none for them.

    ``tree_of`` returns the tree of a tensor, or of the node of a graph that stands for one.
    """

    def value(argument: Any) -> Any:
        if isinstance(argument, (torch.Tensor, torch.fx.Node)):
            return tree_of(argument)
        if isinstance(argument, (bool, int, float)):
            return number(float(argument))
        return argument  # None, a dtype or a string

    arguments = [value(argument) for argument in args]
    keywords = {key: value(argument) for key, argument in kwargs.items() if key not in _IGNORED}
    try:
        return rule(*arguments, **keywords)
    except (TypeError, KeyError):
        return None


def _of(operation: str) -> Callable[..., Node]:
    return lambda *of: Apply(operation, of)


def _scaled(operation: str) -> Callable[..., Node]:
    return lambda a, b, alpha=None: Apply(operation, (a, b if alpha is None else Apply("*", (b, alpha))))


def _clamp(a: Node, low: Node | None = None, high: Node | None = None, **named: Node) -> Node:
    low, high = named.get("min", low), named.get("max", high)
    a = Apply("max", (a, low)) if low is not None else a
    return Apply("min", (a, high)) if high is not None else a


def _div(a: Node, b: Node, rounding_mode: str | None = None) -> Node:
    if rounding_mode is not None:
        raise TypeError
    return Apply("/", (a, b))


def _pow(a: Node, b: Node) -> Node:
    if b == number(2.0):
        return Apply("*", (a, a))
    return Apply("sqrt", (a,)) if b == number(0.5) else Apply("pow", (a, b))


def _times(a: Node, factor: Node) -> Node:
    return a if factor == _ONE else Apply("*", (a, factor))


def _softplus(a: Node, beta: Node = _ONE, threshold: Node = _THRESHOLD) -> Node:
    scaled = _times(a, beta)
    smooth = Apply("softplus", (a,)) if beta == _ONE else Apply("/", (Apply("softplus", (scaled,)), beta))
    return smooth if threshold == _THRESHOLD else Apply("?:", (Apply(">", (scaled, threshold)), a, smooth))


def _elu(a: Node, alpha: Node = _ONE, scale: Node = _ONE, input_scale: Node = _ONE) -> Node:
    if alpha == input_scale == _ONE:
        return _times(Apply("elu", (a,)), scale)
    below = _times(Apply("elu", (_times(a, input_scale),)), alpha)
    return _times(Apply("?:", (Apply(">", (a, number(0.0))), a, below)), scale)


def _hardsigmoid(a: Node) -> Node:
    return Apply("/", (Apply("clamp", (Apply("+", (a, number(3.0))), number(0.0), number(6.0))), number(6.0)))


_IGNORED = ("dtype", "memory_format", "layout", "device", "pin_memory", "non_blocking")
_VIEWS = {
    *("view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.default"),
    *("squeeze.dim", "squeeze.dims", "expand.default", "detach.default", "alias.default"),
}
# By the operation's name in ATen, without its overload.
RULES: dict[str, Callable[..., Node]] = {
    **{name: _of(name) for name, arguments in FUNCTIONS.items() if arguments == 1},
    "neg": _of("neg"),
    **dict.fromkeys(("clone", "_to_copy", "contiguous"), lambda a: a),
    "add": _scaled("+"),
    "sub": _scaled("-"),
    "rsub": lambda a, b: Apply("-", (b, a)),
    "mul": _of("*"),
    "div": _div,
    "reciprocal": lambda a: Apply("/", (number(1.0), a)),
    "square": lambda a: Apply("*", (a, a)),
    "pow": _pow,
    "maximum": _of("max"),
    "minimum": _of("min"),
    "clamp": _clamp,
    "clamp_min": _of("max"),
    "clamp_max": _of("min"),
    "hardtanh": lambda a, low=_MINUS_ONE, high=_ONE: _clamp(a, low, high),
    "leaky_relu": lambda a, slope=_SLOPE: Apply("?:", (Apply(">", (a, number(0.0))), a, Apply("*", (a, slope)))),
    "gelu": lambda a, approximate="none": Apply({"none": "gelu", "tanh": "gelu_tanh"}[approximate], (a,)),
    "softplus": _softplus,
    "elu": _elu,
    "celu": lambda a, alpha=_ONE: _elu(a, alpha, _ONE, alpha if alpha == _ONE else Apply("/", (_ONE, alpha))),
    "hardsigmoid": _hardsigmoid,
    "round": _of("rint"),
    "where": _of("?:"),
    "scalar_tensor": lambda value: value,
    "masked_fill": lambda a, mask, value: Apply("?:", (mask, value, a)),
    **{compare.__name__: _of(sign) for sign, compare in COMPARISONS.items()},
    **dict.fromkeys(("logical_and", "bitwise_and"), _of("&&")),
    **dict.fromkeys(("logical_or", "bitwise_or"), _of("||")),
    **dict.fromkeys(("logical_not", "bitwise_not"), _of("!")),
}
