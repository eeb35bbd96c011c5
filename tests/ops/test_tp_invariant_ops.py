"""Tensor-parallel invariance of the ops: one set of bits for results and gradients on 1, 2, 4 and 8 ranks."""

import functools

import pytest
import torch

import graphar
from graphar import reference
from graphar.numerics import leaf_tree, norm_gradients
from graphar.numerics.leaf_tree import LEAVES
from graphar.reference import linear_gradients
from tests import inside
from tests.cases import normal, same_bits
from tests.processes import run_ranks

TOKENS, FEATURES, HIDDEN, EPS = 24, 32, 64, 1e-5
INVARIANT = {"partition": "tp_invariant"}
DTYPES = (torch.bfloat16, torch.float32)  # of bf16, rounding hides some wrong additions

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(seed, *shape, dtype):
    return normal(seed, torch.Size(shape).numel(), dtype).view(shape)


def own(whole, axis, rank, ranks):
    """A rank's part of a tensor, as a leaf that gets a gradient."""
    return whole.chunk(ranks, axis)[rank].clone(memory_format=torch.contiguous_format).requires_grad_()


def whole_leaf(x):
    return own(x, 0, 0, 1)


class Whole:
    """The tensors of a layer on one rank, by name."""

    def __init__(self, dtype):
        make = functools.partial(drawn, dtype=dtype)
        self.a, self.w, self.bias = make(0, TOKENS, HIDDEN), make(1, FEATURES, HIDDEN), make(2, FEATURES)
        self.dy, self.residual = make(3, TOKENS, FEATURES), make(4, TOKENS, FEATURES)
        self.weight, self.dr = make(5, FEATURES), make(6, TOKENS, FEATURES)


def gradients_of(results, wanted, given):
    return [one.detach() for one in results], list(torch.autograd.grad(results, wanted, given))


# By op: a function of a rank, the number of ranks and the dtype that returns results and gradients; and the axes along
# which each is divided between ranks, None for those that all ranks have.


