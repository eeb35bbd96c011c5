"""Traces a Python function of tensors into an expression.

The function is traced to ATen operations, and each of them becomes one or more operations of the expression. It is
traced twice, with two sets of made-up sizes, since the result must not depend on the sizes. The sum is an fp32 tensor,
so operations on it give fp32. Where torch rounds an intermediate result to bf16 or fp16, the expression rounds too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.operations import FUNCTIONS
from graphar.numerics.epilogues.syntax import LIKE_X, Apply, Name, Node, Operand, number, written

_SIZES = ((7, 11, 13, 17, 19, 23, 29, 31), (8, 12, 14, 18, 20, 24, 30, 32))  # all distinct, and none is 1


class _Leaf(NamedTuple):
    """An argument tensor that no operation has used yet, in the shape that views gave it, before any expand."""

    name: str
    shape: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def trace(
    function: Callable,
    ndim: int,
    tensors: tuple[str, ...],
    kinds: tuple[tuple[str, torch.dtype], ...],
    scalars: tuple[str, ...],
) -> str:
    """Returns the text of the expression that a function computes; ValueError, which says why, if there is none.

    The function takes the sum ``v`` of ``ndim`` dimensions, and by name the tensors, and 0-d tensors for the numbers.
    ``kinds`` says of each tensor how it broadcasts (``_kind`` in epilogue.py), and its dtype.
    """
    if ndim > len(_SIZES[0]):
        raise ValueError(f"epilogue: functions are traced for tensors of at most {len(_SIZES[0])} dimensions")
    first, second = (_trace(function, sizes[:ndim], tensors, kinds, scalars) for sizes in _SIZES)
    if first != second:
        raise ValueError("epilogue: what the function computes depends on sizes; pass what it needs as a number")
    return first


def _trace(function: Callable, shape: tuple[int, ...], tensors, kinds, scalars) -> str:
    inputs: dict[str, Node | _Leaf] = {"v": Name("v")}
    examples = [torch.empty(shape, dtype=torch.float32, device="meta")]
    for name, (kind, dtype) in zip(tensors, kinds, strict=True):
        inputs[name] = _Leaf(name, _shape_of(kind, shape))
        examples.append(torch.empty(_shape_of(kind, shape), dtype=dtype, device="meta"))
    for name in scalars:
        inputs[name] = Name(name)
        examples.append(torch.empty((), dtype=torch.float32, device="meta"))

    def of_all(*values: torch.Tensor) -> torch.Tensor:
        named = dict(zip(inputs, values, strict=True))
        with _Callers():
            return function(named.pop("v"), **named)

    try:
        graph = make_fx(of_all)(*examples).graph
    except _Captured:
        raise
    except Exception as error:  # the function may raise anything
        sizes = f"with {list(shape)} in place of the sum's sizes"
        raise ValueError(f"epilogue: the function cannot be traced, {sizes}: {error}") from error
    return written(_Translation(shape).tree(graph, inputs.values()))


class _Captured(ValueError):
    """A function uses a tensor that is none of its arguments."""

    def __init__(self, of_shape: str = "") -> None:
        super().__init__(
            f"epilogue: the function holds a tensor of its own{of_shape}; pass it as an argument: Epilogue(function,"
            " name=tensor)"
        )


class _Callers(TorchFunctionMode):
    """Marks each traced operation with the function of torch's that the user called.

    Raises _Captured for a tensor that is no argument of the user's function: arguments are on the meta device.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                raise _Captured(f", of shape {list(value.shape)}")
        result = func(*args, **(kwargs or {}))
        caller, tracing = resolve_name(func) or func.__name__, get_proxy_mode()
        assert tracing
        for node in tracing.tracer.graph.nodes:
            node.meta.setdefault("caller", caller)
        return result


