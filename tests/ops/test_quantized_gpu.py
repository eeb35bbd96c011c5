"""Sums with a codec on real GPUs: every kernel, format, size and part gives the specification's bits on every rank."""

import random
from dataclasses import replace

import pytest
import torch

from graphar import reference
from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm
from tests.cases import normal
from tests.gpu import DTYPES, Ranks, parts_of
from tests.ops.conformance import ALLREDUCE, REDUCESCATTER
from tests.ops.gpu_cases import CODECS, QUANTIZED, STOCHASTIC, Case, assert_bits, coded, named

pytestmark = pytest.mark.gpu

PUSH, PIPELINED = QUANTIZED
SCATTER = Algorithm.QUANTIZED_REDUCESCATTER.value
LARGE = {PUSH: 16777240, PIPELINED: 16777240, SCATTER: 67108864}
FED_BACK = {"label": "residual", "options": {"codec": STOCHASTIC}}
RESIDUALS = [
    *named(replace(ALLREDUCE[6], **FED_BACK), QUANTIZED),
    Case(replace(REDUCESCATTER[6], **FED_BACK), {SCATTER: (8199,)}, []),
]


def kernel_of(case: Case) -> str:
    (kernel,) = case.kernels
    return kernel


@pytest.mark.parametrize("case", coded(codec("int8")), ids=str)
def test_a_large_tensor_gives_the_specification(ranks: Ranks, case):
    case.check(ranks, (LARGE[kernel_of(case)],), torch.bfloat16)


def test_parts_of_any_lengths_one_after_another(ranks: Ranks):
    choices = random.Random(5)
    for turn in range(60):
        counts = tuple(
            choices.choice([0, 1, choices.randrange(3000), choices.randrange(300000)]) for _ in range(ranks.world_size)
        )
        if any(counts):
            one, at = CODECS[turn % len(CODECS)], ranks.calls_of(SCATTER)
            parts = parts_of(ranks, normal, sum(counts))
            ys = ranks.place([parts[0].new_full((count,), 7) for count in counts])
            ranks.run_parts("reducescatter", ranks.place(parts), ys, counts, codec=one.text)
            ranks.communicator.synchronize()
            expected = reference.quantized_reducescatter(parts, one, one.seed or 0, at, sizes=counts)
            assert_bits([(y,) for y in ys], [(y,) for y in expected], (one.text, counts))
            assert ranks.calls_of(SCATTER) == at + 1


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@pytest.mark.parametrize("case", RESIDUALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [7, 1025, 262149])
def test_residuals_are_what_the_specification_leaves(ranks: Ranks, case, dtype, numel):
    tensors = case.place(ranks, case.draw(ranks, (numel,), dtype))
    for _ in range(3):
        expected = case.expected({name: [x.cpu() for x in xs] for name, xs in tensors.items()}, case.calls(ranks))
        found = case.call(ranks, tensors)
        ranks.communicator.synchronize()
        assert_bits(found, expected)
