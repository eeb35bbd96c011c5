"""Sums with residual and RMSNorm on real GPUs: what the cases of tests.ops.gpu_cases do not ask of them."""

import itertools

import pytest
import torch

import graphar
from graphar import reference
from tests.cases import normal, same_bits
from tests.gpu import Ranks
from tests.ops.conformance import NORM, SCATTERED_NORM
from tests.ops.gpu_cases import BF16, NORMS, assert_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
# Decoding and prefill.
LAYERS = (
    (NORM, ((1, 2048), (8, 4096), (128, 7168), (32, 1024), (600, 8192), (4, 8192)) * 2),
    (SCATTERED_NORM, ((1, 2048), (8, 4096), (128, 7168), (33, 1024), (4600, 8192), (5, 8192))),
)


def test_weights_that_are_no_numbers_and_rows_of_zeros_in_fp8(ranks: Ranks):
    xs, residual = [torch.zeros(140, 4096) for _ in range(ranks.world_size)], torch.zeros(140, 4096)
    xs[0][::2] = 1.0
    for special in (torch.inf, -torch.inf, torch.nan, 1e38, 1e-38):
        weight = torch.ones(4096)
        weight[4000] = special
        given = [ranks.place(ones) for ones in (xs, [residual] * ranks.world_size, [weight] * ranks.world_size)]
        for scale in (None, torch.tensor(0.5)):
            scales = scale if scale is None else ranks.place([scale] * ranks.world_size)
            options = {"group": ranks.communicator, "scale": scales, "out_dtype": FP8}
            found = graphar.allreduce_residual_rmsnorm(*given, **options)
            ranks.communicator.synchronize()
            expected = reference.allreduce_residual_rmsnorm(xs, residual, weight, scale=scale, out_dtype=FP8)
            assert_bits(list(zip(*found, strict=True)), [expected] * ranks.world_size, (special, scale))


@pytest.mark.parametrize(
    ("case", "kernel"), [(case, kernel) for case in NORMS if len(case.kernels) > 1 for kernel in case.kernels], ids=str
)
def test_few_rows_go_in_one_hop_and_many_in_two(ranks: Ranks, case, kernel):
    before = {name: ranks.calls_of(name) for name in case.kernels}
    case.check(ranks, case.kernels[kernel])
    assert {name: ranks.calls_of(name) for name in case.kernels} == before | {kernel: before[kernel] + 1}


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_layers_replay_in_graphs_beside_eager_calls(rank, world_size, is_scattered):
    """Unsynchronised layers in a graph, with each output, and eager calls in between: wrong elements."""
    (forms, shapes), layers = LAYERS[is_scattered], []
    for at, shape in enumerate(shapes):
        form = forms[at % len(forms)]
        drawn = form.tensors(world_size, shape, BF16, lambda r, *more, at=at: normal(100 * at + r, *more))
        on_gpu = {name: [one.cuda() for one in ones] for name, ones in drawn.items()}
        layers.append((form, on_gpu, form.expected(on_gpu)[rank]))

    def run_all():
        return [form.of_rank(rank, tensors) for form, tensors, _ in layers]

    run_all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_all()
    for _ in range(20):
        graph.replay()
        eager = run_all()
    torch.cuda.synchronize()
    found = itertools.chain(zip(captured, layers, strict=True), zip(eager, layers, strict=True))
    found = [same_bits(*pair) for ones, (*_, wanted) in found for pair in zip(ones, wanted, strict=True)]
    assert set(found) == {0}
