"""The kernels on real GPUs, one process with a tensor a device: every algorithm, the specification's bits."""

import random

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.tables import measured_config, shipped_table
from graphar.runtime.user_tables import find_table
from tests.cases import integers, normal, same_bits
from tests.gpu import DTYPES, KERNEL_ALGORITHMS, Ranks

pytestmark = pytest.mark.gpu

LARGE = (16777216, 16777224, 16777240, 67108864)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LARGE)
def test_large_tensors_give_the_specification(ranks: Ranks, numel, dtype):
    ranks.check_on_gpu(numel, dtype)


@pytest.mark.promise("Any number of elements works: 0, odd, and more than 2^31.")
def test_more_than_two_to_the_31_elements(ranks: Ranks):
    if ranks.world_size > 2:
        pytest.skip("one world size is enough for the width of an index")
    ranks.check_on_gpu((1 << 31) + 9, torch.bfloat16)


@pytest.mark.parametrize("algorithm", [name for name in KERNEL_ALGORITHMS if Algorithm(name).row.limit(2)])
def test_the_largest_tensor_that_the_scratch_takes(ranks: Ranks, algorithm):
    for dtype in DTYPES:
        largest = Algorithm(algorithm).row.limit(ranks.world_size) // dtype.itemsize
        for numel in (largest - 1, largest):
            ranks.check_on_gpu(numel, dtype, algorithm)
    assert ranks.scratch_is_as_before(algorithm)


def test_sizes_around_every_threshold_of_the_table(ranks: Ranks):
    table = shipped_table("nvidia_h200")
    limits = {row["max_nbytes"] for row in table.rows[ranks.world_size][:-1]}
    assert limits
    compressed_from = {table.lossless.least("allreduce", ranks.world_size)} - {None}
    for nbytes in sorted(limits | compressed_from):
        for numel in (nbytes // 2 + offset for offset in (-1, 0, 1)):
            ranks.check_on_gpu(numel, torch.bfloat16)


def test_the_algorithm_under_test_is_the_one_that_ran(ranks: Ranks):
    for algorithm in KERNEL_ALGORITHMS:
        before = ranks.calls_of(algorithm)
        ranks.check(integers, 8192, torch.bfloat16, algorithm)
        assert ranks.calls_of(algorithm) == before + 1
        others = [a for a in KERNEL_ALGORITHMS if a != algorithm]
        assert all(ranks.grid_is_idle(a) for a in [algorithm, *others])


def test_auto_runs_what_explain_says(ranks: Ranks):
    for numel in (1024, 1 << 20, 1 << 24, 1 << 26):
        xs = ranks.place([integers(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)])
        said = Algorithm(ranks.communicator.explain(xs).algorithm)
        before = ranks.calls_of(said)
        ranks.communicator.allreduce(xs)
        ranks.communicator.synchronize()
        assert ranks.calls_of(said) == before + 1


def test_a_tensor_may_have_no_dimensions(ranks: Ranks):
    ranks.check_parts([normal(rank, 1, torch.bfloat16).view(()) for rank in range(ranks.world_size)], "auto")


def test_sizes_algorithms_and_delays_at_random(ranks: Ranks):
    """Two thousand calls that shrink, grow and change algorithm, with one rank late now and then."""
    choices = random.Random(7)
    pool = ranks.place([normal(rank, 1 << 18, torch.bfloat16) for rank in range(ranks.world_size)])
    expected = graphar.reference.allreduce([x.to(pool[0].device) for x in pool])
    for call in range(2000):
        numel = int(2 ** choices.uniform(0, 18))
        start = choices.randrange((1 << 18) - numel + 1)
        algorithm = choices.choice(["auto", *KERNEL_ALGORITHMS])
        ranks.be_late(choices)
        ys = ranks.communicator.allreduce([x[start : start + numel] for x in pool], algorithm=algorithm)
        if call % 10 == 0:
            ranks.communicator.synchronize()
            wrong = same_bits(ys[call % ranks.world_size].cpu(), expected[start : start + numel].cpu())
            assert wrong == 0, f"call {call}: {algorithm}, {numel} elements"


@pytest.mark.promise("What the kernels cannot serve takes an exact fallback, and `explain` says why.")
def test_without_peer_access_the_fallback_answers(ranks: Ranks, monkeypatch):
    def refuse(self):
        raise graphar.UnsupportedError("cuda:0 has no peer access to cuda:1")

    monkeypatch.setattr("graphar.runtime.memory.peer_memory.LocalMemory.check", refuse)
    with graphar.Communicator(devices=range(ranks.world_size)) as communicator:
        parts = [normal(rank, 8192, torch.float32) for rank in range(ranks.world_size)]
        ys = communicator.allreduce(ranks.place(parts))
        ranks.check_result(ys, parts)
        assert "no peer access" in communicator.explain(ys).reason
        with pytest.raises(graphar.UnsupportedError, match="no peer access"):
            communicator.allreduce(ys, algorithm="one_shot")


def test_a_tensor_past_an_algorithms_scratch_is_refused(ranks: Ranks):
    limit = Algorithm.ONE_SHOT_PUSH.row.limit(ranks.world_size)
    xs = ranks.place([torch.zeros(limit // 2 + 8, dtype=torch.bfloat16)] * ranks.world_size)
    with pytest.raises(graphar.UnsupportedError, match="its scratch takes"):
        ranks.communicator.allreduce(xs, algorithm="one_shot_push")
    ranks.check(integers, 8192, torch.bfloat16, "one_shot_push")


def test_the_configuration_that_runs_is_the_tables(ranks: Ranks):
    config = measured_config(find_table(torch.cuda.get_device_name(0)), ranks.world_size, 2048)
    said = ranks.communicator.explain(ranks.place([torch.ones(1024, dtype=torch.bfloat16)] * ranks.world_size))
    assert (said.algorithm, said.blocks, said.threads) == (config.algorithm.value, config.blocks, config.threads)


def test_the_current_device_stays_what_it_was(ranks: Ranks):
    with torch.cuda.device(1):
        again = Ranks(ranks.world_size)
        again.check(integers, 8192, torch.bfloat16, "auto")
        again.communicator.close()
        assert torch.cuda.current_device() == 1
