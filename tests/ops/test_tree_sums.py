"""Sums of fp32 partials as a binary tree over ranks: what the rows of tests.ops.conformance do not ask of them."""

import torch

import graphar
from graphar import reference
from tests import inside
from tests.cases import normal, same_bits

FP32 = torch.float32


def partials(ranks: int):
    return [normal(rank, 528, FP32).view(16, 33) for rank in range(ranks)]


def test_later_calls_keep_order_and_dtype():
    xs = partials(4)
    with graphar.Communicator(devices=["cpu"] * 4) as communicator:
        for _ in range(3):
            in_order, as_tree = communicator.allreduce(xs), inside.allreduce(xs, communicator, order="tree")
            narrow = inside.allreduce(xs, communicator, order="tree", out_dtype=torch.bfloat16)
            assert same_bits(in_order[0], reference.allreduce(xs)) == 0
            assert same_bits(as_tree[0], reference.allreduce(xs, order="tree")) == 0
            assert same_bits(narrow[0], as_tree[0].bfloat16()) == 0


def test_explain_says_that_a_sum_is_added_as_a_tree():
    xs = partials(4)

    for op in (inside.allreduce, inside.reducescatter):
        assert "added as a tree" in str(graphar.explain(op, xs, order="tree"))
        assert "added as a tree" not in str(graphar.explain(op, xs))
    assert "added as a tree" not in str(graphar.explain(xs))
