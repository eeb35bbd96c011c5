"""reducescatter and allgather as torch sees them: schema, fakes, gradients, compilers, transforms and modes."""

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
from graphar.ops.allgather import OP as ALLGATHER
from graphar.ops.reducescatter import OP as REDUCESCATTER
from tests.cases import normal, same_bits
from tests.processes import run_ranks

ops = torch.ops.graphar

# With the axis to split or join along.
INPUTS = {
    "contiguous": (lambda: torch.randn(4, 6), 0),
    "second axis": (lambda: torch.randn(4, 6), 1),
    "transposed": (lambda: torch.randn(4, 6).t(), 0),
    "empty": (lambda: torch.randn(0, 3), 0),
    "empty beside": (lambda: torch.randn(3, 0), 0),
}
every_input = pytest.mark.parametrize(("make", "axis"), INPUTS.values(), ids=INPUTS)
every_op = pytest.mark.parametrize("op", [graphar.reducescatter, graphar.allgather], ids=lambda op: op.__name__)
with_and_without_gradient = pytest.mark.parametrize("requires_grad", [False, True])
ignore_deprecations_inside_torch = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)


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


# ---- schema ---------------------------------------------------------------------------------------------------------


@every_input
@with_and_without_gradient
def test_the_ops_of_a_process_keep_the_rules_of_ops(make, axis, requires_grad):
    x = make().requires_grad_(requires_grad)

    for op in (REDUCESCATTER, ALLGATHER):
        opcheck(op.one, (x, *op.arguments(rank=0, axis=axis, sizes=[x.shape[axis]])))


@every_input
@with_and_without_gradient
def test_reducescatter_list_keeps_the_rules_of_ops(make, axis, requires_grad):
    xs = [make().requires_grad_(requires_grad) for _ in range(3)]
    sizes = [len(part) for part in torch.empty(xs[0].shape[axis]).tensor_split(3)]

    opcheck(ops.reducescatter_list.default, (xs, *REDUCESCATTER.arguments(axis=axis, sizes=sizes)))


@with_and_without_gradient
def test_allgather_list_keeps_the_rules_of_ops(requires_grad):
    xs = [torch.randn(rows, 3).requires_grad_(requires_grad) for rows in (2, 0, 5)]

    columns = [x.t().detach() for x in xs]
    for given, axis in ((xs, 0), (columns, 1)):
        opcheck(ops.allgather_list.default, (given, *ALLGATHER.arguments(axis=axis, sizes=[2, 0, 5])))


@every_op
def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one(op):
    real = [torch.randn(3, 5, dtype=torch.bfloat16).t() for _ in range(2)]
    for axis in (0, 1):
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in real]
            outs = [op(fakes[0], axis=axis), *op(fakes, axis=axis)]

        for out, expected in zip(outs, [op(real[0], axis=axis), *op(real, axis=axis)], strict=True):
            assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)


