"""Registers an op with torch: its schemas, implementations, fakes, gradients, ``out=`` and list forms.

Every op comes in two forms. In the first, each rank is a process, and a call has this rank's tensors. In the second,
one process has all ranks, and a call has lists with one tensor a device. An op is written once, for lists of this
process's ranks. :class:`Op` registers it as

    name(Tensor x, ...) -> Tensor            name_out(Tensor x, ..., Tensor(a!) out, ...) -> ()
    name_list(Tensor[] x, ...) -> Tensor[]   name_list_out(Tensor[] x, ..., Tensor(a!)[] out, ...) -> ()

The arguments after the tensors are the same in all forms. They have no defaults, because torch's autograd of lists does
not allow them. An option that is not used is an empty string or list. ``after`` holds the results of earlier
collectives, so that a compiled graph keeps the order. It is not read.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from graphar.ops.repeats import deliver, keep
from graphar.plan import tensor_checks
from graphar.plan.work import Norm, Parts, Product, Sum, TensorTuple
from graphar.product import products
from graphar.runtime.bind import collective, norm, tensor_tuple
from graphar.runtime.engine import Engine, binders
from graphar.runtime.plan import Tensors
from graphar.runtime.registry import engine_of_devices, engine_of_group

binders.update(
    {
        Sum: collective.bind,
        Parts: collective.bind,
        Norm: norm.bind,
        TensorTuple: tensor_tuple.bind,
        Product: products.bind,
    }
)
library = torch.library.Library("graphar", "DEF")
_ops: dict[str, Op] = {}  # by name
when_traced: list[Callable[[], None]] = []  # functions to call when an op is given tensors without data

Asked = tuple[Tensors, tuple, object]  # the tensors, options and epilogue of a call, as repeats.repeated takes them

_DEFAULTS = {"str": "", "Tensor[]": [], "float[]": [], "float?": None, "int?": None, "ScalarType?": None, "bool": False}
_NAMED_DEFAULTS = {
    "algorithm": "auto",
    "order": "rank",
    "partition": "auto",
    "rank": -1,
    "axis": 0,
    "output": "like_input",
}

# Looked up once: each look-up in a module costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_strided = torch.strided
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms, _TRANSFORMS = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.TransformType
_is_profiling = torch.autograd._profiler_enabled
_records_gradients = torch.is_grad_enabled
_DENSE = (torch.Tensor, torch.nn.Parameter)


def is_plain(x: object) -> bool:
    """Whether a call with ``x`` may skip torch's dispatcher, and call the implementation directly in half the time."""
    return (
        not _is_compiling()
        and type(x) in _DENSE
        and not (x.requires_grad and _records_gradients())
        and x.layout is _strided
        and not x.is_neg()
        and not x.is_meta
        and not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and forward_ad._current_level < 0
        and not _is_profiling()
    )


