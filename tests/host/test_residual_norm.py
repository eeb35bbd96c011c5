"""Residual and norm of sums that are there, and their gradients, executed on the host: the specification's bits."""

from __future__ import annotations

import random

import pytest
import torch

from graphar.numerics import norm_gradients, norms
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import NORM_SHARED_NBYTES, PACK_NBYTES, Scratch
from graphar.runtime.arguments import NormGradientArguments
from graphar.runtime.bind.residual_norm import COLUMNS_ADDED, PAIRS_NBYTES, STAGED_TENSORS, threads_of_sums
from graphar.runtime.catalogue import residual_norm_backward_sources, residual_norm_source
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, KernelFailure, Simulation
from tests.cases import HALVES, bit_patterns, normal, same_bits
from tests.host.build import GROUP_LANES, NORM_SLOTS, build, known, seeds
from tests.host.test_softmax import Memory, run

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

DTYPES = tuple(TYPE_NAMES)
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot


WIDER = tuple(residual_norm_source(dtype, torch.float32) for dtype in HALVES)


def wrong_elements(sanitizer: str, seed: int, mutation: Mutation | None = None, wide: bool = False, **of_call) -> int:
    """How many elements and guards are wrong after one call. The seed decides its size, and whether it is in place.

    If it is ``wide``, fp32 sums meet narrower residuals, and what is summed lies behind the normed rows.
    """
    choices = random.Random(seed)
    dtypes = HALVES if wide else DTYPES
    index, packs = choices.randrange(len(dtypes)), choices.choice(ROW_PACKS)
    dtype, rows = dtypes[index], choices.randint(1, 9)
    columns = packs * PACK_NBYTES // dtype.itemsize
    fill = choices.choice([normal, bit_patterns])
    total = with_canonical_nan(fill(0, rows * columns, torch.float32 if wide else dtype).view(rows, columns))
    residual, weight = normal(20, total.numel(), dtype).view_as(total), normal(21, columns, dtype)
    numbers = choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    place = {"offset": choices.choice([0, 4])} if wide else {"in_place": choices.random() < 0.5}
    call = Call(
        0,
        Config(OF_ANY_KIND, choices.randint(1, min(3, rows)), 32 if packs <= 32 else NORM_SLOTS),
        [total.view(-1)],
        (total.numel(),),
        (2 * residual.nbytes if wide else total.nbytes,),
        operands=(residual, weight, residual.nbytes if wide else torch.zeros_like(total)),
        scalars=numbers,
        columns=columns,
        **place,
        **of_call,
    )
    program = build(WIDER if wide else tuple(map(residual_norm_source, DTYPES)), sanitizer, mutation)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, NORM_SHARED_NBYTES), index, seed)

    (outcome,) = simulation.run([call])

    normed, summed = norms.specification(total, residual, weight, *numbers)
    expected = torch.cat([normed, summed]) if wide else normed
    return same_bits(outcome.results[0].view(dtype), expected.view(-1)) + outcome.broken_guards


LEFT_OUT = Mutation("norm/residual_rmsnorm.cu", "row += norm.teams", "row += norm.teams + 1")
NARROWER = Mutation("norm/residual_rmsnorm.cu", "u64(row) * norm.sums * norm.packs", "u64(row) * norm.packs")
known([LEFT_OUT, NARROWER])


@pytest.mark.parametrize("wide", [False, True], ids=["one dtype", "fp32 sums"])
@pytest.mark.parametrize(("sanitizer", "most_seeds"), [("plain", 24), ("thread", 3), ("address", 6)])
def test_it_gives_the_specifications_bits(sanitizer, most_seeds, wide):
    for seed in seeds(most_seeds):
        assert wrong_elements(sanitizer, seed, wide=wide) == 0, seed


def test_a_row_left_out_is_noticed():
    assert any(wrong_elements("plain", seed, LEFT_OUT) for seed in range(8))


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    assert any(wrong_elements("plain", seed, waits=False) for seed in range(4))


def test_a_row_that_begins_where_one_of_narrower_sums_would_is_noticed():
    assert any(wrong_elements("plain", seed, NARROWER, wide=True) for seed in range(8))


GROUPS = 6
NUMBERS = (1e-5, 1.0)
STAGINGS = ((1, 3), (2, 2), (4, 1))  # packs of a thread, and rows in shared memory


