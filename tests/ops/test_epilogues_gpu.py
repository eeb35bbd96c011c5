"""All-reduce with an epilogue on real GPUs: exact expressions give the specification's bits on every rank."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import graphar
from graphar import Epilogue
from graphar.plan.algorithms import Algorithm, with_epilogue
from tests.cases import normal, same_bits
from tests.gpu import DTYPES, Ranks, parts_of, poison
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

EPILOGUE_KERNELS = tuple(one.value for one in with_epilogue())
NUMELS = (0, 7, 8192, 8193, 8199, 8200, 8216, 131072, 262144, 262149, 16777216, 16777224, 16777240, 67108864)
EXACT = {
    "-v": {},
    "v * scale + bias[col]": {"scale": 0.1, "bias": ("col", torch.bfloat16)},
    "max(v - a[row], b[col]) / (abs(c[index]) + 1) * d[0]": {
        "a": ("row", torch.float16),
        "b": ("col", torch.bfloat16),
        "c": ("index", torch.float32),
        "d": ("0", torch.float32),
    },
    "row > col ? bf16(v) : clamp(fp16(v * 3), -low, 2.5) + rint(v) * isnan(v) - sqrt(index)": {"low": 1.5},
}


def arguments_of(kinds: dict, shape: tuple[int, int]) -> dict:
    """The numbers of ``kinds``, and CPU tensors with as many elements as a sum of that shape requires."""
    rows, columns = shape
    numels = {"row": rows, "col": columns, "index": rows * columns, "0": 1}
    return {
        name: normal(30 + at, numels[kind[0]], kind[1]) if isinstance(kind, tuple) else kind
        for at, (name, kind) in enumerate(kinds.items())
    }


def on_all(ranks: Ranks, what, arguments: dict) -> Epilogue:
    placed = {
        name: ranks.place([one] * ranks.world_size) if isinstance(one, torch.Tensor) else one
        for name, one in arguments.items()
    }
    return Epilogue(what, **placed)


def check(ranks: Ranks, parts, what, arguments: dict, algorithm: str = "auto", **more) -> None:
    xs, epilogue = ranks.place(parts), on_all(ranks, what, arguments)
    poison([x.nbytes for x in xs])
    ys = ranks.communicator.allreduce(xs, epilogue=epilogue, algorithm=algorithm, **more)
    ranks.communicator.synchronize()
    expected = graphar.reference.allreduce(parts, Epilogue(what, **arguments))
    for rank, y in enumerate(ys):
        assert same_bits(y.cpu(), expected) == 0, f"rank {rank}, {what}, {list(expected.shape)}"


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_every_size_gives_the_specification(ranks: Ranks):
    before = [ranks.calls_of(algorithm) for algorithm in EPILOGUE_KERNELS]

    for rows in (1, 64, 1024, 8192):
        shape, what = (rows, 8192), "v * scale + bias[col]"
        check(ranks, parts_of(ranks, normal, shape, torch.bfloat16), what, arguments_of(EXACT[what], shape))

    assert sum(ranks.calls_of(algorithm) for algorithm in EPILOGUE_KERNELS) == sum(before) + 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_any_size_are_negated(ranks: Ranks, dtype):
    for numel in NUMELS:
        generators = [torch.Generator(f"cuda:{rank}").manual_seed(rank) for rank in range(ranks.world_size)]
        xs = [torch.randn(numel, dtype=dtype, device=one.device, generator=one) for one in generators]
        poison([x.nbytes for x in xs])
        ys = ranks.communicator.allreduce(xs, epilogue="-v")
        ranks.communicator.synchronize()
        expected = graphar.reference.allreduce([x.to("cuda:0") for x in xs], "-v")
        assert [same_bits(y.to("cuda:0"), expected) for y in ys] == [0] * ranks.world_size, numel


def test_symmetric_outputs_are_written_directly(ranks: Ranks):
    shape = (512, 1024)
    outs = ranks.communicator.empty(*shape, dtype=torch.bfloat16)
    what = "v * scale + bias[col]"
    parts = parts_of(ranks, normal, shape, torch.bfloat16)
    check(ranks, parts, what, arguments_of(EXACT[what], shape), "two_shot_pipelined", out=outs)
    expected = graphar.reference.allreduce(parts, Epilogue(what, **arguments_of(EXACT[what], shape)))
    assert [same_bits(out.cpu(), expected) for out in outs] == [0] * ranks.world_size


@pytest.mark.parametrize(
    ("what", "function"),
    [
        ("gelu(v)", functional.gelu),
        ("softplus(v) + elu(v) * mish(v)", lambda v: functional.softplus(v) + functional.elu(v) * functional.mish(v)),
        ("gelu_tanh(v)", lambda v: functional.gelu(v, approximate="tanh")),
        ("silu(v) * sigmoid(v)", lambda v: functional.silu(v) * v.sigmoid()),
        ("tanh(v) + exp(v) + erf(v) + expm1(v)", lambda v: v.tanh() + v.exp() + v.erf() + v.expm1()),
        ("log(abs(v)) + log1p(abs(v)) + log2(abs(v))", lambda v: v.abs().log() + v.abs().log1p() + v.abs().log2()),
        ("rsqrt(abs(v)) + pow(abs(v), 0.3) + exp2(v)", lambda v: v.abs().rsqrt() + v.abs().pow(0.3) + v.exp2()),
        ("sin(v) * cos(v)", lambda v: v.sin() * v.cos()),
    ],
)
def test_transcendental_functions_are_torchs_within_a_few_units_in_the_last_place(ranks: Ranks, what, function):
    parts = parts_of(ranks, normal, (64, 129), torch.float32)

    ys = ranks.communicator.allreduce(ranks.place(parts), epilogue=what)

    ranks.communicator.synchronize()
    total = graphar.reference.allreduce(parts).double()
    for y in ys:
        torch.testing.assert_close(y.cpu().double(), function(total), rtol=3e-6, atol=3e-6)
        assert same_bits(y.cpu(), ys[0].cpu()) == 0


def test_a_function_gives_the_bits_of_its_expression(ranks: Ranks):
    shape = (33, 257)
    arguments = {"bias": normal(1, 257, torch.bfloat16), "scale": 0.3}
    parts = parts_of(ranks, normal, shape, torch.bfloat16)

    check(ranks, parts, lambda v, bias, scale: torch.relu(v * scale + bias), arguments)


# ---- plans and graphs -----------------------------------------------------------------------------------------------


def test_another_number_or_tensor_needs_no_other_plan(ranks: Ranks):
    parts = parts_of(ranks, normal, (8, 64), torch.bfloat16)
    check(ranks, parts, "v * s + b[col]", {"s": 1.0, "b": normal(1, 64, torch.float32)})
    plans = len(ranks.communicator.engine.plans)

    for turn in range(5):
        check(ranks, parts, "v * s + b[col]", {"s": 0.7 * turn, "b": normal(turn, 64, torch.float32)})

    assert len(ranks.communicator.engine.plans) == plans


def test_gradients_are_those_of_the_cpu(ranks: Ranks):
    def gradients(place):
        parts = [part.requires_grad_() for part in place(parts_of(ranks, normal, (3, 8), torch.float32))]
        biases = [one.requires_grad_() for one in place([normal(9, 8, torch.float32) for _ in parts])]
        with graphar.Communicator(devices=[part.device for part in parts]) as communicator:
            ys = communicator.allreduce(parts, epilogue=Epilogue("v * v * bias[col]", bias=biases))
            sum((y * (rank + 1)).sum().cpu() for rank, y in enumerate(ys)).backward()
        return [one.grad.cpu() for one in (*parts, *biases)]

    torch.testing.assert_close(gradients(ranks.place), gradients(lambda parts: [part.clone() for part in parts]))


def test_a_tensor_on_another_device_is_refused(ranks: Ranks):
    xs = ranks.place([torch.ones(2, 4)] * ranks.world_size)

    with pytest.raises(ValueError, match="b must be on the device of x, cuda:0, got cpu"):
        ranks.communicator.allreduce(xs, epilogue=Epilogue("v + b[col]", b=[torch.ones(4)] * ranks.world_size))


def test_the_fallback_gives_the_kernels_bits(ranks: Ranks):
    for what, kinds in EXACT.items():
        parts = parts_of(ranks, normal, (17, 65), torch.bfloat16)
        check(ranks, parts, what, arguments_of(kinds, (17, 65)), Algorithm.FALLBACK.value)


# ---- one process a GPU ----------------------------------------------------------------------------------------------


def reduce_as_rank(rank, world_size):
    """How many elements of each call are wrong, by a description of the call."""
    wrong, bias = {}, normal(9, 128, torch.bfloat16)
    for rows in (1, 64, 4096, 65536):
        parts = [normal(peer, rows * 128, torch.bfloat16).view(rows, 128) for peer in range(world_size)]
        expected = graphar.reference.allreduce(parts, Epilogue("v * s + bias[col]", s=0.3, bias=bias))
        epilogue = Epilogue("v * s + bias[col]", s=0.3, bias=bias.cuda())
        wrong[rows] = same_bits(graphar.allreduce(parts[rank].cuda(), epilogue=epilogue).cpu(), expected)
    x, bias = normal(rank, 65536, torch.bfloat16).view(-1, 128).cuda(), bias.cuda()

    def biased(v, bias):
        return torch.relu(v + bias)

    def model(x):
        return graphar.allreduce(x, epilogue=Epilogue(biased, bias=bias))

    y = model(x)
    wrong["compiled"] = same_bits(torch.compile(model, fullgraph=True)(x), y)
    wrong["compiled for CUDA graphs"] = same_bits(torch.compile(model, mode="reduce-overhead")(x), y)
    again = graphar.allreduce(x, epilogue=Epilogue(biased, bias=bias), algorithm="fallback")
    return wrong | {"fallback": same_bits(again, y)}


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_processes_get_the_specification(world_size):
    for wrong in run_on_gpus(reduce_as_rank, world_size):
        assert not any(wrong.values()), wrong