class Op:
    """One op. Its functions take a list for each tensor, and ``given``: the arguments after the tensors, by name.

    Args:
        name: the op's name.
        tensors: the names of each rank's tensors. The list form has a list for each name.
        arguments: the schema of the arguments after the tensors, such as "str communicator, float? timeout_s".
        run: makes the call, which writes the results: ``run(engine, *lists, outs, given)``, with residuals also these.
            It returns what ``engine.run`` returned, and the operands, if it did nothing else; otherwise None.
        fake: ``fake(*lists, given)`` returns new tensors like the results, one for each rank; with ``returns`` other
            than "Tensor" a tuple of tensors for each rank.
        check: ``check(engine, *lists, given)`` raises if the arguments are invalid.
        check_out: ``check_out(*lists, outs, given)`` raises if the memory of ``outs`` does not fit. None: the op has no
            ``out=`` forms.
        residual: ``residual(xs, residuals, outs, given)`` raises if residuals do not fit, and returns the ``given`` of
            a call that replaces them by its rounding errors. None: the op takes no residual.
        backward: ``backward(ctx, gradients)`` returns the gradients of the tensors, as lists, and a dict with the
            gradients of other arguments by name. It is given those of the results, rank by rank. None: the op is not
            differentiable.
        saved: the names of the tensors that the backward pass needs, given the arguments by name. None: all.
        saved_result: which result of each rank it needs, counted from 0. The gradient of an unused result is None then,
            and zeros otherwise. None: no result.
        returns: the result type in the schema of the first form.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[str],
        arguments: str,
        run: Callable,
        fake: Callable,
        *,
        check: Callable | None = None,
        check_out: Callable | None = None,
        residual: Callable | None = None,
        backward: Callable | None = None,
        saved: Callable[[dict], Sequence[str]] | None = None,
        saved_result: int | None = None,
        returns: str = "Tensor",
    ) -> None:
        self.name, self.tensors = name, tuple(tensors)
        _ops[name] = self
        self._types = dict(reversed(one.split(" ")) for one in arguments.split(", "))
        self._given = namedtuple("Given", self._types)
        self._run, self._fake, self._check = run, fake, check
        self._check_out, self._residual = check_out, residual
        self._backward, self.returns = backward, returns
        self._saved, self._saved_result = saved or (lambda given: self.tensors), saved_result
        for suffix, kind in (("", "Tensor"), ("_list", "Tensor[]")):
            given = ", ".join(f"{kind} {one}" for one in self.tensors)
            result = returns if returns != "Tensor" else kind
            self._define(f"{name}{suffix}", f"({given}, {arguments}) -> {result}", suffix, self._implement, self._meta)
            if check_out:
                rest = "Tensor(a!)[] residual, " if residual else ""
                out = kind.replace("Tensor", "Tensor(b!)")
                schema = f"({given}, {rest}{out} out, {arguments}) -> ()"
                self._define(f"{name}{suffix}_out", schema, suffix, self._implement_out, lambda *given, in_list: None)
            over_batch = functools.partial(self._over_batch, in_list=bool(suffix))
            torch.library.register_vmap(f"graphar::{name}{suffix}", over_batch, lib=library)
            if backward:
                self._differentiate(f"{name}{suffix}", in_list=bool(suffix))
        ops = torch.ops.graphar
        self.one, self.list = getattr(ops, name).default, getattr(ops, f"{name}_list").default
        if check_out:
            self.one_out, self.list_out = getattr(ops, f"{name}_out").default, getattr(ops, f"{name}_list_out").default

    # ---- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, *given, plain: bool = False, asked: Asked | None = None):
        """Calls the list form if the first argument is a list. Calls a ``plain`` call's implementation directly.

        Later calls like a plain one may repeat it, if ``asked`` says what the user asked for: see repeats.py.
        """
        if not (plain or torch.compiler.is_compiling()):
            _check_transform(self.name, given)
        if isinstance(given[0], (list, tuple)):
            lists, arguments = self._split(given, in_list=True)
            kinds = zip(arguments, self._types.values(), strict=True)
            rest = [_with_own_nodes(one) if kind == "Tensor[]" else one for one, kind in kinds]
            return self.list(*map(_with_own_nodes, lists), *rest)
        return self._implement(*given, in_list=False, asked=asked) if plain else self.one(*given)

    def into(self, *given, plain: bool = False, asked: Asked | None = None) -> None:
        """Calls the ``out=`` form, in the same way as :meth:`__call__`."""
        if isinstance(given[0], (list, tuple)):
            self.list_out(*given)
        elif plain:
            self._implement_out(*given, in_list=False, asked=asked)
        else:
            self.one_out(*given)

    def arguments(self, **given) -> tuple:
        """Returns the arguments after the tensors, in order, with defaults for those that are not given."""
        if unknown := given.keys() - self._types.keys():
            raise TypeError(f"{self.name} takes no {unknown}")
        return tuple([given[name] if name in given else self._default(name) for name in self._types])

    def takes(self, name: str) -> bool:
        """Whether the op has a tensor or an argument of that name."""
        return name in self.tensors or name in self._types

    def read(self, given: Sequence) -> dict[str, object]:
        """Returns by name the tensors and arguments of a call of the first form."""
        return dict(zip((*self.tensors, *self._types), given, strict=True))

    def write(self, given: dict[str, object]) -> tuple:
        """Returns tensors and arguments in order: the inverse of :meth:`read`, with defaults for missing ones."""
        rest = {name: one for name, one in given.items() if name not in self.tensors}
        return *[given[name] for name in self.tensors], *self.arguments(**rest)

    def _default(self, name: str):
        return _NAMED_DEFAULTS[name] if name in _NAMED_DEFAULTS else _DEFAULTS[self._types[name]]

    # ---- implementations --------------------------------------------------------------------------------------------

    def _define(self, name: str, schema: str, suffix: str, implement: Callable, meta: Callable) -> None:
        library.define(name + schema)
        for key in ("CPU", "CUDA"):
            library.impl(name, functools.partial(implement, in_list=bool(suffix)), key)
        torch.library.register_fake(f"graphar::{name}", functools.partial(meta, in_list=bool(suffix)), lib=library)

    def _split(self, given: Sequence, in_list: bool) -> tuple[list[list[torch.Tensor]], Sequence]:
        """Returns the tensors, as lists of this process's ranks, and the arguments after them."""
        count = len(self.tensors)
        return [list(one) if in_list else [one] for one in given[:count]], given[count:]

    def _engine(self, lists: list[list[torch.Tensor]], given, in_list: bool) -> Engine:
        """Checks a call, and returns its engine."""
        name = given.communicator
        if in_list:
            engine = engine_of_devices(name, tuple([x.device for x in lists[0]]), self.name)
        else:
            engine = engine_of_group(name, self.name)
        if self._check:
            self._check(engine, *lists, given)
        return engine

    def _implement(self, *call, in_list: bool, asked: Asked | None = None):
        lists, arguments = self._split(call, in_list)
        given = self._given(*arguments)
        engine = self._engine(lists, given, in_list)
        outs = self._fake(*lists, given)
        self._make(engine, lists, outs, given, asked)
        if self.returns != "Tensor":
            return [one for results in outs for one in results]
        return outs if in_list else outs[0]

    def _implement_out(self, *call, in_list: bool, asked: Asked | None = None) -> None:
        lists, rest = self._split(call, in_list)
        residuals: Sequence[torch.Tensor] = ()
        if self._residual:
            residuals, *rest = rest
        out, *arguments = rest
        given, outs = self._given(*arguments), list(out) if in_list else [out]
        engine = self._engine(lists, given, in_list)
        self._check_out(*lists, outs, given)
        if residuals:
            given = self._residual(*lists, residuals, outs, given)
        targets = [one if one.is_contiguous() else torch.empty_like(one, memory_format=_contiguous) for one in outs]
        asked = None if targets[0] is not outs[0] else asked
        self._make(engine, lists, targets, given, asked, *([residuals] if residuals else []))
        for target, one in zip((*targets, *residuals), (*outs, *residuals), strict=True):
            deliver(target, one)

    def _make(self, engine: Engine, lists: list, outs: list, given, asked: Asked | None, *residuals) -> None:
        """Makes a call, and keeps it if calls like it can repeat it."""
        repeats = engine.warm.repeats
        made = self._run(engine, *lists, outs, given, *residuals)
        if asked is not None and made is not None and made[0] is not None:
            plan, (own,) = made
            keep(engine, repeats, self.name, asked, plan, own, getattr(given, "codec", ""))

    def _meta(self, *call, in_list: bool):
        for one in when_traced:
            one()
        lists, arguments = self._split(call, in_list)
        results = self._fake(*lists, self._given(*arguments))
        if self.returns != "Tensor":
            return [one for of_rank in results for one in of_rank]
        return results if in_list else results[0]

    def _over_batch(self, info, in_dims: Sequence, *given, in_list: bool):
        """Implements vmap: makes a call for each slice in order, so that every rank makes the same calls."""
        if not info.batch_size:
            raise ValueError(f"{self.name}: vmap over no slices")
        op = self.list if in_list else self.one
        found = [op(*_slices(given, in_dims, at)) for at in range(info.batch_size)]
        if self.returns == "Tensor" and not in_list:
            return torch.stack(found), 0
        return [torch.stack(of_calls) for of_calls in zip(*found, strict=True)], [0] * len(found[0])

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _differentiate(self, name: str, in_list: bool) -> None:
        def keep(ctx, inputs, output) -> None:
            lists, arguments = self._split(inputs, in_list)
            named = dict(zip(self._types, arguments, strict=True))
            tensors = named.get("tensors", ())
            ctx.given = {name: one for name, one in named.items() if self._types[name] != "Tensor[]"}
            ctx.in_list, ctx.ranks = in_list, len(lists[0])
            ctx.none = [_no_gradient(one) for one in arguments]
            ctx.wanted = [one.requires_grad for one in tensors]
            saved = [one for at in self._places_saved(ctx) for one in lists[at]]
            if self._saved_result is not None:
                saved += output[self._saved_result :: len(output) // ctx.ranks]
            ctx.save_for_backward(*saved, *tensors)
            ctx.set_materialize_grads(self._saved_result is None)

        several = in_list or self.returns != "Tensor"

        def rule(ctx, gradient):
            *of_lists, of_named = self._backward(ctx, list(gradient) if several else [gradient])
            of_lists = of_lists if in_list else [one[0] for one in of_lists]
            rest = [of_named.get(one, none) for one, none in zip(self._types, ctx.none, strict=True)]
            return *of_lists, *rest

        torch.library.register_autograd(
            f"graphar::{name}", _in_stream_order(rule) if in_list else rule, setup_context=keep, lib=library
        )

    def saved(self, ctx) -> tuple[list[Sequence[torch.Tensor]], list[torch.Tensor]]:
        """Returns in a backward pass what it needs of the forward pass.

        These are lists of this process's ranks, of each of the op's tensors, empty if it is not saved, and of
        ``saved_result``, if there is one; and the tensors of the epilogue.
        """
        places, left, ranks = self._places_saved(ctx), list(ctx.saved_tensors), ctx.ranks
        lists: list[Sequence[torch.Tensor]] = [()] * len(self.tensors)
        if self._saved_result is not None:
            places, lists = [*places, len(lists)], [*lists, ()]
        for at in places:
            lists[at], left = left[:ranks], left[ranks:]
        return lists, left

    def _places_saved(self, ctx) -> list[int]:
        needed = self._saved(ctx.given)
        return [at for at, name in enumerate(self.tensors) if name in needed]


_contiguous = torch.contiguous_format


def _check_transform(op: str, given: Sequence) -> None:
    """Raises NotImplementedError if a transform of torch.func, such as grad and jacrev, differentiates a tensor."""
    within = _transforms()
    if within is None or within.key() not in (_TRANSFORMS.Grad, _TRANSFORMS.Jvp):
        return
    tensors = [x for one in given for x in (one if isinstance(one, (list, tuple)) else [one])]
    if any(isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        raise NotImplementedError(
            f"{op}: torch.func.{within.key().name.lower()} cannot differentiate it, nor can vjp, jacrev and the like; "
            "use torch.autograd.grad() or backward(), and torch.autograd.functional.jacobian() for all rows"
        )


def _slices(given: Sequence, dims: Sequence, at: int) -> list:
    """Returns slice ``at`` of each tensor that has a batch dimension, and all other arguments unchanged."""
    return [
        _slices(one, dim, at) if isinstance(dim, (list, tuple)) else one if dim is None else one.select(dim, at)
        for one, dim in zip(given, dims, strict=True)
    ]


def op_of(target: object) -> Op | None:
    """Returns the op whose first form is the target of a graph's node; None if there is none."""
    return next((op for op in _ops.values() if op.one is target), None)


def op_named(name: str) -> Op:
    """Returns the op of that name."""
    return _ops[name]


def for_ranks(ctx, name: str, *lists: Sequence[torch.Tensor], **given) -> list[torch.Tensor]:
    """Calls an op in a backward pass, in the same form as the forward op.

    ``lists`` has a list of this process's ranks for each of the op's tensors. Returns the results of this process's
    ranks, rank by rank: of an op with two results first both of one rank, then both of the next.
    """
    op = op_named(name)
    arguments = op.arguments(**given)
    if ctx.in_list:
        return op.list(*map(list, lists), *arguments)
    found = op.one(*[ones[0] for ones in lists], *arguments)
    return [found] if op.returns == "Tensor" else found


def by_result(flat: Sequence[torch.Tensor], ranks: int | None) -> tuple:
    """Returns an op's results as users get them. ``flat`` has them rank by rank.

    With ``ranks``, each result becomes a list with one tensor for each rank. Without, the tensors are returned as a
    tuple.
    """
    if ranks is None:
        return tuple(flat)
    results = len(flat) // ranks
    return tuple([list(flat[at::results]) for at in range(results)])


def check_input(op: str, x: object) -> None:
    """Raises unless ``x`` is a tensor of a dtype that graphar sums, or a list with one for each rank."""
    if isinstance(x, (list, tuple)):
        tensor_checks.check_list(op, x)
    else:
        tensor_checks.check_tensor(op, "x", x)


def check_output(op: str, xs, outs: object, name: str = "out", dtype: torch.dtype | None = None) -> None:
    """Raises unless ``outs`` can take a result like the input, or is a list with a destination for each input.

    ``dtype`` is that of the result; None: that of the input.
    """
    if not isinstance(xs, (list, tuple)):
        tensor_checks.check_out(op, xs, outs, name, dtype)
        return
    tensor_checks.check_one_each(op, name, outs, xs)
    for x, out in zip(xs, outs, strict=True):
        tensor_checks.check_out(op, x, out, name, dtype)


def _no_gradient(argument: object) -> list | None:
    # torch treats any empty list as a list of tensors, and expects a list of gradients for it.
    if isinstance(argument, (list, tuple)) and (not argument or isinstance(argument[0], torch.Tensor)):
        return [None] * len(argument)
    return None


def _with_own_nodes(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns ``xs`` with a view in place of each leaf on a GPU that needs a gradient.

    torch warns if a leaf's gradient comes from an op on another stream, and therefore also if it is on another device.
    """
    if torch.compiler.is_compiling():
        return xs
    return [x.view_as(x) if x.requires_grad and x.is_cuda and x.is_leaf else x for x in xs]


def _in_stream_order(backward: Callable) -> Callable:
    """Returns ``backward(ctx, gradients)`` of a list form, ordered with the streams of all devices.

    torch tracks one stream of an op, the one on its first tensor's device. That stream has waited for the gradients,
    and users of the results wait for it. On the other devices the backward pass runs on the default streams, on
    whichever streams the op was called.
    """

    @functools.wraps(backward)
    def backward_in_order(ctx, gradients):
        on_gpus = [one for one in gradients if type(one) is torch.Tensor and one.is_cuda]  # excludes fake tensors
        known, *others = [torch.cuda.current_stream(one.device) for one in on_gpus] or [None]
        for other in others:
            other.wait_stream(known)
        found = backward(ctx, gradients)
        for other in others:
            known.wait_stream(other)
        return found

    return backward_in_order
