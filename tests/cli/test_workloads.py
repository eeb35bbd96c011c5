"""The calls of trials: results are compared with the specification, and wrong ones are refused."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar.cli.workloads import Prepared
from graphar.plan.trials import Workload

WORKLOADS = (
    Workload("allreduce", 3, 64),
    Workload("allreduce", 3, 64, codec="int8"),
    Workload("reducescatter", 6, 64),
    Workload("allgather", 3, 64),
    Workload("reducescatter", 6, 64, dtype=torch.float32),
    Workload("allreduce_residual_rmsnorm", 3, 64),
    Workload("matmul_allreduce", 5, 64, 128),
    Workload("matmul_allreduce", 5, 64, 128, codec="int8", partition="split_m"),
    Workload("allgather_matmul", 5, 64, 128),
    Workload("prefetch", 3, 64, 128),
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

    rank = 1
    results[rank][0][-1] = 7
    with pytest.raises(graphar.GrapharError, match="rank 1 has a wrong result"):
        prepared.check(4, results)
    results[rank][0].fill_(torch.nan)
    with pytest.raises(graphar.GrapharError, match="rank 1 has a wrong result"):
        prepared.check(4, results)


def test_results_with_a_prefetch_differ_by_weight(cpus):
    prepared = Prepared(Workload("prefetch", 3, 64, 128), cpus)

    with pytest.raises(graphar.GrapharError, match="wrong result"):
        prepared.check(1, prepared.run(0))
