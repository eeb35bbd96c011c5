"""Matmuls of few rows whose result is summed, in one kernel on GPUs: in one process and in one each."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import graphar
from graphar import CollectiveTimeout, reference
from graphar.plan.algorithms import MATMUL_TYPES
from graphar.plan.matmuls import fused_algorithm
from graphar.plan.tiles import SKINNY_TILES
from graphar.product import products
from graphar.product.gemm import matmul
from graphar.runtime.catalogue import SKINNY_KERNELS
from tests import inside
from tests.cases import same_bits
from tests.gpu import Ranks
from tests.processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

ROWS = (1, 3, 8, 16, 33, 64)
DEPTHS = (8, 64, 2048, 7168, 1, 67, 1032, 2050)  # of K
COLUMNS = (8, 64, 200, 8192)


def largest_in_one_hop(op: str) -> dict[int, int]:
    """Replaces the table's limit by one that admits every result, or none."""
    return dict.fromkeys(range(2, 9), 1 << 21 if op == "matmul_one_shot" else 0)


def choosing(op: str):
    """A choice of kernel by which few rows take ``op``."""

    def choose(table, work, world_size):
        policy = replace(table.matmul, one_shot_nbytes=largest_in_one_hop(op))
        return fused_algorithm(replace(table, matmul=policy), work, world_size)

    return choose


@pytest.fixture(autouse=True, params=[one.value for one in SKINNY_KERNELS])
def op(request, monkeypatch):
    """Has results of few rows take this kernel, whatever their size."""
    monkeypatch.setattr(products, "fused_algorithm", choosing(request.param))
    return request.param


def integers(shape, dtype, device, generator):
    """Integers from -4 to 4 without 0. fp32 holds the sums of their products."""
    x = torch.randint(-4, 4, shape, device=device, generator=generator)
    return torch.where(x < 0, x, x + 1).to(dtype)


def normal(shape, dtype, device, generator):
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


class Layer:
    """Operands and a result on every device. ``ks``: K, or a K for each rank."""

    def __init__(
        self, ranks: Ranks, fill, m, n, ks, dtype=torch.bfloat16, transposed=False, biased=False, seed=0
    ) -> None:
        self.ranks, self.a, self.w, self.out = ranks, [], [], []
        ks = [ks] * ranks.world_size if isinstance(ks, int) else ks
        for rank, k in enumerate(ks):
            device = f"cuda:{rank}"
            generator = torch.Generator(device).manual_seed(seed * 10 + rank)
            a, w = (fill((rows, k), dtype, device, generator) for rows in (m, n))
            self.a.append(a)
            self.w.append(w.t().contiguous().t() if transposed else w)
            self.out.append(torch.full((m, n), float("nan"), dtype=dtype, device=device))
        bias = fill((n,), dtype, "cuda:0", torch.Generator("cuda:0").manual_seed(seed)) if biased else None
        self.bias = None if bias is None else [bias.to(a.device) for a in self.a]

    def run(self, **options) -> None:
        communicator = self.ranks.communicator
        inside.fused_matmul_allreduce(
            self.a, self.w, bias=self.bias, out=self.out, partition="tiles", group=communicator, **options
        )

    def forget(self) -> None:
        for out in self.out:
            out.fill_(float("nan"))

    def on_first(self):
        return [x.to("cuda:0") for x in self.a], [x.to("cuda:0") for x in self.w]

    def specified(self) -> torch.Tensor:
        return reference.fused_matmul_allreduce(*self.on_first(), self.bias and self.bias[0])

    def check(self, expected: torch.Tensor, what: object = "") -> None:
        self.ranks.communicator.synchronize()
        for rank, out in enumerate(self.out):
            assert same_bits(out.to("cuda:0"), expected) == 0, f"rank {rank} {what}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", COLUMNS)
def test_integers_of_any_size_give_the_specification(ranks: Ranks, op, n, transposed):
    before, calls = ranks.calls_of(op), 0
    for at, (m, k) in enumerate(itertools.product(ROWS, DEPTHS)):
        layer = Layer(ranks, integers, m, n, k, MATMUL_TYPES[at % 2], transposed, biased=at % 3 == 0, seed=at)
        layer.run()
        calls += 1
        layer.check(layer.specified(), (m, n, k))
    assert ranks.calls_of(op) == before + calls
    assert ranks.grid_is_idle(op)
    assert ranks.scratch_is_as_before(op)


def test_results_wider_than_the_gpu_has_sms_for(ranks: Ranks, op):
    for m, n in ((1, 28672), (16, 28672), (64, 16384), (40, 16392)):
        layer = Layer(ranks, integers, m, n, 320, biased=True)
        before = ranks.calls_of(op)
        layer.run()
        layer.check(layer.specified(), (m, n))
        assert ranks.calls_of(op) == before + 1