@pytest.fixture
def few_groups(monkeypatch):
    monkeypatch.setattr(norm_gradients, "row_groups", lambda rows, row_nbytes: min(rows, GROUPS))
    monkeypatch.setattr(norm_gradients, "LANES", GROUP_LANES)


def wrong_gradients(sanitizer: str, seed: int, mutation: Mutation | None = None) -> int:
    """How many elements and guards are wrong after the kernel of rows, and after the one that adds their groups."""
    choices = random.Random(seed)
    dtype, staging = choices.choice(DTYPES), choices.choice(STAGINGS)
    packs = choices.choice([size for size in (1, 8, 33, 64, 130, 250) if size <= staging[0] * NORM_SLOTS])
    rows, columns = choices.randint(1, 13), packs * PACK_NBYTES // dtype.itemsize
    fill = choices.choice([normal, bit_patterns])
    of_normed, of_summed, summed = (fill(at, rows * columns, dtype).view(rows, columns) for at in range(3))
    weight, of_summed = normal(21, columns, dtype), choices.choice([of_summed, None])
    groups, threads = min(rows, GROUPS), 32 if packs <= 32 else NORM_SLOTS
    expected = norm_gradients.specification(of_normed, of_summed, summed, weight, *NUMBERS)

    program = build(residual_norm_backward_sources(dtype, *staging), sanitizer, mutation)
    tensors = {"of_normed": of_normed, "of_summed": of_summed, "summed": summed, "weight": weight}

    def run_kernel(kernel: int, blocks: int, threads: int, tensors: dict, **results: int) -> tuple[dict, int]:
        memory = Memory()
        for name, x in tensors.items():
            if x is not None:
                memory.give(name, x)
        for name, nbytes in results.items():
            memory.take(name, nbytes)
        numbers = dict(zip(("eps", "weight_offset"), NUMBERS, strict=True))
        arguments = NormGradientArguments(rows=rows, columns=columns, row_groups=groups, with_weight=True, **numbers)
        shared_nbytes = PAIRS_NBYTES + STAGED_TENSORS * staging[0] * staging[1] * threads * PACK_NBYTES
        return run(program, kernel, (blocks, threads), arguments, memory, seed, shared_nbytes)

    found, broken = run_kernel(0, groups, threads, tensors, of_rows=summed.nbytes, groups=4 * groups * columns)
    blocks, threads = -(-columns // COLUMNS_ADDED), threads_of_sums(groups)
    of_groups = {"summed": summed, "weight": weight, "groups": found["groups"]}
    added, more = run_kernel(1, blocks, threads, of_groups, of_weight=weight.nbytes)
    of_rows, of_weight = found["of_rows"], added["of_weight"]
    pairs = zip((of_rows, of_weight), expected, strict=True)
    return sum(same_bits(result.view(dtype), wanted.view(-1)) for result, wanted in pairs) + broken + more


@pytest.mark.parametrize(("sanitizer", "most_seeds"), [("plain", 24), ("thread", 2), ("address", 4)])
@pytest.mark.usefixtures("few_groups")
def test_gradients_have_the_specifications_bits(sanitizer, most_seeds):
    for seed in seeds(most_seeds):
        assert wrong_gradients(sanitizer, seed) == 0, seed


_FILE = "norm/residual_rmsnorm_backward.cu"
MISTAKES = {
    "a row left out": ("row += gridDim.x", "row += gridDim.x + 1"),
    "a copy that is not waited for": ("wait_for_copies<stages - 1>()", "wait_for_copies<stages>()"),
    "the gradient of rows left out": ("if (a.of_summed) more", "if (!a.of_summed) more"),
    "a lane left out": ("u32 l = 0", "u32 l = 1"),
    "a group left out": ("group < a.row_groups", "group + 1 < a.row_groups"),
}


OVERWRITTEN = Mutation(_FILE, "turn ^= 1;", "")
known([*(Mutation(_FILE, *one) for one in MISTAKES.values()), OVERWRITTEN])


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("few_groups")
def test_a_mistake_in_gradients_is_noticed(mistake):
    assert any(wrong_gradients("plain", seed, Mutation(_FILE, *MISTAKES[mistake])) for seed in range(16))


@pytest.mark.usefixtures("few_groups")
def test_numbers_of_warps_that_are_overwritten_early_are_noticed():
    with pytest.raises(KernelFailure, match="data race"):
        any(wrong_gradients("thread", seed, OVERWRITTEN) for seed in range(8))
