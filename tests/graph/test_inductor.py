"""Inductor runs graphar's pass, on the CPU and on GPUs."""

import contextlib
import copy
import shutil

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import integers, same_bits
from tests.parallel_models import HIDDEN, Gradients, backward, tokens, weights
from tests.processes import on_ranks, run_ranks

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)


def run_inductor(rank, world_size):
    """A model of extern kernels and collectives, so that no C++ is compiled. Only rank 0 uses the first sum."""
    from torch._inductor import config

    up, down = weights(torch.float32)

    def model(x):
        unused_elsewhere, y = x @ up, x @ up @ down
        dist.all_reduce(unused_elsewhere)
        dist.all_reduce(y)
        gathered = torch.empty(world_size * y.shape[0], y.shape[1])
        dist.all_gather_into_tensor(gathered, y)
        return (gathered, unused_elsewhere) if rank == 0 else (gathered,)

    def compare(count):
        x = tokens(count, torch.float32) + rank
        total = graphar.allreduce(x @ up @ down)
        return same_bits(torch.compile(model, fullgraph=True)(x)[0], total.repeat(world_size, 1))

    found = [run_norm(up, down)]
    with config.patch(compile_threads=1):
        for off in ((), (), ("allgather",)):
            torch._dynamo.reset()
            with graphar.enable(off=off) as compile_pass:
                found.append((compare(5), len(compile_pass.report.rewritten)))
    return found


def run_norm(up, down):
    """A layer that the pass reduces to matmuls and the fused norm."""
    weight = torch.linspace(-1, 2, HIDDEN)

    def model(x):
        y = x @ up @ down
        dist.all_reduce(y)
        return torch.nn.functional.rms_norm(x + y, (HIDDEN,), weight, 1e-5)

    x = tokens(5, torch.float32)
    with graphar.enable() as compile_pass:
        mine = torch.compile(model, fullgraph=True)(x)
    expected, _ = graphar.allreduce_residual_rmsnorm(x @ up @ down, x, weight, 1e-5)
    return same_bits(mine, expected), [entry.rewrite for entry in compile_pass.report.rewritten]


@needs_a_compiler
def test_inductor_runs_the_pass_and_its_cache_knows_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    for found in run_ranks(run_inductor, 2, timeout_s=180):
        # The second graph of the three alike comes from the cache.
        assert found == [(0, ["norm"]), (0, 3), (0, 0), (0, 2)]


@needs_a_compiler
@pytest.mark.parametrize("enabled", [False, True])
@on_ranks(2, timeout_s=150)
def test_inductor_keeps_the_order_of_a_models_own_calls_on_ranks_of_unequal_sizes(rank, world_size, enabled):
    """Two calls that need nothing of each other, of which the larger one is another one on each rank."""
    narrow, wide = torch.randn(2, 64), torch.randn(4000, 64)
    first, second = (narrow, wide) if rank == 0 else (wide, narrow)
    ends = [torch.randn(len(w), 2) for w in (first, second)]

    def model(a, b):
        # Matmuls alone, so that no C++ is compiled.
        before = graphar.fused_allgather_matmul(a, first)
        return before @ ends[0], graphar.fused_allgather_matmul(a @ b, second) @ ends[1]

    a, b = torch.randn(256, 64), torch.randn(64, 64) / 8
    with graphar.enable() if enabled else contextlib.nullcontext():
        found = torch.compile(model, fullgraph=True)(a, b)
    assert [torch.allclose(*pair, rtol=1e-3, atol=1e-2) for pair in zip(found, model(a, b), strict=True)] == [
        True,
        True,
    ]


@on_ranks(2)
def test_torch_compile_takes_its_modes_beside_the_pass(rank, world_size):
    with graphar.enable() as compile_pass:
        torch.compile(torch.relu, mode="reduce-overhead")  # copies Inductor's configuration
        assert copy.deepcopy(compile_pass) is compile_pass


def of_sum(parts, rank):
    def model(x):
        y = torch.relu(x) * 2
        dist.all_reduce(y)
        return (y + 1,)

    expected = graphar.reference.allreduce([torch.relu(part) * 2 for part in parts]) + 1
    return model, [parts[rank]], [expected]


def of_norm(parts, rank):
    columns, eps = parts[0].shape[1], 1e-5
    weight = torch.linspace(-1, 2, columns).to("cuda", torch.bfloat16)
    residual = integers(len(parts), parts[0].numel(), torch.bfloat16).view_as(parts[0]).cuda()

    def model(x, residual):
        y = x * 2
        dist.all_reduce(y)
        residual = residual + y
        return torch.nn.functional.rms_norm(residual, (columns,), weight, eps), residual

    expected = graphar.reference.allreduce_residual_rmsnorm([part * 2 for part in parts], residual, weight, eps)
    return model, [parts[rank], residual], expected


def of_epilogues(parts, rank):
    from torch.distributed import _functional_collectives as functional

    def model(x):
        y = x * 2
        dist.all_reduce(y)
        return torch.relu(y), functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) * 0.5

    whole = torch.relu(graphar.reference.allreduce([part * 2 for part in parts]))
    expected = whole, graphar.reference.allreduce(parts).chunk(len(parts))[rank] * 0.5
    return model, [parts[rank]], expected


REPLAYED = {  # by name: the model, its results and input, options, and the rewrites
    "a sum": (of_sum, 1, {}, ["allreduce"]),
    "a norm": (of_norm, 2, {}, ["norm"]),
    "operations behind both kinds of sums": (of_epilogues, 2, {"on": ["epilogue"]}, ["epilogue"] * 2),
}


def run_in_graphs(rank, world_size, name):
    """How many elements of the results are wrong in five calls, the last of which are replays; and the report."""
    make, _, options, _ = REPLAYED[name]
    parts = [integers(r, 64 * 512, torch.bfloat16).view(64, 512).cuda() for r in range(world_size)]
    model, inputs, expected = make(parts, rank)
    with graphar.enable(**options) as compile_pass, torch.no_grad():
        replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        found = [[one.clone() for one in replayed(*inputs)] for _ in range(5)]
    wrong = [same_bits(one, other) for results in found for one, other in zip(results, expected, strict=True)]
    return wrong, [entry.rewrite for entry in compile_pass.report.rewritten]


def run_plan_in_inductor(rank, world_size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cuda", (world_size,))
    model = parallelize_module(Gradients().cuda(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = tokens(5, torch.float32).cuda()
    with graphar.enable() as compile_pass:
        fast = backward(torch.compile(model, fullgraph=True), x)
    whole = backward(Gradients().cuda(), x)
    return [one.cpu() for one in fast], [one.cpu() for one in whole], len(compile_pass.report.rewritten)


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_a_model_replays_what_the_pass_writes_in_cuda_graphs(on_gpus, name):
    _, results, _, rewrites = REPLAYED[name]
    for wrong, rewritten in on_gpus(run_in_graphs, name):
        assert wrong == [0] * 5 * results
        assert rewritten == rewrites


@pytest.mark.gpu
def test_an_unmodified_plan_of_torch_runs_in_inductor_on_gpus(on_gpus):
    results = on_gpus(run_plan_in_inductor)
    for fast, whole, rewritten in results:
        assert rewritten == 2
        for mine, theirs, first in zip(fast, whole, results[0][0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            assert same_bits(mine, first) == 0
