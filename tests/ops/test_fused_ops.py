"""fused_matmul_allreduce and fused_matmul_reducescatter as torch sees them: schema, fakes, gradients, compilers."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import graphar
from graphar.graph import order
from graphar.ops.matmul_allreduce import OP as ALLREDUCE
from graphar.ops.matmul_reducescatter import OP as REDUCESCATTER
from graphar.ops.register import op_of
from tests.cases import normal, same_bits
from tests.ops.test_scatter_ops import compiled, needs_a_compiler, world_of_one  # noqa: F401, they are fixtures
from tests.processes import run_ranks

ops = torch.ops.graphar
OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)
CUT = {"partition": "split_m", "num_partitions": 2}

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
with_and_without_gradient = pytest.mark.parametrize("requires_grad", [False, True])
ignore_deprecations_inside_torch = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def operands(ranks=2, dtype=torch.float32, requires_grad=False, lead=(6,)):
    shapes = ((*lead, 5), (4, 5), (4,))
    return [[torch.randn(shape, dtype=dtype).requires_grad_(requires_grad) for _ in range(ranks)] for shape in shapes]


# ---- schema ---------------------------------------------------------------------------------------------------------


@with_and_without_gradient
@pytest.mark.parametrize("lead", [(6,), (3, 2), (0,)], ids=str)
def test_the_ops_of_a_process_keep_the_rules_of_ops(requires_grad, lead):
    (a,), (w,), (bias,) = operands(1, requires_grad=requires_grad, lead=lead)

    for b in ([], [bias]):
        call = {"bias": b, "partition": "none"}
        opcheck(ops.fused_matmul_allreduce.default, (a, w, *ALLREDUCE.arguments(**call)))
        opcheck(
            ops.fused_matmul_reducescatter.default, (a, w, *REDUCESCATTER.arguments(rank=0, sizes=[lead[0]], **call))
        )


@with_and_without_gradient
@pytest.mark.parametrize("codec", ["", "int4"])
def test_the_ops_of_a_list_keep_the_rules_of_ops(requires_grad, codec):
    a, w, bias = operands(2, requires_grad=requires_grad)

    for b in ([], bias):
        call = {"bias": b, "codec": codec, **CUT}
        opcheck(ops.fused_matmul_allreduce_list.default, (a, w, *ALLREDUCE.arguments(**call)))
        opcheck(ops.fused_matmul_reducescatter_list.default, (a, w, *REDUCESCATTER.arguments(sizes=[3, 3], **call)))


def test_the_ops_with_an_output_say_what_they_write():
    (a, a1), (w, w1), (bias, _) = operands(2)
    utils = ("test_schema", "test_faketensor")

    alone = ALLREDUCE.arguments(bias=[bias], partition="none")
    opcheck(ops.fused_matmul_allreduce_out.default, (a, w, torch.empty(6, 4), *alone))
    outs = [torch.empty(6, 4), torch.empty(6, 4)]
    call = ([a, a1], [w, w1], outs, *ALLREDUCE.arguments(**CUT))
    opcheck(ops.fused_matmul_allreduce_list_out.default, call, test_utils=utils)


@every_op
@pytest.mark.parametrize("lead", [(6,), (3, 2)], ids=str)
def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one(op, lead):
    a, w, _ = operands(3, torch.bfloat16, lead=lead)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(x) for x in xs] for xs in (a, w)]
        found = [op(fakes[0][0], fakes[1][0]), *op(*fakes)]

    for mine, wanted in zip(found, [op(a[0], w[0]), *op(a, w)], strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@every_op
def test_meta_tensors_give_a_meta_tensor(op):
    out = op(torch.empty(6, 5, device="meta"), torch.empty(4, 5, device="meta"))

    assert (out.device.type, out.shape) == ("meta", (6, 4))


# ---- gradients ------------------------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("lead", [(5,), (3, 2)], ids=str)
def test_the_gradients_of_a_list_are_its_derivatives(op, lead):
    flat = [x for xs in operands(2, torch.float64, True, lead) for x in xs]

    def call(a0, a1, w0, w1, b0, b1):
        return op([a0, a1], [w0, w1], bias=[b0, b1], partition="split_n", num_partitions=2)

    assert torch.autograd.gradcheck(call, flat)
    assert torch.autograd.gradgradcheck(call, flat)


@every_op
def test_only_what_needs_a_gradient_gets_one(op):
    a, w, _ = operands(2)
    a[1].requires_grad_()

    sum(y.sum() for y in op(a, w)).backward()

    assert [x.grad is not None for x in (*a, *w)] == [False, True, False, False]


def as_rank(rank, world_size):
    """By op, this rank's gradients; the gradient of the whole is the same on all ranks."""
    found = []
    for op in OPS:
        a, w, bias = (normal(at + rank, numel, torch.float32).view(shape) for at, numel, shape in SHAPES)
        leaves = [x.requires_grad_() for x in (a, w, bias)]
        y = op(a, w, bias=bias)
        y.backward(whole()[: len(y)] if op is OPS[0] else whole().tensor_split(world_size)[rank])
        found.append([x.grad for x in leaves])
    return found


SHAPES = ((0, 7 * 5, (7, 5)), (10, 4 * 5, (4, 5)), (20, 4, (4,)))


