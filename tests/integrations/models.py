"""Models over the backend "graphar", as programs: each returns pairs of a result and what is expected."""

import contextlib
import copy
import functools
import importlib.util
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import graphar
from tests.integrations.entry_points import values
from tests.integrations.programs import make_model, mean_gradients
from tests.parallel_models import compiled

MICROBATCHES = 4


def device() -> torch.device:
    return torch.get_default_device()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in model.parameters()]


def gradient_accumulation(rank, n):
    model, x = DistributedDataParallel(make_model()), values(rank).view(1, 6) / 100
    with model.no_sync():
        model(x).square().mean().backward()
    model(x).square().mean().backward()
    return [(mine, 2 * mean) for mine, mean in zip(gradients(model), mean_gradients(n), strict=True)]


def tensor_parallel(rank, n):
    x = torch.arange(24.0).view(3, 8).sin()
    whole, mesh = perceptron(n), init_device_mesh(device().type, (n,))
    model = parallelize_module(perceptron(n), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y, expected = model(x), whole(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    whole_gradients = [one.full_tensor() for one in gradients(model)]
    return [(y, expected), *zip(whole_gradients, gradients(whole), strict=True)]


def perceptron(n: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4 * n), nn.ReLU(), nn.Linear(4 * n, 8))


def pipeline(rank, n):
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(n)))
    mine = copy.deepcopy(whole[rank])
    schedule = Schedule1F1B(PipelineStage(mine, rank, n, device()), MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x, target = torch.arange(48.0).view(8, 6) / 48, torch.ones(8, 6)
    y = schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == n - 1 else {}))
    expected = whole(x)
    nn.functional.mse_loss(expected, target).backward()
    found = list(zip(gradients(mine), gradients(whole[rank]), strict=True))
    return [*found, (y, expected)] if rank == n - 1 else found


@contextlib.contextmanager
def folder_of_all(rank):
    """A new folder, the same on every rank."""
    with tempfile.TemporaryDirectory() if rank == 0 else contextlib.nullcontext() as made:
        found = [made]
        dist.broadcast_object_list(found)
        yield found[0]
        dist.barrier()


def sharded_checkpoint(rank, n):
    saved, loaded = fully_shard(make_model()), fully_shard(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    with folder_of_all(rank) as folder:
        checkpoint.save({"model": get_model_state_dict(saved)}, checkpoint_id=folder)
        state = {"model": get_model_state_dict(loaded)}
        checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(loaded, state["model"])
    pairs = zip(loaded.parameters(), make_model().parameters(), strict=True)
    return [(one.full_tensor(), expected) for one, expected in pairs]


@functools.cache
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).eval()


def transformers_plan(rank, n):
    """Tensor parallelism by a model's own plan: logits, also compiled, and tokens with a dynamic and a static cache."""
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    with folder_of_all(rank) as folder:
        llama().save_pretrained(folder)  # by rank 0
        dist.barrier()
        plan = DistributedConfig(tp_plan="auto", tp_size=n)
        model = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    words = torch.arange(12).view(2, 6)
    with torch.no_grad():
        found = [(model(words).logits, llama()(words).logits)]
        compile_pass = graphar.compile_pass()
        found.append((compiled(model, compile_pass)(words).logits, llama()(words).logits))
        assert compile_pass.report.left == []
        for cache in ("dynamic", "static"):
            how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
            found.append((model.generate(words, **how), llama().generate(words, **how)))
    return found


MODELS = {
    "gradient accumulation": gradient_accumulation,
    "tensor parallelism": tensor_parallel,
    "pipeline": pipeline,
    "checkpoint of shards": sharded_checkpoint,
    "tp_plan of transformers": transformers_plan,
}
NEEDS = {"tp_plan of transformers": ("transformers", "accelerate")}


def missing(name: str) -> list[str]:
    """The packages that a program needs and that are not installed."""
    return [one for one in NEEDS.get(name, ()) if not importlib.util.find_spec(one)]
