"""fused_matmul_allreduce and fused_matmul_reducescatter on GPUs, one process each."""

import random

import pytest
import torch

import graphar
from graphar import UnsupportedError, reference
from tests.cases import same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

every_world_size = pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
WAYS = (
    ("none", None),
    ("split_m", None),
    ("split_n", None),
    ("split_m", 3),
    ("split_n", 5),
    ("tiles", None),
    ("auto", None),
)
SHAPES = ((64, 64, 64), (129, 136, 72), (1024, 2048, 256), (2050, 1032, 136))  # M, N, K
OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)


def integers(shape, seed):
    """The same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16).cuda()


class Layer:
    """This rank's operands, and the bits that every rank, or this one, has to get."""

    def __init__(self, rank, world_size, m, n, k, with_bias=False, seed=0):
        a = [integers((m, k), seed + 10 * r) for r in range(world_size)]
        w = [integers((n, k), seed + 10 * r + 1) for r in range(world_size)]
        self.bias = integers((n,), seed + 5) if with_bias else None
        self.a, self.w = a[rank].clone(), w[rank].clone()
        self.expected = {
            OPS[0]: reference.fused_matmul_allreduce(a, w, self.bias),
            OPS[1]: reference.fused_matmul_reducescatter(a, w, self.bias)[rank],
        }

    def __call__(self, op=OPS[0], **options):
        return op(self.a, self.w, bias=self.bias, **options)

    def wrong(self, y, op=OPS[0]):
        return same_bits(y, self.expected[op])


@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@every_world_size
@on_ranks(by=run_on_gpus)
def test_any_sequence_of_calls_with_late_ranks_is_right(rank, world_size):
    """Makes calls with random sleeps that differ by rank. All ranks make the same calls."""
    alike, mine = random.Random(1), random.Random(100 + rank)
    layers = [Layer(rank, world_size, *shape, seed=1000 * at) for at, shape in enumerate(SHAPES)]
    stream, kept = torch.cuda.Stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(150):
        layer, op, (way, count) = alike.choice(layers), alike.choice(OPS), alike.choice(WAYS)
        on_side = alike.random() < 0.3
        if mine.random() < 0.2:
            torch.cuda._sleep(mine.randrange(3_000_000))
        with torch.cuda.stream(stream if on_side else None):
            kept.append((layer, op, layer(op, partition=way, num_partitions=count)))
    torch.cuda.synchronize()
    assert [layer.wrong(y, op) for layer, op, y in kept] == [0] * 150


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@on_ranks(2, by=run_on_gpus)
def test_a_kernel_that_is_not_loaded_is_an_error_during_capture(rank, world_size):
    layer = Layer(rank, world_size, 256, 256, 64)
    graphar.allreduce(torch.ones(256, 256, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    message = ""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.ones(1, device="cuda")
        try:
            layer()
        except UnsupportedError as error:
            message = str(error)
    wrong = layer.wrong(layer())
    assert "is not loaded and cannot be during graph capture; make one such call before" in message
    assert wrong == 0
