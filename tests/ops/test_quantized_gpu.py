"""All-reduce with a codec on real GPUs: every kernel, format and size gives the specification's bits on every rank."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import graphar
from graphar import Codec
from graphar.numerics.codec_reference import Noise, encode, error_of_wire
from graphar.numerics.codecs import FP8, NAMES, codec
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.call import Call
from graphar.plan.select import by_policy
from graphar.plan.slices import Slice
from graphar.plan.work import Sum
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, launches_of, poison
from tests.processes import run_ranks
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

PUSH, PIPELINED = ALGORITHMS = tuple(one.value for one in with_kernels("allreduce", codec=True))
SMALL = (1, 7, 1024, 1025, 8199, 131072, 262149)
STOCHASTIC = Codec(4, 128, "stochastic", seed=0xFEDCBA9876543210)
MINMAX = Codec(8, 64, scheme="minmax")
CODECS = (
    *(codec(name) for name in NAMES),
    STOCHASTIC,
    Codec(FP8, 1024, "stochastic", scale_dtype=torch.float16, seed=1),
    MINMAX,
    Codec(2, 512, "stochastic", "minmax", torch.float32, seed=2),
)

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)


def reduce(ranks: Ranks, parts, one, algorithm, **more):
    xs = ranks.place(parts)
    poison([x.nbytes for x in xs])
    ys = ranks.communicator.allreduce(xs, codec=one, algorithm=algorithm, **more)
    ranks.communicator.synchronize()
    return ys


def check(ranks: Ranks, parts, one: Codec, algorithm: str) -> None:
    call = ranks.calls_of(algorithm)
    ys = reduce(ranks, parts, one, algorithm)
    expected = graphar.reference.quantized_allreduce(parts, one, one.seed or 0, call)
    assert [same_bits(y.cpu(), expected) for y in ys] == [0] * ranks.world_size, f"{one.text}, {len(expected)} elements"
    assert ranks.calls_of(algorithm) == call + 1


def parts_of(ranks: Ranks, fill, numel, dtype=torch.bfloat16):
    return [fill(rank, numel, dtype) for rank in range(ranks.world_size)]


def can_run(one: Codec, algorithm: str) -> bool:
    return algorithm == PIPELINED or one.spares_a_word


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@every_algorithm
@pytest.mark.parametrize("one", CODECS, ids=lambda one: one.type_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_gives_the_specification_bit_for_bit(ranks: Ranks, algorithm, one, dtype):
    if not can_run(one, algorithm):
        pytest.skip("minmax spares no word for 'not yet'")
    for numel in SMALL:
        check(ranks, parts_of(ranks, bit_patterns if numel < 10000 else normal, numel, dtype), one, algorithm)


@every_algorithm
def test_a_large_tensor_gives_the_specification(ranks: Ranks, algorithm):
    generators = [torch.Generator(f"cuda:{rank}").manual_seed(rank) for rank in range(ranks.world_size)]
    numel, window = 16777240, 1 << 20
    xs = [torch.randn(numel, dtype=torch.bfloat16, device=one.device, generator=one) for one in generators]
    ys = ranks.communicator.allreduce(xs, codec="int8", algorithm=algorithm)
    ranks.communicator.synchronize()
    for start in range(0, numel, window):
        pieces = [x[start : start + window].to("cuda:0") for x in xs]
        expected = graphar.reference.quantized_allreduce(pieces, codec("int8"))
        for rank, y in enumerate(ys):
            assert same_bits(y[start : start + window].to("cuda:0"), expected) == 0, f"rank {rank}, from {start}"


def test_what_the_push_has_no_room_for_is_pipelined(ranks: Ranks):
    xs = [torch.full((48 << 20,), 1.0 + rank, device=f"cuda:{rank}").bfloat16() for rank in range(ranks.world_size)]
    before = ranks.calls_of(PIPELINED)

    ys = ranks.communicator.allreduce(xs, codec="int4")

    ranks.communicator.synchronize()
    assert ranks.calls_of(PIPELINED) == before + 1
    for y in ys:
        assert bool((y == y[0]).all())
        assert abs(float(y[0]) - sum(range(1, ranks.world_size + 1))) < 0.5


@every_algorithm
def test_codecs_and_sizes_that_follow_one_another_do_not_mix(ranks: Ranks, algorithm):
    able = [one for one in CODECS if can_run(one, algorithm)]
    for turn in range(60):
        numel = (131072, 8, 5001, 1024, 262149, 1)[turn % 6]
        check(ranks, parts_of(ranks, normal, numel), able[turn % len(able)], algorithm)
    assert ranks.scratch_is_as_before(algorithm)


@every_algorithm
def test_misaligned_inputs_and_guarded_outputs(ranks: Ranks, algorithm):
    numel, guard = 8199, 64
    parts = parts_of(ranks, normal, numel + 1, torch.float16)
    around = ranks.place([torch.full((numel + 2 * guard + 1,), 7.0, dtype=torch.float16) for _ in parts])
    outs = [one[guard + 1 : guard + 1 + numel] for one in around]
    ranks.communicator.allreduce([x[1:] for x in ranks.place(parts)], out=outs, codec="int6", algorithm=algorithm)
    ranks.communicator.synchronize()
    expected = graphar.reference.quantized_allreduce([part[1:] for part in parts], codec("int6"))
    for one, out in zip(around, outs, strict=True):
        assert same_bits(out.cpu(), expected) == 0
        assert bool((one[: guard + 1] == 7).all())
        assert bool((one[guard + 1 + numel :] == 7).all())


@every_algorithm
def test_the_output_may_be_the_input(ranks: Ranks, algorithm):
    parts = parts_of(ranks, normal, 262149)
    xs = ranks.place(parts)
    ranks.communicator.allreduce(xs, out=xs, codec="int4", algorithm=algorithm)
    ranks.communicator.synchronize()
    expected = graphar.reference.quantized_allreduce(parts, codec("int4"))
    assert [same_bits(x.cpu(), expected) for x in xs] == [0] * ranks.world_size


def test_calls_in_a_row_without_a_wait(ranks: Ranks):
    parts = [[normal(100 * seed + r, 65536, torch.bfloat16) for r in range(ranks.world_size)] for seed in range(3)]
    xs = [ranks.place(one) for one in parts]
    results = [ranks.communicator.allreduce(xs[turn % 3], codec="fp8_e4m3") for turn in range(200)]
    ranks.communicator.synchronize()
    expected = [graphar.reference.quantized_allreduce(one, codec("fp8_e4m3")) for one in parts]
    assert sum(same_bits(y.cpu(), expected[turn % 3]) for turn, ys in enumerate(results) for y in ys) == 0


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@every_algorithm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [7, 1025, 262149])
def test_residuals_are_what_the_specification_leaves(ranks: Ranks, algorithm, dtype, numel):
    xs, residuals = ([normal(rank + at, numel, dtype) for rank in range(ranks.world_size)] for at in (0, 50))
    xs, residuals = ranks.place(xs), ranks.place(residuals)
    for _ in range(3):
        call = ranks.calls_of(algorithm)
        parts = [(residual + x).cpu() for x, residual in zip(xs, residuals, strict=True)]
        ys = ranks.communicator.allreduce(xs, codec=STOCHASTIC, residual=residuals, algorithm=algorithm)
        ranks.communicator.synchronize()

        wires = [encode(part, STOCHASTIC, Noise(STOCHASTIC.seed, call, rank)) for rank, part in enumerate(parts)]
        left = [error_of_wire(*pair, STOCHASTIC) for pair in zip(parts, wires, strict=True)]
        expected = graphar.reference.quantized_allreduce(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(y.cpu(), expected) for y in ys] == [0] * ranks.world_size
        assert [same_bits(mine.cpu(), x) for mine, x in zip(residuals, left, strict=True)] == [0] * ranks.world_size


# ---- graphs and epochs ----------------------------------------------------------------------------------------------


@pytest.mark.promise("Stochastic rounding is unbiased, repeatable with a seed, and new in each call and replay.")
@every_algorithm
def test_every_replay_rounds_in_other_directions(ranks: Ranks, algorithm):
    parts = parts_of(ranks, normal, 8199)
    xs = ranks.place(parts)
    outs = [torch.empty_like(x) for x in xs]
    ranks.communicator.allreduce(xs, out=outs, codec=STOCHASTIC, algorithm=algorithm)
    graph = ranks.capture(lambda: ranks.communicator.allreduce(xs, out=outs, codec=STOCHASTIC, algorithm=algorithm))
    first = ranks.calls_of(algorithm)
    for call in range(first, first + 4):
        graph.replay()
        ranks.communicator.synchronize()
        expected = graphar.reference.quantized_allreduce(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(out.cpu(), expected) for out in outs] == [0] * ranks.world_size


@every_algorithm
def test_a_graph_replays_after_every_reference_is_gone(fresh_ranks: Ranks, algorithm):
    ranks = fresh_ranks
    parts = parts_of(ranks, normal, 8199)
    xs = ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    ranks.communicator.prepare([torch.bfloat16], codecs=["int4"])
    graph = ranks.capture(lambda: ranks.communicator.allreduce(xs, out=outs, codec="int4", algorithm=algorithm))
    ranks.communicator.engine.plans.clear()
    gc.collect()
    for _ in range(500):
        graph.replay()
    ranks.communicator.synchronize()
    expected = graphar.reference.quantized_allreduce(parts, codec("int4"))
    assert [same_bits(out.cpu(), expected) for out in outs] == [0] * ranks.world_size


@every_algorithm
def test_epochs_wrap(fresh_ranks: Ranks, algorithm):
    check(fresh_ranks, parts_of(fresh_ranks, normal, 1025), STOCHASTIC, algorithm)
    fresh_ranks.set_epochs(algorithm, (1 << 32) - 4)
    for turn in range(8):
        call = ((1 << 32) - 4 + turn) % (1 << 32)
        parts = parts_of(fresh_ranks, normal, 1025 + turn)
        ys = reduce(fresh_ranks, parts, STOCHASTIC, algorithm)
        expected = graphar.reference.quantized_allreduce(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(y.cpu(), expected) for y in ys] == [0] * fresh_ranks.world_size


# ---- failures -------------------------------------------------------------------------------------------------------


@every_algorithm
def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks, algorithm):
    numel, world_size = 65536, fresh_ranks.world_size
    check(fresh_ranks, parts_of(fresh_ranks, normal, numel), codec("int4"), algorithm)
    engine = fresh_ranks.communicator.engine
    xs = [torch.ones(numel, dtype=torch.bfloat16, device=f"cuda:{rank}") for rank in range(world_size)]
    call = Call.of(Sum(numel, codec("int4").text), xs[0])
    config = by_policy(Algorithm(algorithm), call, engine.facts(call, xs[0]))
    launches = launches_of(engine, call, config, Slice(numel), 0.5)
    begin = time.monotonic()
    for launch, x in zip(launches[:-1], xs, strict=False):
        launch(x, torch.empty_like(x))
    with pytest.raises(graphar.CollectiveTimeout, match="waited past the deadline for rank") as raised:
        fresh_ranks.communicator.synchronize()
    assert time.monotonic() - begin < 5
    record = raised.value.record
    assert (record.algorithm, record.sequence, record.peer) == (algorithm, 1, world_size - 1)
    with pytest.raises(graphar.CollectiveTimeout):
        reduce(fresh_ranks, parts_of(fresh_ranks, normal, 8), codec("int4"), "auto")


# ---- one process a GPU ----------------------------------------------------------------------------------------------


def reduce_as_rank(rank, world_size):
    """How many elements of each call are wrong, by its description; and a result of random rounding without a seed."""
    wrong = {}
    for one in (codec("int4"), MINMAX):
        for numel in (1, 8199, 262149):
            parts = [normal(peer, numel, torch.bfloat16) for peer in range(world_size)]
            y = graphar.allreduce(parts[rank].cuda(), codec=one)
            wrong[one.text, numel] = same_bits(y.cpu(), graphar.reference.quantized_allreduce(parts, one))
    x = normal(rank, 65536, torch.bfloat16).cuda()
    y = graphar.allreduce(x, codec="int8")
    wrong["fallback"] = same_bits(graphar.allreduce(x, codec="int8", algorithm="fallback"), y)
    wrong["compiled"] = same_bits(torch.compile(lambda x: graphar.allreduce(x, codec="int8"), fullgraph=True)(x), y)
    return wrong, graphar.allreduce(x, codec=Codec(3, rounding="stochastic")).cpu()


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_processes_get_the_specification(world_size):
    results = run_ranks(reduce_as_rank, world_size, backend="cpu:gloo,cuda:nccl", timeout_s=180.0)

    for wrong, unseeded in results:
        assert not any(wrong.values()), wrong
        assert same_bits(unseeded, results[0][1]) == 0
