"""Kernels with an epilogue, executed on the host: exact expressions give the specification's bits, others come near."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from graphar import reference
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.numerics.epilogues.code import generate
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.epilogues.syntax import parse
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.runtime.catalogue import KERNELS, kernel_source
from graphar.simulator.build import SANITIZERS, Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import build, known, seeds
from tests.host.cases import WAYS, scratch_of
from tests.host.mutant import notices

pytestmark = pytest.mark.host

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Expressions, and the dtypes of their tensors, sorted by name.
EXACT = (
    ("-v", ()),
    ("v * scale + bias[col]", (BF16,)),
    ("max(v - a[row], b[col]) / (abs(c[index]) + 1) * d[0]", (FP16, BF16, FP32, FP32)),
    ("row > col ? bf16(v) : clamp(fp16(v * 3), -low, 2.5) + rint(v) * isnan(v) - index", ()),
    ("where(col < 3, hardswish(v), hardswish(-v))", ()),
)
NEAR = (
    "gelu(v) + gelu_tanh(v) * silu(v) - sigmoid(v) + tanh(v) * exp(min(v, 1)) + erf(v) + rsqrt(abs(v) + 1)"
    " + softplus(v) - elu(v) * mish(v)",
    (),
)
WORLD_SIZES = (2, 3, 4)
CALLS = 8
ALGORITHMS = tuple(one for one in KERNELS if one.row.takes_epilogue)
MUTANTS = (
    ("a row's end goes unnoticed", "ends ? arguments.first_col : at.col + 1", "at.col + 1"),
    ("places begin where a launch does", "first = skipped + pack * E", "first = 0 * skipped + pack * E"),
    ("a pack's last element has no operands", "if (e < count) Expression", "if (e + 1 < count) Expression"),
    ("a NaN gives way to a number", "return a > b || is_nan(a) ? a : b;", "return a > b ? a : b;"),
)


known(Mutation("device/epilogue.cuh", *one[1:]) for one in MUTANTS)


def variants(algorithm: Algorithm) -> tuple[str | None, ...]:
    return WAYS[algorithm].variants


def expressions_of(sanitizer: str) -> tuple:
    return (*EXACT, NEAR) if sanitizer == "plain" else EXACT


def world_sizes_of(sanitizer: str) -> tuple[int, ...]:
    return WORLD_SIZES[:1] if sanitizer == "address" else WORLD_SIZES


def program(algorithm: Algorithm, dtypes, sanitizer: str, mutation: Mutation | None = None):
    sources = [
        kernel_source(algorithm, dtype, world_size, variant, generate(*expression))
        for dtype in dtypes
        for world_size in world_sizes_of(sanitizer)
        for expression in expressions_of(sanitizer)
        for variant in variants(algorithm)
    ]
    return build(tuple(sources), sanitizer, mutation)


def draw_counts(
    algorithm: Algorithm, world_size: int, rows: int, columns: int, choices: random.Random
) -> tuple[int, ...]:
    """The elements of each rank's part, at most so many rows; of the whole tensor if the op has no parts."""
    if algorithm is not Algorithm.REDUCESCATTER_PUSH:
        return (rows * columns,)
    counts = tuple(choices.choice([0, choices.randint(1, rows), rows]) * columns for _ in range(world_size))
    return counts if any(counts) else (rows * columns,) * world_size


