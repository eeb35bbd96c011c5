"""Each communicator's grids take a share of the GPU, by how many communicators are declared. The rule is (18)."""

import itertools

import pytest
import torch

from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan import tune
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.matmuls import prefers_tiles
from graphar.plan.policy import Chip
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.select import Facts, select
from graphar.plan.tables import measured_config, shipped_table
from graphar.plan.work import Norm, Parts, Product, Sum

SMS, TABLE = 132, shipped_table("nvidia_h200")
MANY = (2, 3, 4, 7, 14)
SIZES = tuple(1 << power for power in range(10, 31, 2))
every_number = pytest.mark.parametrize("communicators", MANY)


def works(world_size):
    """Works of every op that has kernels, of many sizes."""
    yield from (Sum(nbytes // 2, wire) for nbytes in SIZES for wire in ("", "int8", "int4"))
    for op, nbytes, wire in itertools.product(("reducescatter", "allgather"), SIZES, ("", "int8")):
        if not (wire and op == "allgather"):
            yield Parts(op, (nbytes // 2,) * world_size, wire)
    for rows in (1, 4, 8, 16, 32, 60, 512, 4000):
        yield Norm(ALLREDUCE_NORM, (rows * 8192,), 8192)
        yield Norm(REDUCESCATTER_NORM, (rows * 8192,) * world_size, 8192)


def configs(chip):
    """The grids of all calls: by the table, by name, and of lossless compression."""
    for world_size in WORLD_SIZES:
        facts = Facts(world_size, TABLE, chip)
        for work in works(world_size):
            yield select(Call(work, torch.bfloat16, 0), facts).config
        for nbytes, algorithm in itertools.product(SIZES, ("one_shot_push", "two_shot_tma", "two_shot_lossless")):
            limit = Algorithm(algorithm).row.limit(world_size)
            if limit is None or nbytes <= limit:
                yield select(Call(Sum(nbytes // 2), torch.bfloat16, 0, algorithm=algorithm), facts).config


def halves_of_sms(config):
    """The halves of SMs that a grid takes. Blocks of a cluster count as whole SMs: they may lie on one each."""
    halves = config.algorithm.row.takes_half(config.threads) and config.cluster == 1
    return config.blocks * (1 if halves else 2)


@every_number
def test_grids_of_as_many_communicators_as_declared_fit_on_the_gpu(communicators):
    most = max(halves_of_sms(one) for one in configs(Chip(SMS, "sm_90a", communicators)))

    assert (communicators * most <= 2 * SMS) == (communicators > 2)
    assert most >= 2 * SMS // communicators - communicators  # and leave little of it unused


def test_two_communicators_have_the_grids_that_were_measured():
    chip = Chip(SMS, "sm_90a")

    assert (chip.communicators, chip.shared_blocks(), chip.shared_blocks(halves=True)) == (2, SMS - 1, SMS - 1)
    assert [chip.shared_blocks(halves=True, cluster=one) for one in (2, 4, 8)] == [SMS - 1] * 3
    assert [chip.shared_blocks(cluster=one) for one in (2, 4, 8)] == [128, 124, 112]
    for world_size, nbytes in itertools.product(WORLD_SIZES, SIZES):
        config = measured_config(TABLE, world_size, nbytes)
        chosen = select(Call(Sum(nbytes // 2), torch.bfloat16, 0), Facts(world_size, TABLE, chip, lossless=False))
        if nbytes >= (TABLE.copies.least("allreduce", world_size) or 2 * SIZES[-1]):
            config = Config(Algorithm.TWO_SHOT_COPIES, TABLE.copies.sum_blocks, 512)
            assert chosen.config == config
        assert (chosen.config.threads, chosen.config.blocks) == (config.threads, min(config.blocks, SMS - 1))


@every_number
def test_a_grid_that_starts_early_and_the_one_before_leave_half_an_sm_to_the_last_communicator(communicators):
    chip = Chip(SMS, "sm_90a", communicators)
    found = {(one.blocks, one.algorithm.row.takes_half(one.threads)) for one in configs(chip)}
    # Of two communicators, grids of whole SMs lie beside the blocks of the one before.
    counted = [(blocks, halves) for blocks, halves in found if halves or communicators > 2]
    early = [blocks * (1 if halves else 2) for blocks, halves in counted if chip.may_overlap(blocks, halves)]

    assert early
    assert (communicators - 1) * (chip.shared_blocks(halves=True) + max(early)) < 2 * SMS


def test_of_two_communicators_every_grid_starts_early_but_those_with_more_blocks_than_sms():
    chip = Chip(SMS, "sm_90a")

    assert all(chip.may_overlap(blocks, halves) for blocks in range(1, SMS) for halves in (False, True))
    assert not chip.may_overlap(SMS + 1, halves=True)
    assert not chip.may_overlap(2 * (SMS - 1), halves=True)


def test_of_three_communicators_small_grids_start_early():
    chip = Chip(SMS, "sm_90a", 3)

    assert [chip.may_overlap(blocks, halves=True) for blocks in (1, 43, 44, 88)] == [True, True, False, False]
    assert [chip.may_overlap(blocks, halves=False) for blocks in (1, 21, 22, 44)] == [True, True, False, False]


@pytest.mark.parametrize("sms", [40, 58, 78, 108, 114, 132, 148, 160])
def test_the_smallest_share_has_a_block_for_every_rank_and_its_sms_include_a_pair_of_one_gpc(sms):
    most = Chip(sms, "sm_90a").most_communicators
    chip = Chip(sms, "sm_90a", most)

    assert chip.shared_blocks(halves=True) >= 8
    assert sms - (most - 1) * chip.shared_blocks(cluster=2) > 8  # more than GPCs


def test_tuning_tries_grids_of_the_share():
    tried = tune.candidates("allreduce", [4], 64 << 20, Chip(SMS, "sm_90a", 3))

    assert {one.blocks for one in tried if one.algorithm is Algorithm.TWO_SHOT_PIPELINED} == {88}
    assert {one.blocks for one in tried if one.algorithm is Algorithm.TWO_SHOT_TMA} == {32}


def test_auto_fuses_no_matmul_where_its_kernel_has_only_a_share():
    policy, gathered, work = TABLE.matmul, TABLE.allgather_matmul, Product("fused_matmul_allreduce", (8192,), 8192)
    chips = [Chip(SMS, "sm_90a", communicators) for communicators in (2, 3)]

    assert [prefers_tiles(work, policy, chip, 4) for chip in chips] == [True, False]
    assert all(gathered.faster(4, rows, chips[1], True) != "tiles" for rows in range(1, 1 << 15, 97))
    assert [gathered.faster(4, 4096, chips[0], is_plain) for is_plain in (True, False)] == ["chunks", "none"]


def test_a_table_does_not_keep_how_many_communicators_were_declared():
    chip = Chip(SMS, "sm_90a", 3)

    assert Chip.in_common([chip, Chip(108, "sm_80", 3)]) == Chip(108, "sm_80", 3)
    assert "communicators" not in TABLE.to_json()