def whole():
    return normal(30, 7 * 4, torch.float32).view(7, 4)


def test_the_gradients_of_processes_are_those_of_one_loss_that_all_compute():
    for rank, by_op in enumerate(run_ranks(as_rank, 3)):
        a, w, _ = (normal(at + rank, numel, torch.float32).view(shape) for at, numel, shape in SHAPES)
        for of_a, of_w, _ in by_op:
            torch.testing.assert_close(of_a, whole() @ w)
            torch.testing.assert_close(of_w, whole().t() @ a)
        torch.testing.assert_close(by_op[0][2], whole().sum(0))
        torch.testing.assert_close(by_op[1][2], whole().tensor_split(3)[rank].sum(0))


def forward_only(rank, world_size):
    """How many all-reduces a process's backward pass makes."""
    a, w, _ = (normal(at + rank, numel, torch.float32).view(shape) for at, numel, shape in SHAPES)
    with graphar.Communicator() as communicator:
        y = graphar.fused_matmul_allreduce(a.requires_grad_(), w.requires_grad_(), group=communicator)
        made = communicator.engine._group_calls._made
        y.backward(whole())
        return communicator.engine._group_calls._made - made


def test_the_gradients_of_an_all_reduce_of_processes_send_nothing():
    assert run_ranks(forward_only, 2) == [0, 0]


# ---- compilers ------------------------------------------------------------------------------------------------------


def lists(a, b, w, v):
    first, second = graphar.fused_matmul_allreduce([a * 2, b], [w, v], partition="split_n", num_partitions=2)
    return first + 1, second, graphar.fused_matmul_reducescatter([a, b], [w, v], codec="int8")[1]


def processes(a, b, w, v):
    y = graphar.fused_matmul_allreduce(a + 1, w, bias=v[:, 0], partition="split_m", num_partitions=2)
    return y * 2, graphar.fused_matmul_reducescatter(b, w)


@pytest.mark.parametrize("function", [lists, processes])
def test_compiled_calls_give_the_eager_bits_at_any_size(compiled, function):  # noqa: F811
    fast = compiled(function)
    w, v = torch.randn(4, 5), torch.randn(4, 5)

    for rows in (4, 6, 9):
        a, b = torch.randn(rows, 5), torch.randn(rows, 5)
        for mine, expected in zip(fast(a, b, w, v), function(a, b, w, v), strict=True):
            assert same_bits(mine, expected) == 0


def test_compiled_calls_have_gradients(compiled):  # noqa: F811
    (a, b), (w, v), _ = operands(2, requires_grad=True)

    def loss(a, b, w, v):
        whole = graphar.fused_matmul_allreduce([a, b], [w, v])[0].square().sum()
        return whole + graphar.fused_matmul_reducescatter(a, w).sum()

    eager = torch.autograd.grad(loss(a, b, w, v), (a, b, w, v))
    fast = torch.autograd.grad(compiled(loss)(a, b, w, v), (a, b, w, v))

    for mine, expected in zip(fast, eager, strict=True):
        torch.testing.assert_close(mine, expected)


@needs_a_compiler
@ignore_deprecations_inside_torch
@pytest.mark.parametrize("function", [lists, processes])
def test_inductor_gives_the_eager_bits(compiled, function):  # noqa: F811
    (a, b), (w, v), _ = operands(2)

    with importlib.import_module("torch._inductor.config").patch(compile_threads=1):  # more are processes that stay
        found = compiled(function, backend="inductor")(a, b, w, v)

    for mine, expected in zip(found, function(a, b, w, v), strict=True):
        assert same_bits(mine, expected) == 0


def compile_in_processes(rank, world_size):
    group = dist.new_group()
    found = []
    for which in (None, group):
        torch._dynamo.reset()

        def layer(a, w, which=which):
            y = graphar.fused_matmul_allreduce(a * 2, w, group=which)
            return y + 1, graphar.fused_matmul_reducescatter(a, w, group=which, partition="split_n")

        fast = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (5, 7):
            a, w = (normal(rank + at, numel * 3, torch.float32).view(numel, 3) for at, numel in ((0, rows), (9, 8)))
            found += [same_bits(*pair) for pair in zip(fast(a, w), layer(a, w), strict=True)]
    return found


def test_processes_can_compile_their_calls():
    assert run_ranks(compile_in_processes, 2) == [[0] * 8] * 2


def test_a_graph_keeps_the_order_of_calls_that_need_nothing_of_each_other():
    def function(a, w):
        part = graphar.fused_matmul_reducescatter(a, w, partition="split_n")
        return graphar.allreduce(a), graphar.fused_matmul_allreduce(a, w, bias=w[:, 0]), part

    a, w = torch.randn(6, 5), torch.randn(4, 5)
    module = make_fx(function)(a, w)
    order.keep(module.graph)
    module.recompile()

    nodes = [node for node in module.graph.nodes if "graphar" in str(node.target)]
    names = ["fused_matmul_reducescatter", "allreduce", "fused_matmul_allreduce"]
    assert [node.target.name() for node in nodes] == [f"graphar::{name}" for name in names]
    assert [op_of(node.target).read(node.args)["after"] for node in nodes] == [[], [nodes[0]], [nodes[1]]]
    for mine, expected in zip(module(a, w), function(a, w), strict=True):
        assert same_bits(mine, expected) == 0
