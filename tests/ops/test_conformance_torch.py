"""Every op with every option as torch sees it: rules of ops, fakes, transforms, modes, profiler."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphar
from tests.cases import integers, lay_out, normal, same_bits, times
from tests.ops.conformance import (
    BY_OP,
    FORMS,
    PLAIN,
    SCALED,
    both,
    changed,
    every_form,
    every_op,
    every_plain_form,
    given,
)
from tests.ops.specified import FP8
from tests.processes import on_ranks
from tests.test_layers import MAX_SCHEMAS

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

ops = torch.ops.graphar
RULES = ("test_schema", "test_autograd_registration", "test_faketensor")
COMPILED = "test_aot_dispatch_dynamic"  # once an op: tests/ops/test_conformance_compilers.py compiles every form
WITH_OUT = [form for form in FORMS if form.takes_out]
MAPPED = [form for form in FORMS if not form.writes]


class Recorder(TorchDispatchMode):
    """Records the calls of graphar's ops."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "graphar":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


def recorded(function):
    with Recorder() as recorder:
        function()
    (call,) = recorder.calls
    return call


def check_rules(form, call, tensors, rules=RULES):
    """Runs torch's opcheck on a recorded call, with gradients for the tensors that get some.

    The rule of schemas has torch compare tensors before and after the call, which it cannot in FP8.
    """
    function, args = recorded(call)
    from_other_ops = any(word in form.op.__name__ for word in ("rmsnorm", "tuple"))
    own_gradients = [] if from_other_ops else form.leaves
    wanted = {id(x) for name in own_gradients for x in tensors[name]}

    def with_gradient(one):
        if isinstance(one, (list, tuple)) and one and isinstance(one[0], torch.Tensor):
            return list(map(with_gradient, one))
        return one.detach().clone().requires_grad_() if id(one) in wanted else one

    opcheck(function, tuple(map(with_gradient, args)), test_utils=[one for one in rules if allows(one, tensors)])


def allows(rule, tensors):
    return rule != "test_schema" or all(x.dtype != FP8 for xs in tensors.values() for x in xs)


@every_form
def test_an_op_keeps_the_rules_of_ops(form):
    one, many = given(form)
    rules = (*RULES, COMPILED) if form in PLAIN else RULES

    check_rules(form, lambda: form.of_rank(0, one), one, rules)
    check_rules(form, lambda: form.in_list(many), many, rules)


@every_plain_form
@pytest.mark.parametrize("layout", ["transposed", "empty"])
def test_an_op_keeps_the_rules_of_ops_with_strided_and_with_empty_tensors(form, layout):
    tensors = given(form, (0, *form.small[1:]) if layout == "empty" else form.small)
    one, many = changed(lambda x: lay_out(x, layout), tensors)

    check_rules(form, lambda: form.of_rank(0, one), one)
    check_rules(form, lambda: form.in_list(many), many)


def both_outs(form, *tensors):
    """What each of several calls may write to."""
    return [[torch.empty_like(y) for (y,) in form.expected(of_call)] for of_call in tensors]


@pytest.mark.parametrize("form", WITH_OUT, ids=str)
def test_the_forms_with_an_output_say_what_they_write(form):
    one, many = given(form)
    (out,), outs = both_outs(form, one, many)

    for call in (lambda: form.in_list(many, out=outs), lambda: form.of_rank(0, one, out=out)):
        function, args = recorded(call)
        rules = [rule for rule in ("test_schema", "test_faketensor") if allows(rule, one)]
        opcheck(function, args, test_utils=rules)


def test_options_are_no_ops_of_their_own():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("graphar::")]

    assert {f"graphar::{op.__name__}" for op in BY_OP} < set(names)
    assert len(names) <= MAX_SCHEMAS
    for option in ("quantized", "codec", "epilogue", "residual_out", "feedback", "after"):
        assert [name for name in names if option in name and name != "graphar::epilogue_backward"] == []


def kinds(ys):
    """Shape, strides and dtype of each result. The strides of an empty one do not matter."""
    return [(y.shape, y.numel() and y.stride(), y.dtype) for y in ys]


@every_form
def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one(form):
    for shape in {form.small, *form.shapes}:
        tensors = given(form, shape)
        if not form.writes:
            tensors = changed(lambda x: lay_out(x, "transposed"), tensors)
        with FakeTensorMode() as mode:
            fakes = both(form, changed(mode.from_tensor, tensors))

        assert kinds(fakes) == kinds(both(form, tensors)), shape


@pytest.mark.parametrize("form", MAPPED, ids=str)
def test_a_meta_tensor_gives_a_meta_tensor(form):
    (one, _) = tensors = given(form)
    real = form.of_rank(0, one)

    found = form.of_rank(0, changed(lambda x: x.to("meta"), tensors)[0])

    assert [y.device.type for y in found] == ["meta"] * len(real)
    assert kinds(found) == kinds(real)


def stacked(form, batch):
    """The tensors of ``batch`` calls, stacked along a dimension that differs by argument, and these dimensions."""
    made = [given(form)[0] for _ in range(batch)]
    dims = {name: at % 2 * made[0][name][0].ndim for at, name in enumerate(made[0])}
    return {
        name: torch.stack([times(one[name][0], at + 1) for at, one in enumerate(made)], dim)
        for name, dim in dims.items()
    }, dims


