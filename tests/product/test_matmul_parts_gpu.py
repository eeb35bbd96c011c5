"""Matmuls that end in a sum over ranks, in one kernel, on GPUs: the bits of a matmul whose result is then reduced."""

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import graphar
from graphar.errors import UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.plan.algorithms import MATMUL_TYPES, Algorithm
from graphar.plan.call import Call as PlannedCall
from graphar.plan.call import Operands
from graphar.plan.tiles import MatmulTile, narrow, travels_in_tiles
from graphar.plan.work import Product
from graphar.product import fused
from graphar.product.fused import fused_launches
from graphar.product.gemm import matmul
from graphar.runtime import catalogue, launcher
from graphar.runtime.engine import Engine
from tests.cases import same_bits
from tests.gpu import Ranks


def summed_tiles(op: str, codec: Codec | None = None) -> tuple[MatmulTile, ...]:
    tiles = Algorithm(op).row.tiles
    return tiles if codec is None else narrow(tiles)


def run_fused(engine: Engine, op: str, counts: tuple[int, ...], ranks: list[Operands], codec="", **how) -> None:
    """One call of a fused kernel by its name. The inputs of ``ranks`` are a, w and perhaps a bias."""
    (a, w, *bias), _, *_ = ranks[0]
    work = Product(Algorithm(op).op, counts, len(w), bool(bias), codec)
    fused_launches(engine, PlannedCall.of(work, a), Algorithm(op), **how).run(ranks)


SUMMED_TILE_KERNELS = tuple(one.value for one in catalogue.SUMMED_TILE_KERNELS)
every_op = pytest.mark.parametrize("op", SUMMED_TILE_KERNELS)
every_tile = pytest.mark.parametrize(
    ("op", "tile"),
    [pytest.param(op, tile, id=f"{op}-{tile}") for op in SUMMED_TILE_KERNELS for tile in summed_tiles(op)],
)
CODECS = (Codec(8), Codec(4), Codec(3, 64, scale_dtype=torch.float32))

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


def parts_of(rows: int, world_size: int) -> tuple[int, ...]:
    return tuple(len(part) for part in torch.tensor_split(torch.empty(rows), world_size))


