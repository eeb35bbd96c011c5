"""Codecs on the CPU: the rounding of each call, with and without a seed, and the choice of kernels on GPUs."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import graphar
from graphar import Codec, Communicator, UnsupportedError, reference
from graphar.numerics.codec_reference import Noise, encode, part_of_wires
from graphar.numerics.codecs import BUCKET_SIZES, NAMES, SCALE_DTYPES, codec
from graphar.ops.sums import SCATTER as OP
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES
from graphar.plan.select import Facts, algorithms_of, select
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, Sum
from graphar.ranks.cpu import fallback
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_ranks

INT4 = Codec(4)
STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
KERNEL = Algorithm.QUANTIZED_REDUCESCATTER
PUSH, PIPELINED = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
TABLE = shipped_table("default")
ops = torch.ops.graphar


def text_of(one):
    return one if isinstance(one, str) else one.text


def expected(parts, one, call=0):
    one = codec(text_of(one))
    return graphar.reference.quantized_allreduce(parts, one, one.seed or 0, call)


@pytest.fixture
def trio():
    with Communicator(devices=["cpu"] * 3) as communicator:
        yield communicator


@pytest.fixture
def parts():
    return [normal(rank, 3001, torch.bfloat16) for rank in range(3)]


def reduce_as_rank(rank, world_size):
    x = normal(rank, 3001, torch.bfloat16)
    found = [graphar.allreduce(x, codec=STOCHASTIC) for _ in range(3)]
    found.append(graphar.allreduce(x, codec=STOCHASTIC, out=x))
    unseeded = graphar.allreduce(normal(rank, 3001, torch.bfloat16), codec=Codec(2, rounding="stochastic"))
    return found, unseeded


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
def test_processes_get_the_specifications_bits_and_the_same_ones_without_a_seed(parts):
    results = run_ranks(reduce_as_rank, 3)

    wanted = [expected(parts, STOCHASTIC, call) for call in range(4)]
    for found, unseeded in results:
        assert [same_bits(mine, total) for mine, total in zip(found, wanted, strict=True)] == [0] * len(wanted)
        assert same_bits(unseeded, results[0][1]) == 0


def test_each_call_rounds_in_other_directions_and_the_next_communicator_in_the_same(parts):
    rows = []
    for _ in range(2):
        with Communicator(devices=["cpu"] * 3) as communicator:
            rows.append([communicator.allreduce(parts, codec=STOCHASTIC)[0] for _ in range(3)])

    assert [same_bits(a, b) for a, b in zip(*rows, strict=True)] == [0, 0, 0]
    assert [same_bits(rows[0][call], expected(parts, STOCHASTIC, call)) for call in range(3)] == [0, 0, 0]
    assert same_bits(rows[0][0], rows[0][1]) > 100


def test_without_a_seed_communicators_differ(parts):
    one, results = Codec(4, rounding="stochastic"), []
    for _ in range(2):
        with Communicator(devices=["cpu"] * 3) as communicator:
            results.append(communicator.allreduce(parts, codec=one)[0])

    assert same_bits(*results) > 100


@pytest.fixture
def with_kernels(monkeypatch):
    """A communicator that chooses as if it had four GPUs."""
    communicator = Communicator(devices=[f"cuda:{rank}" for rank in range(4)])
    monkeypatch.setattr(communicator.engine, "find_runner", lambda device: True)
    communicator.engine.table = TABLE
    yield communicator
    communicator.close()


def explain(communicator, numel, one, algorithm="auto"):
    x = torch.empty(numel, dtype=torch.bfloat16, device="meta")
    return communicator.engine.explain(Call.of(Sum(numel, text_of(one)), x, algorithm=algorithm), x)


def test_explain_says_what_an_element_costs(with_kernels):
    said = explain(with_kernels, 1 << 20, "int4")

    assert said.algorithm == "quantized_two_shot_push"
    assert said.reason == (
        "4.5 bits an element on the wire, 3.6 times fewer than torch.bfloat16, by table 'default' for 4 ranks and "
        "2097152 bytes"
    )


@pytest.mark.parametrize(("numel", "one"), [(1 << 26, "int4"), (8, Codec(4, 128, scheme="minmax"))])
def test_what_the_push_cannot_take_is_pipelined(with_kernels, numel, one):
    assert explain(with_kernels, numel, one).algorithm == "quantized_two_shot_pipelined"
    with pytest.raises(UnsupportedError, match="quantized_two_shot_push cannot serve this call: "):
        explain(with_kernels, numel, one, "quantized_two_shot_push")


def test_a_codec_without_a_spare_word_has_one_algorithm():
    assert algorithms_of(codec("int4"), "allreduce") == [PUSH, PIPELINED]
    assert algorithms_of(Codec(4, scheme="minmax"), "allreduce") == [PIPELINED]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("one", [codec(name) for name in NAMES] + [Codec(8, 32, scheme="minmax")], ids=str)
def test_a_configuration_can_run(world_size, one):
    for numel in (1, 1024, 1025, 1 << 20, 1 << 25, 1 << 31):
        call = Call(Sum(numel, one.text), torch.bfloat16, 0)
        config, _ = select(call, Facts(world_size, TABLE, TABLE.chip))
        assert 1 <= config.blocks <= MAX_BLOCKS
        assert 32 <= config.threads <= 512
        if config.algorithm is PUSH:
            assert config.threads % (32 * world_size) == 0
        else:
            assert 1 <= config.chunk * one.tile_nbytes <= PIPELINED.row.scratch(world_size).capacity * 16


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_slot_of_the_push_takes_the_largest_shard_of_every_codec_that_may_use_it(world_size):
    numel = PUSH.row.limit(world_size) // 2
    slot = PUSH.row.scratch(world_size).capacity * 16
    for one in (
        Codec(bits, size, scale_dtype=dtype)
        for bits in (8, "fp8_e4m3")
        for size in BUCKET_SIZES
        for dtype in SCALE_DTYPES
    ):
        shard = -(-one.tiles(numel) // world_size) * 1024
        assert one.wire_nbytes(shard) <= slot
        assert encode(torch.ones(2048), one).numel() == one.wire_nbytes(2048)


def test_random_rounding_without_a_seed_is_refused_where_determinism_is_asked_for(trio, parts):
    one = Codec(4, rounding="stochastic")
    trio.allreduce(parts, codec=one)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="stochastic rounding without a seed is not deterministic"):
            trio.allreduce(parts, codec=one)
        trio.allreduce(parts, codec=STOCHASTIC)
    finally:
        torch.use_deterministic_algorithms(False)


def inputs(shape, dtype=torch.bfloat16, ranks=3, fill=normal):
    return [fill(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(ranks)]


def scattered(parts, one, call=0, sizes=None):
    return reference.quantized_reducescatter(parts, one, one.seed or 0, call, sizes=sizes)


def wrong(found, wanted):
    """By rank, how many elements differ."""
    return [same_bits(*pair) for pair in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("one", [INT4, codec("fp8_e4m3"), Codec(8, 64, scheme="minmax"), STOCHASTIC], ids=str)
def test_each_part_is_rounded_as_an_all_reduce_rounds_a_tensor_but_its_sum_is_not(one):
    parts = inputs((2 * 1024, 3), torch.float32, ranks=2)  # each part has whole tiles

    found = torch.cat(scattered(parts, one))

    wires = [encode(part.view(-1), one, Noise(one.seed or 0, 0, rank)) for rank, part in enumerate(parts)]
    assert same_bits(found, part_of_wires(wires, one, parts[0])) == 0
    exact = reference.allreduce(parts)
    two_roundings = reference.quantized_allreduce(parts, one, one.seed or 0)
    assert 0 < (found - exact).norm() < (two_roundings - exact).norm()


def test_a_part_shares_no_bucket_with_its_neighbours():
    calm, loud = torch.full((40,), 0.01), torch.full((40,), 1000.0)
    parts = [torch.cat([calm, loud])] * 2

    first, second = scattered(parts, INT4)

    torch.testing.assert_close(first, 2 * calm, rtol=0.01, atol=0)
    torch.testing.assert_close(second, 2 * loud, rtol=0.01, atol=0)


def test_each_part_has_random_numbers_of_its_own():
    parts = [torch.cat([normal(rank, 1024, torch.float32)] * 2) for rank in range(2)]

    first, second = scattered(parts, STOCHASTIC)

    assert same_bits(first, second) > 100


UNEVEN = (0, 3000, 1025)


UNEVEN_CALL = Call(Parts("reducescatter", UNEVEN, STOCHASTIC.text), torch.bfloat16, -1)


@on_ranks(3)
def test_processes_may_have_parts_of_any_lengths(rank, world_size):
    fallback._CHUNK_NUMEL = 1024  # so that parts go in several pieces, some of them empty
    parts = inputs((sum(UNEVEN),))
    out = torch.empty(UNEVEN[rank], dtype=torch.bfloat16)
    Communicator().engine.run(UNEVEN_CALL, [Operands((parts[rank],), (out,))])
    assert same_bits(out, scattered(parts, STOCHASTIC, sizes=UNEVEN)[rank]) == 0


def test_a_list_may_have_parts_of_any_lengths(trio, monkeypatch):
    monkeypatch.setattr(fallback, "_CHUNK_NUMEL", 1024)
    parts = inputs((sum(UNEVEN),))
    outs = [torch.empty(count, dtype=torch.bfloat16) for count in UNEVEN]

    trio.engine.run(UNEVEN_CALL, [Operands((x,), (out,)) for x, out in zip(parts, outs, strict=True)])

    assert wrong(outs, scattered(parts, STOCHASTIC, sizes=UNEVEN)) == [0, 0, 0]


def test_each_call_rounds_in_other_directions(trio):
    parts = inputs((3001,))

    calls = [trio.reducescatter(parts, codec=STOCHASTIC) for _ in range(3)]

    assert [wrong(found, scattered(parts, STOCHASTIC, call)) for call, found in enumerate(calls)] == [[0] * 3] * 3
    assert same_bits(calls[0][0], calls[1][0]) > 100


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter], ids=lambda op: op.__name__)
def test_one_rank_leaves_nothing_in_its_residual(op):
    residual = torch.ones(8)

    (y,) = op([torch.full((8,), 2.0)], codec="int4", residual=[residual])

    assert y.tolist() == [3] * 8
    assert not residual.any()


def test_a_fake_result_is_as_long_as_its_ranks_part(group_of):
    group_of(2, rank=1)
    with FakeTensorMode() as mode:
        x, residual = (mode.from_tensor(torch.ones(3, 4)) for _ in range(2))
        plain = OP.one(x, *OP.arguments(rank=1, sizes=[2, 1], codec="int4"))
        fed_back = graphar.reducescatter(x, codec="int4", residual=residual)

    assert plain.shape == fed_back.shape == (1, 4)


def test_any_codec_has_its_kernel():
    assert algorithms_of(INT4, "reducescatter") == algorithms_of(Codec(4, scheme="minmax"), "reducescatter") == [KERNEL]
    assert algorithms_of(INT4, "allgather") == []
