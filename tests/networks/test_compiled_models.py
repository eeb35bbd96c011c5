"""Unmodified models compiled with graphar's pass give the bits of eager graphar, in one process per rank."""

import functools

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import same_bits
from tests.parallel_models import MLP, TOKENS, Gradients, SequenceParallelMLP, backward, compiled, tokens, unsharded_mlp
from tests.processes import run_ranks


def run_mlp(rank, world_size):
    compile_pass = graphar.compile_pass()
    fast = compiled(MLP(rank, world_size), compile_pass)
    eager = MLP(rank, world_size, all_reduce=lambda y: graphar.allreduce(y, out=y))
    with torch.no_grad():
        results = [(fast(tokens(count)), eager(tokens(count))) for count in TOKENS]
    return results, [entry.rewrite for entry in compile_pass.report.rewritten], compile_pass.report.graphs


def run_sequence_parallel(rank, world_size):
    compile_pass = graphar.compile_pass()
    fast = compiled(SequenceParallelMLP(rank, world_size), compile_pass)
    eager = SequenceParallelMLP(rank, world_size, graphar.allgather, graphar.reducescatter)
    with torch.no_grad():
        parts = [tokens(world_size * count).chunk(world_size)[rank] for count in TOKENS]
        results = [(fast(part), eager(part)) for part in parts]
    return results, [entry.rewrite for entry in compile_pass.report.rewritten], compile_pass.report.graphs


def run_with_max(rank, world_size):
    compile_pass = graphar.compile_pass()

    def model(x):
        largest, total = x.amax(), x * 2
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return total / largest

    x = tokens(5).float() + rank
    total = graphar.allreduce(x * 2)
    expected = total / (tokens(5).float() + world_size - 1).amax()
    return compiled(model, compile_pass)(x), expected, str(compile_pass.report)


def run_plan(rank, world_size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    compile_pass = graphar.compile_pass()
    model = parallelize_module(Gradients(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = tokens(5, torch.float32)
    fast = backward(compiled(model, compile_pass), x)
    return fast, backward(Gradients(), x), [entry.rewrite for entry in compile_pass.report.rewritten]


class Exported(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def run_exported(rank, world_size):
    tokens_vary = ({0: torch.export.Dim("tokens")},)
    with torch.no_grad():
        program = torch.export.export(Exported(MLP(rank, world_size)), (tokens(5),), dynamic_shapes=tokens_vary)
        graphar.compile_pass()(program.graph)
        eager = MLP(rank, world_size, all_reduce=lambda y: graphar.allreduce(y, out=y))
        results = [(program.module()(tokens(count)), eager(tokens(count))) for count in TOKENS]
    return results, [str(node.target) for node in program.graph.nodes]


def run_all(rank, world_size):
    found = {"mlp": run_mlp(rank, world_size), "sequence": run_sequence_parallel(rank, world_size)}
    if world_size == 2:
        found |= {"max": run_with_max(rank, world_size), "plan": run_plan(rank, world_size)}
        found |= {"exported": run_exported(rank, world_size)}
    return found


@functools.cache
def results_of(world_size):
    """What every rank returned for each model."""
    return run_ranks(run_all, world_size, timeout_s=180)


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n}ranks")
def ranks(request):
    return results_of(request.param)


@pytest.fixture
def two_ranks():
    return results_of(2)


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
@pytest.mark.parametrize("scenario", ["mlp", "sequence"])
def test_a_compiled_model_has_the_bits_of_eager_graphar(ranks, scenario):
    for results, *_ in (rank[scenario] for rank in ranks):
        assert [same_bits(fast, eager) for fast, eager in results] == [0] * len(TOKENS)


def test_every_rank_has_the_same_bits(ranks):
    first, *others = [[fast for fast, _ in rank["mlp"][0]] for rank in ranks]
    for other in others:
        assert [same_bits(mine, theirs) for mine, theirs in zip(first, other, strict=True)] == [0] * len(TOKENS)


def test_a_sharded_model_is_close_to_the_whole_one(ranks):
    for (fast, _), count in zip(ranks[0]["mlp"][0], TOKENS, strict=True):
        torch.testing.assert_close(fast.float() / 2, unsharded_mlp(tokens(count)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("scenario", "rewrites"), [("mlp", ["allreduce"]), ("sequence", ["reducescatter", "allgather"])]
)
def test_a_varying_token_count_compiles_once_more_and_no_further(ranks, scenario, rewrites):
    fused = ["matmul"] if scenario == "sequence" else []  # the table has tiles between 2 ranks, and chunks between 4
    for _, rewritten, graphs in (rank[scenario] for rank in ranks):
        assert graphs <= 2
        assert rewritten == (rewrites + fused) * graphs


def test_a_model_that_also_takes_a_maximum_keeps_that(two_ranks):
    for fast, expected, report in (rank["max"] for rank in two_ranks):
        assert same_bits(fast, expected) == 0
        assert "1 graph: 1 collective became graphar's, 1 stayed torch's, 0 fusions refused" in report
        assert "left: graphar has sums, not max" in report


def test_an_unmodified_plan_of_torch_is_rewritten_forward_and_backward(two_ranks):
    for fast, whole, rewritten in (rank["plan"] for rank in two_ranks):
        assert rewritten == ["allreduce", "allreduce"]
        for mine, theirs, first in zip(fast, whole, two_ranks[0]["plan"][0], strict=True):
            torch.testing.assert_close(mine, theirs)
            assert same_bits(mine, first) == 0


def test_the_pass_takes_the_graph_of_an_exported_program(two_ranks):
    for results, targets in (rank["exported"] for rank in two_ranks):
        assert [same_bits(mine, eager) for mine, eager in results] == [0] * len(TOKENS)
        assert "graphar.allreduce.default" in targets
        assert not any("c10d" in target for target in targets)
