"""Collectives in CUDA graphs, one process with a tensor a device: captured first, replayed, and refused."""

import gc

import pytest
import torch

import graphar
from tests.gpu import Ranks
from tests.ops.gpu_cases import (
    BF16,
    COPIED,
    FOLLOWED,
    GATHER,
    GATHERED,
    NORMS,
    NORMS_OF_TREES,
    OF_INT4,
    RANDOM,
    SCATTER,
    SUM,
    SUMMED,
    SUMMED_AND_NORMED,
    SUMMED_FOLLOWED,
    SUMS,
    TREE,
    TREES,
    assert_bits,
    settle,
)
from tests.ops.test_collectives_gpu import every

pytestmark = pytest.mark.gpu

EPILOGUES = (*FOLLOWED["v * scale + bias[col]"], *FOLLOWED["v + c[index] - row + b[col]"][-1:])
MATMULS = (*SUMMED, *SUMMED_FOLLOWED, *SUMMED_AND_NORMED, *GATHERED)
OF_ROWS = (*EPILOGUES, *NORMS, *NORMS_OF_TREES)


def empty_results(ranks: Ranks, expected) -> list[torch.Tensor]:
    return ranks.place([torch.full_like(y, 7) for (y,) in expected])


@pytest.mark.promise("Stochastic rounding is unbiased, repeatable with a seed, and new in each call and replay.")
@every(SUM, SCATTER, GATHER, *COPIED, *RANDOM, TREE, *TREES, *OF_ROWS, *MATMULS)
def test_what_is_prepared_is_captured_first_and_replayed_with_other_data(fresh_ranks: Ranks, case):
    ranks = fresh_ranks
    case.skip_unless_served(ranks)
    shapes = ((3, 2048), (640, 4096)) if case in OF_ROWS else ((640, 2048, 256),) if case in MATMULS else ((12345,),)
    for shape in (shape for shape in shapes if case.fits(ranks, shape, case.dtypes[0])):
        drawn, found = [case.draw(ranks, shape, seed=100 * turn) for turn in range(3)], []
        case.prepare(ranks, drawn[0])
        tensors = case.place(ranks, drawn[0])
        graph = ranks.capture(lambda tensors=tensors, found=found: found.append(case.call(ranks, tensors)))
        for new in drawn:
            for name, xs in tensors.items():
                for x, one in zip(xs, new[name], strict=True):
                    x.copy_(one)
            settle(ranks)
            at = case.calls(ranks)
            graph.replay()
            ranks.communicator.synchronize()
            assert_bits(found[-1], case.expected(new, at), shape)


@pytest.mark.promise("Graphs replay after everything that Python held is gone, and epochs may wrap.")
@every(*SUMS, SCATTER, GATHER, *COPIED, *OF_INT4)
def test_a_graph_replays_after_every_reference_is_gone(fresh_ranks: Ranks, case):
    ranks, drawn = fresh_ranks, case.draw(fresh_ranks, (8199,))
    expected, tensors = case.expected(drawn), case.place(ranks, drawn)
    outs = empty_results(ranks, expected)
    case.call_into(ranks, tensors, outs)
    graph = ranks.capture(lambda: [case.call_into(ranks, tensors, outs) for _ in range(3)])
    ranks.communicator.engine.plans.clear()
    del ranks.communicator
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=out.device) for out in outs]
    for _ in range(1000):
        graph.replay()
    settle(ranks)
    for out in outs:
        out.view(torch.uint8).fill_(7)
    settle(ranks)
    graph.replay()
    settle(ranks)
    assert_bits([(out,) for out in outs], expected)
    assert all(bool((one == 0x55).all()) for one in junk)


@every(SUM, SCATTER, GATHER, *COPIED)
def test_replays_mix_with_eager_calls_and_other_graphs(ranks: Ranks, case):
    made = []
    for seed, numel in enumerate((5, 8192, 1 << 20, 12 << 20)):  # the last is several launches of a reduce-scatter
        drawn = case.draw(ranks, (numel,), seed=100 * seed)
        expected, tensors = case.expected(drawn), case.place(ranks, drawn)
        expected = [tuple(y.cpu() for y in ys) for ys in expected]
        case.check(ranks, (numel,))
        outs = empty_results(ranks, expected)
        graph = ranks.capture(lambda tensors=tensors, outs=outs: case.call_into(ranks, tensors, outs))
        made.append((graph, outs, expected, tensors))
    for turn in range(50):
        for graph, outs, expected, tensors in made[: 4 if turn % 16 == 0 else 3]:
            for out in outs:
                out.view(torch.uint8).fill_(7)
            settle(ranks)
            graph.replay()
            settle(ranks)
            assert_bits([(out,) for out in outs], expected, turn)
            if turn % 3 == 0:
                assert_bits(case.call(ranks, tensors), expected, turn)


@pytest.mark.promise("Kernels are loaded before they are launched, and never during a capture.")
@pytest.mark.parametrize(
    ("case", "dtype"), [(SUM, torch.float16), (SCATTER, BF16), (GATHER, BF16), (EPILOGUES[0], BF16)], ids=str
)
def test_capturing_what_was_not_prepared_is_refused(fresh_ranks: Ranks, case, dtype):
    # Small all-gathers may be prepared: sums by copies have ranks meet in their kernel.
    drawn = case.draw(fresh_ranks, (1024, 1024) if case is GATHER else (64, 128), dtype)
    tensors, expected = case.place(fresh_ranks, drawn), case.expected(drawn)
    outs = empty_results(fresh_ranks, expected)
    fresh_ranks.communicator.prepare(dtypes=[BF16])
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(graphar.CommunicatorError, match="no plan yet")
    with refused, torch.cuda.device(0), torch.cuda.graph(graph):
        tensors["x"][0].add(1)  # torch warns of an empty graph
        case.call_into(fresh_ranks, tensors, outs)
    found = case.call(fresh_ranks, tensors)
    fresh_ranks.communicator.synchronize()
    assert_bits(found, expected)
