"""Models as they are, compiled with graphar's pass, one process a rank: the bits of eager graphar, also in Inductor."""

from __future__ import annotations

import functools
import importlib.util
import shutil

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import integers, same_bits
from tests.ranks import run_ranks

TOKENS = (5, 7, 9, 12)
HIDDEN, INNER = 16, 64

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers cannot be imported"
)


def backend(compile_pass):
    """What Inductor does to a graph as far as the pass, and no further: takes milliseconds."""
    from torch._dynamo.backends.common import aot_autograd

    def run_pass(graph_module, inputs):
        compile_pass(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        return graph_module

    return aot_autograd(fw_compiler=run_pass)


def compiled(model, compile_pass):
    return torch.compile(model, fullgraph=True, backend=backend(compile_pass))


def tokens(count, dtype=torch.bfloat16):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).to(dtype)


def weights(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    up, down = torch.randn(HIDDEN, INNER, generator=generator) / 4, torch.randn(INNER, HIDDEN, generator=generator) / 8
    return up.to(dtype), down.to(dtype)


# ---- models, written for torch.distributed --------------------------------------------------------------------------


class MLP:
    """A tensor-parallel MLP as it is written for dist.all_reduce."""

    def __init__(self, rank, world_size, all_reduce=dist.all_reduce):
        up, down = weights()
        self.up, self.down = up.chunk(world_size, 1)[rank], down.chunk(world_size)[rank]
        self.all_reduce = all_reduce

    def __call__(self, x):
        y = torch.relu(x @ self.up) @ self.down
        self.all_reduce(y)
        return y * 2


class SequenceParallelMLP(MLP):
    """The same with its tokens divided between ranks outside, in functional collectives."""

    def __init__(self, rank, world_size, gather=None, scatter=None):
        super().__init__(rank, world_size)
        self.gather, self.scatter = gather or self._gather, scatter or self._scatter

    def __call__(self, x):
        return self.scatter(torch.relu(self.gather(x) @ self.up) @ self.down)

    @staticmethod
    def _gather(x):
        from torch.distributed import _functional_collectives as functional

        return functional.all_gather_tensor(x, 0, dist.group.WORLD)

    @staticmethod
    def _scatter(x):
        from torch.distributed import _functional_collectives as functional

        return functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)


def unsharded_mlp(x):
    up, down = weights()
    return (torch.relu(x @ up) @ down).float()


# ---- on every rank --------------------------------------------------------------------------------------------------


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


class Gradients(torch.nn.Module):
    def __init__(self):
        super().__init__()
        up, down = weights(torch.float32)
        self.up, self.down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN, bias=False)
        self.up.weight.data, self.down.weight.data = up.t().contiguous(), down.t().contiguous()
        torch.nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def backward(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


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


# ---- what is promised -----------------------------------------------------------------------------------------------


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
    for _, rewritten, graphs in (rank[scenario] for rank in ranks):
        assert graphs <= 2
        assert rewritten == rewrites * graphs


def test_a_model_that_also_takes_a_maximum_keeps_that(two_ranks):
    for fast, expected, report in (rank["max"] for rank in two_ranks):
        assert same_bits(fast, expected) == 0
        assert "1 graphs, 1 rewritten, 1 left" in report
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


# ---- transformers ---------------------------------------------------------------------------------------------------


def llama():
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False)).eval()


def parallel(model, mesh, rowwise):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": rowwise()}
    layer |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": rowwise()}
    return parallelize_module(model, mesh, {f"model.layers.*.{name}": style for name, style in layer.items()})


def run_llama(rank, world_size):
    from torch.distributed.tensor.parallel import RowwiseParallel

    import graphar.nn

    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    ids = [torch.arange(2 * count).view(2, count) * 7 % 100 for count in (6, 9, 11)]
    compile_pass = graphar.compile_pass()
    fast = compiled(parallel(llama(), mesh, RowwiseParallel), compile_pass)
    eager, whole = parallel(llama(), mesh, graphar.nn.RowwiseParallel), llama()
    with torch.no_grad():
        logits = [[model(one).logits for model in (fast, eager, whole)] for one in ids]
    return logits, compile_pass.report


@needs_transformers
def test_an_unmodified_llama_of_transformers_has_the_bits_of_eager_graphar():
    first, *others = run_ranks(run_llama, 2, timeout_s=300)

    for logits, report in (first, *others):
        assert (report.graphs, len(report.rewritten), report.left) == (2, 8, [])  # twice, 2 a layer
        for (fast, eager, whole), (theirs, *_) in zip(logits, first[0], strict=True):
            assert same_bits(fast, eager) == 0
            assert same_bits(fast, theirs) == 0
            torch.testing.assert_close(fast, whole)


# ---- Inductor -------------------------------------------------------------------------------------------------------


def run_inductor(rank, world_size, directory):
    """Extern kernels and collectives alone, for which no C++ is compiled; rank 0 alone uses the first sum."""
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

    found = []
    with config.patch(compile_threads=1):
        for off in ((), (), ("allgather",)):
            torch._dynamo.reset()
            with graphar.enable(off=off) as compile_pass:
                found.append((compare(5), len(compile_pass.report.rewritten)))
    return found


@needs_a_compiler
def test_inductor_runs_the_pass_and_its_cache_knows_the_options(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    for found in run_ranks(run_inductor, 2, str(tmp_path), timeout_s=180):
        assert found == [(0, 3), (0, 0), (0, 2)]  # the second graph comes from the cache


# ---- on GPUs --------------------------------------------------------------------------------------------------------


def run_in_graphs(rank, world_size):
    def model(x):
        y = torch.relu(x) * 2
        dist.all_reduce(y)
        return y + 1

    parts = [integers(r, 8192, torch.bfloat16).cuda() for r in range(world_size)]
    expected = graphar.reference.allreduce([torch.relu(part) * 2 for part in parts]) + 1
    with graphar.enable() as compile_pass:
        replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        wrong = [same_bits(replayed(parts[rank]).clone(), expected) for _ in range(5)]
    return wrong, str(compile_pass.report)


def run_plan_in_inductor(rank, world_size):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cuda", (world_size,))
    model = parallelize_module(Gradients().cuda(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = tokens(5, torch.float32).cuda()
    with graphar.enable() as compile_pass:
        fast = backward(torch.compile(model, fullgraph=True), x)
    whole = backward(Gradients().cuda(), x)
    return [one.cpu() for one in fast], [one.cpu() for one in whole], len(compile_pass.report.rewritten)


@pytest.fixture
def on_gpus(tmp_path, monkeypatch):
    """Runs a function on 2 GPUs, with a cache of its own: what comes from a cache is not in a report."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return lambda function: run_ranks(function, 2, backend="cpu:gloo,cuda:nccl", timeout_s=300)


@pytest.mark.gpu
def test_a_model_with_dist_all_reduce_replays_in_cuda_graphs(on_gpus):
    for wrong, report in on_gpus(run_in_graphs):
        assert wrong == [0] * 5
        assert "all_reduce(sum) of [8192] bfloat16 on cuda in group '0': graphar::allreduce" in report


@pytest.mark.gpu
def test_an_unmodified_plan_of_torch_runs_in_inductor_on_gpus(on_gpus):
    results = on_gpus(run_plan_in_inductor)
    for fast, whole, rewritten in results:
        assert rewritten == 2
        for mine, theirs, first in zip(fast, whole, results[0][0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            assert same_bits(mine, first) == 0
