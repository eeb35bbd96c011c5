"""Every op with every option under torch's compilers: bits at any size, written tensors, exports, order of calls."""

import importlib
import shutil

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import graphar
from graphar.graph import collectives
from graphar.ops.register import op_of
from tests.cases import normal, same_bits, times
from tests.ops.conformance import (
    ALLGATHER_TUPLE,
    ALLREDUCE,
    BY_OP,
    FORMS,
    FUSED_REDUCESCATTER,
    PLAIN,
    SCALED,
    both,
    changed,
    compiled,
    copies,
    every_op,
    flat,
    given,
)
from tests.processes import on_ranks

__all__ = ["compiled"]  # a fixture
pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]

ops = torch.ops.graphar
WITH_OUT = [form for form in FORMS if form.takes_out]


def steady(op):
    return [form for form in BY_OP[op] if form.is_steady]


def calls(forms, tensors):
    """The results of all forms, with one tensor and with lists, between other ops."""
    inputs = [changed(lambda x: times(x, 1), one) for one in tensors]
    return [[y.float() * 2 for y in both(*pair)] for pair in zip(forms, inputs, strict=True)]


def with_rows(forms, rows):
    return [given(form, (rows, *form.small[1:])) for form in forms]


def differ(forms, found, expected):
    return [
        str(form)
        for form, *pair in zip(forms, found, expected, strict=True)
        if any(same_bits(*ys) for ys in zip(*pair, strict=True))
    ]


SIZES = (23, 14, 9)  # of rows: no other dimension has these sizes, since a compiler unifies equal ones


@every_op
def test_calls_compiled_once_give_the_eager_bits_at_any_size(compiled, op):
    forms, graphs = steady(op), []

    def count(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    fast = compiled(lambda tensors: calls(forms, tensors), backend=count)
    for rows in SIZES:
        tensors = with_rows(forms, rows)
        assert differ(forms, fast(tensors), calls(forms, tensors)) == []

    assert len(graphs) == 1


# A result, several results, and a matmul. A compiler that generates code is slow, and sees no difference in other ops.
FOR_INDUCTOR = [forms[0] for forms in (ALLREDUCE, ALLGATHER_TUPLE, FUSED_REDUCESCATTER)]


@pytest.mark.promise("The CPU gives the same bits, and so do compiled, captured and replayed calls.")
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_inductor_gives_the_eager_bits(compiled):
    tensors = with_rows(FOR_INDUCTOR, 6)

    config = importlib.import_module("torch._inductor.config")
    with config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):  # more threads are processes that stay
        found = compiled(lambda tensors: calls(FOR_INDUCTOR, tensors), backend="inductor")(tensors)

    assert differ(FOR_INDUCTOR, found, calls(FOR_INDUCTOR, tensors)) == []


def written(form, tensors):
    """The results of a call, the tensors that it writes, and the value of another op on one result."""
    ys = form.in_list(copies(tensors))
    return [ys[0][0] + 1, *flat(ys)]


@pytest.mark.parametrize("form", [form for form in FORMS if form.writes and not form.is_random], ids=str)
def test_compiled_calls_write_what_eager_ones_write(compiled, form):
    fast = compiled(lambda tensors: written(form, tensors))

    for rows in (6, 9):
        _, tensors = given(form, (rows, 8))
        assert not any(same_bits(*pair) for pair in zip(fast(tensors), written(form, tensors), strict=True))


def into(forms, of_forms):
    found = []
    for form, tensors in zip(forms, of_forms, strict=True):
        like = form.in_list(tensors)
        outs = [torch.empty_like(y) for (y,) in like]
        form.in_list(tensors, out=outs)
        found.append([out + 1 for out in outs])
    return found


def test_compiled_calls_write_to_out(compiled):
    forms = [form for form in WITH_OUT if form.label in ("", "int4", "epilogue")]
    tensors = [given(form)[1] for form in forms]

    assert differ(forms, compiled(lambda tensors: into(forms, tensors))(tensors), into(forms, tensors)) == []


def test_an_input_that_is_the_output_may_be_compiled(compiled):
    def in_place(a, b):
        a, b = a * 2, b * 3
        graphar.allreduce([a, b], out=[a, b])
        return a + b, a

    a, b = torch.randn(5, 3), torch.randn(5, 3)

    assert [same_bits(*pair) for pair in zip(compiled(in_place)(a, b), in_place(a, b), strict=True)] == [0, 0]


