"""Reduce-scatter with a codec on real GPUs: every format, size and part gives the specification's bits."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import graphar
from graphar import Codec, reference
from graphar.fsdp import ExactReduceScatter, QuantizedReduceScatter
from graphar.numerics.codec_reference import Noise
from graphar.numerics.codecs import FP8, NAMES, codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.select import by_policy
from graphar.plan.slices import slices
from tests.cases import bit_patterns, left_after_scatter, normal, same_bits
from tests.gpu import DTYPES, Ranks, launches_of, poison
from tests.processes import run_ranks
from tests.worlds import GPU_WORLD_SIZES, SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

KERNEL = Algorithm.QUANTIZED_REDUCESCATTER
INT4 = codec("int4")
STOCHASTIC = Codec(4, 128, "stochastic", seed=0xFEDCBA9876543210)
CODECS = (
    *(codec(name) for name in NAMES),
    STOCHASTIC,
    Codec(FP8, 1024, "stochastic", scale_dtype=torch.float16, seed=1),
    Codec(8, 64, scheme="minmax"),
    Codec(2, 512, "stochastic", "minmax", torch.float32, seed=2),
)
SMALL = (1, 7, 1024, 1025, 8199, 131072, 262149)


def parts_of(ranks: Ranks, fill, numel, dtype=torch.bfloat16):
    return [fill(rank, numel, dtype) for rank in range(ranks.world_size)]


def even(ranks: Ranks, numel):
    return tuple(len(part) for part in torch.empty(numel).tensor_split(ranks.world_size))


def check(ranks: Ranks, parts, one: Codec, counts=None) -> None:
    """Checks one call. Parts have the lengths ``counts``, by default those of torch.tensor_split."""
    call = ranks.calls_of(KERNEL)
    if counts is None:
        xs = ranks.place(parts)
        poison([x.tensor_split(ranks.world_size)[rank].nbytes for rank, x in enumerate(xs)])
        ys = ranks.communicator.reducescatter(xs, codec=one)
    else:
        ys = ranks.place([parts[0].new_full((count,), 7) for count in counts])
        ranks.run_parts("reducescatter", ranks.place(parts), ys, counts, codec=one.text)
    ranks.communicator.synchronize()
    expected = reference.quantized_reducescatter(parts, one, one.seed or 0, call, sizes=counts)
    wrong = [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)]
    assert wrong == [0] * ranks.world_size, f"{one.text}, {[len(part) for part in expected]} elements"
    assert ranks.calls_of(KERNEL) == call + 1


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.parametrize("one", CODECS, ids=lambda one: one.type_name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_codec_gives_the_specification_bit_for_bit(ranks: Ranks, one, dtype):
    for numel in SMALL:
        check(ranks, parts_of(ranks, bit_patterns if numel < 10000 else normal, numel, dtype), one)


def test_a_large_tensor_gives_the_specification(ranks: Ranks):
    numel, one = 67108864, codec("int8")
    xs = [
        torch.randn(
            numel, dtype=torch.bfloat16, device=f"cuda:{r}", generator=torch.Generator(f"cuda:{r}").manual_seed(r)
        )
        for r in range(ranks.world_size)
    ]
    ys = ranks.communicator.reducescatter(xs, codec=one)
    ranks.communicator.synchronize()
    begin, window = 0, 1 << 20
    for rank, y in enumerate(ys):
        for start in range(0, len(y), window):
            mine = y[start : start + window].to("cuda:0")
            pieces = [x[begin + start :][: len(mine)].to("cuda:0") for x in xs]
            (*_, expected) = reference.quantized_reducescatter(pieces, one, sizes=[0] * (len(xs) - 1) + [len(mine)])
            assert same_bits(mine, expected) == 0, f"rank {rank}, from {start}"
        begin += len(y)


def test_parts_of_any_lengths_one_after_another(ranks: Ranks):
    choices = random.Random(5)
    for turn in range(60):
        counts = tuple(
            choices.choice([0, 1, choices.randrange(3000), choices.randrange(300000)]) for _ in range(ranks.world_size)
        )
        if any(counts):
            check(ranks, parts_of(ranks, normal, sum(counts)), CODECS[turn % len(CODECS)], counts)


def test_an_empty_tensor_launches_nothing(ranks: Ranks):
    before = ranks.calls_of(KERNEL)
    ys = ranks.communicator.reducescatter(ranks.place([torch.ones(0, 4)] * ranks.world_size), codec="int4")
    assert [y.shape for y in ys] == [(0, 4)] * ranks.world_size
    assert ranks.calls_of(KERNEL) == before


def test_misaligned_inputs(ranks: Ranks):
    parts = parts_of(ranks, normal, 8200, torch.float16)
    ys = ranks.communicator.reducescatter([x[1:] for x in ranks.place(parts)], codec=STOCHASTIC)
    ranks.communicator.synchronize()
    call = ranks.calls_of(KERNEL) - 1
    expected = reference.quantized_reducescatter([part[1:] for part in parts], STOCHASTIC, STOCHASTIC.seed, call)
    assert [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)] == [0] * ranks.world_size


def test_nothing_is_written_beside_the_outputs(ranks: Ranks):
    guard, counts = 64, even(ranks, 8199)
    parts = parts_of(ranks, normal, 8199)
    around = ranks.place([torch.full((count + 2 * guard,), 7.0, dtype=torch.bfloat16) for count in counts])
    outs = [one[guard:-guard] for one in around]
    ranks.run_parts("reducescatter", ranks.place(parts), outs, counts, codec="int6")
    ranks.communicator.synchronize()
    for one, part in zip(around, reference.quantized_reducescatter(parts, codec("int6")), strict=True):
        assert same_bits(one[guard:-guard].cpu(), part) == 0
        assert bool((one[:guard] == 7).all())
        assert bool((one[-guard:] == 7).all())


def test_calls_in_a_row_without_a_wait(ranks: Ranks):
    parts = [[normal(100 * seed + r, 65536, torch.bfloat16) for r in range(ranks.world_size)] for seed in range(3)]
    xs = [ranks.place(one) for one in parts]
    results = [ranks.communicator.reducescatter(xs[turn % 3], codec="fp8_e4m3") for turn in range(200)]
    ranks.communicator.synchronize()
    expected = [reference.quantized_reducescatter(one, codec("fp8_e4m3")) for one in parts]
    for turn, ys in enumerate(results):
        wrong = [same_bits(y.cpu(), part) for y, part in zip(ys, expected[turn % 3], strict=True)]
        assert wrong == [0] * ranks.world_size, f"call {turn}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [7, 1025, 262149])
def test_residuals_are_what_the_specification_leaves(ranks: Ranks, dtype, numel):
    xs, residuals = (ranks.place([normal(r + at, numel, dtype) for r in range(ranks.world_size)]) for at in (0, 50))
    for _ in range(3):
        call = ranks.calls_of(KERNEL)
        parts = [(residual + x).cpu() for x, residual in zip(xs, residuals, strict=True)]
        ys = ranks.communicator.reducescatter(xs, codec=STOCHASTIC, residual=residuals)
        ranks.communicator.synchronize()

        expected = reference.quantized_reducescatter(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)] == [0] * ranks.world_size
        for rank, (residual, part) in enumerate(zip(residuals, parts, strict=True)):
            left = left_after_scatter(part, STOCHASTIC, Noise(STOCHASTIC.seed, call, rank), even(ranks, numel))
            assert same_bits(residual.cpu(), left) == 0, f"rank {rank}"


# ---- graphs, epochs, failures ---------------------------------------------------------------------------------------


def test_every_replay_rounds_in_other_directions(ranks: Ranks):
    parts, counts = parts_of(ranks, normal, 8199), even(ranks, 8199)
    xs = ranks.place(parts)
    ys = ranks.place([parts[0].new_empty(count) for count in counts])
    ranks.communicator.prepare([torch.bfloat16], ops=["reducescatter"], codecs=[STOCHASTIC])
    graph = ranks.capture(lambda: ranks.run_parts("reducescatter", xs, ys, counts, codec=STOCHASTIC.text))
    first = ranks.calls_of(KERNEL)
    for call in range(first, first + 4):
        graph.replay()
        ranks.communicator.synchronize()
        expected = reference.quantized_reducescatter(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)] == [0] * ranks.world_size


def test_epochs_wrap(fresh_ranks: Ranks):
    check(fresh_ranks, parts_of(fresh_ranks, normal, 1025), STOCHASTIC)
    fresh_ranks.set_epochs(KERNEL, (1 << 32) - 4)
    for turn in range(8):
        call = ((1 << 32) - 4 + turn) % (1 << 32)
        parts = parts_of(fresh_ranks, normal, 1025 + turn)
        ys = fresh_ranks.communicator.reducescatter(fresh_ranks.place(parts), codec=STOCHASTIC)
        fresh_ranks.communicator.synchronize()
        expected = reference.quantized_reducescatter(parts, STOCHASTIC, STOCHASTIC.seed, call)
        assert [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)] == [0] * fresh_ranks.world_size


def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks):
    numel, world_size = 65536, fresh_ranks.world_size
    parts, counts = parts_of(fresh_ranks, normal, numel), even(fresh_ranks, numel)
    check(fresh_ranks, parts, INT4)
    engine, xs = fresh_ranks.communicator.engine, fresh_ranks.place(parts)
    call = fresh_ranks.call_of_parts("reducescatter", xs[0], counts, INT4.text)
    (only,) = slices(KERNEL, world_size, counts, 2)
    launches = launches_of(engine, call, by_policy(KERNEL, call, engine.facts(call, xs[0])), only, 0.5)
    begin = time.monotonic()
    for launch, x, count in zip(launches[:-1], xs, counts, strict=False):
        launch(x, x.new_empty(count))
    with pytest.raises(graphar.CollectiveTimeout, match="waited past the deadline for rank") as raised:
        fresh_ranks.communicator.synchronize()
    assert time.monotonic() - begin < 5
    record = raised.value.record
    assert (record.op, record.algorithm, record.sequence, record.peer) == (KERNEL.op, KERNEL, 1, world_size - 1)


# ---- one process a GPU ----------------------------------------------------------------------------------------------

every_world_size = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
every_shared_world_size = pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)


def scatter_as_rank(rank, world_size):
    """How many elements of each call are wrong, by a description of the call."""
    wrong = {}
    for one in (INT4, Codec(8, 64, scheme="minmax")):
        for shape in ((1,), (8199,), (262149,), (9, 7168)):
            parts = [normal(peer, torch.Size(shape).numel(), torch.bfloat16).view(shape) for peer in range(world_size)]
            y = graphar.reducescatter(parts[rank].cuda(), codec=one, axis=-1)
            expected = reference.quantized_reducescatter(parts, one, axis=len(shape) - 1)[rank]
            wrong[one.text, shape] = same_bits(y.cpu(), expected)
    x = normal(rank, 65536, torch.bfloat16).cuda()
    y = graphar.reducescatter(x, codec="int8")
    compiled = torch.compile(lambda x: graphar.reducescatter(x, codec="int8"), fullgraph=True)(x)
    wrong["compiled"] = same_bits(compiled, y)
    return wrong


@every_shared_world_size
def test_processes_get_the_specification(world_size):
    for wrong in run_ranks(scatter_as_rank, world_size, backend="cpu:gloo,cuda:nccl", timeout_s=180.0):
        assert not any(wrong.values()), wrong


def make_layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))


def gradients_with(make_reduce_scatter, rank, **options):
    """Each layer in a group of its own, so that reduce-scatters run beside the backward pass."""
    model = make_layers().cuda()
    for module in (*model, model):
        fully_shard(module, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule) and make_reduce_scatter:
            module.set_custom_reduce_scatter(make_reduce_scatter())
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        model.zero_grad()
        model(torch.randn(64, 256, generator=generator).cuda()).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def fully_shard_as_rank(rank, world_size):
    """The relative errors of gradients by torch's own reduce-scatter, and by int8 without and with feedback."""
    exact = gradients_with(ExactReduceScatter, rank)
    assert all(same_bits(*pair) == 0 for pair in zip(exact, gradients_with(ExactReduceScatter, rank), strict=True))
    errors = []
    for make in (
        None,
        lambda: QuantizedReduceScatter("int8"),
        lambda: QuantizedReduceScatter("int8", error_feedback=True),
    ):
        found = gradients_with(make, rank)
        errors.append(max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)))
    dist.barrier()
    return errors


@every_world_size
def test_fully_shard_gets_exact_and_quantised_gradients(world_size):
    results = run_ranks(fully_shard_as_rank, world_size, backend="cpu:gloo,cuda:nccl", timeout_s=180.0)

    for torchs, quantised, fed_back in results:
        assert torchs < 1e-5
        assert 0 < quantised < 0.02
        assert 0 < fed_back < 0.02
    assert results == [results[0]] * world_size
