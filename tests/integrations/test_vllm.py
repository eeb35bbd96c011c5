"""The plugin in vLLM itself, on the CPU: a model on two ranks, and the communicator that vLLM has for CUDA."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from graphar import reference
from tests.integrations.vllm_model import LAYERS, PROMPTS, RANKS, TOKENS
from tests.pages import ROOT
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: nox -s vllm")

ON_THE_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
TOLD = "graphar serves the sums and gathers of group tp:0"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns what the model says with GRAPHAR_VLLM set to a text, compiled or not."""

    @functools.cache
    def run(asked: str, *options: str) -> dict:
        folder = str(tmp_path_factory.mktemp("model"))
        command = [sys.executable, "-m", "tests.integrations.vllm_model", folder, *options]
        environment = os.environ | ON_THE_CPU | OFFLINE | {"GRAPHAR_VLLM": asked}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(answers[-1]) | {"workers_told": done.stdout.count(TOLD)}

    return run


@pytest.mark.parametrize("options", [[], ["--compile"]], ids=["eager", "compiled"])
def test_tokens_and_their_probabilities_are_those_without_the_plugin(model, options):
    own, graphars = model("0", *options), model("1", *options)

    assert own["classes"] == ["vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator"] * RANKS
    assert own["calls"] == [{}] * RANKS
    assert (own["workers_told"], graphars["workers_told"]) == (0, RANKS)
    assert graphars["classes"] == ["graphar.integrations.vllm.DeviceCommunicator"] * RANKS
    assert graphars["tokens"] == own["tokens"]
    assert graphars["logprobs"] == [pytest.approx(of_prompt, abs=1e-4) for of_prompt in own["logprobs"]]
    assert [len(set(tokens)) > TOKENS // 2 for tokens in own["tokens"]] == [True] * len(PROMPTS)


def test_vllms_sleep_mode_suspends_graphars_communicator_and_resumes_it(model):
    """Before the tokens of the other tests were made."""
    assert model("1")["slept"] == [[True, False]] * RANKS
    assert model("0")["slept"] == [[False, False]] * RANKS


@pytest.mark.parametrize("options", [[], ["--compile"]], ids=["eager", "compiled"])
def test_every_sum_and_gather_of_the_model_is_graphars(model, options):
    calls = model("1", *options)["calls"]
    steps = calls[0]["allgather"]  # of the logits, once a step

    # Two sums a layer, behind the attention and behind the MLP, and one of the embedding.
    assert calls == [{"allgather": steps, "allreduce": steps * (2 * LAYERS + 1)}] * RANKS
    assert steps >= TOKENS


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(4 * 6).reshape(4, 6) * (rank + 1)).to(dtype)


def with_vllms_communicator_for_cuda(rank, world_size):
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from graphar.integrations.vllm import TensorParallel

    class DeviceCommunicator(TensorParallel, CudaCommunicator):
        pass

    group, device = dist.group.WORLD, torch.device("cpu")
    communicator = DeviceCommunicator(cpu_group=group, device=device, device_group=group, unique_name="tp:0")
    x, counts = of_rank(rank, torch.bfloat16), of_rank(rank, torch.int64)
    sums = [communicator.all_reduce(x), communicator.all_reduce(counts)]
    gathers = [communicator.all_gather(x, 1), communicator.all_gather(counts, 1)]
    parts = [communicator.reduce_scatter(x, dim) for dim in (0, 1)]
    used = communicator.graphar
    communicator.destroy()
    return sums, gathers, parts, used.closed, communicator.pynccl_comm


def test_the_class_for_cuda_serves_floats_and_leaves_integers_to_vllm():
    floats, counts = ([of_rank(rank, dtype) for rank in range(2)] for dtype in (torch.bfloat16, torch.int64))
    total = reference.allreduce(floats)

    for rank, found in enumerate(run_ranks(with_vllms_communicator_for_cuda, 2, timeout_s=240.0)):
        sums, gathers, parts, closed, vllms_own = found
        assert torch.equal(sums[0], total)
        assert torch.equal(sums[1], counts[0] + counts[1])
        assert torch.equal(gathers[0], torch.cat(floats, 1))
        assert torch.equal(gathers[1], torch.cat(counts, 1))
        assert torch.equal(parts[0], total.chunk(2, 0)[rank])
        assert torch.equal(parts[1], total.chunk(2, 1)[rank])
        assert (closed, vllms_own) == (True, None)  # destroyed as well
