"""How many bytes sums that are added as a tree send, counted on the host: 4 an element, and 2 for a rounded sum."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.runtime.catalogue import kernel_source
from graphar.simulator.simulation import Call, Outcome, Simulation
from tests.host import cases
from tests.host.build import build
from tests.host.cases import scratch_of
from tests.host.products import (
    REDUCE,
    SCATTER,
    Kind,
    Operands,
    Products,
    kinds_of,
    packed,
    partial_skinny_tiles,
    partial_tiles,
)

pytestmark = pytest.mark.host

FP32, BF16 = torch.float32, torch.bfloat16
PARTIAL, ROUNDED = 4, 2  # bytes of an element
N = 128  # columns
every_world_size = pytest.mark.parametrize("world_size", [2, 4, 8])


def sent(outcomes: list[Outcome]) -> int:
    """The bytes that all ranks sent."""
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

    simulation = Simulation(program, algorithm, world_size, scratch_of(algorithm, world_size), 0, 0)

    found = sent(simulation.run([call]))

    # In one shot every rank gets all partials of its peers; in two, those of its share, and the sums of the others.
    assert found == numel * (world_size - 1) * nbytes * (world_size if algorithm == "one_shot_push" else 1)


def bytes_of_ones(products: Products, tile, m: int, counts: tuple[int, ...], received: int) -> int:
    """The bytes that ranks send for a product of ones with ``m`` rows, of which each receives some."""
    world_size, k = products.world_size, 64 * LEAVES // products.world_size
    a, w, bias = (torch.ones(shape, dtype=products.dtype) for shape in ((m, k), (N, k), (N,)))
    shape, x = Config(products.algorithm, 1, tile.threads), packed(Operands(a, w, bias, None), m, group_rows=1)
    kernel, results = products.fitting.index(Kind(tile)), (2 * received * N,) * world_size
    return sent(products.run([Call(kernel, shape, [x] * world_size, counts, results)], 0))


@every_world_size
@pytest.mark.parametrize(
    ("algorithm", "nbytes"),
    [(Algorithm.MATMUL_ONE_SHOT, PARTIAL), (Algorithm.MATMUL_TWO_SHOT, PARTIAL + ROUNDED)],
    ids=lambda one: str(one),
)
def test_a_skinny_matmul_sends_as_much(algorithm, nbytes, world_size):
    tiles = partial_skinny_tiles(world_size)
    m, products = 8, Products(algorithm, kinds_of(tiles), world_size)

    found = bytes_of_ones(products, tiles[1], m, (m * N,), m)

    # A sum of 8 columns is one pack, of whose partials each rank sends two.
    assert found == m * N * (world_size - 1) * nbytes * (world_size if algorithm == "matmul_one_shot" else 1)


@every_world_size
@pytest.mark.parametrize(("algorithm", "nbytes"), [(SCATTER, PARTIAL), (REDUCE, PARTIAL + ROUNDED)], ids=str)
def test_tiles_send_as_much(algorithm, nbytes, world_size):
    rows, counts, (tile, *others) = 64, (64,) * world_size, partial_tiles(world_size)
    products = Products(algorithm, kinds_of((tile, *others)), world_size)

    found = bytes_of_ones(products, tile, sum(counts), counts, rows if algorithm is SCATTER else sum(counts))

    assert found == rows * world_size * N * (world_size - 1) * nbytes
