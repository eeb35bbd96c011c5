"""How many bytes sums that are added as a tree send, counted on the host: 4 an element, and 2 for a rounded sum."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, SENTINEL, Scratch
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.runtime.catalogue import kernel_source
from graphar.simulator.simulation import Call, Simulation
from tests.host import cases, test_matmul_partials, test_matmul_skinny
from tests.host.build import build
from tests.host.cases import scratch_of
from tests.host.matmul_operands import packed
from tests.host.test_matmul_tiles import REDUCE, SCATTER, dtype_of

pytestmark = pytest.mark.host

FP32, BF16 = torch.float32, torch.bfloat16
PARTIAL, ROUNDED = 4, 2  # bytes of an element
N = 128  # columns
every_world_size = pytest.mark.parametrize("world_size", [2, 4, 8])


def sent(program, algorithm, world_size: int, scratch: Scratch, call: Call) -> int:
    """The bytes that all ranks send in a call."""
    outcomes = Simulation(program, algorithm, world_size, scratch, 0, 0).run([call])
    assert not any(outcome.record.kind or outcome.broken_guards for outcome in outcomes)
    return sum(outcome.sent_nbytes for outcome in outcomes)


@every_world_size
@pytest.mark.parametrize(
    ("algorithm", "nbytes"),
    [(Algorithm.ONE_SHOT_PUSH, PARTIAL), (Algorithm.TWO_SHOT_PUSH, PARTIAL + ROUNDED)],
    ids=lambda one: str(one),
)
def test_a_sum_of_partials_sends_each_to_its_owner_and_its_rounded_sum_back(algorithm, nbytes, world_size):
    numel = 1024
    program = build((kernel_source(algorithm, FP32, world_size, None, None, "TreeOrder, bf16"),), "plain")
    plain, _ = cases.draw_call(algorithm, world_size, FP32, 0, random.Random(0), 0)
    xs = [torch.full((numel,), float(rank)) for rank in range(world_size)]
    call = replace(plain, inputs=xs, counts=(numel,), output_nbytes=(2 * numel,) * world_size, offset=0, in_place=False)

    found = sent(program, algorithm, world_size, scratch_of(algorithm, world_size), call)

    # In one shot every rank gets all partials of its peers; in two, those of its share, and the sums of the others.
    assert found == numel * (world_size - 1) * nbytes * (world_size if algorithm == "one_shot_push" else 1)


def operands(world_size: int, m: int) -> list[torch.Tensor]:
    dtype, k = dtype_of(world_size), 64 * LEAVES // world_size
    a, w, bias = (torch.ones(shape, dtype=dtype) for shape in ((m, k), (N, k), (1, N)))
    return [packed([m, N, k, 0, 1, False], a, w, bias, "by_rows")] * world_size


@every_world_size
@pytest.mark.parametrize(
    ("algorithm", "nbytes"),
    [(Algorithm.MATMUL_ONE_SHOT, PARTIAL), (Algorithm.MATMUL_TWO_SHOT, PARTIAL + ROUNDED)],
    ids=lambda one: str(one),
)
def test_a_skinny_matmul_sends_as_much(algorithm, nbytes, world_size):
    m, tile = 8, SkinnyTile(8, 2, 1, LEAVES // world_size, True)
    program = test_matmul_skinny.program_of(algorithm, world_size, "plain", [(tile, "by_rows")])
    capacity = test_matmul_skinny.CAPACITY
    scratch = Scratch(capacity, 2 * world_size * capacity * PACK_NBYTES, SENTINEL, tile.shared_nbytes + 2048)
    shape = Config(algorithm, 1, tile.threads)
    call = Call(0, shape, operands(world_size, m), (m * N,), (2 * m * N,) * world_size)

    found = sent(program, algorithm, world_size, scratch, call)

    # A sum of 8 columns is one pack, of whose partials each rank sends two.
    assert found == m * N * (world_size - 1) * nbytes * (world_size if algorithm == "matmul_one_shot" else 1)


@every_world_size
@pytest.mark.parametrize(("algorithm", "nbytes"), [(SCATTER, PARTIAL), (REDUCE, PARTIAL + ROUNDED)], ids=str)
def test_tiles_send_as_much(algorithm, nbytes, world_size):
    rows = 64
    tile = MatmulTile(64, 64, 2, whole=True, leaves=LEAVES // world_size, partials=True)
    program = test_matmul_partials.program_of(algorithm, world_size, "plain", [(tile, "by_rows")])
    received = rows if algorithm is SCATTER else rows * world_size
    shape = Config(algorithm, 1, tile.threads)
    results = (2 * received * N,) * world_size
    call = Call(0, shape, operands(world_size, rows * world_size), (rows,) * world_size, results)

    found = sent(program, algorithm, world_size, test_matmul_partials.scratch_of(algorithm, world_size), call)

    assert found == rows * world_size * N * (world_size - 1) * nbytes
