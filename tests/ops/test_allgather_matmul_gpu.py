"""fused_allgather_matmul between GPUs: in one process with operands on every device, and with a process each."""

import random
import time

import pytest
import torch

import graphar
from graphar import reference
from tests.cases import same_bits
from tests.gpu import Ranks
from tests.ops.gpu_cases import GATHERED
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

every_shared_world_size = pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)


def integers(shape, dtype, device, seed):
    """Random integers from -4 to 4 without 0: fp32 holds any sum of fewer than 2^20 products."""
    x = torch.randint(-4, 4, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(x < 0, x, x + 1).to(device, dtype)


def operands(devices, counts, n, k, dtype=torch.bfloat16, seed=0):
    """The rows, the weight and the bias of every rank."""
    made = []
    for rank, (device, count) in enumerate(zip(devices, counts, strict=True)):
        w = integers((n, k), dtype, device, seed + 8 * rank + 1)
        bias = integers((n,), dtype, device, seed + 8 * rank + 2)
        made.append((integers((count, k), dtype, device, seed + 8 * rank), w, bias))
    return [list(ones) for ones in zip(*made, strict=True)]


def draw_size(choices, partition, most):
    """A size of a weight: torch's matmul of others than multiples of 8 may add partial sums that it has rounded."""
    unit = 1 if partition == "tiles" else 8
    return unit * choices.randint(1, most // unit)


@pytest.mark.parametrize("case", [case for case in GATHERED if case.form.options["partition"] != "none"], ids=str)
def test_gathers_beyond_the_scratch_give_the_specification(ranks: Ranks, case):
    case.check(ranks, ((160 << 20) // (2 * 8192) // ranks.world_size, 128, 8192))


@every_shared_world_size
@on_ranks(by=run_on_gpus)
def test_processes_get_the_specification_while_one_is_late(rank, world_size):
    choices, found = random.Random(world_size), []
    for seed in range(60):
        counts = [choices.choice([1, 128, choices.randint(1, 900)]) for _ in range(world_size)]
        partition = choices.choice(["tiles", "tiles", "chunks", "chunks", "none", "auto"])
        n, k = draw_size(choices, partition, 800), draw_size(choices, partition, 800)
        a, w, bias = operands(["cuda"] * world_size, counts, n, k, seed=100 * seed)
        expected = reference.fused_allgather_matmul(a, w[rank], bias[rank])
        if seed % world_size == rank:
            time.sleep(0.02)
        y = graphar.fused_allgather_matmul(a[rank], w[rank], bias=bias[rank], sizes=counts, partition=partition)
        found.append(same_bits(y, expected))
    assert found == [0] * len(found)
