"""The ops as torch sees them: schema, fakes, gradients, compilers, transforms and modes."""

from __future__ import annotations

import importlib
import shutil

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import graphar
from graphar.ops.allreduce import OP
from tests.cases import normal, same_bits
from tests.processes import run_ranks

ops = torch.ops.graphar
CALL = OP.arguments()

INPUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(4, 6).t(),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}
every_input = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
ignore_deprecations_inside_torch = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
with_and_without_gradient = pytest.mark.parametrize("requires_grad", [False, True])


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def compiled():
    """torch.compile that accepts no graph break and compiles for any size."""
    torch._dynamo.reset()
    yield lambda function, backend="aot_eager": torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()


class Recorder(TorchDispatchMode):
    """Notes the ops that come by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


# ---- schema ---------------------------------------------------------------------------------------------------------


@every_input
@with_and_without_gradient
def test_allreduce_keeps_the_rules_of_ops(make, requires_grad):
    opcheck(ops.allreduce.default, (make().requires_grad_(requires_grad), *CALL))


@every_input
@with_and_without_gradient
def test_allreduce_list_keeps_the_rules_of_ops(make, requires_grad):
    xs = [make().requires_grad_(requires_grad) for _ in range(3)]

    opcheck(ops.allreduce_list.default, (xs, *CALL))


@every_input
def test_allreduce_out_keeps_the_rules_of_ops(make):
    opcheck(ops.allreduce_out.default, (make(), [], make(), *CALL))


@every_input
def test_allreduce_list_out_keeps_the_rules_of_ops(make):
    opcheck(ops.allreduce_list_out.default, ([make(), make()], [], [make(), make()], *CALL))


def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one():
    real = torch.randn(3, 4, dtype=torch.bfloat16).t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        outs = [graphar.allreduce(fake), *graphar.allreduce([fake, fake])]

    expected = graphar.allreduce(real)
    for out in outs:
        assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_a_meta_tensor_gives_a_meta_tensor():
    out = graphar.allreduce(torch.empty(3, 4, device="meta").t())

    assert (out.device.type, out.shape, out.stride()) == ("meta", (4, 3), (3, 1))


# ---- gradients ------------------------------------------------------------------------------------------------------


def test_the_gradients_of_a_list_are_those_of_its_sum():
    xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    assert torch.autograd.gradcheck(lambda *xs: graphar.allreduce(xs), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: graphar.allreduce(xs), xs)


def gradient_of_rank(rank, world_size):
    x = normal(rank, 8199, torch.bfloat16).requires_grad_()
    graphar.allreduce(x).backward(normal(10 + rank, 8199, torch.bfloat16))
    return x.grad


def test_the_gradient_of_a_process_is_the_sum_of_all_processes_gradients():
    expected = graphar.reference.allreduce([normal(10 + rank, 8199, torch.bfloat16) for rank in range(3)])

    gradients = run_ranks(gradient_of_rank, 3)

    assert [same_bits(gradient, expected) for gradient in gradients] == [0, 0, 0]


def test_an_output_nobody_uses_adds_nothing_to_the_gradient():
    xs = [torch.ones(2, requires_grad=True) for _ in range(2)]

    (graphar.allreduce(xs)[1] * 3).sum().backward()

    assert [x.grad.tolist() for x in xs] == [[3, 3], [3, 3]]


def test_an_input_that_needs_no_gradient_gets_none():
    frozen, trained = torch.ones(2), torch.ones(2, requires_grad=True)

    graphar.allreduce([frozen, trained])[0].sum().backward()

    assert frozen.grad is None
    assert trained.grad.tolist() == [1, 1]


def test_without_grad_mode_the_result_needs_no_gradient():
    x = torch.ones(2, requires_grad=True)

    with torch.no_grad():
        results = [graphar.allreduce(x), *graphar.allreduce([x, x])]

    assert not any(result.requires_grad for result in results)


def test_inference_mode_works():
    with torch.inference_mode():
        assert graphar.allreduce([torch.ones(1), torch.ones(1)])[0].item() == 2
        assert graphar.allreduce(torch.ones(1)).item() == 1


# ---- compilers ------------------------------------------------------------------------------------------------------


def reduce_between(a, b):
    first, second = graphar.allreduce([a * 2, b + 1])
    return first + second, graphar.allreduce(a)


def reduce_into(a, b):
    outs = [torch.empty_like(a), torch.empty_like(b)]
    graphar.allreduce([a, b], out=outs)
    single = graphar.allreduce(b, out=torch.empty_like(b))
    return outs[0] + 1, single * 2


def reduce_in_place(a, b):
    a, b = a * 2, b * 3
    graphar.allreduce([a, b], out=[a, b])
    return a + b, a


def reduce_with_choices(a, b):
    return tuple(graphar.allreduce([a, b], algorithm="fallback", timeout_s=3.0))


@pytest.mark.parametrize("function", [reduce_between, reduce_into, reduce_in_place, reduce_with_choices])
def test_compiled_calls_give_the_eager_bits_at_any_size(compiled, function):
    fast = compiled(function)

    for rows in (5, 7, 12):
        a, b = torch.randn(rows, 3), torch.randn(rows, 3)
        for mine, expected in zip(fast(a, b), function(a, b), strict=True):
            assert same_bits(mine, expected) == 0


def test_a_size_that_changes_compiles_nothing_anew(compiled):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    fast = compiled(reduce_between, backend=count)
    for rows in (5, 7, 12):
        fast(torch.randn(rows, 3), torch.randn(rows, 3))

    assert len(graphs) == 1


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@ignore_deprecations_inside_torch
@pytest.mark.parametrize("function", [reduce_between, reduce_in_place])
def test_inductor_gives_the_eager_bits(compiled, function):
    a, b = torch.randn(5, 3), torch.randn(5, 3)

    with importlib.import_module("torch._inductor.config").patch(compile_threads=1):  # more are processes that stay
        outs = compiled(function, backend="inductor")(a, b)

    for mine, expected in zip(outs, function(a, b), strict=True):
        assert same_bits(mine, expected) == 0


def test_compiled_calls_have_gradients(compiled):
    a, b = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)

    first, second = compiled(lambda a, b: graphar.allreduce([a, b * 2]))(a, b)
    (first + 2 * second).sum().backward()

    assert a.grad.tolist() == [3.0] * 5
    assert b.grad.tolist() == [6.0] * 5


def test_a_communicator_can_be_used_in_compiled_code(compiled):
    with graphar.Communicator(devices=["cpu"] * 2) as list_form, graphar.Communicator() as process_form:
        fast = compiled(lambda a, b: (list_form.allreduce([a, b])[0], process_form.allreduce(b)))
        a, b = torch.randn(5), torch.randn(5)

        total, own = fast(a, b)

    assert same_bits(total, a + b) == 0
    assert same_bits(own, b) == 0


def reduce_compiled(rank, world_size):
    fast = torch.compile(lambda x: graphar.allreduce(x * 2) + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    return [fast(torch.full((rows,), float(rank))).tolist() for rows in (2, 5)]


def test_processes_can_compile_their_calls():
    assert run_ranks(reduce_compiled, 2) == [[[3.0] * 2, [3.0] * 5]] * 2


class Model(torch.nn.Module):
    def forward(self, a, b):
        return graphar.allreduce([a, b])[0] + graphar.allreduce(a)


def test_export_keeps_one_node_a_call():
    rows = {0: torch.export.Dim("rows")}
    program = torch.export.export(Model(), (torch.randn(3, 4), torch.randn(3, 4)), dynamic_shapes=(rows, rows))
    a, b = torch.randn(7, 4), torch.randn(7, 4)

    targets = [node.target for node in program.graph.nodes]
    assert targets.count(ops.allreduce_list.default) == 1
    assert targets.count(ops.allreduce.default) == 1
    assert same_bits(program.module()(a, b), Model()(a, b)) == 0


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_op(mode):
    graph = make_fx(lambda x: graphar.allreduce(x) + 1, tracing_mode=mode)(torch.ones(3)).graph

    assert ops.allreduce.default in [node.target for node in graph.nodes]


# ---- transforms -----------------------------------------------------------------------------------------------------


def reduce_slices(rank, world_size):
    return torch.vmap(graphar.allreduce)(normal(rank, 12, torch.float32).view(4, 3))


def test_vmap_of_one_tensor_reduces_each_slice():
    expected = graphar.reference.allreduce([normal(rank, 12, torch.float32).view(4, 3) for rank in range(2)])

    assert [same_bits(total, expected) for total in run_ranks(reduce_slices, 2)] == [0, 0]


def test_vmap_of_a_list_is_refused():
    with pytest.raises(RuntimeError, match="Batching rule not implemented for graphar::allreduce_list"):
        torch.vmap(lambda a: graphar.allreduce([a, a]))(torch.randn(4, 3))


def test_grad_of_torch_func_is_refused():
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: graphar.allreduce(x).sum())(torch.ones(3))


@ignore_deprecations_inside_torch
def test_a_forward_mode_derivative_is_refused():
    with pytest.raises(NotImplementedError, match=r"allreduce: .*forward-mode"):
        torch.func.jvp(graphar.allreduce, (torch.ones(3),), (torch.ones(3),))


@ignore_deprecations_inside_torch
@pytest.mark.parametrize("as_input", [lambda x: x, lambda x: [x, x]], ids=["tensor", "list"])
def test_a_dual_tensor_is_refused(as_input):
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match=r"allreduce: .*forward-mode"):
            graphar.allreduce(as_input(x))


# ---- modes, subclasses, profiler ------------------------------------------------------------------------------------


def test_a_dispatch_mode_sees_every_op():
    x = torch.ones(3)

    with Recorder() as recorder:
        graphar.allreduce(x)
        graphar.allreduce(x, out=torch.empty(3))
        graphar.allreduce([x, x])
        graphar.allreduce([x, x], out=[torch.empty(3), torch.empty(3)])

    seen = [function for function in recorder.seen if function.namespace == "graphar"]
    names = ("allreduce", "allreduce_out", "allreduce_list", "allreduce_list_out")
    assert seen == [getattr(ops, name).default for name in names]


def test_a_function_mode_sees_the_op():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Mode():
        graphar.allreduce(x)

    assert any("graphar.allreduce" in name for name in seen)


def test_a_tensor_subclass_sees_the_op():
    seen = []

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    graphar.allreduce(torch.ones(3).as_subclass(Subclass))

    assert any("graphar.allreduce" in name for name in seen)


def test_the_profiler_sees_the_op():
    x = torch.ones(3)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        graphar.allreduce(x)
        graphar.allreduce([x, x])

    names = [event.name for event in profile.events()]
    assert "graphar::allreduce" in names
    assert "graphar::allreduce_list" in names


def test_a_parameter_is_a_tensor_like_any_other():
    assert graphar.allreduce(torch.nn.Parameter(torch.ones(3))).tolist() == [1, 1, 1]
