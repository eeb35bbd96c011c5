"""two_shot_lossless on real GPUs, with data that pack well, badly and not at all."""

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.scratch import Sizes
from graphar.plan.slices import Slice
from graphar.plan.work import Sum
from tests.cases import bit_patterns, far_apart, in_turns, normal, same_bits
from tests.gpu import Ranks, launches_of

pytestmark = pytest.mark.gpu

NAME = "two_shot_lossless"
LARGE = 1 << 27  # elements; auto compresses them on H200s

every_fill = pytest.mark.parametrize(
    "fill", [normal, far_apart, bit_patterns, in_turns], ids=lambda fill: fill.__name__
)


@every_fill
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 262149, 2097152, 4194313])
def test_any_data_give_the_specification(ranks: Ranks, numel, fill):
    ranks.check(fill, numel, torch.bfloat16, NAME)


@pytest.mark.parametrize("numel", [16777216, 67108873])
def test_many_chunks_give_the_specification(ranks: Ranks, numel):
    ranks.check_on_gpu(numel, torch.bfloat16, NAME)


@every_fill
@pytest.mark.parametrize("blocks", [1, 7, Sizes.pipeline_blocks])
@pytest.mark.parametrize("chunk", [1, 3, Sizes.lossless_chunk])
def test_every_grid_and_chunk_gives_the_specification(ranks: Ranks, blocks, chunk, fill):
    ranks.check(fill, 8192, torch.bfloat16, NAME)  # makes the plan
    numel = 5 * min(blocks, 8) * ranks.world_size * chunk * 1024 + 5
    parts = [fill(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    call, config = Call.of(Sum(numel), xs[0]), Config(Algorithm(NAME), blocks, 512, chunk)
    launches = launches_of(ranks.communicator.engine, call, config, Slice(numel), 10)
    for launch, x, out in zip(launches, xs, outs, strict=True):
        launch(x, out)
    ranks.communicator.synchronize()
    ranks.check_result(outs, parts)


def test_other_dtypes_are_refused(ranks: Ranks):
    xs = ranks.place([torch.ones(8, dtype=torch.float16)] * ranks.world_size)

    with pytest.raises(graphar.UnsupportedError, match=r"it has no kernel for torch\.float16"):
        ranks.communicator.allreduce(xs, algorithm=NAME)


def large(ranks: Ranks, compressible: bool, seed: int = 0) -> list[torch.Tensor]:
    """A tensor for each rank: of normal values, or of random bits, in which no tile can be compressed."""
    made = []
    for rank in range(ranks.world_size):
        generator = torch.Generator(f"cuda:{rank}").manual_seed(10 * seed + rank)
        place = {"device": f"cuda:{rank}", "generator": generator}
        bits = torch.randint(-(1 << 15), 1 << 15, (LARGE,), dtype=torch.int16, **place)
        made.append(torch.randn(LARGE, dtype=torch.bfloat16, **place) if compressible else bits.view(torch.bfloat16))
    return made


def check_large(ranks: Ranks, ys: list[torch.Tensor], xs: list[torch.Tensor]) -> None:
    ranks.communicator.synchronize()
    for start in range(0, LARGE, 1 << 24):
        window = slice(start, start + (1 << 24))
        expected = graphar.reference.allreduce([x[window].to("cuda:0") for x in xs])
        for rank, y in enumerate(ys):
            assert same_bits(y[window].to("cuda:0"), expected) == 0, f"rank {rank}, from element {start}"


@pytest.fixture
def compresses(ranks: Ranks):
    xs = [torch.empty(LARGE, dtype=torch.bfloat16, device=f"cuda:{rank}") for rank in range(ranks.world_size)]
    if ranks.communicator.explain(xs).algorithm != NAME:
        pytest.skip("this machine's table has no size from which on auto compresses")


@pytest.mark.usefixtures("compresses")
def test_a_captured_graph_is_exact_whatever_its_data_become(ranks: Ranks):
    xs = large(ranks, compressible=True)
    outs = [torch.empty_like(x) for x in xs]
    ranks.communicator.allreduce(xs, out=outs)
    graph = ranks.capture(lambda: ranks.communicator.allreduce(xs, out=outs))
    calls = ranks.calls_of(NAME)

    for turn, compressible in enumerate((True, False, True, False, False, True)):
        for x, out, data in zip(xs, outs, large(ranks, compressible, turn), strict=True):
            x.copy_(data)
            out.fill_(torch.nan)
        ranks.communicator.synchronize()
        graph.replay()
        check_large(ranks, outs, xs)

    assert ranks.calls_of(NAME) == calls + 6


@pytest.mark.usefixtures("compresses")
def test_with_and_without_compression_the_bits_are_the_same(ranks: Ranks):
    with graphar.Communicator(devices=range(ranks.world_size), timeout_s=10, lossless=False) as plain:
        for compressible in (True, False):
            xs = large(ranks, compressible)
            said = plain.explain(xs)
            assert said.algorithm != NAME
            assert said.reason.endswith("; lossless compression is off")

            ys, zs = ranks.communicator.allreduce(xs), plain.allreduce(xs)

            plain.synchronize()
            check_large(ranks, ys, xs)
            assert [same_bits(y, z) for y, z in zip(ys, zs, strict=True)] == [0] * ranks.world_size


@pytest.mark.usefixtures("compresses")
def test_a_rank_with_random_bits_does_not_change_what_others_send(ranks: Ranks):
    """Each sender decides by itself."""
    packed, random = large(ranks, compressible=True), large(ranks, compressible=False)
    xs = [random[0], *packed[1:]]

    ys = ranks.communicator.allreduce(xs)

    check_large(ranks, ys, xs)
