"""Suspend and resume between processes with a GPU each: a captured decoder step replays with the same bits."""

import pytest
import torch
import torch.nn.functional as F

import graphar
from tests.cases import normal, same_bits
from tests.processes import on_ranks

pytestmark = pytest.mark.gpu(2)

TOKENS, HIDDEN, LAYERS, MB = 16, 4096, 4, 1 << 20


def decoder_step(rank, world_size):
    """A function of hidden states: layers of products that are divided over ranks, with their sums, norms and gate."""

    def weight(seed, rows, columns):
        return (normal(seed, rows * columns, torch.bfloat16).view(rows, columns) / columns**0.5).cuda()

    part, ones = HIDDEN // world_size, torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    layers = [
        [weight(100 * at + 10 * rank + one, *shape) for one, shape in enumerate(shapes(part))] for at in range(LAYERS)
    ]

    def step(x):
        residual, normed = x, x
        for up, down, gate, out in layers:
            inner = F.silu(normed @ up.t())
            normed, residual = graphar.fused_matmul_allreduce_residual_rmsnorm(inner, down, residual, ones)
            inner = F.silu(normed @ gate.t())
            normed, residual = graphar.allreduce_residual_rmsnorm(inner @ out.t(), residual, ones)
        return graphar.allreduce(normed)

    return step


def shapes(part):
    return (part, HIDDEN), (HIDDEN, part), (part, HIDDEN), (HIDDEN, part)


@pytest.mark.promise("A suspended communicator holds no GPU memory. Resumed, it has the same addresses; graphs replay.")
@on_ranks(2, backend="cuda:nccl,cpu:gloo", timeout_s=200)
def test_a_captured_decoder_step_replays_after_suspensions(rank, world_size):
    step = decoder_step(rank, world_size)
    x = normal(1, TOKENS * HIDDEN, torch.bfloat16).view(TOKENS, HIDDEN).cuda()
    graph = torch.cuda.CUDAGraph()
    step(x)
    step(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = step(x)
    graph.replay()
    torch.cuda.synchronize()
    expected, wrong, freed = result.cpu(), [], []
    for _ in range(5):
        before = torch.cuda.device_memory_used()
        graphar.suspend()
        freed.append((before - torch.cuda.device_memory_used()) / MB)
        torch.distributed.barrier()
        graphar.resume()
        result.fill_(7)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        wrong.append(same_bits(result.cpu(), expected))
        wrong.append(same_bits(step(x).cpu(), expected))
    held = graphar.runtime.registry.engine_of_group("").memory().total.reserved_nbytes / MB
    assert wrong == [0] * 10
    assert min(freed) >= 0.99 * held
