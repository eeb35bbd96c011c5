"""perf leaves: the bits of the tree. test_products.py has what it shares with other topics."""

from __future__ import annotations

from functools import partial

import torch

from perf.topics.leaves import TORCH, TREE, Leaves, tree_of_leaves
from tests.perf.test_products import gpu, multiply, operands

__all__ = ("gpu", "operands")  # fixtures


def test_leaves_must_have_the_bits_of_the_tree(gpu, operands):
    right = tree_of_leaves(operands, 0)

    def launch(flips):
        operands.out.copy_(right)
        operands.out.view(torch.int16)[3, 5] ^= flips

    assert right.equal(multiply(operands.a, operands.weight(0), leaves=8))
    for flips, wrong in ((0, {}), (1, {TREE: 1})):
        launches = dict.fromkeys((TORCH, TREE), partial(launch, flips))
        assert Leaves.count_wrong(launches, operands, 1) == {TORCH: 0, TREE: 0} | wrong
