"""Sums with a codec on real GPUs: every kernel, format, size and part gives the specification's bits on every rank."""

import random
from dataclasses import replace

import pytest
import torch

import graphar
from graphar import Codec, reference
from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.select import by_policy
from graphar.plan.slices import Slice, slices
from graphar.plan.work import Sum
from tests.cases import normal, same_bits
from tests.gpu import DTYPES, Ranks, launches_of, parts_of
from tests.ops.conformance import ALLREDUCE, REDUCESCATTER
from tests.ops.gpu_cases import CODECS, OF_INT4, QUANTIZED, STOCHASTIC, Case, assert_bits, coded, named
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

PUSH, PIPELINED = QUANTIZED
SCATTER = Algorithm.QUANTIZED_REDUCESCATTER.value
LARGE = {PUSH: 16777240, PIPELINED: 16777240, SCATTER: 67108864}
FED_BACK = {"label": "residual", "options": {"codec": STOCHASTIC}}
RESIDUALS = [
    *named(replace(ALLREDUCE[6], **FED_BACK), QUANTIZED),
    Case(replace(REDUCESCATTER[6], **FED_BACK), {SCATTER: (8199,)}, []),
]


def kernel_of(case: Case) -> str:
    (kernel,) = case.kernels
    return kernel


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", coded(codec("int8")), ids=str)
def test_a_large_tensor_gives_the_specification(ranks: Ranks, case):
    case.check(ranks, (LARGE[kernel_of(case)],), torch.bfloat16)


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
            one, at = CODECS[turn % len(CODECS)], ranks.calls_of(SCATTER)
            parts = parts_of(ranks, normal, sum(counts))
            ys = ranks.place([parts[0].new_full((count,), 7) for count in counts])
            ranks.run_parts("reducescatter", ranks.place(parts), ys, counts, codec=one.text)
            ranks.communicator.synchronize()
            expected = reference.quantized_reducescatter(parts, one, one.seed or 0, at, sizes=counts)
            assert_bits([(y,) for y in ys], [(y,) for y in expected], (one.text, counts))
            assert ranks.calls_of(SCATTER) == at + 1


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@pytest.mark.parametrize("case", RESIDUALS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [7, 1025, 262149])
def test_residuals_are_what_the_specification_leaves(ranks: Ranks, case, dtype, numel):
    tensors = case.place(ranks, case.draw(ranks, (numel,), dtype))
    for _ in range(3):
        expected = case.expected({name: [x.cpu() for x in xs] for name, xs in tensors.items()}, case.calls(ranks))
        found = case.call(ranks, tensors)
        ranks.communicator.synchronize()
        assert_bits(found, expected)


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OF_INT4, ids=str)
def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks, case):
    numel, kernel = 65536, Algorithm(kernel_of(case))
    case.check(fresh_ranks, (numel,), torch.bfloat16)
    drawn = case.draw(fresh_ranks, (numel,), torch.bfloat16)
    counts = [len(y) for (y,) in case.expected(drawn)]
    engine, xs, text = fresh_ranks.communicator.engine, fresh_ranks.place(drawn["x"]), codec("int4").text
    if kernel.op == "reducescatter":
        asked = fresh_ranks.call_of_parts("reducescatter", xs[0], counts, text)
        (only,) = slices(kernel, fresh_ranks.world_size, tuple(counts), 2)
    else:
        asked, only = Call.of(Sum(numel, text), xs[0]), Slice(numel)
    launches = launches_of(engine, asked, by_policy(kernel, asked, engine.facts(asked, xs[0])), only, 0.5)
    for launch, x, count in zip(launches[:-1], xs, counts, strict=False):
        launch(x, x.new_empty(count))
    assert fresh_ranks.assert_the_last_is_named(kernel).op == kernel.op
    with pytest.raises(graphar.CollectiveTimeout):
        case.call(fresh_ranks, {"x": xs})


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
