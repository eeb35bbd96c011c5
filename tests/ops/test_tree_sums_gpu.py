"""Sums as a tree on real GPUs, one process with a tensor a device: the specification's bits, by every algorithm."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import with_tree
from tests import inside
from tests.cases import normal, same_bits
from tests.gpu import DTYPES, Ranks, poison

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_many_as_trees")]

ALGORITHMS = ("auto", *(one.value for one in with_tree()))
LARGE = 40 << 20  # elements: 160 MB, more than the scratch of two_shot_push takes
FP32 = torch.float32
every_result = pytest.mark.parametrize("out_dtype", DTYPES, ids=str)


def reduce(ranks: Ranks, xs, **options):
    poison([x.nbytes for x in xs])
    ys = inside.allreduce(xs, ranks.communicator, order="tree", **options)
    ranks.communicator.synchronize()
    return ys


def parts_of(ranks: Ranks, fill, numel):
    return [fill(rank, numel, FP32) for rank in range(ranks.world_size)]


def assert_all(ys, expected, what=""):
    for rank, y in enumerate(ys):
        assert same_bits(y.cpu(), expected) == 0, f"rank {rank} {what}"


@every_result
def test_large_tensors_give_the_specification(ranks: Ranks, out_dtype):
    xs = [
        torch.randn(LARGE + 5, device=f"cuda:{r}", generator=torch.Generator(f"cuda:{r}").manual_seed(r))
        for r in range(ranks.world_size)
    ]
    total = reference.allreduce([x.to("cuda:0") for x in xs], order="tree", out_dtype=out_dtype).cpu()

    assert_all(reduce(ranks, xs, out_dtype=out_dtype), total)
    scattered = inside.reducescatter(xs, ranks.communicator, order="tree", out_dtype=out_dtype)
    assert same_bits(torch.cat([y.cpu() for y in scattered]), total) == 0


@every_result
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_epilogue_works_on_the_sum_before_it_is_rounded(ranks: Ranks, algorithm, out_dtype):
    parts = parts_of(ranks, normal, 8199)
    ys = reduce(ranks, ranks.place(parts), epilogue="max(v * 3, -1)", out_dtype=out_dtype, algorithm=algorithm)

    assert_all(ys, reference.allreduce(parts, "max(v * 3, -1)", "tree", out_dtype))


@every_result
def test_symmetric_outputs_are_stored_into_directly(ranks: Ranks, out_dtype):
    parts = parts_of(ranks, normal, 8199)
    outs = ranks.communicator.empty(8199, dtype=out_dtype)
    tree = {"order": "tree", "out_dtype": out_dtype, "algorithm": "two_shot_pipelined"}
    inside.allreduce(ranks.place(parts), ranks.communicator, out=outs, **tree)
    ranks.communicator.synchronize()

    assert_all(outs, reference.allreduce(parts, order="tree", out_dtype=out_dtype))


def test_gradients_are_added_as_a_tree(ranks: Ranks):
    xs = [x.requires_grad_() for x in ranks.place(parts_of(ranks, normal, 1000))]
    ys = inside.allreduce(xs, ranks.communicator, order="tree", out_dtype=torch.bfloat16)
    given = [normal(50 + rank, 1000, torch.bfloat16) for rank in range(ranks.world_size)]

    found = torch.autograd.grad(ys, xs, ranks.place(given))

    assert_all(found, reference.allreduce([one.float() for one in given], order="tree"))


def test_the_kernel_is_told(ranks: Ranks):
    xs = ranks.place(parts_of(ranks, normal, 1000))

    assert "one_shot_push" in str(graphar.explain(inside.allreduce, xs, ranks.communicator, order="tree"))