def _shape_of(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if kind == LIKE_X:
        return shape
    return tuple(
        1 if letter == "1" else size for letter, size in zip(kind, shape[len(shape) - len(kind) :], strict=True)
    )


class _Translation:
    """Translates a graph of ATen operations into a syntax tree; ``shape`` is the sum's."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._values: dict[object, Node | _Leaf] = {}

    def tree(self, graph: Graph, inputs: Iterable[Node | _Leaf]) -> Node:
        """Returns the tree of what the graph returns for these inputs."""
        *nodes, output = graph.nodes
        following = iter(inputs)
        for node in nodes:
            if node.op == "placeholder":
                self._values[node] = next(following)
            elif node.op == "call_function":
                self._values[node] = self._operation(node)
            else:
                raise _Captured()
        result = output.args[0]
        value = getattr(result, "meta", {}).get("val")
        if not isinstance(value, torch.Tensor):
            raise ValueError("epilogue: the function must return one tensor")
        if tuple(value.shape) != self._shape:
            raise ValueError("epilogue: what the function returns must have the shape of the sum")
        return self._value(result)

    def _operation(self, node) -> Node | _Leaf:
        name = str(node.target).removeprefix("aten.")
        result = node.meta.get("val")
        if name in _VIEWS:
            return self._view(name, node, result)
        rule = RULES.get(name.partition(".")[0])
        if rule is None:
            raise _unfusable(node, f"arithmetic, comparisons, casts and these functions can: {_FUSED}")
        if result.dtype not in (*TYPE_NAMES, torch.bool) and name != "scalar_tensor.default":
            raise _unfusable(node, f"it gives {result.dtype}; there are bfloat16, float16, float32 and bool")
        arguments = [self._value(argument) for argument in node.args]
        keywords = {key: self._value(argument) for key, argument in node.kwargs.items() if key not in IGNORED}
        try:
            tree = rule(*arguments, **keywords)
        except (TypeError, KeyError):
            raise _unfusable(node, "not with these arguments") from None
        return as_stored(tree, result.dtype)

    def _view(self, name: str, node, result: torch.Tensor) -> Node | _Leaf:
        """Returns a view: an argument may get another shape before it is used, but computed values only broadcast."""
        value = self._values[node.args[0]]
        if name == "expand.default":
            return value
        if isinstance(value, _Leaf) and math.prod(value.shape) == result.numel():
            return value._replace(shape=tuple(result.shape))
        if result.shape != node.args[0].meta["val"].shape:
            raise _unfusable(node, "it gives the sum, or what was computed, another shape")
        return value

    def _value(self, argument) -> Any:
        if isinstance(argument, torch.fx.Node):
            value = self._values[argument]
            return self._operand(value) if isinstance(value, _Leaf) else value
        if isinstance(argument, (bool, int, float)):
            return number(float(argument))
        return argument  # None, a dtype or a string

    def _operand(self, leaf: _Leaf) -> Node:
        """Returns the element that an operation reads of a tensor, by the shape that it has there."""
        name, shape = leaf
        if math.prod(shape) == 1:
            return Operand(name, "0")
        if shape == self._shape:
            return Operand(name, "index")
        if shape[-1] == self._shape[-1] == math.prod(shape):
            return Operand(name, "col")
        if shape == (*self._shape[:-1], 1):
            return Operand(name, "row")
        raise ValueError(f"epilogue: {name} broadcasts over neither the rows nor the columns of the last dimension")


def _unfusable(node, why: str) -> ValueError:
    return ValueError(f"epilogue: {node.meta.get('caller', node.target)} cannot be fused: {why}")


_FUSED = ", ".join(
    sorted({*FUNCTIONS, "celu", "hardsigmoid", "hardtanh", "leaky_relu", "relu6", "selu"} - {"bf16", "fp16"})
)


_TRUTHS = ("<", "<=", ">", ">=", "==", "!=", "&&", "||", "!", "isnan")  # these give 0 or 1


def as_stored(tree: Node, dtype: torch.dtype) -> Node:
    """Returns the value that a tensor of ``dtype`` stores: 0 or 1 for bool, and rounded for bf16 and fp16."""
    if dtype == torch.bool:
        return tree if isinstance(tree, Apply) and tree.operation in _TRUTHS else Apply("!=", (tree, number(0.0)))
    return Apply(TYPE_NAMES[dtype], (tree,)) if dtype in (torch.bfloat16, torch.float16) else tree


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


def _gelu(a: Node, approximate: str = "none") -> Node:
    return Apply({"none": "gelu", "tanh": "gelu_tanh"}[approximate], (a,))


def _pow(a: Node, b: Node) -> Node:
    if b == number(2.0):
        return Apply("*", (a, a))
    return Apply("sqrt", (a,)) if b == number(0.5) else Apply("pow", (a, b))


def _leaky_relu(a: Node, slope: Node | None = None) -> Node:
    return Apply("?:", (Apply(">", (a, number(0.0))), a, Apply("*", (a, slope or number(0.01)))))


_ONE = number(1.0)


def _times(a: Node, factor: Node) -> Node:
    return a if factor == _ONE else Apply("*", (a, factor))


def _softplus(a: Node, beta: Node | None = None, threshold: Node | None = None) -> Node:
    beta, threshold = beta or _ONE, threshold or number(20.0)
    scaled = _times(a, beta)
    smooth = Apply("softplus", (a,)) if beta == _ONE else Apply("/", (Apply("softplus", (scaled,)), beta))
    return smooth if threshold == number(20.0) else Apply("?:", (Apply(">", (scaled, threshold)), a, smooth))


def _elu(a: Node, alpha: Node | None = None, scale: Node | None = None, input_scale: Node | None = None) -> Node:
    alpha, scale, input_scale = (factor or _ONE for factor in (alpha, scale, input_scale))
    if alpha == input_scale == _ONE:
        return _times(Apply("elu", (a,)), scale)
    below = _times(Apply("elu", (_times(a, input_scale),)), alpha)
    return _times(Apply("?:", (Apply(">", (a, number(0.0))), a, below)), scale)


def _hardsigmoid(a: Node) -> Node:
    return Apply("/", (Apply("clamp", (Apply("+", (a, number(3.0))), number(0.0), number(6.0))), number(6.0)))


IGNORED = ("dtype", "memory_format", "layout", "device", "pin_memory", "non_blocking")
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
    "hardtanh": lambda a, low=None, high=None: _clamp(a, low or number(-1.0), high or number(1.0)),
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "celu": lambda a, alpha=None: _elu(a, alpha, None, alpha and Apply("/", (_ONE, alpha))),
    "hardsigmoid": _hardsigmoid,
    "round": _of("rint"),
    "where": _of("?:"),
    "scalar_tensor": lambda value: value,
    "masked_fill": lambda a, mask, value: Apply("?:", (mask, value, a)),
    **{name: _of(sign) for name, sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "=="))},
    "ne": _of("!="),
    **dict.fromkeys(("logical_and", "bitwise_and"), _of("&&")),
    **dict.fromkeys(("logical_or", "bitwise_or"), _of("||")),
    **dict.fromkeys(("logical_not", "bitwise_not"), _of("!")),
}