@every_op
def test_a_meta_tensor_gives_a_meta_tensor(op):
    out = op(torch.empty(3, 4, device="meta").t())

    assert (out.device.type, out.shape, out.stride()) == ("meta", (4, 3), (3, 1))


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradients_of_a_list_are_those_of_the_parts_of_its_sum(axis):
    xs = [torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    assert torch.autograd.gradcheck(lambda *xs: graphar.reducescatter(xs, axis=axis), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: graphar.reducescatter(xs, axis=axis), xs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradients_of_gathered_tensors_are_their_parts_of_the_sum(dtype):
    xs = [torch.randn(rows, 2, dtype=dtype, requires_grad=True) for rows in (2, 1, 0, 3)]

    assert torch.autograd.gradcheck(lambda *xs: graphar.allgather(xs), xs)
    assert torch.autograd.gradgradcheck(lambda *xs: graphar.allgather(xs), xs)
    assert torch.autograd.gradcheck(lambda *xs: graphar.allgather([x.t() for x in xs], axis=1), xs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_of_one_gathered_tensor(dtype):
    x = torch.randn(3, 2, dtype=dtype, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x: graphar.allgather(x, axis=1), [x])


def gradients_of_rank(rank, world_size):
    x = normal(rank, 7 * 64, torch.bfloat16).view(7, 64).requires_grad_()
    y = graphar.reducescatter(x)
    y.backward(gradient_of_part(rank, len(y)))
    z = normal(rank, (rank + 1) * 64, torch.bfloat16).view(rank + 1, 64).requires_grad_()
    graphar.allgather(z, sizes=[r + 1 for r in range(world_size)]).backward(gradient_of_whole(rank))
    return x.grad, z.grad


def gradient_of_part(rank, rows):
    return normal(10 + rank, rows * 64, torch.bfloat16).view(rows, 64)


def gradient_of_whole(rank):
    return normal(20 + rank, 6 * 64, torch.bfloat16).view(6, 64)


def test_each_op_of_processes_has_the_other_as_its_gradient():
    scattered = torch.cat([gradient_of_part(rank, rows) for rank, rows in enumerate([3, 2, 2])])
    gathered = graphar.reference.allreduce([gradient_of_whole(rank) for rank in range(3)]).split([1, 2, 3])

    for rank, (of_x, of_z) in enumerate(run_ranks(gradients_of_rank, 3)):
        assert same_bits(of_x, scattered) == 0
        assert same_bits(of_z, gathered[rank]) == 0


def test_without_grad_mode_the_result_needs_no_gradient():
    x = torch.ones(2, requires_grad=True)

    with torch.no_grad():
        results = [graphar.reducescatter(x), *graphar.allgather([x, x])]

    assert not any(result.requires_grad for result in results)


@every_op
def test_inference_mode_works(op):
    with torch.inference_mode():
        assert op(torch.ones(1)).item() == 1
        assert op([torch.ones(2), torch.ones(2)])[0].shape == op([torch.ones(2), torch.ones(2)])[1].shape


# ---- compilers ------------------------------------------------------------------------------------------------------


def lists(a, b):
    first, second = graphar.reducescatter([a * 2, b + 1], axis=1)
    return first + 1, second, graphar.allgather([first, second * 3], axis=-1)[1]


def processes(a, b):
    return graphar.reducescatter(a + 1) * 2, graphar.allgather(b, axis=1), graphar.allgather(a, sizes=[a.shape[0]])


@pytest.mark.parametrize("function", [lists, processes])
def test_compiled_calls_give_the_eager_bits_at_any_size(compiled, function):
    fast = compiled(function)

    for columns in (5, 8, 12):
        a, b = torch.randn(4, columns), torch.randn(4, columns)
        for mine, expected in zip(fast(a, b), function(a, b), strict=True):
            assert same_bits(mine, expected) == 0


@pytest.mark.parametrize("function", [lists, processes])
def test_a_size_that_changes_compiles_nothing_anew(compiled, function):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    fast = compiled(function, backend=count)
    for columns in (5, 8, 12):
        fast(torch.randn(4, columns), torch.randn(4, columns))

    assert len(graphs) == 1


def test_compiled_calls_have_gradients(compiled):
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    weight = torch.randn(9, 3)

    def loss(a, b):
        return (graphar.allgather([a, b])[0] * weight).sum() + graphar.reducescatter(a).square().sum()

    eager = torch.autograd.grad(loss(a, b), (a, b))
    fast = torch.autograd.grad(compiled(loss)(a, b), (a, b))

    assert [same_bits(mine, expected) for mine, expected in zip(fast, eager, strict=True)] == [0, 0]


def compile_in_processes(rank, world_size):
    group = dist.new_group()
    results = []
    with graphar.Communicator() as communicator:
        for which in (None, group, communicator):
            torch._dynamo.reset()

            def scatter_and_gather(x, which=which):
                part = graphar.reducescatter(x * 2, which)
                sizes = [(x.shape[0] - r + world_size - 1) // world_size for r in range(world_size)]
                return part + 1, graphar.allgather(part, which, sizes=sizes)

            fast = torch.compile(scatter_and_gather, fullgraph=True, dynamic=True, backend="aot_eager")
            for rows in (5, 7, 12):
                x = normal(rank, rows * 3, torch.float32).view(rows, 3).requires_grad_()
                pairs = list(zip(fast(x), scatter_and_gather(x), strict=True))
                gradients = [torch.autograd.grad(one.sum(), x)[0] for one in (pairs[1])]
                results += [same_bits(mine.detach(), expected.detach()) for mine, expected in [*pairs, gradients]]
    return results


def test_processes_can_compile_their_calls():
    assert run_ranks(compile_in_processes, 2) == [[0] * 27] * 2


def test_a_fake_of_each_rank_has_that_ranks_length():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.randn(5, 3))
        calls = [REDUCESCATTER.arguments(rank=rank, sizes=[2, 2, 1]) for rank in range(3)]
        lengths = [ops.reducescatter(fake, *call).shape[0] for call in calls]

    assert lengths == [2, 2, 1]


@needs_a_compiler
@ignore_deprecations_inside_torch
@pytest.mark.parametrize("function", [lists, processes])
def test_inductor_gives_the_eager_bits(compiled, function):
    a, b = torch.randn(4, 5), torch.randn(4, 5)

    with importlib.import_module("torch._inductor.config").patch(compile_threads=1):  # more are processes that stay
        outs = compiled(function, backend="inductor")(a, b)

    for mine, expected in zip(outs, function(a, b), strict=True):
        assert same_bits(mine, expected) == 0


class Model(torch.nn.Module):
    def forward(self, a, b):
        return graphar.allgather([a, b])[0].sum() + graphar.reducescatter(a).sum()


def test_export_keeps_one_node_a_call():
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(Model(), (torch.randn(3, 4), torch.randn(3, 4)), dynamic_shapes=(rows, rows))
    a, b = torch.randn(7, 4), torch.randn(7, 4)

    targets = [node.target for node in program.graph.nodes]
    assert targets.count(ops.allgather_list.default) == 1
    assert targets.count(ops.reducescatter.default) == 1
    assert same_bits(program.module()(a, b), Model()(a, b)) == 0


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_ops(mode):
    graph = make_fx(lambda x: graphar.allgather(graphar.reducescatter(x)) + 1, tracing_mode=mode)(torch.ones(3)).graph

    targets = [node.target for node in graph.nodes]
    assert ops.reducescatter.default in targets
    assert ops.allgather.default in targets


# ---- transforms and modes -------------------------------------------------------------------------------------------


@every_op
@ignore_deprecations_inside_torch
def test_a_forward_mode_derivative_is_refused(op):
    with pytest.raises(NotImplementedError, match=rf"{op.__name__}: .*forward-mode"):
        torch.func.jvp(op, (torch.ones(3),), (torch.ones(3),))


def test_a_dispatch_mode_sees_every_op():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Recorder():
        graphar.reducescatter(x)
        graphar.reducescatter([x, x])
        graphar.allgather(x)
        graphar.allgather([x, x])

    names = ("reducescatter", "reducescatter_list", "allgather", "allgather_list")
    assert [one for one in seen if one.namespace == "graphar"] == [getattr(ops, name).default for name in names]


@every_op
def test_the_profiler_sees_the_op(op):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op(torch.ones(3))

    assert f"graphar::{op.__name__}" in [event.name for event in profile.events()]


@every_op
def test_a_parameter_is_a_tensor_like_any_other(op):
    assert op(torch.nn.Parameter(torch.ones(3))).tolist() == [1, 1, 1]