@pytest.mark.parametrize("tile", SKINNY_TILES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_are_those_of_graphars_matmul_that_is_then_reduced(ranks: Ranks, tile, transposed):
    for k in (64, 2048, 7168):
        layer = Layer(ranks, normal, tile.rows, 8192, k, transposed=transposed)
        layer.run()
        expected = reference.allreduce([matmul(a, w).to("cuda:0") for a, w in zip(layer.a, layer.w, strict=True)])
        layer.check(expected, k)


def test_ranks_may_differ_in_k_and_in_where_their_operands_lie(ranks: Ranks, op):
    layer = Layer(ranks, integers, 16, 264, [136, *range(8, 8 * ranks.world_size, 8)], biased=True)
    layer.a[0], layer.w[0] = layer.a[0][:, 1:34], layer.w[0][:, 3:36]
    layer.a[-1], layer.w[-1] = layer.a[-1][:, :0], layer.w[-1][:, :0]
    layer.w[1] = layer.w[1].t().contiguous().t()
    before = ranks.calls_of(op)

    layer.run()

    layer.check(layer.specified())
    assert ranks.calls_of(op) == before + 1


def test_a_result_too_large_for_its_scratch_takes_the_other_kernel(ranks: Ranks, op):
    layer = Layer(ranks, integers, 64, 16448, 64)
    before = ranks.calls_of(op)

    layer.run()

    layer.check(layer.specified())
    assert ranks.calls_of(op) == before


@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_beside_out(ranks: Ranks, offset):
    for m, n in ((1, 8), (3, 200), (33, 1032)):
        layer = Layer(ranks, integers, m, n, 136)
        room = [torch.full((m * n + 128,), float("nan"), dtype=torch.bfloat16, device=a.device) for a in layer.a]
        layer.out = [one[64 + offset : 64 + offset + m * n].view(m, n) for one in room]

        layer.run()

        layer.check(layer.specified(), (m, n))
        layer.forget()
        assert all(one.isnan().all() for one in room)


def test_sizes_change_from_call_to_call_with_a_rank_late_now_and_then(ranks: Ranks):
    choices = random.Random(ranks.world_size)
    layers = [
        Layer(ranks, integers, m, n, k, transposed=seed % 2 == 1, seed=seed)
        for seed, (m, n, k) in enumerate([(1, 8192, 512), (64, 8192, 136), (8, 8, 8), (33, 2056, 72), (16, 20480, 64)])
    ]
    expected = [layer.specified() for layer in layers]
    for _ in range(40):
        drawn = random.Random(choices.random()).sample(range(len(layers)), len(layers))
        for at in drawn:
            layers[at].forget()
            ranks.be_late(choices, 0.2, 2_000_000)
            layers[at].run()
        for at in drawn:
            layers[at].check(expected[at])


def chained(layers: list[Layer], norm: list, constant_weight: bool) -> list[list[torch.Tensor]]:
    """The normed rows and residuals of layers that follow one another, by layer and rank."""
    how = {"partition": "tiles", "constant_weight": constant_weight, "group": layers[0].ranks.communicator}
    found = [layers[0].a, layers[0].a]
    for layer in layers:
        found += inside.fused_matmul_allreduce_residual_rmsnorm(found[-2], layer.w, found[-1], norm, **how)
    return found


@pytest.mark.parametrize("m", [1, 16])
def test_layers_whose_kernels_are_launched_early_behind_norms_replay_with_constant_weights(ranks: Ranks, m):
    layers = [Layer(ranks, normal, m, 8192, 8192, seed=seed) for seed in range(4)]
    norm = [torch.ones_like(a[0]) for a in layers[0].a]
    expected = chained(layers, norm, constant_weight=False)
    chained(layers, norm, constant_weight=True)
    found = []

    graph = ranks.capture(lambda: found.extend(chained(layers, norm, constant_weight=True)))

    for _ in range(20):
        graph.replay()
        ranks.communicator.synchronize()
        wrong = [same_bits(*pair) for pairs in zip(found, expected, strict=True) for pair in zip(*pairs, strict=True)]
        assert wrong == [0] * len(wrong)


def test_epochs_wrap(fresh_ranks, op):
    ranks, layer = fresh_ranks, Layer(fresh_ranks, integers, 16, 512, 128)
    expected = layer.specified()
    layer.run()
    layer.check(expected)
    ranks.set_epochs(op, 2**32 - 4)
    for turn in range(8):
        layer.forget()
        layer.run()
        layer.check(expected, turn)
    assert ranks.calls_of(op) == 4


def _integers_of(rank, shape, seed):
    generator = torch.Generator().manual_seed(seed + rank)
    return torch.randint(-4, 5, shape, generator=generator).to(torch.bfloat16)


def _layers_in_a_row(rank, world_size, op):
    """Wrong elements of eager calls, and of a graph's replays."""
    products.fused_algorithm = choosing(op)
    a, w = (
        [_integers_of(r, shape, seed) for r in range(world_size)] for shape, seed in (((16, 512), 0), ((2048, 512), 9))
    )
    expected = reference.fused_matmul_allreduce(a, w)
    mine, weight = a[rank].cuda(), w[rank].cuda()

    def call():
        return graphar.fused_matmul_allreduce(mine, weight, partition="tiles")

    found = []
    for turn in range(64):
        if turn % (3 * world_size) == rank:
            torch.cuda._sleep(1_000_000)
        found.append(call())
    graph, replayed = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = [call() for _ in range(3)]
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    return sum(same_bits(y.cpu(), expected) for y in (*found, *replayed))


def test_processes_get_the_specifications_bits(gpu_count, op):
    wrong = run_ranks(_layers_in_a_row, gpu_count, op, backend="cpu:gloo,cuda:nccl", timeout_s=180)

    assert wrong == [0] * gpu_count


def _one_rank_stays_away(rank, world_size, op):
    products.fused_algorithm = choosing(op)
    a, w = (torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda") for rows in (8, 2048))
    with graphar.Communicator() as communicator:
        for _ in range(3):
            graphar.fused_matmul_allreduce(a, w, partition="tiles", group=communicator)
        communicator.synchronize()
        if rank == 0:
            return None
        try:
            graphar.fused_matmul_allreduce(a, w, partition="tiles", group=communicator, timeout_s=1)
            communicator.synchronize()
        except CollectiveTimeout as error:
            assert (a @ w.t()).isfinite().all()
            return error.record.algorithm, error.record.peer
        return "nothing"


def test_a_rank_that_stays_away_is_named(gpu_count, op):
    found = run_ranks(_one_rank_stays_away, gpu_count, op, backend="cpu:gloo,cuda:nccl", timeout_s=180)

    assert found[1:] == [(op, 0)] * (gpu_count - 1)
