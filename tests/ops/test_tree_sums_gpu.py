"""Sums as a tree on real GPUs, one process with a tensor a device: the specification's bits, by every algorithm."""

from dataclasses import replace

import pytest
import torch

import graphar
from graphar import reference
from tests import inside
from tests.cases import normal
from tests.gpu import Ranks, parts_of
from tests.ops.gpu_cases import SCATTERED_TREES, TREES, assert_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_many_as_trees")]

LARGE = 40 << 20  # elements: 160 MB, more than the scratch of two_shot_push takes
FP32 = torch.float32
BY_TABLE = [case for case in TREES if not case.kernels]
ALONG_FIRST = [case for case in SCATTERED_TREES if case.form.options["axis"] == 0]


@pytest.mark.parametrize("case", [*BY_TABLE, *ALONG_FIRST], ids=str)
def test_large_tensors_give_the_specification(ranks: Ranks, case):
    case.check(ranks, (LARGE + 5,))


@pytest.mark.parametrize("case", TREES, ids=str)
def test_an_epilogue_works_on_the_sum_before_it_is_rounded(ranks: Ranks, case):
    replace(case, form=replace(case.form, epilogue="max(v * 3, -1)")).check(ranks, (8199,))


def test_gradients_are_added_as_a_tree(ranks: Ranks):
    xs = [x.requires_grad_() for x in ranks.place(parts_of(ranks, normal, 1000, FP32))]
    ys = inside.allreduce(xs, ranks.communicator, order="tree", out_dtype=torch.bfloat16)
    given = [normal(50 + rank, 1000, torch.bfloat16) for rank in range(ranks.world_size)]

    found = torch.autograd.grad(ys, xs, ranks.place(given))

    expected = reference.allreduce([one.float() for one in given], order="tree")
    assert_bits([(one,) for one in found], [(expected,)] * ranks.world_size)


def test_the_kernel_is_told(ranks: Ranks):
    xs = ranks.place(parts_of(ranks, normal, 1000, FP32))

    assert "one_shot_push" in str(graphar.explain(inside.allreduce, xs, ranks.communicator, order="tree"))
