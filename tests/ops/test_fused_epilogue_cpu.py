"""Matmuls that are summed over ranks with an epilogue, on the CPU: the specification's bits, gradients, compilers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional

import graphar
from graphar import Epilogue, reference
from graphar.graph import order
from graphar.ops.matmul_allreduce import OP as ALLREDUCE
from graphar.ops.matmul_reducescatter import OP as REDUCESCATTER
from tests.cases import normal, same_bits
from tests.ops.test_fused_cpu import OPS, WAYS, can_cut, every_op, operands, specified
from tests.ops.test_scatter_ops import compiled, world_of_one  # noqa: F401, they are fixtures
from tests.processes import run_ranks

FUSED, SCATTER = OPS
ops = torch.ops.graphar
PLACES = "relu(v * scale - c[col]) + f[index] * r[row] + row * 0.5 - col / 3 + index"
every_way = pytest.mark.parametrize(("partition", "count"), WAYS, ids=str)


def tensors_for(op, m, n, ranks):
    """By rank, what PLACES takes for each one's result."""
    rows = [m] * ranks if op is FUSED else [len(one) for one in torch.empty(m).tensor_split(ranks)]
    made = []
    for rank, own in enumerate(rows):
        at = rank if op is SCATTER else 0  # what all ranks receive, they make alike
        c, f, r = (normal(300 + kind, size, torch.float16) for kind, size in ((0, n), (1 + 2 * at, own * n), (2, own)))
        made.append({"c": c, "f": f, "r": r})
    return made


def in_lists(by_rank):
    return {name: [one[name] for one in by_rank] for name in by_rank[0]}


def check_list(op, m, n, k, dtype, *, text=PLACES, ranks=3, with_bias=False, **options):
    a, w, bias = operands(m, n, k, dtype, ranks, with_bias=with_bias)
    by_rank = tensors_for(op, m, n, ranks)
    given = Epilogue(text, scale=0.3, **in_lists(by_rank))
    found = op(a, w, bias=None if bias is None else [bias] * ranks, epilogue=given, **options)
    wanted = Epilogue(text, scale=0.3, **by_rank[0]) if op is FUSED else given
    for one, expected in zip(found, specified(op, a, w, bias, epilogue=wanted), strict=True):
        assert same_bits(one, expected) == 0, (m, n, k, with_bias, options)


# ---- bits -----------------------------------------------------------------------------------------------------------


@every_op
@every_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_places_are_those_of_the_whole_result_whatever_the_partition(op, partition, count, dtype):
    for (m, n, k), with_bias in itertools.product(((7, 129, 65), (33, 40, 130), (1, 1, 1)), (False, True)):
        if can_cut(op, partition, count, m, n, 3):
            check_list(op, m, n, k, dtype, with_bias=with_bias, partition=partition, num_partitions=count)


@every_op
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_number_of_ranks_gets_the_specification(op, ranks):
    for partition in ("none", "split_m", "split_n"):
        check_list(op, 19, 24, 33, torch.float16, ranks=ranks, with_bias=True, partition=partition)


def test_the_bits_are_those_of_the_products_reduced_with_the_epilogue():
    a, w, bias = operands(33, 40, 65, torch.bfloat16, with_bias=True)
    products = [reference.matmul(*pair) for pair in zip(a, w, strict=True)]

    found = graphar.fused_matmul_allreduce(a, w, epilogue="gelu(v) - row", partition="split_n")

    for one in (*found, reference.fused_matmul_allreduce(a, w, epilogue="gelu(v) - row")):
        assert same_bits(one, reference.allreduce(products, "gelu(v) - row")) == 0
    with_bias = reference.fused_matmul_allreduce(a, w, bias, epilogue="relu(v)")
    assert same_bits(with_bias, reference.allreduce(products, Epilogue("relu(v + b[col])", b=bias))) == 0


def test_an_epilogue_that_does_nothing_leaves_the_bits_of_the_bias():
    a, w, bias = operands(9, 16, 12, torch.bfloat16, with_bias=True)

    assert same_bits(reference.fused_matmul_allreduce(a, w, bias, epilogue="v"), specified(FUSED, a, w, bias)[0]) == 0