class Call:
    """Operands on every device, and what each rank must get."""

    def __init__(
        self,
        op: str,
        counts: tuple[int, ...],
        n: int,
        k: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        seed: int = 0,
        transposed: bool = False,
        biased: bool = False,
        ks: Sequence[int] | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.op, self.counts, self.bias, self.codec = op, counts, [None] * len(counts), codec
        scattered = op == "matmul_reducescatter"
        self.a, self.w, self.out, products = [], [], [], []
        for rank, count in enumerate(counts):
            device = f"cuda:{rank}"
            generator = torch.Generator(device).manual_seed(seed * 10 + rank)
            own_k = ks[rank] if ks else k
            a, w = (torch.randn(r, own_k, dtype=dtype, device=device, generator=generator) for r in (sum(counts), n))
            self.a.append(a)
            self.w.append(w.t().contiguous().t() if transposed else w)
            self.out.append(torch.full((count if scattered else sum(counts), n), torch.nan, dtype=dtype, device=device))
            products.append(matmul(a, w).to("cuda:0"))
        if biased:
            self.bias = [torch.arange(n, dtype=dtype, device=out.device) / 8 for out in self.out]
            products = [product.float() for product in products]
        if codec and scattered:
            total = torch.cat(graphar.reference.quantized_reducescatter(products, codec, sizes=counts))
        elif codec:
            total = graphar.reference.quantized_allreduce(products, codec)
        else:
            total = graphar.reference.allreduce(products)
        if biased:
            total = (total + self.bias[0].float()).to(dtype)
        self.expected = total.split(counts) if scattered else [total] * len(counts)

    def run(self, ranks: Ranks, tile=None) -> None:
        engine, codec = ranks.communicator.engine, self.codec.text if self.codec else ""
        assert engine.find_runner(torch.device("cuda:0"))
        operands = [
            Operands((a, w) if bias is None else (a, w, bias), (out,))
            for a, w, bias, out in zip(self.a, self.w, self.bias, self.out, strict=True)
        ]
        run_fused(engine, self.op, self.counts, operands, codec, tile=tile)

    def forget(self) -> None:
        for out in self.out:
            out.fill_(float("nan"))

    def check(self, ranks: Ranks, what: object = "") -> None:
        ranks.communicator.synchronize()
        for rank, (out, expected) in enumerate(zip(self.out, self.expected, strict=True)):
            assert same_bits(out.to("cuda:0"), expected) == 0, f"rank {rank} {what}"


@every_tile
def test_the_bits_are_those_of_a_matmul_that_is_then_reduced(ranks, op, tile):
    sizes = [(ranks.world_size * 128, 256, 64), (1, 8, 8), (129, 136, 72), (700, 904, 200), (2051, 2056, 1032)]
    for (m, n, k), dtype, transposed, biased in itertools.product(sizes, MATMUL_TYPES, (False, True), (False, True)):
        call = Call(op, parts_of(m, ranks.world_size), n, k, dtype, transposed=transposed, biased=biased)
        call.run(ranks, tile)
        call.check(ranks, (m, n, k, dtype, transposed, biased))


@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@pytest.mark.parametrize(
    ("op", "tile"),
    [pytest.param(op, tile, id=f"{op}-{tile}") for op in SUMMED_TILE_KERNELS for tile in summed_tiles(op, CODECS[0])],
)
def test_with_a_codec_they_are_those_of_the_collective_with_it(ranks, op, tile):
    sizes = [(ranks.world_size * 128, 256, 64), (1, 64, 8), (129, 192, 72), (700, 960, 200), (2051, 2112, 1032)]
    for (m, n, k), dtype, codec, biased in itertools.product(sizes, MATMUL_TYPES, CODECS, (False, True)):
        call = Call(op, parts_of(m, ranks.world_size), n, k, dtype, biased=biased, codec=codec)
        call.run(ranks, tile)
        call.check(ranks, (m, n, k, dtype, codec, biased))


@pytest.mark.parametrize("found", [float("nan"), float("inf"), -float("inf")])
@every_op
def test_what_is_not_finite_spoils_its_bucket_and_no_other(ranks, op, found):
    call = Call(op, parts_of(512, ranks.world_size), 512, 64, codec=CODECS[0])
    call.a[1][70, 3] = found
    call.w[1].fill_(0)
    call.w[1][33, 3] = 1
    products = [matmul(a, w).to("cuda:0") for a, w in zip(call.a, call.w, strict=True)]
    specified = {
        "matmul_reducescatter": graphar.reference.quantized_reducescatter(products, call.codec, sizes=call.counts),
        "matmul_allreduce": [graphar.reference.quantized_allreduce(products, call.codec)] * ranks.world_size,
    }
    call.expected = specified[op]
    call.run(ranks)
    call.check(ranks)
    assert any(expected.isnan().any() for expected in call.expected)


@every_op
def test_the_tile_that_is_chosen_and_several_launches_a_call(ranks, op):
    for m in (256, 1024, 4096, 10000):
        call = Call(op, parts_of(m, ranks.world_size), 8192, 256)
        call.run(ranks)
        call.check(ranks, m)


@every_op
def test_ranks_whose_devices_have_unlike_numbers_of_sms_have_equal_grids(fresh_ranks, op, monkeypatch):
    monkeypatch.setattr(launcher, "sm_count", lambda device: 100 - 23 * device)
    for m in (256, 4096):
        call = Call(op, parts_of(m, fresh_ranks.world_size), 8192, 256)
        call.run(fresh_ranks)
        call.check(fresh_ranks, m)
    assert fresh_ranks.communicator.engine.runner.chip.sms == 100 - 23 * (fresh_ranks.world_size - 1)


def test_ranks_with_small_and_large_k_take_tiles_of_their_own(ranks):
    ks = [(512, 4160)[rank % 2] for rank in range(ranks.world_size)]
    call = Call("matmul_allreduce", parts_of(1100, ranks.world_size), 8192, 0, ks=ks)
    call.run(ranks)
    call.check(ranks)


def test_kernels_sizes_tiles_and_parts_change_from_call_to_call(ranks):
    choices, calls = random.Random(ranks.world_size), []
    for seed in range(16):
        counts = tuple(choices.choice([0, 1, 64, choices.randint(1, 1500)]) for _ in range(ranks.world_size))
        counts = (*counts[:-1], counts[-1] or 70)
        op, codec, n = (
            choices.choice(SUMMED_TILE_KERNELS),
            choices.choice([None, *CODECS]),
            8 * choices.randint(1, 300),
        )
        if codec and not travels_in_tiles(codec, n):
            n = -(-n // 64) * 64
        calls.append(Call(op, counts, n, 8 * choices.randint(1, 60), seed=seed, codec=codec))
    for turn in range(6):
        drawn = [(call, choices.choice(summed_tiles(call.op, call.codec))) for call in calls]
        for call, tile in drawn:
            call.forget()
            for rank in range(ranks.world_size):
                if choices.random() < 0.3:
                    with torch.cuda.device(rank):
                        torch.cuda._sleep(choices.randint(1, 2_000_000))
            call.run(ranks, tile)
        for call, tile in drawn:
            call.check(ranks, (turn, tile))


@every_op
def test_a_graph_replays_also_between_other_calls(ranks, op):
    captured = Call(op, parts_of(1000, ranks.world_size), 1024, 512)
    other = Call(op, parts_of(300, ranks.world_size), 2048, 128, seed=1)
    for call in (captured, other):
        call.run(ranks)
    graph = ranks.capture(lambda: [captured.run(ranks) for _ in range(3)])
    for turn in range(100):
        captured.forget()
        graph.replay()
        if turn % 10 == 0:
            ranks.communicator.synchronize()  # the other devices' streams know nothing of the graph
            other.forget()
            other.run(ranks)
            other.check(ranks, turn)
        captured.check(ranks, turn)


@every_op
def test_epochs_wrap(fresh_ranks, op):
    ranks, call = fresh_ranks, Call(op, parts_of(500, fresh_ranks.world_size), 512, 128)
    call.run(ranks)
    call.check(ranks)
    ranks.set_epochs(op, 2**32 - 3)
    for turn in range(8):
        call.forget()
        call.run(ranks)
        call.check(ranks, turn)
    assert ranks.calls_of(op) == 5
    assert ranks.grid_is_idle(op)


def test_what_the_kernel_cannot_serve_is_refused(ranks, monkeypatch):
    monkeypatch.setattr(fused, "aligned_copy", lambda x: x)  # or it would be copied
    call = Call("matmul_reducescatter", parts_of(80, ranks.world_size), 520, 64)
    call.a[0] = call.a[0][:, 1:33]

    with pytest.raises(UnsupportedError, match="rows of a"):
        call.run(ranks)
