"""Sums with a codec on real GPUs: every kernel, format, size and part gives the specification's bits on every rank."""

from __future__ import annotations

import random
import time

import pytest
import torch

import graphar
from graphar import Codec, reference
from graphar.numerics.codec_reference import Noise
from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.call import Call
from graphar.plan.select import by_policy
from graphar.plan.slices import Slice, slices
from graphar.plan.work import Sum
from tests.cases import left_after_scatter, normal, same_bits
from tests.gpu import DTYPES, Ranks, launches_of, parts_of, poison
from tests.ops.gpu_cases import CODECS, STOCHASTIC
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

PUSH, PIPELINED = SUMS = tuple(one.value for one in with_kernels("allreduce", codec=True))
SCATTER = Algorithm.QUANTIZED_REDUCESCATTER.value
INT4 = codec("int4")

every_algorithm = pytest.mark.parametrize("algorithm", [*SUMS, SCATTER])


def even(ranks: Ranks, numel):
    return tuple(len(part) for part in torch.empty(numel).tensor_split(ranks.world_size))


def counts_of(ranks: Ranks, algorithm: str, numel: int):
    """How many elements each rank gets."""
    return even(ranks, numel) if algorithm == SCATTER else (numel,) * ranks.world_size


def call(ranks: Ranks, xs, one, algorithm: str, **more):
    if algorithm == SCATTER:
        return ranks.communicator.reducescatter(xs, codec=one, **more)
    return ranks.communicator.allreduce(xs, codec=one, algorithm=algorithm, **more)


def call_into(ranks: Ranks, xs, outs, one: Codec, algorithm: str) -> None:
    if algorithm == SCATTER:
        ranks.run_parts("reducescatter", xs, outs, [len(out) for out in outs], codec=one.text)
    else:
        ranks.communicator.allreduce(xs, out=outs, codec=one, algorithm=algorithm)


def specified(parts, one: Codec, algorithm: str, at: int = 0, counts=None) -> list[torch.Tensor]:
    """What each rank gets from call number ``at``."""
    if algorithm == SCATTER:
        return reference.quantized_reducescatter(parts, one, one.seed or 0, at, sizes=counts)
    return [reference.quantized_allreduce(parts, one, one.seed or 0, at)] * len(parts)


def assert_bits(ranks: Ranks, ys, expected, what: object = "") -> None:
    ranks.communicator.synchronize()
    wrong = [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)]
    assert wrong == [0] * ranks.world_size, f"{what}, {[len(part) for part in expected]} elements"


def check(ranks: Ranks, parts, one: Codec, algorithm: str, counts=None) -> None:
    """Checks one call. Parts of a reduce-scatter have the lengths ``counts``, or those of torch.tensor_split."""
    at, xs = ranks.calls_of(algorithm), ranks.place(parts)
    if counts is None:
        poison([count * parts[0].itemsize for count in counts_of(ranks, algorithm, len(parts[0]))])
        ys = call(ranks, xs, one, algorithm)
    else:
        ys = ranks.place([parts[0].new_full((count,), 7) for count in counts])
        call_into(ranks, xs, ys, one, algorithm)
    assert_bits(ranks, ys, specified(parts, one, algorithm, at, counts), one.text)
    assert ranks.calls_of(algorithm) == at + 1


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "numel"), [(PUSH, 16777240), (PIPELINED, 16777240), (SCATTER, 67108864)], ids=str
)
def test_a_large_tensor_gives_the_specification(ranks: Ranks, algorithm, numel):
    generators = [torch.Generator(f"cuda:{rank}").manual_seed(rank) for rank in range(ranks.world_size)]
    xs = [torch.randn(numel, dtype=torch.bfloat16, device=one.device, generator=one) for one in generators]
    ys, first, window = call(ranks, xs, codec("int8"), algorithm), 0, 1 << 20
    ranks.communicator.synchronize()
    for rank, y in enumerate(ys):
        for start in range(0, len(y), window):
            mine = y[start : start + window].to("cuda:0")
            pieces = [x[first + start :][: len(mine)].to("cuda:0") for x in xs]
            (*_, expected) = specified(pieces, codec("int8"), algorithm, 0, [0] * (len(xs) - 1) + [len(mine)])
            assert same_bits(mine, expected) == 0, f"rank {rank}, from {start}"
        first += len(y) if algorithm == SCATTER else 0


def test_what_the_push_has_no_room_for_is_pipelined(ranks: Ranks):
    xs = [torch.full((48 << 20,), 1.0 + rank, device=f"cuda:{rank}").bfloat16() for rank in range(ranks.world_size)]
    before = ranks.calls_of(PIPELINED)

    ys = ranks.communicator.allreduce(xs, codec="int4")

    ranks.communicator.synchronize()
    assert ranks.calls_of(PIPELINED) == before + 1
    for y in ys:
        assert bool((y == y[0]).all())
        assert abs(float(y[0]) - sum(range(1, ranks.world_size + 1))) < 0.5


