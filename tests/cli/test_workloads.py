"""The calls of trials: results are compared with the specification, and wrong ones are refused."""

import pytest
import torch

import graphar
from graphar.cli import specified, timing
from graphar.cli.specified import Prepared
from graphar.plan.tune import Workload

WORKLOADS = (
    Workload("allreduce", 3, 64),
    Workload("allreduce", 3, 64, codec="int8"),
    Workload("reducescatter", 6, 64),
    Workload("allgather", 3, 64),
    Workload("alltoall", 6, 64),
    Workload("reducescatter", 6, 64, dtype=torch.float32),
    Workload("allreduce_residual_rmsnorm", 3, 64),
    Workload("matmul_allreduce", 5, 64, 128),
    Workload("matmul_allreduce", 5, 64, 128, codec="int8", partition="split_m"),
    Workload("allgather_matmul", 5, 64, 128),
    Workload("matmul", 5, 64, 128),
)


@pytest.fixture(scope="module")
def cpus():
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        yield communicator


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_what_the_call_gives_is_right_and_anything_else_is_refused(cpus, workload):
    prepared = Prepared(workload, cpus)

    for at in range(5):
        results = prepared.run(at)
        prepared.check(at, results)

    whole = results[1][0]
    for part, number in ((whole[-1], 7), (whole, torch.nan)):
        part.fill_(number)
        with pytest.raises(graphar.GrapharError, match="rank 1 has a wrong result"):
            prepared.check(4, results)


@pytest.mark.parametrize(("n", "k", "count"), [(64, 128, 12), (2048, 4096, 12), (4096, 4096, 4), (2816, 4096, 6)])
def test_matmuls_use_as_many_weights_in_turn_as_do_not_fit_into_l2(cpus, monkeypatch, n, k, count):
    made = []

    def random(devices, shape, seed=0):
        made.append((shape, seed))
        return [torch.zeros(1, 1)] * len(devices)

    monkeypatch.setattr(specified, "random", random)
    _, expected = specified._matmul(Workload("matmul", 5, n, k), cpus.devices, cpus.engine)

    assert made == [((5, k), 0), *(((n, k), 1 + at) for at in range(count))]
    assert len(expected) == count
    assert timing.CALLS % count == 0


def test_a_matmul_goes_by_the_engines_table_and_its_results_differ_by_weight(cpus, monkeypatch):
    engines, choose = [], specified.choose
    monkeypatch.setattr(specified, "choose", lambda *given: engines.append(given[0]) or choose(*given))
    prepared = Prepared(Workload("matmul", 5, 64, 128), cpus)

    results = prepared.run(0)

    assert set(engines) == {cpus.engine}
    prepared.check(0, results)
    with pytest.raises(graphar.GrapharError, match="wrong result"):
        prepared.check(1, results)
