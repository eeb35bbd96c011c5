"""The options of an op are arguments of its one schema: as torch checks, differentiates, exports and maps them."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import graphar
from graphar import Epilogue
from graphar.ops.allreduce import OP as ALLREDUCE
from graphar.ops.reducescatter import OP as REDUCESCATTER
from tests.cases import normal, same_bits
from tests.ops.test_scatter_ops import compiled, world_of_one  # noqa: F401, they are fixtures

MOST_SCHEMAS = 26
BIASED = "v * s + b[col]"


def bias(ranks):
    return [torch.randn(6) for _ in range(ranks)]


# By name, the arguments of a call of so many ranks.
OPTIONS = {
    "codec": lambda ranks: {"codec": "int4"},
    "epilogue": lambda ranks: {"epilogue": BIASED, "tensors": bias(ranks), "scalars": [0.5]},
    "prefetch": lambda ranks: {"prefetch": bias(ranks)},
    "after": lambda ranks: {"after": bias(1)},
}
every_option = pytest.mark.parametrize("given", OPTIONS.values(), ids=OPTIONS)
with_and_without_gradient = pytest.mark.parametrize("requires_grad", [False, True])


def matrices(ranks, requires_grad=False):
    return [torch.randn(4, 6).requires_grad_(requires_grad) for _ in range(ranks)]


# ---- schemas --------------------------------------------------------------------------------------------------------


def test_an_option_is_no_op_of_its_own():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("graphar::")]

    assert "graphar::allreduce" in names
    assert len(names) <= MOST_SCHEMAS
    for option in ("quantized", "codec", "epilogue", "prefetch", "residual_out", "feedback", "after"):
        assert [name for name in names if option in name and name != "graphar::epilogue_backward"] == []


def test_what_is_written_is_read_and_what_is_not_given_is_not_used():
    call = ("x", *ALLREDUCE.arguments(codec="int4"))  # as a graph's node has it, whose tensors are nodes

    assert ALLREDUCE.write(ALLREDUCE.read(call)) == call
    assert {name for name, one in ALLREDUCE.read(call).items() if one} == {"x", "algorithm", "codec"}
    with pytest.raises(TypeError, match=r"allreduce takes no \{'axis'\}"):
        ALLREDUCE.arguments(axis=1)


@every_option
@with_and_without_gradient
def test_an_op_keeps_the_rules_of_ops_with_each_option(world_of_one, given, requires_grad):  # noqa: F811
    one, two = (matrices(ranks, requires_grad) for ranks in (1, 2))

    opcheck(ALLREDUCE.one, (*one, *ALLREDUCE.arguments(**given(1))))
    opcheck(ALLREDUCE.list, (two, *ALLREDUCE.arguments(**given(2))))


@every_option
def test_so_does_its_form_with_an_output(world_of_one, given):  # noqa: F811
    opcheck(ALLREDUCE.one_out, (*matrices(1), [], *matrices(1), *ALLREDUCE.arguments(**given(1))))
    opcheck(ALLREDUCE.list_out, (matrices(2), [], matrices(2), *ALLREDUCE.arguments(**given(2))))


@pytest.mark.parametrize("op", [ALLREDUCE, REDUCESCATTER], ids=lambda op: op.name)
def test_so_does_its_form_with_a_residual(world_of_one, op):  # noqa: F811
    one, two = {"codec": "int4"}, {"codec": "int4"}
    outs = matrices(2)
    if op is REDUCESCATTER:
        one, two = one | {"rank": 0, "sizes": [4]}, two | {"sizes": [2, 2]}
        outs = [torch.empty(2, 6) for _ in range(2)]

    opcheck(op.one_out, (*matrices(1), matrices(1), *matrices(1), *op.arguments(**one)))
    opcheck(op.list_out, (matrices(2), matrices(2), outs, *op.arguments(**two)))


def test_tensors_of_an_epilogue_have_gradients_as_torch_checks_them(world_of_one):  # noqa: F811
    for ranks in (1, 2):
        tensors = [one.requires_grad_() for one in bias(ranks)]
        call = ALLREDUCE.arguments(epilogue=BIASED, tensors=tensors, scalars=[0.5])
        given = matrices(ranks, requires_grad=True)
        opcheck(*((ALLREDUCE.one, (*given, *call)) if ranks == 1 else (ALLREDUCE.list, (given, *call))))


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter], ids=lambda op: op.__name__)
def test_the_gradients_of_a_list_with_an_epilogue_are_those_of_torch(op):
    def leaves():
        xs = [normal(rank, 24, torch.float32).view(4, 6).requires_grad_() for rank in range(2)]
        return xs, [normal(5 + rank, 6, torch.float32).requires_grad_() for rank in range(2)]

    def loss(ys):
        return sum(((rank + 1) * y).square().sum() for rank, y in enumerate(ys))

    (xs, biases), (others, their_biases) = leaves(), leaves()
    loss(op(xs, epilogue=Epilogue("silu(v) * s + b[col]", s=0.5, b=biases))).backward()

    total = others[0] + others[1]
    sums = [total, total] if op is graphar.allreduce else total.tensor_split(2)
    loss(torch.nn.functional.silu(v) * 0.5 + b for v, b in zip(sums, their_biases, strict=True)).backward()

    for mine, theirs in zip((*xs, *biases), (*others, *their_biases), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_is_prefetched_has_no_gradient_and_the_sum_has_its_own():
    xs, weights = matrices(2, requires_grad=True), matrices(2, requires_grad=True)

    sum(y.sum() for y in graphar.allreduce(xs, prefetch=weights)).backward()

    assert [x.grad.tolist() for x in xs] == [[[2.0] * 6] * 4] * 2
    assert [weight.grad for weight in weights] == [None, None]


# ---- compilers ------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(normal(9, 6, torch.float32))

    def forward(self, x):
        total = graphar.allreduce(x, epilogue=Epilogue("relu(v + b[col])", b=self.bias))
        return graphar.allreduce(total, codec="int4"), graphar.allreduce([x, total], codec="int8")[1]


def test_export_keeps_one_node_a_call_with_its_options(world_of_one):  # noqa: F811
    program = torch.export.export(Model(), (torch.randn(3, 6),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    x = torch.randn(7, 6)

    calls = [node for node in program.graph.nodes if "graphar" in str(node.target)]
    assert [node.target for node in calls] == [ALLREDUCE.one, ALLREDUCE.one, ALLREDUCE.list]
    options = [ALLREDUCE.read(node.args) for node in calls]
    assert [(one["codec"], one["epilogue"]) for one in options] == [
        ("", "relu(v + b[col])"),
        ("int4", ""),
        ("int8", ""),
    ]
    for mine, expected in zip(program.module()(x), Model()(x), strict=True):
        assert same_bits(mine, expected) == 0


def with_residual(x, residual):
    return graphar.allreduce(x * 2, codec="int4", residual=residual) + 1


def with_residuals(x, residual):
    return graphar.allreduce([x * 2, x], codec="int4", residual=[residual, residual + 1])[1] + 1


def with_output(x, residual):
    out = torch.empty_like(x)
    graphar.allreduce(x * 2, out=out, epilogue=Epilogue("v + r[index]", r=residual))
    return out * 2


@pytest.mark.parametrize("function", [with_residual, with_residuals, with_output])
def test_compiled_calls_write_what_eager_ones_write(world_of_one, compiled, function):  # noqa: F811
    fast = compiled(function)
    for rows in (3, 5, 8):
        x, mine = normal(rows, rows * 6, torch.float32).view(rows, 6), torch.ones(rows, 6)
        theirs = mine.clone()

        assert same_bits(fast(x, mine), function(x, theirs)) == 0
        assert same_bits(mine, theirs) == 0


# ---- vmap -----------------------------------------------------------------------------------------------------------


def test_vmap_makes_a_call_a_slice_whatever_its_options(world_of_one):  # noqa: F811
    x, b = torch.randn(5, 4, 6), torch.randn(6, 5)
    calls = [
        lambda x, b: graphar.allreduce(x, codec="int4"),
        lambda x, b: graphar.allreduce(x, epilogue=Epilogue(BIASED, s=0.5, b=b)),
        lambda x, b: graphar.allreduce(x, prefetch=b),
        lambda x, b: graphar.reducescatter(x, epilogue=Epilogue(BIASED, s=0.5, b=b)),
        lambda x, b: graphar.fused_matmul_allreduce(x, x, bias=b[:4]),
        lambda x, b: graphar.allreduce_residual_rmsnorm(x, x, b)[1],
    ]

    for call in calls:
        expected = torch.stack([call(*pair) for pair in zip(x, b.t(), strict=True)])
        assert same_bits(torch.vmap(call, in_dims=(0, 1))(x, b), expected) == 0


def test_vmap_has_gradients(world_of_one):  # noqa: F811
    x = torch.randn(5, 6, requires_grad=True)

    torch.vmap(lambda x: graphar.allreduce(x, epilogue="v * v"))(x).sum().backward()

    torch.testing.assert_close(x.grad, 2 * x.detach())


@pytest.mark.parametrize("options", [{"out": ...}, {"codec": "int4", "residual": ...}], ids=["out", "residual"])
def test_vmap_of_what_is_written_in_place_is_refused(world_of_one, options):  # noqa: F811
    def call(x):
        given = {name: torch.zeros_like(x) if one is ... else one for name, one in options.items()}
        return graphar.allreduce(x, **given)

    with pytest.raises(RuntimeError, match="Batching rule not implemented for graphar::allreduce_out"):
        torch.vmap(call)(torch.randn(4, 3))
