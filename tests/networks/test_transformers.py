"""An unmodified Llama of transformers, sharded by a plan of torch's, gets graphar's ops under torch.compile."""

import copy
import functools
import importlib

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

import graphar
from tests.cases import same_bits
from tests.parallel_models import backend, compiled
from tests.processes import import_first, run_on_gpus, run_ranks

import_first("transformers.models.llama.modeling_llama")

LAYERS, TOKENS = 1, (6, 9, 11)


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Not at the top: every process that collects tests would import transformers."""
    pytest.importorskip("transformers", reason="transformers cannot be imported")


def llama(hidden=32, layers=LAYERS, vocabulary=100):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1, use_cache=False)).eval()


def parallel(model, device="cpu"):
    """Shards linear layers, embedding and head in place, by torch's parallel styles."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
    layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
    plan = {f"model.layers.*.{name}": style for name, style in layer.items()}
    plan |= {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan |= {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, dist.device_mesh.init_device_mesh(device, (dist.get_world_size(),)), plan)


def words(count, device="cpu"):
    return (torch.arange(2 * count).view(2, count) * 7 % 100).to(device)


def expected_rewrites():
    """Two fused norms for each layer, a sum after the embedding, and gathered logits."""
    return [*["norm"] * 2 * LAYERS, "allreduce", "allgather"]


def compiled_twice(model, compile_pass, logits):
    """A model that is traced once, and run with and without the pass. Each call appends both logits to ``logits``."""

    def run_both(graph_module, inputs):
        changed = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        compile_pass(changed.graph)
        changed.graph.lint()
        changed.recompile()

        def run(*arguments):
            (mine,), (torchs,) = (one(*arguments) for one in (changed, graph_module))
            logits.append((torchs, mine))
            return (mine,)

        return run

    decompositions = importlib.import_module("torch._inductor.decomposition").select_decomp_table()
    return torch.compile(
        model, fullgraph=True, backend=aot_autograd(fw_compiler=run_both, decompositions=decompositions)
    )


def run_pass(rank, world_size):
    """Logits without a code generator: by torch's sums, graphar's sums, fused norms, and the unsharded model."""
    sums_only, fused, sums = graphar.compile_pass(off=["norm", "matmul"]), graphar.compile_pass(), []
    summed = compiled_twice(parallel(llama()), sums_only, sums)
    normed, whole = compiled(parallel(llama()), fused), llama()
    with torch.no_grad():
        summed(words(TOKENS[0]))
        norms = [(normed(any_number(words(count))).logits, whole(words(count)).logits) for count in TOKENS]
    return *sums, norms, sums_only.report, fused.report


def any_number(ids):
    """The same ids, marked so that one graph serves any number of tokens."""
    torch._dynamo.mark_dynamic(ids, 1)
    return ids


@functools.cache
def results_of_pass():
    return run_ranks(run_pass, 2, timeout_s=180)


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
def test_with_graphars_sums_it_has_the_bits_of_torchs():
    for (torchs, graphars), *_ in results_of_pass():
        assert same_bits(graphars, torchs) == 0  # two ranks' values have one sum in fp32


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
def test_with_fused_norms_it_has_the_unsharded_models_logits_and_every_rank_the_same_bits():
    (_, first, *_), (_, second, *_) = results_of_pass()

    for (mine, whole), (theirs, _) in zip(first, second, strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-4)
        assert same_bits(mine, theirs) == 0


def test_every_collective_is_rewritten_and_the_report_says_to_what():
    for _, _, sums_only, fused in results_of_pass():
        assert [entry.rewrite for entry in fused.rewritten] == expected_rewrites() * fused.graphs
        assert {entry.rewrite for entry in fused.refused} == {"matmul"}  # these are too small
        assert fused.graphs == 1  # for any number of tokens
        assert [entry.rewrite for entry in sums_only.rewritten] == ["allreduce"] * 3 + ["allgather"]
        assert {entry.why_left for entry in sums_only.refused} == {"turned off"}
        assert sums_only.left == fused.left == []


def run_invariant(rank, world_size):
    """Logits and gradients of a model that is trained, and the report. One rank has the model whole."""
    from graphar.nn import make_tp_invariant

    model = llama(vocabulary=128).bfloat16().train()
    if world_size == 1:
        styles = dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], "colwise")
        styles |= {"o_proj": "rowwise", "down_proj": "rowwise"}
        names = {name: name.split(".")[-1] for name, _ in model.named_modules()}
        make_tp_invariant(model, {name: styles[short] for name, short in names.items() if short in styles})
    else:
        parallel(model)
    compile_pass = graphar.compile_pass(tp_invariant=True)
    run = torch.compile(model, fullgraph=True, backend=backend(compile_pass), dynamic=False)
    logits = run(words(TOKENS[0])).logits
    logits.float().square().mean().backward()
    gradients = [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in model.parameters()]
    return [logits.detach(), *gradients], compile_pass.report


def test_a_plan_that_is_compiled_to_be_invariant_trains_with_the_bits_of_the_whole_model():
    ((expected, _),) = run_ranks(run_invariant, 1, timeout_s=180)

    for found, report in run_ranks(run_invariant, 2, timeout_s=180):
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)
        assert report.is_tp_invariant
        assert {one.module for one in report.breaks} == {"model.layers.0.self_attn"}


def run_in_graphs(rank, world_size):
    from torch._dynamo.utils import counters
    from torch._inductor import config

    with torch.no_grad(), config.patch(deterministic=True), graphar.enable() as compile_pass:
        model = parallel(llama(1024).bfloat16().cuda(), "cuda")
        replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        logits = [replayed(words(8, "cuda")).logits.clone().cpu() for _ in range(4)]
        others = [one(words(8, "cuda")).logits.cpu() for one in (model, llama(1024).bfloat16().cuda())]
    return logits, others, compile_pass.report, counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
def test_it_replays_in_cuda_graphs_with_graphars_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    results = run_on_gpus(run_in_graphs, 2, timeout_s=300)

    for logits, others, report, skips in results:
        assert [entry.rewrite for entry in report.rewritten] == expected_rewrites()
        assert skips == 0
        assert [same_bits(one, results[0][0][0]) for one in logits] == [0] * 4
        for torchs in others:  # sharded, and whole; bf16 rounds to 2^-9, a few times a layer
            assert (logits[0].float() - torchs.float()).norm() < 2**-5 * torchs.float().norm()
