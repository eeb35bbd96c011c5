"""The doctor's self-test approves an algorithm only if its own kernels ran and gave the right bits."""

from collections import Counter

import pytest
import torch

import graphar
from graphar import Algorithm
from graphar.cli.doctor import self_test
from graphar.cli.doctor.findings import NOTE, OK, PROBLEM
from graphar.cli.doctor.self_test import calls_on_cpu, calls_on_gpus
from graphar.plan.algorithms import COMPRESSING, MATMUL_ARCH

ALGORITHMS = [one for one in Algorithm if one is not Algorithm.HIERARCHICAL]
PUSH = Algorithm.TWO_SHOT_PUSH
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")


def tell(algorithm):
    (said,) = self_test.self_test(algorithm)
    return said


@no_gpu
def test_the_cpu_gives_the_specifications_bits_in_every_op():
    said = tell(Algorithm.FALLBACK)

    assert said.found.startswith("the specification's bits on 4 ranks on the CPU, by allreduce, reducescatter,")
    assert [op.name for op, _ in calls_on_cpu() if op.name not in said.found] == []


@pytest.mark.promise("`doctor` finds what is wrong and says what to do.")
@no_gpu
@pytest.mark.parametrize("name", dict.fromkeys(op.function for op, _ in calls_on_cpu()))
def test_one_wrong_bit_is_found(monkeypatch, name):
    whole, calls = getattr(graphar, name), [call for call in calls_on_cpu() if call[0].function == name]

    def flip(*args, **options):
        found = whole(*args, **options)
        ys = found[-1] if isinstance(found, tuple) else found
        ys[0].view(-1).view(torch.int16)[-1] ^= 1
        return found

    monkeypatch.setattr(graphar, name, flip)
    monkeypatch.setattr(self_test, "calls_on_cpu", lambda: calls)

    said = tell(Algorithm.FALLBACK)

    made = Counter(op.name for op, _ in calls)
    differ = "; ".join(f"{count} elements of {op} differ from the specification" for op, count in made.items())
    assert (said.status, said.found) == (PROBLEM, f"{differ}, on 4 ranks on the CPU")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (graphar.UnsupportedError("needs sm_90 or newer"), NOTE),
        (graphar.CollectiveTimeout("rank 0 waited"), PROBLEM),
        (graphar.DriverError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory"), PROBLEM),
    ],
    ids=["unsupported", "timeout", "driver"],
)
def test_what_an_algorithm_raises_is_told(monkeypatch, error, status):
    def refuse(xs, **options):
        raise error

    monkeypatch.setattr(graphar, "allreduce", refuse)

    said = tell(Algorithm.FALLBACK)

    assert said.status == status
    assert str(error) in said.found


@pytest.fixture
def gpus(monkeypatch):
    """Has ranks on the CPU pass for GPUs, and ``counted`` for the numbers of calls that kernels report."""

    def pretend(world_size, counted, arch=MATMUL_ARCH):
        for name in ("allreduce", "reducescatter", "allgather", "alltoall"):
            op = getattr(graphar, name)
            monkeypatch.setattr(graphar, name, lambda xs, algorithm="", op=op, **options: op(xs, **options))
        monkeypatch.setattr(self_test, "is_available", lambda: True)
        monkeypatch.setattr(self_test, "_devices", lambda on_gpus: ["cpu"] * world_size)
        monkeypatch.setattr(self_test, "_counted", lambda communicator: counted)
        monkeypatch.setattr(self_test, "architecture", lambda device: arch)

    return pretend


def due(algorithm, world_size):
    """How many calls of every rank the algorithm's kernel has to count."""
    return {algorithm: [len(calls_on_gpus(algorithm, world_size))] * world_size} if algorithm.row.layout else {}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_whose_kernels_count_its_calls_is_approved(gpus, algorithm):
    gpus(3, due(algorithm, 3))

    said = tell(algorithm)

    assert said.status == OK
    assert said.found.startswith("the specification's bits on 3 GPUs, by ")


@pytest.mark.parametrize("algorithm", [one for one in ALGORITHMS if one is not Algorithm.FALLBACK])
def test_an_algorithm_whose_calls_take_the_fallback_is_not(gpus, algorithm):
    gpus(3, {})

    said = tell(algorithm)

    assert said.status == PROBLEM
    assert said.found.startswith("calls ran by fallback, not by ")
    assert algorithm.value in said.found


