"""Sums of fp32 partials as a binary tree over ranks: what the rows of tests.ops.conformance do not ask of them."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from tests import inside
from tests.cases import normal, same_bits
from tests.processes import run_ranks

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


def test_explain_says_that_a_sum_is_added_as_a_tree():
    xs = partials(4)

    for op in (inside.allreduce, inside.reducescatter):
        assert "added as a tree" in str(graphar.explain(op, xs, order="tree"))
        assert "added as a tree" not in str(graphar.explain(op, xs))
    assert "added as a tree" not in str(graphar.explain(xs))
