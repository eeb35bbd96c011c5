"""Registers an op with torch: its schemas, implementations, fakes, gradients, ``out=`` and list forms.

Every op comes in two forms. In the first, each rank is a process, and a call has this rank's tensors. In the second,
one process has all ranks, and a call has lists with one tensor a device. An op is written once, for lists of this
process's ranks. :class:`Op` registers it as

    name(Tensor x, ...) -> Tensor            name_out(Tensor x, ..., Tensor(a!) out, ...) -> ()
    name_list(Tensor[] x, ...) -> Tensor[]   name_list_out(Tensor[] x, ..., Tensor(a!)[] out, ...) -> ()

The arguments after the tensors are the same in all forms: fields of options.Arguments. In a schema they have no
defaults, because torch's autograd of lists does not allow them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from graphar.ops.options import DEFAULTS, EVERY, KINDS, Arguments
from graphar.ops.repeats import Asked, dispatch_modes, function_modes, is_profiling, keep, records_gradients
from graphar.plan.work import Exchange, Loss, Norm, Parts, Product, Sum, TensorTuple
from graphar.product import products
from graphar.runtime.bind import collective, loss
from graphar.runtime.engine import Engine, binders
from graphar.runtime.registry import engine_of_devices, engine_of_group

binders |= dict.fromkeys((Sum, Parts, Exchange), collective.bind)
binders |= {Norm: collective.bind_norm, TensorTuple: collective.bind_tuple, Product: products.bind, Loss: loss.bind}
library = torch.library.Library("graphar", "DEF")
ops_by_name: dict[str, Op] = {}
when_traced: list[Callable[[], None]] = []  # functions to call when an op is given tensors without data

Lists = list[list[torch.Tensor]]  # for each of an op's tensors, one of each of this process's ranks
_WHERE = ("communicator", "rank", "axis", "sizes", "timeout_s")

# Looked up once: each look-up in a module costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_strided = torch.strided
_contiguous = torch.contiguous_format
_functorch = torch._C._functorch  # type: ignore[attr-defined]
_transforms = _functorch.peek_interpreter_stack
_DENSE = (torch.Tensor, torch.nn.Parameter)


def _is_plain(values: Sequence) -> bool:
    """Whether a call with these tensors, and lists of tensors, may skip torch's dispatcher, which takes half the time.

    It calls no function of Python: each is a frame more in every call that repeats no earlier one.
    """
    if (
        _is_compiling()
        or dispatch_modes()
        or function_modes()
        or _transforms() is not None
        or forward_ad._current_level >= 0
        or is_profiling()
    ):
        return False
    for value in values:
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if (
                type(x) not in _DENSE
                or (x.requires_grad and records_gradients())
                or x.layout is not _strided
                or x.is_neg()
                or x.is_conj()
                or x.is_meta
            ):
                return False
    return True


class Op:
    """One op. A family of ops is a subclass, which says what its ops do.

    Its functions take a list of the ranks' tensors for each name in ``tensors``, then the Arguments. ``arguments`` are
    the names of those that not every op has. ``with_out``: whether ``out=`` forms have schemas; else a compiler copies.
    """

    tensors: tuple[str, ...] = ("x",)  # the names of each rank's tensors
    has_several = False  # whether each rank has several results
    # Makes a call, run(engine, *lists, outs, arguments), and writes the results. Residuals come last. It returns the
    # plan and the ranks' operands, if it did no more than run the plan; otherwise None.
    run: Callable[..., Any]
    # Returns new tensors like the results, fake(*lists, arguments): one for each rank, or a tuple if it has several.
    fake: Callable[..., list]
    # Raises if the memory of results does not fit, check_out(*lists, outs, arguments).
    check_out: Callable[..., None]
    # Raises if residuals do not fit, with_residuals(xs, residuals, outs, arguments). Returns the arguments of a call
    # that overwrites them with its rounding errors. None: the op takes no residuals.
    with_residuals: Callable[..., Arguments] | None = None
    # Returns the gradients of the tensors, as lists, and a dict with the gradients of other arguments by name:
    # backward(ctx, gradients, saved, tensors). ``gradients`` are of the results, rank by rank. ``saved`` has a
    # list of the ranks' tensors for each name in ``tensors``, of None if they are not needed, and one for
    # ``saved_result``; ``tensors`` are the epilogue's. ``ctx.arguments`` has the arguments without tensors,
    # ``ctx.where`` the ones that say which ranks have which parts, and ``ctx.needs`` what needs a gradient.
    backward: Callable[..., tuple] | None = None
    needed: tuple[str, ...] | None = None  # the names of the tensors that the backward pass needs; None: all
    # Which result of each rank the backward pass needs, from 0. The gradient of an unused one is then None, not zeros.
    saved_result: int | None = None

    def __init__(self, name: str, *arguments: str, with_out: bool = False) -> None:
        self.name = name
        self._defaults = {name: DEFAULTS[name] for name in (*EVERY, *arguments)}
        self._lists = [name for name in self._defaults if KINDS[name] == "Tensor[]"]
        ops_by_name[name] = self
        self.one, self.one_out = self._register(in_list=False, with_out=with_out)
        self.list, self.list_out = self._register(in_list=True, with_out=with_out)

    def check(self, engine: Engine, *call: Any, **named: Any) -> None:
        """Raises if the arguments of a call, check(engine, *lists, arguments), are invalid."""

    def saved(self, arguments: Arguments) -> tuple[str, ...]:
        """Returns the names of the tensors that the backward pass of a call with these arguments needs."""
        return self.tensors if self.needed is None else self.needed

    def __call__(self, *tensors, asked: Asked | None = None, **named) -> Any:
        """Makes a call, of the list form if the first argument is a list, and returns its results as users get them.

        ``asked`` has what the user asked for, so that later calls can repeat this one: see repeats.py.
        """
        in_list, arguments = isinstance(tensors[0], (list, tuple)), self.complete(named)
        if _is_plain((*tensors, *[arguments[name] for name in self._lists])):
            lists = [list(xs) if in_list else [xs] for xs in tensors]
            results = self._results(lists, Arguments(arguments), in_list, asked)
        else:
            values = (*tensors, *arguments.values())
            _check_transform(self.name, values)
            results = self.list(*map(_with_own_nodes, values)) if in_list else self.one(*values)
        if not self.has_several:
            return results
        if not in_list:
            return tuple(results)
        each = len(results) // len(tensors[0])
        return tuple([list(results[at::each]) for at in range(each)])

    def into(self, *tensors, asked: Asked | None = None, **named) -> None:
        """Calls the ``out=`` form in the same way. The last tensor, or list of tensors, takes the results."""
        in_list, arguments = isinstance(tensors[0], (list, tuple)), self.complete(named)
        values = (*tensors, *arguments.values())
        if _is_plain((*tensors, *[arguments[name] for name in self._lists])):
            self._implement_out(*values, in_list=in_list, asked=asked)
        elif self.one_out:
            (self.list_out if in_list else self.one_out)(*values)
        else:
            *tensors, outs = tensors
            results = self(*tensors, **named)
            for out, result in zip(outs, results, strict=True) if in_list else [(outs, results)]:
                out.copy_(result)  # a compiler sees what is written to

    def complete(self, named: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments after the tensors, in order; those that are missing have their defaults."""
        values = self._defaults | named
        if len(values) > len(self._defaults):
            raise TypeError(f"{self.name} has no argument {[*values][-1]!r}")
        return values

    def arguments(self, **named: Any) -> tuple:
        """Returns the arguments after the tensors, as a graph's node has them."""
        return tuple([[] if value == () else value for value in self.complete(named).values()])

    def takes(self, name: str) -> bool:
        return name in self.tensors or name in self._defaults

    def read(self, values: Sequence) -> dict[str, Any]:
        """Returns by name the tensors and arguments of a call of the first form."""
        return dict(zip((*self.tensors, *self._defaults), values, strict=True))

    def write(self, named: Mapping[str, Any]) -> tuple:
        """Returns tensors and arguments in order: the inverse of :meth:`read`, with defaults for missing ones."""
        rest = {name: value for name, value in named.items() if name not in self.tensors}
        return *[named[name] for name in self.tensors], *self.arguments(**rest)

    def dispatched(self, **named: Any) -> Any:
        return self.one(*self.write(named))

    def _register(self, in_list: bool, with_out: bool) -> tuple[Any, Any]:
        """Returns what torch makes of a form of the op, and of that with ``out=``; None if there is none."""
        name, kind = (f"{self.name}_list", "Tensor[]") if in_list else (self.name, "Tensor")
        tensors = ", ".join(f"{kind} {tensor}" for tensor in self.tensors)
        arguments = ", ".join(f"{KINDS[name]} {name}" for name in self._defaults)
        in_form = functools.partial(functools.partial, in_list=in_list)
        schema, rule = f"{name}({tensors}, {arguments}) -> {'Tensor[]' if self.has_several else kind}", None
        if self.backward:
            rule = self._rule_of_list if in_list else in_form(self._rule)
        form = define(schema, in_form(self._implement), in_form(self._meta), rule, in_form(self._keep_context))
        torch.library.register_vmap(f"graphar::{name}", in_form(self._vmap), lib=library)
        form_out = None
        if with_out:
            rest = "Tensor(a!)[] residual, " if self.with_residuals else ""
            out = kind.replace("Tensor", "Tensor(b!)")
            schema = f"{name}_out({tensors}, {rest}{out} out, {arguments}) -> ()"
            form_out = define(schema, in_form(self._implement_out), lambda *_: None)
        return form, form_out

    def _split(self, call: Sequence, in_list: bool) -> tuple[Lists, Sequence, Arguments]:
        """Returns the tensors, as lists of this process's ranks; what follows them in an ``out=`` form; the others."""
        count, first = len(self.tensors), len(call) - len(self._defaults)
        lists = [list(value) if in_list else [value] for value in call[:count]]
        return lists, call[count:first], Arguments(dict(zip(self._defaults, call[first:], strict=True)))

    def _engine(self, lists: Lists, arguments: Arguments, in_list: bool) -> Engine:
        name = arguments.communicator
        if in_list:
            engine = engine_of_devices(name, tuple([x.device for x in lists[0]]), self.name)
        else:
            engine = engine_of_group(name, self.name)
        self.check(engine, *lists, arguments)
        return engine

    def _results(self, lists: Lists, arguments: Arguments, in_list: bool, asked: Asked | None = None) -> Any:
        engine = self._engine(lists, arguments, in_list)
        outs = self.fake(*lists, arguments)
        self._make(engine, lists, outs, arguments, None if in_list else asked)
        return self._as_schema(outs, in_list)

    def _as_schema(self, outs: list, in_list: bool) -> Any:
        if self.has_several:
            return [result for of_rank in outs for result in of_rank]
        return outs if in_list else outs[0]

    def _implement(self, *call, in_list: bool) -> Any:
        lists, _, arguments = self._split(call, in_list)
        return self._results(lists, arguments, in_list)

    def _implement_out(self, *call, in_list: bool, asked: Asked | None = None) -> None:
        lists, written, arguments = self._split(call, in_list)
        residuals, out = written if self.with_residuals else ((), *written)
        outs = list(out) if in_list else [out]
        engine = self._engine(lists, arguments, in_list)
        self.check_out(*lists, outs, arguments)
        if residuals and self.with_residuals:
            arguments = self.with_residuals(*lists, residuals, outs, arguments)
        targets = [out if out.is_contiguous() else torch.empty_like(out, memory_format=_contiguous) for out in outs]
        asked = None if in_list or targets[0] is not outs[0] else asked
        self._make(engine, lists, targets, arguments, asked, *([residuals] if residuals else []))
        for target, destination in zip((*targets, *residuals), (*outs, *residuals), strict=True):
            if target is not destination:
                destination.copy_(target)
            else:  # torch does not see that kernels wrote: a backward pass that needs the old content must raise
                torch.autograd.graph.increment_version(destination)

    def _make(self, engine: Engine, lists: Lists, outs: list, arguments: Arguments, asked: Asked | None, *residuals):
        """Makes a call, and keeps it if calls like it can repeat it."""
        repeats = engine.warm.repeats
        made = self.run(engine, *lists, outs, arguments, *residuals)
        if asked is not None and made is not None and made[0] is not None:
            plan, (operands,) = made
            keep(engine, repeats, self.name, asked, plan, operands, arguments.codec if self.takes("codec") else "")

    def _meta(self, *call, in_list: bool) -> Any:
        for callback in when_traced:
            callback()
        lists, _, arguments = self._split(call, in_list)
        return self._as_schema(self.fake(*lists, arguments), in_list)

    def _vmap(self, info, dims: Sequence, *values, in_list: bool) -> tuple:
        """Makes a call for each slice in order, so that every rank makes the same calls."""
        if not info.batch_size:
            raise ValueError(f"{self.name}: vmap over no slices")
        call = self.list if in_list else self.one
        results = [call(*_slices(values, dims, at)) for at in range(info.batch_size)]
        if not (in_list or self.has_several):
            return torch.stack(results), 0
        return [torch.stack(of_calls) for of_calls in zip(*results, strict=True)], [0] * len(results[0])

    def _keep_context(self, ctx, inputs, output, *, in_list: bool) -> None:
        lists, _, arguments = self._split(inputs, in_list)
        named, values = vars(arguments), vars(arguments).values()
        tensors = named.get("tensors", ())
        ctx.arguments = Arguments({name: value for name, value in named.items() if name not in self._lists})
        ctx.in_list, ctx.ranks = in_list, len(lists[0])
        # torch treats any empty list as a list of tensors, and expects a list of gradients for it.
        has_tensors = [isinstance(x, (list, tuple)) and (not x or isinstance(x[0], torch.Tensor)) for x in values]
        ctx.none = [[None] * len(x) if has else None for x, has in zip(values, has_tensors, strict=True)]
        needed, result, none = self.saved(ctx.arguments), self.saved_result, [None] * ctx.ranks
        saved = [xs if name in needed else none for name, xs in zip(self.tensors, lists, strict=True)]
        saved.append(none if result is None else output[result :: len(output) // ctx.ranks])
        ctx.save_for_backward(*itertools.chain(*saved), *tensors)
        ctx.set_materialize_grads(result is None)

    def _rule(self, ctx, gradient, *, in_list: bool) -> tuple:
        assert self.backward
        needs = dict(zip((*self.tensors, *self._defaults), ctx.needs_input_grad, strict=True))
        ctx.needs = needs if in_list else needs | {name: [needs[name]] for name in self.tensors}
        ctx.where = {name: getattr(ctx.arguments, name) for name in _WHERE if self.takes(name)}
        left = iter(ctx.saved_tensors)
        saved = [[*itertools.islice(left, ctx.ranks)] for _ in (*self.tensors, "result")]
        gradients = list(gradient) if in_list or self.has_several else [gradient]
        *of_lists, of_named = self.backward(ctx, gradients, saved, [*left])
        of_lists = of_lists if in_list else [gradients[0] for gradients in of_lists]
        return *of_lists, *[of_named.get(name, none) for name, none in zip(self._defaults, ctx.none, strict=True)]

    def _rule_of_list(self, ctx, gradients) -> tuple:
        """Returns the gradients of a list form, whose backward pass is ordered with the streams of all devices.

        torch tracks one stream of an op, the one on its first tensor's device. That stream has waited for the
        gradients, and users of the results wait for it. On the other devices the backward pass runs on the default
        streams, on whichever streams the op was called.
        """
        on_gpus = [x for x in gradients if type(x) is torch.Tensor and x.is_cuda]  # excludes fake tensors
        streams = [torch.cuda.current_stream(x.device) for x in on_gpus]
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        results = self._rule(ctx, gradients, in_list=True)
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        return results


def define(
    schema: str, implement: Callable, fake: Callable, backward: Callable | None = None, keep: Callable | None = None
) -> Any:
    """Defines an operator of torch.ops.graphar for CPUs and GPUs, and returns its overload.

    ``fake`` returns tensors like its results. ``backward`` and ``keep`` are its rule and what prepares the context,
    as torch.library.register_autograd takes them.
    """
    library.define(schema)
    name = schema.partition("(")[0]
    torch.library.impl(f"graphar::{name}", ("cpu", "cuda"), implement, lib=library)
    torch.library.register_fake(f"graphar::{name}", fake, lib=library)
    if backward:
        torch.library.register_autograd(f"graphar::{name}", backward, setup_context=keep, lib=library)
    return getattr(torch.ops.graphar, name).default


def op_of(target: object) -> Op | None:
    """Returns the op whose first form is the target of a graph's node; None if there is none."""
    return next((op for op in ops_by_name.values() if op.one is target), None)


def for_ranks(ctx, name: str, *lists: Sequence[torch.Tensor], **named) -> list[torch.Tensor]:
    """Calls an op in a backward pass, in the same form as the forward op.

    ``lists`` has a list of this process's ranks for each of the op's tensors. Returns the results, rank by rank.
    """
    op = ops_by_name[name]
    values = op.arguments(**named)
    if ctx.in_list:
        return op.list(*map(list, lists), *values)
    results = op.one(*[xs[0] for xs in lists], *values)
    return results if op.has_several else [results]


def _check_transform(op: str, values: Sequence) -> None:
    """Raises NotImplementedError if a transform of torch.func, such as grad and jacrev, differentiates a tensor."""
    if _is_compiling() or (within := _transforms()) is None:
        return
    differentiates = within.key() in (_functorch.TransformType.Grad, _functorch.TransformType.Jvp)
    tensors = filter(torch.is_tensor, tree_leaves(values))  # those in lists, too
    if differentiates and any(map(_functorch.is_functorch_wrapped_tensor, tensors)):
        raise NotImplementedError(
            f"{op}: torch.func.{within.key().name.lower()} cannot differentiate it, nor can vjp, jacrev and the like; "
            "use torch.autograd.grad() or backward(), and torch.autograd.functional.jacobian() for all rows"
        )


def _slices(values: Sequence, dims: Sequence, at: int) -> list:
    """Returns slice ``at`` of each tensor that has a batch dimension, and all other values unchanged."""
    return [
        _slices(value, dim, at) if isinstance(dim, (list, tuple)) else value if dim is None else value.select(dim, at)
        for value, dim in zip(values, dims, strict=True)
    ]


def _with_own_nodes(value: Any) -> Any:
    """Returns a list of tensors with a view in place of each leaf on a GPU that needs a gradient; else the value.

    torch warns if a leaf's gradient comes from an op on another stream, and therefore also if it is on another device.
    """
    if not isinstance(value, (list, tuple)):
        return value
    if _is_compiling() or not all(isinstance(x, torch.Tensor) for x in value):
        return list(value)
    return [x.view_as(x) if x.requires_grad and x.is_cuda and x.is_leaf else x for x in value]