def summed(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, bias = own(x.a, 1, rank, ranks), own(x.w, 1, rank, ranks), whole_leaf(x.bias)
    y = graphar.fused_matmul_allreduce(a, w, bias=bias, **INVARIANT)
    return gradients_of([y], [a, w, bias], [x.dy])


def summed_with_epilogue(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, bias = own(x.a, 1, rank, ranks), own(x.w, 1, rank, ranks), whole_leaf(x.bias)
    y = graphar.fused_matmul_allreduce(a, w, bias=bias, epilogue="v * tanh(v)", **INVARIANT)
    return gradients_of([y], [a, w, bias], [x.dy])


def scattered(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, bias = own(x.a, 1, rank, ranks), own(x.w, 1, rank, ranks), whole_leaf(x.bias)
    y = graphar.fused_matmul_reducescatter(a, w, bias=bias, **INVARIANT)
    return gradients_of([y], [a, w, bias], [x.dy.chunk(ranks)[rank]])


def gathered(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, bias = own(x.a, 0, rank, ranks), own(x.w, 0, rank, ranks), own(x.bias, 0, rank, ranks)
    y = graphar.fused_allgather_matmul(a, w, bias=bias, **INVARIANT)
    return gradients_of([y], [a, w, bias], [x.dy.chunk(ranks, 1)[rank]])


def column_parallel(rank, ranks, dtype):
    x, group = Whole(dtype), torch.distributed.group.WORLD if ranks > 1 else None
    a, w, bias = own(x.a, 0, 0, 1), own(x.w, 0, rank, ranks), own(x.bias, 0, rank, ranks)
    y = graphar.linear(a, w, bias, group=group)
    return gradients_of([y], [a, w, bias], [x.dy.chunk(ranks, 1)[rank]])


def normed(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, residual, weight = (
        own(x.a, 1, rank, ranks),
        own(x.w, 1, rank, ranks),
        *map(whole_leaf, (x.residual, x.weight)),
    )
    found = graphar.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, EPS, **INVARIANT)
    return gradients_of(list(found), [a, w, residual, weight], [x.dy, x.dr])


def normed_parts(rank, ranks, dtype):
    x = Whole(dtype)
    a, w, residual = own(x.a, 1, rank, ranks), own(x.w, 1, rank, ranks), own(x.residual, 0, rank, ranks)
    weight = whole_leaf(x.weight)
    found = graphar.fused_matmul_reducescatter_residual_rmsnorm(a, w, residual, weight, EPS, **INVARIANT)
    given = [one.chunk(ranks)[rank] for one in (x.dy, x.dr)]
    return gradients_of(list(found), [a, w, residual, weight], given)


OPS = {
    summed: (None, 1, 1, None),
    summed_with_epilogue: (None, 1, 1, None),
    scattered: (0, 1, 1, None),
    gathered: (1, 0, 0, 0),
    column_parallel: (1, None, 0, 0),
    normed: (None, None, 1, 1, None, None),
    normed_parts: (0, 0, 1, 1, 0, None),
}


def every_op(rank, ranks, dtype):
    """What this rank gets of each op. A call is made three times, since the third repeats the second."""
    return [[op(rank, ranks, dtype) for _ in range(3)] for op in OPS]


def joined(parts, axis):
    if axis is not None:
        return torch.cat(parts, axis)
    assert all(same_bits(one, parts[0]) == 0 for one in parts)
    return parts[0]


@pytest.fixture(scope="module")
def on_one_rank():
    """What each op gives a process without a group."""
    return {dtype: every_op(0, 1, dtype) for dtype in DTYPES}


@every_dtype
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_results_and_gradients_have_the_same_bits_for_every_number_of_ranks(ranks, dtype, on_one_rank):
    by_rank = run_ranks(every_op, ranks, dtype)

    for at, (op, axes) in enumerate(OPS.items()):
        for call in range(3):
            found = [[*results, *gradients] for results, gradients in (one[at][call] for one in by_rank)]
            results, gradients = on_one_rank[dtype][at][0]
            for parts, axis, whole in zip(zip(*found, strict=True), axes, [*results, *gradients], strict=True):
                assert same_bits(joined(list(parts), axis), whole) == 0, (op.__name__, call, axis)


@every_dtype
def test_one_rank_has_the_specifications_bits(dtype, on_one_rank):
    x = Whole(dtype)
    y = reference.fused_matmul_allreduce([x.a], [x.w], x.bias, tp_invariant=True)
    (da,), (dw,), dbias = linear_gradients.row_parallel(x.dy, [x.a], [x.w])
    row_parallel = [y, da, dw, dbias]
    dx, (dw,), (dbias,) = linear_gradients.column_parallel([x.dy], x.a, [x.w])
    column_parallel = [reference.linear(x.a, x.w, x.bias, tp_invariant=True), dx, dw, dbias]

    for at, expected in enumerate((row_parallel, None, row_parallel, column_parallel, column_parallel)):
        for results, gradients in on_one_rank[dtype][at] if expected else ():
            pairs = zip([*results, *gradients], expected, strict=True)
            assert [same_bits(*pair) for pair in pairs] == [0, 0, 0, 0]
    pair = reference.fused_matmul_allreduce_residual_rmsnorm([x.a], [x.w], x.residual, x.weight, EPS, tp_invariant=True)
    for at in (5, 6):  # both norms: on one rank, its part is the whole
        for results, gradients in on_one_rank[dtype][at]:
            assert [same_bits(*both) for both in zip(results, pair, strict=True)] == [0, 0]
            weight = norm_gradients.weight_partial(x.dy, pair[1], EPS, 1).to(dtype)
            assert same_bits(gradients[3], weight) == 0


def partials():
    return [drawn(rank, 16, 33, dtype=torch.float32) for rank in range(4)]


def test_later_calls_keep_order_and_dtype():
    xs = partials()
    with graphar.Communicator(devices=["cpu"] * 4) as communicator:
        for _ in range(3):
            in_order, as_tree = communicator.allreduce(xs), inside.allreduce(xs, communicator, order="tree")
            narrow = inside.allreduce(xs, communicator, order="tree", out_dtype=torch.bfloat16)
            assert same_bits(in_order[0], reference.allreduce(xs)) == 0
            assert same_bits(as_tree[0], reference.allreduce(xs, order="tree")) == 0
            assert same_bits(narrow[0], as_tree[0].bfloat16()) == 0


def test_explain_says_that_a_sum_is_added_as_a_tree():
    for op in (inside.allreduce, inside.reducescatter):
        assert "added as a tree" in str(graphar.explain(op, partials(), order="tree"))
        assert "added as a tree" not in str(graphar.explain(op, partials()))
    assert "added as a tree" not in str(graphar.explain(partials()))


def partials_in(order):
    """Four leaves' sums of positions that fp32 adds differently in each order, and how many elements differ."""
    leaves = [drawn(leaf, 16, 16, dtype=torch.float32) * 3.0**leaf for leaf in range(LEAVES)]
    tree = leaf_tree.tree_sum(leaves)
    return same_bits(order(leaves), tree) / tree.numel()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda leaves: functools.reduce(torch.add, leaves),
        lambda leaves: leaf_tree.tree_sum(leaves[1:] + leaves[:1]),
        lambda leaves: leaf_tree.tree_sum([one.bfloat16().float() for one in leaves]),
    ],
    ids=["ranks", "turned", "rounded"],
)
def test_another_order_gives_other_bits(wrong):
    assert partials_in(wrong) > 0.3


def test_a_tree_whose_neighbours_are_swapped_is_the_same():
    assert partials_in(lambda leaves: leaf_tree.tree_sum([leaves[at ^ 1] for at in range(LEAVES)])) == 0
