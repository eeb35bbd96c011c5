"""graphar.allreduce with a codec, on the CPU: the specification's bits, in both forms and under torch's machinery."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.library import opcheck

import graphar
from graphar import Codec, Communicator, UnsupportedError
from graphar.numerics.codec_reference import encode
from graphar.numerics.codecs import BUCKET_SIZES, NAMES, SCALE_DTYPES, codec
from graphar.ops.allreduce import OP
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES
from graphar.plan.select import algorithms_of
from graphar.plan.shapes import for_quantized
from graphar.plan.tables import shipped_table
from graphar.ranks import fallback
from tests.cases import KERNEL_DTYPES, bit_patterns, normal, same_bits
from tests.processes import run_ranks

STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
CODECS = ("int4", "fp8_e4m3", Codec(8, 64, scheme="minmax"))
PUSH, PIPELINED = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
TABLE = shipped_table("default")
ops = torch.ops.graphar

every_codec = pytest.mark.parametrize("one", CODECS, ids=str)


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


# ---- results --------------------------------------------------------------------------------------------------------


@every_codec
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_list_gets_the_specifications_bits(one, dtype, trio):
    for numel in (1, 1024, 5001):
        parts = [bit_patterns(rank, numel, dtype) for rank in range(3)]

        results = trio.allreduce(parts, codec=one)

        assert [same_bits(result, expected(parts, one)) for result in results] == [0, 0, 0]


def reduce_as_rank(rank, world_size):
    found = []
    for one in CODECS:
        x = normal(rank, 3001, torch.bfloat16)
        found.append(graphar.allreduce(x, codec=one))
        found.append(graphar.allreduce(x, codec=one, out=x))
    for _ in range(2):
        found.append(graphar.allreduce(normal(rank, 3001, torch.bfloat16), codec=STOCHASTIC))
    unseeded = graphar.allreduce(normal(rank, 3001, torch.bfloat16), codec=Codec(2, rounding="stochastic"))
    return found, unseeded


def test_processes_get_the_specifications_bits_and_the_same_ones_without_a_seed(parts):
    calls = 2 * len(CODECS)

    results = run_ranks(reduce_as_rank, 3)

    wanted = [expected(parts, one) for one in CODECS for _ in range(2)]
    wanted += [expected(parts, STOCHASTIC, calls + call) for call in range(2)]
    for found, unseeded in results:
        assert [same_bits(mine, total) for mine, total in zip(found, wanted, strict=True)] == [0] * len(wanted)
        assert same_bits(unseeded, results[0][1]) == 0


def test_what_goes_in_pieces_is_rounded_as_a_whole(trio, parts, monkeypatch):
    monkeypatch.setattr(fallback, "_CHUNK_NUMEL", 1024)

    results = trio.allreduce(parts, codec=STOCHASTIC)

    assert same_bits(results[2], expected(parts, STOCHASTIC)) == 0


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


def test_the_output_may_be_the_input_or_have_gaps(trio, parts):
    xs, gaps = [part.clone() for part in parts], [torch.zeros(3001, 2, dtype=torch.bfloat16) for _ in parts]

    trio.allreduce(xs, codec="int4", out=xs)
    trio.allreduce(parts, codec="int4", out=[gap[:, 0] for gap in gaps])

    for x, gap in zip(xs, gaps, strict=True):
        assert same_bits(x, expected(parts, "int4")) == 0
        assert same_bits(gap[:, 0].contiguous(), expected(parts, "int4")) == 0
        assert not gap[:, 1].any()


@pytest.mark.parametrize("with_residuals", [False, True])
def test_the_outputs_of_a_list_are_returned_and_must_be_as_many(trio, parts, with_residuals):
    options = {"codec": "int4"} | ({"residual": [torch.zeros_like(part) for part in parts]} if with_residuals else {})
    outs = [torch.empty_like(part) for part in parts]

    found = trio.allreduce(parts, out=outs, **options)

    assert [one is out for one, out in zip(found, outs, strict=True)] == [True] * 3
    with refuses(ValueError, "out must be a list of 3 tensors, one for each of x, got a list of 2"):
        trio.allreduce(parts, out=outs[:2], **options)


def test_an_empty_tensor_and_one_rank_change_nothing(trio):
    x = normal(0, 77, torch.float32)

    assert trio.allreduce([torch.ones(0)] * 3, codec="int4")[0].shape == (0,)
    assert same_bits(graphar.allreduce([x], codec="int2")[0], x) == 0


# ---- torch ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_ops_keep_the_rules_of_ops(world_of_one, requires_grad):
    call = OP.arguments(codec="int4")
    xs = [torch.randn(4, 6).requires_grad_(requires_grad) for _ in range(2)]

    opcheck(ops.allreduce.default, (xs[0], *call))
    opcheck(ops.allreduce_list.default, (xs, *call))
    if not requires_grad:
        opcheck(ops.allreduce_out.default, (xs[0], [], xs[1], *call))
        opcheck(ops.allreduce_list_out.default, (xs, [], [torch.empty(4, 6), torch.empty(4, 6)], *call))


def test_a_fake_result_has_the_shape_strides_and_dtype_of_a_real_one():
    real = torch.randn(3, 4).t()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        found = graphar.allreduce([fake, fake], codec="int4")[1]

    wanted = graphar.allreduce([real, real], codec="int4")[1]
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("one", ["int8", Codec(6, 64)], ids=["by name", "by Codec"])
def test_a_compiled_function_gives_the_same_bits(one, parts):
    torch._dynamo.reset()

    def reduce_twice(a, b):
        first, second = graphar.allreduce([a * 2, b], codec=one)
        return first + 1, second

    found = torch.compile(reduce_twice, fullgraph=True, backend="aot_eager")(*parts[:2])

    wanted = reduce_twice(*parts[:2])
    assert [same_bits(a, b) for a, b in zip(found, wanted, strict=True)] == [0, 0]


def test_the_gradient_is_the_quantised_sum_of_the_gradients():
    xs = [normal(rank, 2000, torch.float32).requires_grad_() for rank in range(2)]
    gradients = [normal(5 + rank, 2000, torch.float32) for rank in range(2)]

    torch.autograd.backward(graphar.allreduce(xs, codec="int6"), gradients)

    assert [same_bits(x.grad, expected(gradients, "int6")) for x in xs] == [0, 0]


# ---- what is chosen -------------------------------------------------------------------------------------------------


def test_explain_says_why_no_kernel_runs(trio, parts):
    said = trio.explain(parts, codec="int4")

    assert (said.algorithm, said.reason) == ("fallback", "the tensor is on the CPU")


@pytest.fixture
def with_kernels(monkeypatch):
    """A communicator of four GPUs, as far as choosing goes."""
    communicator = Communicator(devices=[f"cuda:{rank}" for rank in range(4)])
    monkeypatch.setattr(communicator.engine, "find_runner", lambda device: True)
    communicator.engine.table = TABLE
    yield communicator
    communicator.close()


def explain(communicator, numel, one, algorithm="auto"):
    x = torch.empty(numel, dtype=torch.bfloat16, device="meta")
    return communicator.engine.explain(Call.of("allreduce", x, algorithm=algorithm, codec=text_of(one)), x)


def test_explain_says_what_an_element_costs(with_kernels):
    said = explain(with_kernels, 1 << 20, "int4")

    assert said.algorithm == "quantized_two_shot_push"
    assert said.reason == (
        "4.5 bits an element on the wire, 3.6 times fewer than torch.bfloat16, for 4 ranks and 2097152 bytes"
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
def test_a_shape_can_run(world_size, one):
    for numel in (1, 1024, 1025, 1 << 20, 1 << 25, 1 << 31):
        shape = for_quantized(TABLE.quantized, TABLE.chip.sms, one, world_size, numel, 2)
        assert 1 <= shape.blocks <= MAX_BLOCKS
        assert 32 <= shape.threads <= 512
        if shape.algorithm is PUSH:
            assert shape.threads % (32 * world_size) == 0
        else:
            assert 1 <= shape.chunk * one.tile_nbytes <= PIPELINED.row.scratch(world_size).capacity * 16


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


# ---- bad arguments --------------------------------------------------------------------------------------------------

_NAMES = "fp8_e4m3, int8, int6, int5, int4, int3, int2"
BAD = {
    "a name": ({"codec": "int7"}, ValueError, f"codec must be a graphar.Codec or one of {_NAMES}, got 'int7'"),
    "a number": ({"codec": 4}, TypeError, "codec must be a graphar.Codec or the name of one, got int"),
    "an exact algorithm": (
        {"codec": "int4", "algorithm": "one_shot"},
        ValueError,
        "algorithm must be one of auto, quantized_two_shot_push, quantized_two_shot_pipelined, fallback, hierarchical "
        "with a codec, got 'one_shot'",
    ),
    "a timeout": (
        {"codec": "int4", "timeout_s": 0},
        ValueError,
        "timeout_s must be above 0 and at most 1e6 seconds, got 0",
    ),
}


def refuses(kind, message, op="allreduce"):
    return pytest.raises(kind, match=f"^{re.escape(f'{op}: {message}')}$")


@pytest.mark.parametrize(("arguments", "kind", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_refused(trio, parts, arguments, kind, message):
    with refuses(kind, message):
        trio.allreduce(parts, **arguments)
    if "timeout_s" not in arguments:
        with refuses(kind, message, "explain"):
            trio.explain(parts, **arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_a_dtype_that_no_codec_rounds_is_refused(trio, world_of_one, dtype):
    x = torch.ones(3, dtype=dtype)
    with refuses(ValueError, f"a codec rounds bfloat16, float16 and float32, got a tensor of {dtype}"):
        trio.allreduce([x] * 3, codec="int4")
    with refuses(ValueError, f"a codec rounds bfloat16, float16 and float32, got a tensor of {dtype}"):
        graphar.allreduce(x, codec="int4", out=x)


def test_a_codec_algorithm_needs_a_codec(trio, parts):
    with pytest.raises(ValueError, match="algorithm must be one of auto, one_shot_push"):
        trio.allreduce(parts, algorithm="quantized_two_shot_push")


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


def test_codecs_to_prepare_are_checked(trio):
    with refuses(ValueError, f"codec must be a graphar.Codec or one of {_NAMES}, got 'int7'", "prepare"):
        trio.prepare(codecs=["int4", "int7"])