@every_op
def test_a_tensor_may_have_the_name_bias(op):
    a, w, bias = operands(9, 8, 12, torch.float32, with_bias=True)

    found = op(a, w, bias=[bias] * 3, epilogue=Epilogue("v + bias[col] * bias_", bias=[bias] * 3, bias_=2))

    wanted = specified(op, a, w, bias, epilogue=Epilogue("v + twice[col] * 2", twice=bias))
    assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0] * 3


@every_op
def test_a_function_of_tensors_with_leading_dimensions_is_traced(op):
    a, w, bias = operands(30, 8, 7, torch.bfloat16, with_bias=True)
    cubes, gates = [one.view(6, 5, 7) for one in a], normal(9, 5, torch.bfloat16).view(5, 1)

    def gated(v, gate):
        return functional.silu(v) * gate

    found = op(
        cubes,
        w,
        bias=[bias] * 3,
        epilogue=Epilogue(gated, gate=[gates.expand(2, 5, 8).contiguous()] * 3)
        if op is SCATTER
        else Epilogue(gated, gate=[gates.expand(6, 5, 8).contiguous()] * 3),
    )

    gate = gates.expand(2 if op is SCATTER else 6, 5, 8).reshape(-1)
    wanted = specified(op, cubes, w, bias, epilogue=Epilogue("silu(v) * gate[index]", gate=gate))
    assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0] * 3


def as_rank(rank, world_size):
    wrong = []
    for (partition, count), op, with_bias in itertools.product(WAYS, OPS, (False, True)):
        a, w, bias = operands(33, 40, 65, torch.bfloat16, world_size, with_bias=with_bias)
        by_rank = tensors_for(op, 33, 40, world_size)
        own = Epilogue(PLACES, scale=0.3, **by_rank[rank])
        y = op(a[rank], w[rank], bias=bias, epilogue=own, partition=partition, num_partitions=count)
        whole = own if op is FUSED else Epilogue(PLACES, scale=0.3, **in_lists(by_rank))
        wrong.append(same_bits(y, specified(op, a, w, bias, epilogue=whole)[rank]))
    return wrong


def test_processes_get_the_specifications_bits_whatever_the_partition():
    assert run_ranks(as_rank, 3) == [[0] * 4 * len(WAYS)] * 3


@every_op
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0)])
def test_no_rows_or_no_columns_give_an_empty_result(op, m, n):
    a, w, _ = operands(m, n, 4, torch.float32)

    assert [one.shape for one in op(a, w, epilogue="-v")] == [one.shape for one in specified(op, a, w)]


