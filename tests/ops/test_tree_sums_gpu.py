"""Sums as a tree on real GPUs, one process with a tensor a device: the specification's bits, by every algorithm."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import with_tree
from tests import inside
from tests.cases import bit_patterns, integers, negative_zeros, normal, same_bits
from tests.gpu import DTYPES, Ranks, fits, poison

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_many_as_trees")]

ALGORITHMS = ("auto", *(one.value for one in with_tree()))
SMALL = (0, 1, 3, 4, 5, 8, 64, 8192, 8193, 8199, 8216, 131072, 262149)
SHAPES = ((16, 128), (15, 128), (9, 7168), (5, 3, 7), (3, 1), (1, 5), (3, 0))
LARGE = 40 << 20  # elements: 160 MB, more than the scratch of two_shot_push takes
FP32 = torch.float32
FILLS = pytest.mark.parametrize("fill", [integers, normal, bit_patterns, negative_zeros], ids=lambda f: f.__name__)
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


@FILLS
@every_result
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_specification_bit_for_bit(ranks: Ranks, algorithm, out_dtype, fill):
    for numel in SMALL:
        if algorithm == "auto" or fits(algorithm, ranks.world_size, numel, FP32):
            parts = parts_of(ranks, fill, numel)
            ys = reduce(ranks, ranks.place(parts), out_dtype=out_dtype, algorithm=algorithm)
            assert_all(ys, reference.allreduce(parts, order="tree", out_dtype=out_dtype), f"of {numel}")


@FILLS
@every_result
def test_each_rank_gets_its_part_bit_for_bit(ranks: Ranks, out_dtype, fill):
    for shape in SHAPES:
        parts = [part.view(shape) for part in parts_of(ranks, fill, torch.Size(shape).numel())]
        for axis in range(len(shape)):
            ys = inside.reducescatter(
                ranks.place(parts), ranks.communicator, axis=axis, order="tree", out_dtype=out_dtype
            )
            expected = reference.reducescatter(parts, axis, order="tree", out_dtype=out_dtype)
            for rank, (y, part) in enumerate(zip(ys, expected, strict=True)):
                assert same_bits(y.cpu(), part) == 0, f"rank {rank}, {shape}, axis {axis}"


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


def test_calls_of_both_orders_and_all_dtypes_take_turns_in_one_scratch(ranks: Ranks):
    for at, numel in enumerate((8199, 64, 131072, 8193, 1, 8199)):
        parts = parts_of(ranks, bit_patterns, numel)
        xs = ranks.place(parts)
        for algorithm in ("one_shot_push", "two_shot_push"):
            for out_dtype in (None, *DTYPES[at % 3 :], *DTYPES[: at % 3]):
                ys = reduce(ranks, xs, out_dtype=out_dtype, algorithm=algorithm)
                assert_all(ys, reference.allreduce(parts, order="tree", out_dtype=out_dtype), algorithm)
            assert_all(ranks.reduce(xs, algorithm), reference.allreduce(parts), f"{algorithm} in the order of ranks")
            assert ranks.scratch_is_as_before(algorithm)


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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_graph_replays(ranks: Ranks, algorithm):
    parts = parts_of(ranks, normal, 8199)
    xs = ranks.place(parts)
    outs = [torch.empty_like(x, dtype=torch.bfloat16) for x in xs]

    def call() -> None:
        inside.allreduce(xs, ranks.communicator, order="tree", out_dtype=torch.bfloat16, out=outs, algorithm=algorithm)

    call()
    graph = ranks.capture(call)
    for seed in range(3):
        parts = [normal(10 * seed + rank, 8199, FP32) for rank in range(ranks.world_size)]
        for x, part in zip(xs, parts, strict=True):
            x.copy_(part)
        for device in range(ranks.world_size):
            torch.cuda.synchronize(device)
        graph.replay()
        ranks.communicator.synchronize()
        assert_all(outs, reference.allreduce(parts, order="tree", out_dtype=torch.bfloat16))


def test_a_prepared_sum_can_be_captured_first_of_all(fresh_ranks: Ranks):
    parts = parts_of(fresh_ranks, normal, 8199)
    xs = fresh_ranks.place(parts)
    outs = [torch.empty_like(x, dtype=torch.bfloat16) for x in xs]
    fresh_ranks.communicator.prepare(dtypes=[torch.bfloat16], tp_invariant=True)

    tree = {"order": "tree", "out_dtype": torch.bfloat16}
    graph = fresh_ranks.capture(lambda: inside.allreduce(xs, fresh_ranks.communicator, out=outs, **tree))
    graph.replay()
    fresh_ranks.communicator.synchronize()

    assert_all(outs, reference.allreduce(parts, **tree))


def test_gradients_are_added_as_a_tree(ranks: Ranks):
    xs = [x.requires_grad_() for x in ranks.place(parts_of(ranks, normal, 1000))]
    ys = inside.allreduce(xs, ranks.communicator, order="tree", out_dtype=torch.bfloat16)
    given = [normal(50 + rank, 1000, torch.bfloat16) for rank in range(ranks.world_size)]

    found = torch.autograd.grad(ys, xs, ranks.place(given))

    assert_all(found, reference.allreduce([one.float() for one in given], order="tree"))


def test_the_kernel_is_told(ranks: Ranks):
    xs = ranks.place(parts_of(ranks, normal, 1000))

    assert "one_shot_push" in str(graphar.explain(inside.allreduce, xs, ranks.communicator, order="tree"))