def test_parts_of_any_lengths_one_after_another(ranks: Ranks):
    choices = random.Random(5)
    for turn in range(60):
        counts = tuple(
            choices.choice([0, 1, choices.randrange(3000), choices.randrange(300000)]) for _ in range(ranks.world_size)
        )
        if any(counts):
            check(ranks, parts_of(ranks, normal, sum(counts)), CODECS[turn % len(CODECS)], SCATTER, counts)


def test_an_empty_tensor_launches_nothing(ranks: Ranks):
    before = ranks.calls_of(SCATTER)
    ys = ranks.communicator.reducescatter(ranks.place([torch.ones(0, 4)] * ranks.world_size), codec="int4")
    assert [y.shape for y in ys] == [(0, 4)] * ranks.world_size
    assert ranks.calls_of(SCATTER) == before


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@every_algorithm
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [7, 1025, 262149])
def test_residuals_are_what_the_specification_leaves(ranks: Ranks, algorithm, dtype, numel):
    xs, residuals = (ranks.place([normal(r + at, numel, dtype) for r in range(ranks.world_size)]) for at in (0, 50))
    messages = even(ranks, numel) if algorithm == SCATTER else [numel]
    for _ in range(3):
        at = ranks.calls_of(algorithm)
        parts = [(residual + x).cpu() for x, residual in zip(xs, residuals, strict=True)]
        ys = call(ranks, xs, STOCHASTIC, algorithm, residual=residuals)

        assert_bits(ranks, ys, specified(parts, STOCHASTIC, algorithm, at))
        for rank, (residual, part) in enumerate(zip(residuals, parts, strict=True)):
            left = left_after_scatter(part, STOCHASTIC, Noise(STOCHASTIC.seed, at, rank), messages)
            assert same_bits(residual.cpu(), left) == 0, f"rank {rank}"


# ---- graphs and epochs ----------------------------------------------------------------------------------------------


# ---- failures -------------------------------------------------------------------------------------------------------


@every_algorithm
def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks, algorithm):
    numel, world_size = 65536, fresh_ranks.world_size
    parts, counts = parts_of(fresh_ranks, normal, numel), counts_of(fresh_ranks, algorithm, numel)
    check(fresh_ranks, parts, INT4, algorithm)
    engine, xs, kernel = fresh_ranks.communicator.engine, fresh_ranks.place(parts), Algorithm(algorithm)
    if algorithm == SCATTER:
        asked = fresh_ranks.call_of_parts("reducescatter", xs[0], counts, INT4.text)
        (only,) = slices(kernel, world_size, counts, 2)
    else:
        asked, only = Call.of(Sum(numel, INT4.text), xs[0]), Slice(numel)
    launches = launches_of(engine, asked, by_policy(kernel, asked, engine.facts(asked, xs[0])), only, 0.5)
    begin = time.monotonic()
    for launch, x, count in zip(launches[:-1], xs, counts, strict=False):
        launch(x, x.new_empty(count))
    with pytest.raises(graphar.CollectiveTimeout, match="waited past the deadline for rank") as raised:
        fresh_ranks.communicator.synchronize()
    assert time.monotonic() - begin < 5
    record = raised.value.record
    assert (record.op, record.algorithm, record.sequence, record.peer) == (kernel.op, kernel, 1, world_size - 1)
    with pytest.raises(graphar.CollectiveTimeout):
        call(fresh_ranks, fresh_ranks.place(parts), INT4, "auto" if algorithm in SUMS else SCATTER)


# ---- one process a GPU ----------------------------------------------------------------------------------------------


def sum_as_rank(rank, world_size):
    """How many elements of each call are wrong, by its description; and a result of random rounding without a seed."""
    wrong = {}
    x = normal(rank, 65536, torch.bfloat16).cuda()
    y = graphar.allreduce(x, codec="int8")
    wrong["fallback"] = same_bits(graphar.allreduce(x, codec="int8", algorithm="fallback"), y)
    for op in (graphar.allreduce, graphar.reducescatter):
        compiled = torch.compile(lambda x, op=op: op(x, codec="int8"), fullgraph=True)(x)
        wrong[f"{op.__name__}, compiled"] = same_bits(compiled, op(x, codec="int8"))
    return wrong, graphar.allreduce(x, codec=Codec(3, rounding="stochastic")).cpu()


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_compiled_calls_and_the_fallback_have_the_bits_of_an_eager_call(world_size):
    results = run_on_gpus(sum_as_rank, world_size)

    for wrong, unseeded in results:
        assert not any(wrong.values()), wrong
        assert same_bits(unseeded, results[0][1]) == 0