def draw_call(algorithm: Algorithm, world_size: int, dtype: torch.dtype, at: int, choices: random.Random):
    """A call of expression ``at``, and what each rank must get."""
    text, dtypes = (*EXACT, NEAR)[at]
    way = WAYS[algorithm]
    rows, columns = choices.randint(1, 9), choices.choice([1, 3, 8, 40, 61])
    counts = draw_counts(algorithm, world_size, rows, columns, choices)
    skipped = choices.choice([0, 8]) * columns if len(counts) > 1 else 0
    fill = normal if at == len(EXACT) else choices.choice([normal, bit_patterns])
    xs = [fill(rank, sum(counts), dtype) for rank in range(world_size)]
    numel = max(counts) + skipped
    sizes = {"row": numel // columns, "col": columns, "index": numel, "0": 1}
    found = parse(text)
    tensors = [
        normal(20 + at, sizes[next(one.subscript for one in found.operands if one.name == name)], one_dtype)
        for at, (name, one_dtype) in enumerate(zip(found.tensors, dtypes, strict=True))
    ]
    scalars = [0.375 + k for k in range(len(found.scalars))]
    form, operands = Pointwise(text, dtypes, columns), EpilogueInputs(tensors, scalars)
    shares = zip(*(x.split(counts) for x in xs), strict=True)
    sums = [reference.allreduce(share, out_dtype=torch.float32) for share in shares]
    parts = [with_canonical_nan(form.apply(total, operands, skipped, numel).to(xs[0].dtype)) for total in sums]
    parts = parts if len(counts) > 1 else parts * world_size
    threads = choices.choice(way.threads(world_size))
    shape = Config(algorithm, choices.choice([1, 2, 3]), threads, choices.choice([1, 3]) if way.chunked else 0)
    variant = choices.randrange(len(way.variants))
    call = Call(
        at * len(way.variants) + variant,
        shape,
        xs,
        counts,
        tuple(part.nbytes for part in parts),
        offset=choices.choice([0, dtype.itemsize]),
        in_place=way.in_place[variant] and choices.random() < 0.3,
        operands=tuple(tensors),
        scalars=tuple(scalars),
        columns=columns,
        skipped=skipped,
    )
    return call, parts


def simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed, expressions, mutation=None):
    """What each rank got from each call, and what it must get."""
    choices = random.Random(f"{algorithm} {world_size} {dtype} {seed}")
    drawn = [draw_call(algorithm, world_size, dtype, choices.choice(expressions), choices) for _ in range(CALLS)]
    each, world_sizes = len(expressions_of(sanitizer)) * len(variants(algorithm)), world_sizes_of(sanitizer)
    first = (dtypes.index(dtype) * len(world_sizes) + world_sizes.index(world_size)) * each
    needs = scratch_of(algorithm, world_size)
    made = program(algorithm, dtypes, sanitizer, mutation)
    outcomes = Simulation(made, algorithm, world_size, needs, first, seed).run([call for call, _ in drawn])
    assert [(outcome.record.kind, outcome.broken_guards) for outcome in outcomes] == [(0, 0)] * world_size
    return [
        (result.view(dtype), parts[rank])
        for rank, outcome in enumerate(outcomes)
        for result, (_, parts) in zip(outcome.results, drawn, strict=True)
    ]


CASES = [(one, *how) for one in ALGORITHMS for how in ((s, n) for s in SANITIZERS for n in world_sizes_of(s))]


@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), CASES)
def test_exact_expressions_give_the_specifications_bits(algorithm, sanitizer, world_size):
    dtypes = tuple(TYPE_NAMES) if sanitizer == "plain" else (BF16,)
    for dtype in dtypes:
        for seed in seeds(4 if sanitizer == "plain" else 2):
            results = simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed, range(len(EXACT)))
            assert [same_bits(mine, total) for mine, total in results] == [0] * len(results), f"{dtype}, seed {seed}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_transcendental_functions_come_near(algorithm):
    for mine, total in simulate(algorithm, 3, tuple(TYPE_NAMES), FP32, "plain", 0, [len(EXACT)]):
        torch.testing.assert_close(mine, total, rtol=3e-6, atol=3e-6)


def wrong_results(mutation: Mutation, seed: int) -> bool:
    results = simulate(Algorithm.REDUCESCATTER_PUSH, 3, (FP32,), FP32, "plain", seed, range(len(EXACT)), mutation)
    return any(same_bits(mine, part) for mine, part in results)


@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[what for what, *_ in MUTANTS])
def test_a_mistake_is_noticed(what, old, new):
    mutation = Mutation("device/epilogue.cuh", old, new)

    assert any(notices(partial(wrong_results, mutation, seed)) for seed in range(8))
