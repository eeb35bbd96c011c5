"""Kernels with an epilogue, executed on the host: exact expressions give the specification's bits, others come near."""

from __future__ import annotations

import random

import pytest
import torch

from graphar import Epilogue, reference
from graphar.algorithms import Algorithm, Shape
from graphar.epilogues.code import generate
from graphar.epilogues.syntax import parse
from graphar.kernels import EPILOGUE_KERNELS, TYPE_NAMES, kernel_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import build
from tests.host.cases import WAYS, scratch_of
from tests.host.simulate import Call, Simulation

pytestmark = pytest.mark.host

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Expressions, and the dtypes of their tensors, sorted by name.
EXACT = (
    ("-v", ()),
    ("v * scale + bias[col]", (BF16,)),
    ("max(v - a[row], b[col]) / (abs(c[index]) + 1) * d[0]", (FP16, BF16, FP32, FP32)),
    ("row > col ? bf16(v) : clamp(fp16(v * 3), -low, 2.5) + rint(v) * isnan(v) - index", ()),
)
NEAR = ("gelu(v) + gelu_tanh(v) * silu(v) - sigmoid(v) + tanh(v) * exp(min(v, 1)) + erf(v) + rsqrt(abs(v) + 1)", ())
WORLD_SIZES = (2, 3, 4)
CALLS = 8


def variants(algorithm: str) -> tuple[str | None, ...]:
    return WAYS[Algorithm(algorithm)].variants


def program(algorithm: str, dtypes, sanitizer: str):
    sources = [
        kernel_source(algorithm, dtype, world_size, variant, generate(*expression))
        for dtype in dtypes
        for world_size in WORLD_SIZES
        for expression in (*EXACT, NEAR)
        for variant in variants(algorithm)
    ]
    return build(tuple(sources), sanitizer)


def draw_call(algorithm: str, world_size: int, dtype: torch.dtype, at: int, choices: random.Random):
    """A call of expression ``at``, and what every rank must get."""
    text, dtypes = (*EXACT, NEAR)[at]
    way = WAYS[Algorithm(algorithm)]
    rows, columns = choices.randint(1, 9), choices.choice([1, 3, 8, 40, 61])
    fill = normal if at == len(EXACT) else choices.choice([normal, bit_patterns])
    xs = [fill(rank, rows * columns, dtype).view(rows, columns) for rank in range(world_size)]
    sizes = {"row": rows, "col": columns, "index": rows * columns, "0": 1}
    found = parse(text)
    tensors = {
        one.name: normal(20 + k, sizes[one.subscript], dtypes[found.tensors.index(one.name)])
        for k, one in enumerate(found.operands)
    }
    scalars = {name: 0.375 + k for k, name in enumerate(found.scalars)}
    total = reference.allreduce(xs, Epilogue(text, **tensors, **scalars))
    threads = choices.choice(way.threads(world_size))
    shape = Shape(
        Algorithm(algorithm), choices.choice([1, 2, 3]), threads, choices.choice([1, 3]) if way.chunked else 0
    )
    variant = choices.randrange(len(way.variants))
    call = Call(
        at * len(way.variants) + variant,
        shape,
        [x.reshape(-1) for x in xs],
        (rows * columns,),
        (total.nbytes,) * world_size,
        offset=choices.choice([0, dtype.itemsize]),
        in_place=way.in_place[variant] and choices.random() < 0.3,
        operands=tuple(tensors[name] for name in found.tensors),
        scalars=tuple(scalars[name] for name in found.scalars),
        columns=columns,
    )
    return call, total.reshape(-1)


def simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed, expressions):
    choices = random.Random(f"{algorithm} {world_size} {dtype} {seed}")
    drawn = [draw_call(algorithm, world_size, dtype, choices.choice(expressions), choices) for _ in range(CALLS)]
    each = (len(EXACT) + 1) * len(variants(algorithm))
    first = (dtypes.index(dtype) * len(WORLD_SIZES) + WORLD_SIZES.index(world_size)) * each
    needs = scratch_of(Algorithm(algorithm), world_size)
    made = program(algorithm, dtypes, sanitizer)
    outcomes = Simulation(made, Algorithm(algorithm), world_size, needs, first, seed).run([call for call, _ in drawn])
    assert [(outcome.record.kind, outcome.broken_guards) for outcome in outcomes] == [(0, 0)] * world_size
    return [
        (result.view(dtype), total)
        for outcome in outcomes
        for result, (_, total) in zip(outcome.results, drawn, strict=True)
    ]


def cases():
    for algorithm in EPILOGUE_KERNELS:
        for sanitizer in ("plain", "thread", "address"):
            group = pytest.mark.xdist_group(f"epilogue-{algorithm}-{sanitizer}")
            for world_size in WORLD_SIZES:
                yield pytest.param(algorithm, sanitizer, world_size, marks=group)


@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), list(cases()))
def test_exact_expressions_give_the_specifications_bits(algorithm, sanitizer, world_size):
    dtypes = tuple(TYPE_NAMES) if sanitizer == "plain" else (BF16,)
    for dtype in dtypes:
        for seed in range(4 if sanitizer == "plain" else 2):
            results = simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed, range(len(EXACT)))
            assert [same_bits(mine, total) for mine, total in results] == [0] * len(results), f"{dtype}, seed {seed}"


@pytest.mark.parametrize("algorithm", EPILOGUE_KERNELS)
def test_transcendental_functions_come_near(algorithm):
    for mine, total in simulate(algorithm, 3, tuple(TYPE_NAMES), FP32, "plain", 0, [len(EXACT)]):
        torch.testing.assert_close(mine, total, rtol=3e-6, atol=3e-6)