@pytest.mark.parametrize(
    ("form", "in_list"),
    [*((form, False) for form in MAPPED if form.is_steady), *((form, True) for form in (*PLAIN, *SCALED))],
    ids=str,
)
def test_vmap_makes_a_call_a_slice(form, in_list):
    batch = 2 if in_list else 3
    tensors, dims = stacked(form, batch)

    def call(one):
        given = {name: [x] for name, x in one.items()}
        return tuple(tree_leaves(form.in_list(given))) if in_list else form.of_rank(0, given)

    expected = [call({name: x.select(dims[name], at) for name, x in tensors.items()}) for at in range(batch)]
    found = torch.vmap(call, in_dims=(dims,))(tensors)

    for at, y in enumerate(found):
        assert same_bits(y, torch.stack([ys[at] for ys in expected])) == 0


@pytest.mark.parametrize("options", [{"out": ...}, {"codec": "int4", "residual": ...}], ids=["out", "residual"])
def test_vmap_of_what_is_written_in_place_is_refused(options):
    def call(x):
        return graphar.allreduce(x, **{name: x.clone() if one is ... else one for name, one in options.items()})

    with pytest.raises(RuntimeError, match="Batching rule not implemented for graphar::allreduce_out"):
        torch.vmap(call)(torch.randn(4, 3))


@on_ranks(2)
def test_vmap_of_processes_makes_a_call_a_slice(rank, world_size):
    found = []
    for form in PLAIN:
        if form.op in (graphar.allreduce, graphar.fused_matmul_allreduce):
            slices = [form.tensors(world_size, form.small, fill=fill) for fill in (normal, integers)]
            own = {name: torch.stack([one[name][rank] for one in slices]) for name in slices[0]}
            (ys,) = torch.vmap(
                lambda one, form=form: form.of_rank(rank, {n: [x] * world_size for n, x in one.items()})
            )(own)
            found += [same_bits(y, form.expected(one)[rank][0]) for y, one in zip(ys, slices, strict=True)]
    assert found == [0] * 4


def with_tangent(x):
    return torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)) if x.dtype.is_floating_point else x


@every_form
def test_a_forward_mode_derivative_is_refused(form):
    names = {form.op.__name__.removesuffix("_tuple")} | ({"log_probs"} if "temperature" in form.options else set())
    with torch.autograd.forward_ad.dual_level():
        one, many = changed(with_tangent, given(form))
        for call in (lambda: form.in_list(many), lambda: form.of_rank(0, one)):
            with pytest.raises(NotImplementedError, match=rf"^({'|'.join(names)}): .*forward-mode"):
                call()


def test_grad_of_torch_func_is_refused():
    with pytest.raises(NotImplementedError, match=r"allreduce: torch.func.grad .* use torch.autograd.grad\(\)"):
        torch.func.grad(lambda x: graphar.allreduce(x).sum())(torch.ones(3))


@every_form
def test_a_dispatch_mode_sees_one_op_a_call(form):
    one, many = given(form)
    name = form.op.__name__
    calls = [("_out" * bool(form.writes), partial(form.of_rank, 0, one), partial(form.in_list, many))]
    if form.takes_out:
        (out,), outs = both_outs(form, one, many)
        has_schema = hasattr(ops, f"{name}_out")  # else a mode sees a call without `out`, and a copy
        calls.append(("_out" * has_schema, partial(calls[0][1], out=out), partial(calls[0][2], out=outs)))

    for suffix, *of_call in calls:
        seen = [recorded(call)[0] for call in of_call]
        assert seen == [getattr(ops, f"{name}{kind}{suffix}").default for kind in ("", "_list")]


@every_plain_form
def test_function_modes_and_subclasses_see_the_op(form):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    tensors = given(form)
    with Mode():
        form.of_rank(0, tensors[0])
    by_mode = seen.copy()
    seen.clear()
    form.of_rank(0, changed(lambda x: x.as_subclass(Subclass), tensors)[0])

    for names in (by_mode, seen):
        assert any(f"graphar.{form.op.__name__}" in name for name in names)


@pytest.mark.parametrize("form", [form for form in FORMS if form.is_steady], ids=str)
def test_autocast_changes_no_bits(form):
    dtype = torch.float32 if torch.float32 in form.dtypes else form.dtypes[0]
    tensors = [form.tensors(ranks, form.small, dtype, normal) for ranks in (1, 2)]
    expected = both(form, tensors)

    with torch.autocast("cpu", torch.bfloat16):
        found = both(form, tensors)

    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)


@every_op
def test_the_profiler_sees_the_op(op):
    for form in (BY_OP[op][0], *[form for form in SCALED if form.op is op]):
        tensors = given(form)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = both(form, tensors)

        names = {event.name for event in profile.events()}
        assert {f"graphar::{op.__name__}", f"graphar::{op.__name__}_list"} <= names
        assert [same_bits(*pair) for pair in zip(found, both(form, tensors), strict=True)] == [0] * len(found)


@every_plain_form
def test_a_parameter_is_a_tensor_like_any_other(form):
    tensors = given(form)
    expected = both(form, tensors)

    with torch.no_grad():
        found = both(form, changed(lambda x: torch.nn.Parameter(x, x.dtype.is_floating_point), tensors))

    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)