@pytest.mark.promise("`doctor` finds what is wrong and says what to do.")
@pytest.mark.parametrize(
    ("counted", "told"),
    [
        ({Algorithm.ONE_SHOT: [3, 3, 3]}, "one_shot 3/3/3"),
        ({PUSH: [3, 3, 3], Algorithm.ONE_SHOT: [1, 1, 1]}, "two_shot_push 3/3/3 and one_shot 1/1/1"),
        ({PUSH: [3, 2, 3]}, "two_shot_push 3/2/3"),
        ({PUSH: [3, 3, None]}, "two_shot_push 3/3/None"),
    ],
    ids=["another", "another besides", "not on all ranks", "not known of one"],
)
def test_calls_that_another_algorithm_made_are_told(gpus, counted, told):
    gpus(3, counted)

    said = tell(PUSH)

    assert (said.status, said.found) == (PROBLEM, f"calls ran by {told}, not by two_shot_push 3/3/3, on 3 GPUs")


@pytest.mark.parametrize("algorithm", COMPRESSING.values())
def test_what_compresses_is_examined_although_the_environment_turns_it_off(gpus, monkeypatch, algorithm):
    monkeypatch.setenv("GRAPHAR_LOSSLESS", "0")
    settings = []
    monkeypatch.setattr(self_test, "_faults", lambda communicator, *_: settings.append(communicator.engine.lossless))
    gpus(3, {})

    tell(algorithm)

    assert settings == [True]


@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_algorithm_has_calls_except_matmul_two_shot_between_two_gpus(world_size):
    without = [one for one in ALGORITHMS if not calls_on_gpus(one, world_size)]

    assert without == ([Algorithm.MATMUL_TWO_SHOT] if world_size == 2 else [])


@pytest.mark.parametrize(
    ("algorithm", "arch", "reason"),
    [
        (Algorithm.HIERARCHICAL, MATMUL_ARCH, "it adds host by host, and there is one"),
        (Algorithm.MATMUL_TWO_SHOT, MATMUL_ARCH, "no call of this test takes it between 2 GPUs"),
        (Algorithm.MATMUL_ALLREDUCE, "sm_80", "needs sm_90a, cuda:0 is sm_80"),
    ],
)
def test_what_cannot_run_here_is_noted_with_the_reason(gpus, monkeypatch, algorithm, arch, reason):
    gpus(2, {}, arch)
    monkeypatch.setattr(self_test, "_devices", lambda on_gpus: [0, 1])

    said = tell(algorithm)

    assert (said.status, said.found) == (NOTE, f"not here: {reason}")


@pytest.mark.gpu
def test_every_algorithm_that_can_run_here_is_exact():
    count, capability = min(torch.cuda.device_count(), 8), torch.cuda.get_device_capability()
    elsewhere = {Algorithm.HIERARCHICAL, Algorithm.MULTIMEM_ONE_SHOT, Algorithm.MULTIMEM_TWO_SHOT}
    elsewhere |= {Algorithm.MATMUL_TWO_SHOT} if count == 2 else set()
    elsewhere |= {Algorithm.TWO_SHOT_TMA} if capability < (9, 0) else set()
    elsewhere |= {one for one in Algorithm if one.row.folder == "matmul"} if capability != (9, 0) else set()

    results = {algorithm: tell(algorithm) for algorithm in self_test.algorithms()}

    assert [said for said in results.values() if said.status == PROBLEM] == []
    assert {algorithm for algorithm, said in results.items() if said.status == NOTE} == elsewhere


@pytest.mark.gpu
def test_kernels_that_run_in_anothers_place_are_told(monkeypatch):
    allreduce, count = graphar.allreduce, min(torch.cuda.device_count(), 8)

    def by_one_shot(xs, algorithm, **options):
        return allreduce(xs, algorithm="one_shot", **options)

    monkeypatch.setattr(graphar, "allreduce", by_one_shot)

    said = tell(PUSH)

    calls = "/".join(["3"] * count)
    told = f"calls ran by one_shot {calls}, not by two_shot_push {calls}, on {count} GPUs"
    assert (said.status, said.found) == (PROBLEM, told)
