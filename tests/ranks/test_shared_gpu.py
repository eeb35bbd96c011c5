"""Ranks in processes that share one GPU, by GRAPHAR_TEST_SHARE_GPU=1: every public op has its specification's bits.

Kernels of different processes take turns on the GPU in time slices, so a wait on a peer takes milliseconds.
"""

from __future__ import annotations

import pytest
import torch

from graphar.runtime.registry import engine_of_group
from tests.cases import integers, same_bits
from tests.ops.conformance import FORMS, PARAMETERS, copies
from tests.processes import RankFailed, run_ranks

pytestmark = pytest.mark.gpu(1)

WORLD_SIZE, CALLS = 2, 4
# A form that writes its arguments, and one that rounds at random, give something else at each call.
EVERY_FORM = [
    form
    for form in FORMS
    if torch.bfloat16 in form.dtypes and not form.writes and "stochastic" not in str(form) + str(form.options)
]
SHAPE, PRODUCT = (8, 128), (8, 128, 64)  # of products: [..., N, K]


def tensors_of(form):
    """Whole numbers, whose products are exact in fp32: no order of accumulation changes a bit."""
    shape = PRODUCT if "w" in PARAMETERS[form.op] else SHAPE
    return form.tensors(WORLD_SIZE, shape, torch.bfloat16, integers)


def every_op(rank, world_size):
    """By form, how many elements of this rank's results differ, and how many kernels have counted calls.

    Each call is made several times, since the later ones repeat the launch of the earlier ones.
    """
    torch.cuda.set_device(0)
    wrong = {}
    for form in EVERY_FORM:
        tensors = tensors_of(form)
        expected = form.expected(copies(tensors))[rank]
        on_gpu = {name: [one.cuda() for one in ones] for name, ones in tensors.items()}
        wrong[str(form)] = 0
        for _ in range(CALLS):
            found = form.of_rank(rank, on_gpu)
            wrong[str(form)] += sum(same_bits(y.cpu(), right) for y, right in zip(found, expected, strict=True))
    runner = engine_of_group("").runner
    return wrong, len(runner.calls_begun()) if runner else 0


def test_every_public_op_has_its_specifications_bits(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    for wrong, kernels in run_ranks(every_op, WORLD_SIZE, timeout_s=300):
        assert wrong == dict.fromkeys(map(str, EVERY_FORM), 0)
        assert kernels > 0


def test_without_the_switch_ranks_that_share_a_gpu_are_refused(monkeypatch):
    monkeypatch.delenv("GRAPHAR_TEST_SHARE_GPU", raising=False)

    with pytest.raises(RankFailed, match="ranks 0 and 1 both use GPU"):
        run_ranks(every_op, WORLD_SIZE)
