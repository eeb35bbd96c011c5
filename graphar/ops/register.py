"""Registers an op with torch: its schemas, implementations, fakes, gradients, ``out=`` and list forms.

Every op comes in two forms. In the first, each rank is a process, and a call has this rank's tensors. In the second,
one process has all ranks, and a call has lists with one tensor a device. An op is written once, for lists of this
process's ranks. :class:`Op` registers it as

    name(Tensor x, ...) -> Tensor            name_out(Tensor x, ..., Tensor(a!) out, ...) -> ()
    name_list(Tensor[] x, ...) -> Tensor[]   name_list_out(Tensor[] x, ..., Tensor(a!)[] out, ...) -> ()

The arguments after the tensors are the same in all forms: the fields of a dataclass, see options.py. In a schema they
have no defaults, because torch's autograd of lists does not allow them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import forward_ad

from graphar.ops.batching import check_transform, over_batch, transforms
from graphar.ops.differentiation import Differentiation, Saved, with_own_nodes
from graphar.ops.options import Given, defaults, kinds
from graphar.ops.repeats import Asked, deliver, keep
from graphar.plan.work import Exchange, Loss, Norm, Parts, Product, Sum, TensorTuple
from graphar.product import products
from graphar.runtime.bind import alltoall, collective, loss, norm, tensor_tuple
from graphar.runtime.checks import tensor_checks
from graphar.runtime.engine import Engine, binders
from graphar.runtime.registry import engine_of_devices, engine_of_group

binders.update(
    {
        Sum: collective.bind,
        Parts: collective.bind,
        Norm: norm.bind,
        TensorTuple: tensor_tuple.bind,
        Exchange: alltoall.bind,
        Product: products.bind,
        Loss: loss.bind,
    }
)
library = torch.library.Library("graphar", "DEF")
_ops: dict[str, Op] = {}  # by name
when_traced: list[Callable[[], None]] = []  # functions to call when an op is given tensors without data

G = TypeVar("G", bound=Given)
Lists = list[list[torch.Tensor]]  # of each of an op's tensors, those of this process's ranks

# Looked up once: each look-up in a module costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_strided = torch.strided
_contiguous = torch.contiguous_format
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_records_gradients = torch.is_grad_enabled
_DENSE = (torch.Tensor, torch.nn.Parameter)


def is_plain(x: Any) -> bool:
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
        and transforms() is None
        and forward_ad._current_level < 0
        and not _is_profiling()
    )


class Op(Generic[G]):
    """One op. Its functions take, for each name in ``tensors``, a list of the ranks' tensors; then ``arguments``.

    Args:
        name: the op's name.
        tensors: the names of each rank's tensors. The list form has a list for each name.
        arguments: the dataclass of the arguments after the tensors; its fields are the schema's.
        run: ``run(engine, *lists, outs, arguments)`` makes the call, and writes the results. Residuals come last. It
            returns the plan and the ranks' operands, if it did no more than run the plan; otherwise None.
        fake: ``fake(*lists, arguments)`` returns new tensors like the results: one for each rank, or with ``returns``
            other than "Tensor" a tuple for each rank.
        check: ``check(engine, *lists, arguments)`` raises if the arguments are invalid.
        check_out: ``check_out(*lists, outs, arguments)`` raises if the memory of ``outs`` does not fit. None: the op
            has no ``out=`` forms.
        with_out: whether the ``out=`` forms have schemas. If not, :meth:`into` makes plain calls only.
        residual: ``residual(xs, residuals, outs, arguments)`` raises if residuals do not fit. It returns the arguments
            of a call that overwrites them with its rounding errors. None: the op takes no residual.
        backward, saved, saved_result: see :class:`Differentiation`. Without ``backward`` it is not differentiable.
        returns: the result type in the schema of the first form.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[str],
        arguments: type[G],
        run: Callable,
        fake: Callable,
        *,
        check: Callable = lambda *_: None,
        check_out: Callable | None = None,
        with_out: bool = True,
        residual: Callable | None = None,
        backward: Callable | None = None,
        saved: Callable[[dict[str, Any]], Sequence[str]] | None = None,
        saved_result: int | None = None,
        returns: str = "Tensor",
    ) -> None:
        self.name, self.tensors, self.returns = name, tuple(tensors), returns
        _ops[name] = self
        self.given, self._kinds, self._defaults = arguments, kinds(arguments), defaults(arguments)
        self._run, self._fake, self._check = run, fake, check
        self._check_out, self._with_out, self._residual = check_out, with_out, residual
        self._rule = None
        if backward:
            several = returns != "Tensor"
            self._rule = Differentiation(self.tensors, self._kinds, backward, saved, saved_result, several)
        for in_list in (False, True):
            self._register(in_list)
        ops = torch.ops.graphar
        self.one, self.list = getattr(ops, name).default, getattr(ops, f"{name}_list").default
        if check_out and with_out:
            self.one_out, self.list_out = getattr(ops, f"{name}_out").default, getattr(ops, f"{name}_list_out").default

    # ---- calls ------------------------------------------------------------------------------------------------------

    def __call__(self, *tensors, given: G, plain: bool = False, asked: Asked | None = None) -> Any:
        """Calls the list form if the first argument is a list. Makes a ``plain`` call without torch's dispatcher.

        ``asked`` has what the user asked for, so that later calls can repeat a plain one: see repeats.py.
        """
        if plain:
            outs = self._results([[x] for x in tensors], given, False, asked)
            return outs if self.returns != "Tensor" else outs[0]
        rest = self._values(given)
        if not _is_compiling():
            check_transform(self.name, (*tensors, *rest))
        if not isinstance(tensors[0], (list, tuple)):
            return self.one(*tensors, *rest)
        pairs = zip(rest, self._kinds.values(), strict=True)
        rest = [with_own_nodes(value) if kind == "Tensor[]" else value for value, kind in pairs]
        return self.list(*[with_own_nodes(list(xs)) for xs in tensors], *rest)

    def into(self, *tensors, given: G, plain: bool = False, asked: Asked | None = None) -> None:
        """Calls the ``out=`` form, in the same way as :meth:`__call__`."""
        if plain:
            in_list = isinstance(tensors[0], list)
            self._implement_out(*tensors, *self._values(given), in_list=in_list, asked=asked)
        elif isinstance(tensors[0], (list, tuple)):
            self.list_out(*tensors, *self._values(given))
        else:
            self.one_out(*tensors, *self._values(given))

    def _values(self, arguments: G) -> list:
        return [getattr(arguments, name) for name in self._kinds]

    def arguments(self, **named: Any) -> tuple:
        """Returns the arguments after the tensors, in order; those that are missing have their defaults."""
        if unknown := named.keys() - self._kinds.keys():
            raise TypeError(f"{self.name} takes no {unknown}")
        return tuple([named[name] if name in named else self._defaults[name] for name in self._kinds])

    def takes(self, name: str) -> bool:
        """Whether the op has a tensor or an argument of that name."""
        return name in self.tensors or name in self._kinds

    def read(self, values: Sequence) -> dict[str, Any]:
        """Returns by name the tensors and arguments of a call of the first form."""
        return dict(zip((*self.tensors, *self._kinds), values, strict=True))

    def write(self, named: Mapping[str, Any]) -> tuple:
        """Returns tensors and arguments in order: the inverse of :meth:`read`, with defaults for missing ones."""
        rest = {name: value for name, value in named.items() if name not in self.tensors}
        return *[named[name] for name in self.tensors], *self.arguments(**rest)

    def saved(self, ctx) -> Saved:
        """Returns in a backward pass what it needs of the forward pass: see :meth:`Differentiation.saved`."""
        assert self._rule
        return self._rule.saved(ctx)

    # ---- schemas ----------------------------------------------------------------------------------------------------

    def _register(self, in_list: bool) -> None:
        """Registers a form of the op, its form with ``out=``, if it has one, vmap and the backward pass."""
        name, kind = (f"{self.name}_list", "Tensor[]") if in_list else (self.name, "Tensor")
        tensors = ", ".join(f"{kind} {tensor}" for tensor in self.tensors)
        arguments = ", ".join(f"{kind} {name}" for name, kind in self._kinds.items())
        result = self.returns if self.returns != "Tensor" else kind
        self._define(name, f"({tensors}, {arguments}) -> {result}", in_list, self._implement, self._meta)
        if self._check_out and self._with_out:
            rest = "Tensor(a!)[] residual, " if self._residual else ""
            schema = f"({tensors}, {rest}{kind.replace('Tensor', 'Tensor(b!)')} out, {arguments}) -> ()"
            self._define(f"{name}_out", schema, in_list, self._implement_out, lambda *_, in_list: None)

        def over(info, dims: Sequence, *values):
            is_one = self.returns == "Tensor" and not in_list
            return over_batch(self.name, self.list if in_list else self.one, is_one, info.batch_size, dims, values)

        torch.library.register_vmap(f"graphar::{name}", over, lib=library)
        if self._rule:
            self._rule.register(library, name, in_list)

    def _define(self, name: str, schema: str, in_list: bool, implement: Callable, meta: Callable) -> None:
        library.define(name + schema)
        for key in ("CPU", "CUDA"):
            library.impl(name, functools.partial(implement, in_list=in_list), key)
        torch.library.register_fake(f"graphar::{name}", functools.partial(meta, in_list=in_list), lib=library)

    # ---- implementations --------------------------------------------------------------------------------------------

    def _split(self, values: Sequence, in_list: bool) -> tuple[Lists, Sequence]:
        """Returns the tensors, as lists of this process's ranks, and the arguments after them."""
        count = len(self.tensors)
        return [list(value) if in_list else [value] for value in values[:count]], values[count:]

    def _engine(self, lists: Lists, arguments: G, in_list: bool) -> Engine:
        """Checks a call, and returns its engine."""
        name = arguments.communicator
        if in_list:
            engine = engine_of_devices(name, tuple([x.device for x in lists[0]]), self.name)
        else:
            engine = engine_of_group(name, self.name)
        self._check(engine, *lists, arguments)
        return engine

    def _results(self, lists: Lists, arguments: G, in_list: bool, asked: Asked | None = None) -> list[torch.Tensor]:
        """Makes a call, and returns new results, rank by rank."""
        engine = self._engine(lists, arguments, in_list)
        outs = self._fake(*lists, arguments)
        self._make(engine, lists, outs, arguments, asked)
        return outs if self.returns == "Tensor" else [result for results in outs for result in results]

    def _implement(self, *call, in_list: bool):
        lists, values = self._split(call, in_list)
        outs = self._results(lists, self.given(*values), in_list)
        return outs if in_list or self.returns != "Tensor" else outs[0]

    def _implement_out(self, *call, in_list: bool, asked: Asked | None = None) -> None:
        lists, rest = self._split(call, in_list)
        residuals: Sequence[torch.Tensor] = ()
        if self._residual:
            residuals, *rest = rest
        out, *values = rest
        arguments, outs = self.given(*values), list(out) if in_list else [out]
        engine = self._engine(lists, arguments, in_list)
        assert self._check_out
        self._check_out(*lists, outs, arguments)
        if residuals and self._residual:
            arguments = self._residual(*lists, residuals, outs, arguments)
        targets = [out if out.is_contiguous() else torch.empty_like(out, memory_format=_contiguous) for out in outs]
        asked = None if targets[0] is not outs[0] else asked
        self._make(engine, lists, targets, arguments, asked, *([residuals] if residuals else []))
        for target, destination in zip((*targets, *residuals), (*outs, *residuals), strict=True):
            deliver(target, destination)

    def _make(self, engine: Engine, lists: Lists, outs: list, arguments: G, asked: Asked | None, *residuals) -> None:
        """Makes a call, and keeps it if calls like it can repeat it."""
        repeats = engine.warm.repeats
        made = self._run(engine, *lists, outs, arguments, *residuals)
        if asked is not None and made is not None and made[0] is not None:
            plan, (operands,) = made
            keep(engine, repeats, self.name, asked, plan, operands, getattr(arguments, "codec", ""))

    def _meta(self, *call, in_list: bool):
        for callback in when_traced:
            callback()
        lists, values = self._split(call, in_list)
        results = self._fake(*lists, self.given(*values))
        if self.returns != "Tensor":
            return [result for of_rank in results for result in of_rank]
        return results if in_list else results[0]


def op_of(target: object) -> Op | None:
    """Returns the op whose first form is the target of a graph's node; None if there is none."""
    return next((op for op in _ops.values() if op.one is target), None)


def op_named(name: str) -> Op:
    """Returns the op of that name."""
    return _ops[name]


def for_ranks(ctx, name: str, *lists: Sequence[torch.Tensor], **named) -> list[torch.Tensor]:
    """Calls an op in a backward pass, in the same form as the forward op.

    ``lists`` has a list of this process's ranks for each of the op's tensors. Returns all results of the first of these
    ranks, then all of the next.
    """
    op = op_named(name)
    values = op.arguments(**named)
    if ctx.in_list:
        return op.list(*map(list, lists), *values)
    results = op.one(*[xs[0] for xs in lists], *values)
    return [results] if op.returns == "Tensor" else results


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


def check_output(op: str, xs, outs: Any, name: str = "out") -> None:
    """Raises unless ``outs`` can take a result like the input, or is a list with a destination for each input."""
    if not isinstance(xs, (list, tuple)):
        tensor_checks.check_out(op, xs, outs, name)
        return
    tensor_checks.check_one_each(op, name, outs, xs)
    for x, out in zip(xs, outs, strict=True):
        tensor_checks.check_out(op, x, out, name)