@on_ranks(2, timeout_s=200)
def test_processes_can_compile_their_calls(rank, world_size):
    """Which forms differ if compiled, with the default group, another group, a mesh and a communicator."""
    group, mesh = torch.distributed.new_group(), init_device_mesh("cpu", (world_size,))
    found, every = [], [*PLAIN, *SCALED]
    with graphar.Communicator() as communicator:
        for which, forms in ((None, every), (communicator, every), (group, PLAIN[:3]), (mesh, PLAIN[:3])):
            torch._dynamo.reset()

            def function(tensors, which=which, forms=forms):
                return [form.of_rank(rank, one, group=which) for form, one in zip(forms, tensors, strict=True)]

            fast = torch.compile(function, fullgraph=True, dynamic=False, backend="aot_eager")
            tensors = [form.tensors(world_size, form.small, fill=normal) for form in forms]
            found += [same_bits(*pair) for pair in zip(flat(fast(tensors)), flat(function(tensors)), strict=True)]
    assert found.count(0) == len(found) > 2 * len([*PLAIN, *SCALED])


WITH_EPILOGUE = (graphar.fused_allgather_matmul, graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)


@pytest.mark.parametrize("op", WITH_EPILOGUE, ids=lambda op: op.__name__)
def test_what_a_backward_pass_computes_again_stays_there(op):
    # The value before the epilogue is small, so a compiler would keep it from the forward pass. Ranks whose sizes
    # differ would decide differently, and make calls in another order.
    torch._dynamo.reset()
    found = []

    def noting(graph, inputs):
        found.append([node.target for node in graphar_nodes(graph)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=noting, bw_compiler=noting, partition_fn=min_cut_rematerialization_partition)
    a, w = torch.randn(4, 512, requires_grad=True), torch.randn(2, 512)

    torch.compile(lambda a, w: op(a, w, epilogue="tanh(v)"), fullgraph=True, backend=backend)(a, w).sum().backward()

    forward, backward = found
    assert forward == [getattr(ops, op.__name__).default]
    assert ops.epilogue_backward.default in backward[1:]


class Calls(torch.nn.Module):
    def __init__(self, forms):
        super().__init__()
        self.forms = forms

    def forward(self, tensors):
        return calls(self.forms, tensors)


@every_op
def test_export_keeps_one_node_a_call(op):
    forms = steady(op)
    model, tensors = Calls(forms), with_rows(forms, 6)

    program = torch.export.export(model, (tensors,))

    one, in_list = (getattr(ops, f"{op.__name__}{suffix}").default for suffix in ("", "_list"))
    assert [node.target for node in graphar_nodes(program)] == [one, in_list] * len(forms)
    assert differ(forms, program.module()(tensors), model(tensors)) == []


def graphar_nodes(module):
    return [node for node in module.graph.nodes if "graphar" in str(node.target)]


def came_before(node, after):
    """Whether ``after`` holds one item only: ``node`` or a result of it."""
    (one,) = after
    return one is node or one.args[0] is node


def ones_of(forms, tensors):
    """The results of the calls with one tensor per rank."""
    return [form.of_rank(0, one) for form, one in zip(forms, tensors, strict=True)]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_sees_the_ops(mode):
    tensors = [given(form)[0] for form in PLAIN]

    module = make_fx(lambda tensors: ones_of(PLAIN, tensors), tracing_mode=mode)(tensors)

    assert [node.target for node in graphar_nodes(module)] == [getattr(ops, form.op.__name__).default for form in PLAIN]


def test_a_graph_keeps_the_order_of_calls_that_need_nothing_of_each_other():
    forms = [form for form in FORMS if form.is_steady]
    tensors = [given(form)[0] for form in forms]
    module = make_fx(lambda tensors: ones_of(forms, tensors))(tensors)

    collectives.keep_order(module.graph)
    module.recompile()

    nodes = graphar_nodes(module)
    assert [node.target for node in nodes] == [getattr(ops, form.op.__name__).default for form in forms]
    behind = [op_of(node.target).read(node.args)["after"] for node in nodes]
    assert behind[0] == []
    assert all(came_before(node, before) for node, before in zip(nodes, behind[1:], strict=False))
    assert differ(forms, module(tensors), ones_of(forms, tensors)) == []