@pytest.mark.parametrize("partition", ["none", "split_m", "split_n"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_result_goes_to_out(partition, contiguous):
    a, w, bias = operands(9, 16, 12, torch.bfloat16, with_bias=True)
    outs = [torch.full((9, 16) if contiguous else (16, 9), 7.0).bfloat16() for _ in a]
    outs = outs if contiguous else [one.t() for one in outs]

    found = FUSED(a, w, bias=[bias] * 3, out=outs, epilogue="v * col", partition=partition)

    assert [mine is out for mine, out in zip(found, outs, strict=True)] == [True] * 3
    wanted = reference.fused_matmul_allreduce(a, w, bias, epilogue="v * col")
    assert [same_bits(one, wanted) for one in outs] == [0] * 3


# ---- gradients ------------------------------------------------------------------------------------------------------


def leaves(ranks=2):
    shapes = ((6, 5), (4, 5), (4,), (4,))
    return [
        [normal(at * 10 + r, torch.Size(shape).numel(), torch.float32).view(shape) for r in range(ranks)]
        for at, shape in enumerate(shapes)
    ]


@every_op
def test_the_gradients_of_a_list_are_those_of_its_parts(op):
    mine, theirs = ([[one.clone().requires_grad_() for one in ones] for ones in leaves()] for _ in range(2))

    def loss(results):
        return sum((y * (rank + 1)).pow(2).sum() for rank, y in enumerate(results))

    a, w, bias, scale = mine
    loss(op(a, w, bias=bias, epilogue=Epilogue("gelu(v) * s[col]", s=scale))).backward()
    a, w, bias, scale = theirs
    total = a[0] @ w[0].t() + a[1] @ w[1].t()
    sums = [total, total] if op is FUSED else total.tensor_split(2)
    loss(functional.gelu(one + b) * s for one, b, s in zip(sums, bias, scale, strict=True)).backward()

    for one, other in zip(itertools.chain(*mine), itertools.chain(*theirs), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def gradients_as_rank(rank, world_size):
    """Of one loss that all ranks compute from the whole result; then of this rank's part of it."""
    found = []
    for op in OPS:
        a, w, bias, scale = (ones[rank if at < 2 else 0].requires_grad_() for at, ones in enumerate(leaves(world_size)))
        y = op(a, w, bias=bias, epilogue=Epilogue("v * v * s[col]", s=scale))
        y.pow(2).sum().backward()
        found.append([one.grad for one in (a, w, bias, scale)])
    return found


def test_the_gradients_of_processes_are_those_of_the_layer():
    a, w, bias, scale = leaves()
    for one in (*a, *w, bias[0], scale[0]):
        one.requires_grad_()
    v = a[0] @ w[0].t() + a[1] @ w[1].t() + bias[0]
    (v * v * scale[0]).pow(2).sum().backward()

    for rank, (of_whole, of_part) in enumerate(found := run_ranks(gradients_as_rank, 2)):
        for mine, leaf in zip(of_whole, (a[rank], w[rank], bias[0], scale[0]), strict=True):
            torch.testing.assert_close(mine, leaf.grad)
        for mine, leaf in zip(of_part[:2], (a[rank], w[rank]), strict=True):
            torch.testing.assert_close(mine, leaf.grad)
    for at, leaf in ((2, bias[0]), (3, scale[0])):
        torch.testing.assert_close(sum(of_part[at] for _, of_part in found), leaf.grad)


# ---- compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_ops_keep_the_rules_of_ops(world_of_one, requires_grad):  # noqa: F811
    (a, b), (w, v), (bias, bias_b), _ = ([one.requires_grad_(requires_grad) for one in ones] for ones in leaves())
    given = {"scalars": [0.5], "epilogue": "v * s + bias[col]", "partition": "split_m", "num_partitions": 2}
    one, two = {"tensors": [bias], **given}, {"tensors": [bias, bias_b], **given}

    opcheck(ops.fused_matmul_allreduce.default, (a, w, *ALLREDUCE.arguments(**one)))
    opcheck(ops.fused_matmul_allreduce_list.default, ([a, b], [w, v], *ALLREDUCE.arguments(**two)))
    opcheck(ops.fused_matmul_reducescatter.default, (a, w, *REDUCESCATTER.arguments(rank=0, sizes=[6], **one)))
    opcheck(
        ops.fused_matmul_reducescatter_list.default, ([a, b], [w, v], *REDUCESCATTER.arguments(sizes=[3, 3], **two))
    )


def test_the_ops_with_an_output_say_what_they_write(world_of_one):  # noqa: F811
    (a, b), (w, v), (bias, bias_b), _ = leaves()
    given = {"scalars": [0.5], "epilogue": "v * s + bias[col]", "partition": "split_n", "num_partitions": 2}
    outs = [torch.empty(6, 4), torch.empty(6, 4)]
    utils = ("test_schema", "test_faketensor")

    opcheck(ops.fused_matmul_allreduce_out.default, (a, w, outs[0], *ALLREDUCE.arguments(tensors=[bias], **given)))
    opcheck(
        ops.fused_matmul_allreduce_list_out.default,
        ([a, b], [w, v], outs, *ALLREDUCE.arguments(tensors=[bias, bias_b], **given)),
        test_utils=utils,
    )


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_compiled_calls_give_the_eager_bits_and_gradients_at_any_size(world_of_one, compiled, op):  # noqa: F811
    def layer(a, w, bias):
        shifted = op([a * 2, a], [w, w], bias=[bias, bias], epilogue=Epilogue(lambda v, b: v.relu() + b, b=[bias] * 2))
        return shifted[1], op(a, w, bias=bias, epilogue=Epilogue("v * s", s=0.5))

    fast = compiled(layer)
    for rows in (4, 6, 10):
        leaf = [normal(rows + at, rows * 5 if at == 0 else 20, torch.float32) for at in range(2)]
        given = [leaf[0].view(rows, 5), leaf[1].view(4, 5), normal(3, 4, torch.float32)]
        given = [one.requires_grad_() for one in given]
        mine, expected = fast(*given), layer(*given)
        assert [same_bits(*pair) for pair in zip(mine, expected, strict=True)] == [0, 0]
        gradients = [torch.autograd.grad(sum(one.sum() for one in ones), given) for ones in (mine, expected)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_a_graph_keeps_the_order_of_calls_that_need_nothing_of_each_other(world_of_one):  # noqa: F811
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(lambda a, w: (FUSED(a, w, epilogue="-v"), SCATTER(a, w, epilogue="-v")))(
        *leaves()[0][:1], leaves()[1][0]
    )
    order.keep(module.graph)

    first, second = (node for node in module.graph.nodes if "graphar" in str(node.target))
    assert (first.target, second.target) == (ALLREDUCE.one, REDUCESCATTER.one)
    given = ALLREDUCE.read(first.args), REDUCESCATTER.read(second.args)
    assert [(one["epilogue"], one["after"]) for one in given] == [("-v", []), ("-v", [first])]


# ---- refusals -------------------------------------------------------------------------------------------------------

A, W = torch.ones(6, 5), torch.ones(4, 5)


@every_op
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": "int8", "epilogue": "-v"}, ValueError, "takes a codec or an epilogue, not both"),
        ({"epilogue": 3}, TypeError, "must be an expression or a function"),
        ({"epilogue": Epilogue("v + b[col]", b=torch.ones(4))}, ValueError, "an epilogue's tensors are lists of 2"),
        ({"epilogue": Epilogue("v + b[col]", b=[torch.ones(3)] * 2)}, ValueError, r"b\[col\] needs 4 element"),
        ({"epilogue": Epilogue("v + b[row]", b=[torch.ones(5)] * 2)}, ValueError, r"b\[row\] needs [36] element"),
        (
            {"epilogue": Epilogue("v + b[col]", b=[torch.ones(4), torch.ones(4).half()])},
            ValueError,
            "must have equal dtypes on all ranks",
        ),
        ({"epilogue": "v", "partition": "split_m", "num_partitions": 9}, ValueError, "split_m cannot make 9"),
    ],
)
def test_a_bad_argument_is_refused_by_name(op, options, error, message):
    with pytest.raises(error, match=message):
        op([A, A], [W, W], **options)


@every_op
def test_beside_a_bias_there_is_room_for_three_tensors(op):
    four = Epilogue("v + a[0] + b[0] + c[0] + d[0]", **{name: [torch.ones(1)] * 2 for name in "abcd"})

    op([A, A], [W, W], epilogue=four)
    with pytest.raises(ValueError, match="takes at most 4 tensors, got a, b, bias, c, d"):
        op([A, A], [W, W], bias=[torch.ones(4)] * 2, epilogue=four)


@every_op
def test_fp64_has_no_epilogue(op):
    with pytest.raises(ValueError, match=r"works on sums of .*, got a tensor of torch.float64"):
        op([A.double()] * 2, [W.double()] * 2, epilogue="-v")


def test_an_output_that_is_a_tensor_of_the_epilogue_is_refused():
    outs = [torch.ones(6, 4) for _ in range(2)]

    with pytest.raises(ValueError, match="out must share no memory with tensor 0 of the epilogue"):
        FUSED([A, A], [W, W], out=outs, epilogue=Epilogue("v + r[index]", r=outs))
