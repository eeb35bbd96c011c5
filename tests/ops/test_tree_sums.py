"""Sums of fp32 partials as a binary tree over ranks: the same bits for each number of ranks, and who serves them."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from graphar.numerics.leaf_tree import LEAVES, tree_sum
from tests import inside
from tests.cases import normal, same_bits
from tests.processes import run_ranks

FP32 = torch.float32
DTYPES = (FP32, torch.bfloat16, torch.float16)
NUMELS = (1, 1000, (300 << 10) + 3)  # in messages behind a header, and in shards
SHAPE = (16, 33)


def leaves(shape=SHAPE):
    return [normal(leaf, torch.Size(shape).numel(), FP32).view(shape) for leaf in range(LEAVES)]


def partials(ranks: int, shape=SHAPE):
    """The partial of each rank: the sum of its leaves, a node of the tree."""
    each = LEAVES // ranks
    return [tree_sum(leaves(shape)[rank * each : (rank + 1) * each]) for rank in range(ranks)]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_number_of_ranks_gives_the_same_bits(ranks, out_dtype):
    expected = tree_sum(leaves()).to(out_dtype)

    for y in inside.allreduce(partials(ranks), order="tree", out_dtype=out_dtype):
        assert same_bits(y, expected) == 0
    parts = inside.reducescatter(partials(ranks), order="tree", out_dtype=out_dtype)
    assert same_bits(torch.cat(parts), expected) == 0


def test_the_order_of_ranks_gives_other_bits():
    assert same_bits(graphar.allreduce(partials(8))[0], tree_sum(leaves())) > 50


def test_later_calls_keep_order_and_dtype():
    xs = partials(4)
    with graphar.Communicator(devices=["cpu"] * 4) as communicator:
        for _ in range(3):
            in_order, as_tree = communicator.allreduce(xs), inside.allreduce(xs, communicator, order="tree")
            narrow = inside.allreduce(xs, communicator, order="tree", out_dtype=torch.bfloat16)
            assert same_bits(in_order[0], reference.allreduce(xs)) == 0
            assert same_bits(as_tree[0], reference.allreduce(xs, order="tree")) == 0
            assert same_bits(narrow[0], as_tree[0].bfloat16()) == 0


# ---- processes ------------------------------------------------------------------------------------------------------


def answers(rank, world_size):
    """What this rank gets: by numel and dtype of the all-reduce and of the reduce-scatter, and gradients."""
    found = []
    for numel in NUMELS:
        x = partials(world_size, (numel,))[rank]
        for dtype in DTYPES:
            for _ in range(2):
                y = inside.allreduce(x, order="tree", out_dtype=dtype)
            into = torch.empty_like(y)
            inside.allreduce(x, order="tree", out_dtype=dtype, out=into)
            scaled = inside.allreduce(x, order="tree", out_dtype=dtype, epilogue="v * 3")
            found.append((y, into, scaled, inside.reducescatter(x, order="tree", out_dtype=dtype)))
    leaf = partials(world_size)[rank].requires_grad_()
    y = inside.allreduce(leaf, order="tree", out_dtype=torch.bfloat16)
    return found, torch.autograd.grad(y, leaf, normal(50 + rank, y.numel(), y.dtype).view(SHAPE))[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_get_the_specifications_bits(world_size):
    by_rank = run_ranks(answers, world_size)

    given = [normal(50 + rank, SHAPE[0] * SHAPE[1], torch.bfloat16).view(SHAPE) for rank in range(world_size)]
    gradient = reference.allreduce([one.float() for one in given], order="tree")
    cases = [(numel, dtype) for numel in NUMELS for dtype in DTYPES]
    for rank, (found, of_leaf) in enumerate(by_rank):
        for (numel, dtype), (y, into, scaled, part) in zip(cases, found, strict=True):
            total = reference.allreduce(leaves((numel,)), order="tree", out_dtype=dtype)
            assert same_bits(y, total) == same_bits(into, total) == 0
            assert same_bits(part, total.tensor_split(world_size)[rank]) == 0
            assert same_bits(scaled, reference.allreduce(leaves((numel,)), "v * 3", "tree", dtype)) == 0
        assert same_bits(of_leaf, gradient) == 0


def call_in_other_orders(rank, world_size):
    """The messages of calls that differ between ranks in the order, and in the dtype of the result."""
    messages = []
    for given in ({}, {"order": "tree", "out_dtype": torch.bfloat16}):
        communicator = graphar.Communicator(timeout_s=20)
        communicator.allreduce(torch.ones(4))
        with pytest.raises(CommunicatorError) as raised:
            inside.allreduce(torch.ones(4), communicator, **(given if rank else {"order": "tree"}))
        messages.append(str(raised.value))
    return messages


def test_ranks_that_add_in_other_orders_are_told():
    for by_order, by_dtype in run_ranks(call_in_other_orders, 2):
        assert by_order.count("added as a tree") == 1
        assert by_dtype.count("added as a tree") == 2
        assert by_dtype.count("result torch.bfloat16") == 1


# ---- torch.compile --------------------------------------------------------------------------------------------------


def test_a_compiled_call_keeps_order_and_dtype():
    def layer(xs):
        ys = inside.allreduce(xs, order="tree", out_dtype=torch.float16)
        return ys + inside.reducescatter(xs, order="tree", out_dtype=torch.bfloat16)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(partials(4))
    torch._dynamo.reset()

    for mine, expected in zip(compiled, layer(partials(4)), strict=True):
        assert same_bits(mine, expected) == 0


def test_explain_says_that_a_sum_is_added_as_a_tree():
    xs = partials(4)

    for op in (inside.allreduce, inside.reducescatter):
        assert "added as a tree" in str(graphar.explain(op, xs, order="tree"))
        assert "added as a tree" not in str(graphar.explain(op, xs))
    assert "added as a tree" not in str(graphar.explain(xs))
