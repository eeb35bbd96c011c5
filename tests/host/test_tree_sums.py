"""Kernels that add as a tree, executed on the host: the specification's bits at 2, 4 and 8 ranks, in each dtype.

A communicator's calls take turns: with the order of ranks and as a tree, with results of 32 bits and of 16. All share
their slots.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from graphar import reference
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.numerics.epilogues.code import generate
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.plan.algorithms import Algorithm
from graphar.plan.work import Sum, template_of
from graphar.runtime.catalogue import KERNELS, kernel_source
from graphar.simulator.build import Mutation
from graphar.simulator.calls import Drawn
from graphar.simulator.simulation import Call
from tests.cases import FLOAT_FILLS, normal
from tests.host import cases
from tests.host.build import build, known, seeds
from tests.host.cases import WAYS, faults
from tests.host.mutant import notices

pytestmark = pytest.mark.host

ALGORITHMS = tuple(one for one in KERNELS if one.row.adds_tree)
WORLD_SIZES = (2, 4, 8)
MOST_RANKS = {"plain": 8, "thread": 4, "address": 8}
SEEDS = {"plain": 6, "thread": 3, "address": 2}
CALLS = 6
FP32, BF16 = torch.float32, torch.bfloat16
TREES = (*TYPE_NAMES,)  # the results' dtypes
EXPRESSION, DTYPES_OF_TENSORS = "v * scale - a[index]", (BF16,)
# What a call may be: in the order of ranks, as a tree with each result, and with an epilogue.
KINDS = (None, *TREES, "epilogue")
PACK, SENTINEL, TWO_SHOT = "device/pack.cuh", "device/sync/sentinel.cuh", "allreduce/two_shot_push.cu"
ADD = "total[0] = sum_of_tree<N>(part, w);"
MUTANTS = {
    "ranks added one after another": (
        PACK,
        "return sum_of_tree<Count / 2>(part, w) + sum_of_tree<Count / 2>(part + Count / 2, w);",
        "return sum_of_tree<Count - 1>(part, w) + sum_of_tree<1>(part + Count - 1, w);",
        "one_shot_push",
    ),
    "neighbours that are no neighbours": (
        PACK,
        ADD,
        "const Pack swapped[4] = {part[0], part[2], part[1], part[3]};\n    total[0] = sum_of_tree<N>(swapped, w);",
        "reducescatter_push",
    ),
    "a sum rounded before its last addition": (
        PACK,
        ADD,
        "const float pair[2] = {sum_of_tree<N / 2>(part, w), sum_of_tree<N / 2>(part + N / 2, w)};\n"
        "    float rounded[2];\n    bf16::unpack(bf16::round(pair), rounded);\n    total[0] = rounded[0] + rounded[1];",
        "two_shot_pipelined",
    ),
    "a half pack of which one word is looked at": (
        SENTINEL,
        "most[i] = max(parts[i].word[0], parts[i].word[1]);",
        "most[i] = parts[i].word[0];",
        "two_shot_push",
    ),
    "a half pack that is not armed again": (
        SENTINEL,
        "store_relaxed_sys(place, HalfPack{{not_yet, not_yet}});",
        "(void)place;",
        "two_shot_push",
    ),
    "slots of sums that are counted in packs": (
        TWO_SHOT,
        "gather + sums * owner * a.capacity, first",
        "gather + owner * a.capacity, first",
        "two_shot_push",
    ),
    "slots of half packs that lie like those of packs": (
        "device/sync/two_shot_pipeline.cuh",
        "(in_a_pack<P> * from * a.capacity + at)",
        "(from * 2 + at)",
        "two_shot_pipelined",
    ),
    "half packs stored where no 8 bytes begin": (
        PACK,
        "whole(reinterpret_cast<u64>(p) % sizeof(P) ? 0 : n / E)",
        "whole(n / E)",
        "one_shot_push",
    ),
}


def test_only_kernels_without_a_codec_add_as_a_tree():
    assert set(ALGORITHMS) == {"one_shot_push", "two_shot_push", "two_shot_pipelined", "reducescatter_push"}
    assert not any(one.row.takes_codec or not one.row.exact for one in ALGORITHMS)


def program(algorithm: Algorithm, world_sizes, sanitizer: str, *mutations: Mutation):
    sources = []
    for world_size in world_sizes:
        for variant in WAYS[algorithm].variants:
            for kind in KINDS:
                tree = template_of(Sum(1, order="tree", out_dtype=BF16 if kind == "epilogue" else kind))
                epilogue = generate(EXPRESSION, DTYPES_OF_TENSORS) if kind == "epilogue" else None
                order = tree if kind else None
                sources.append(kernel_source(algorithm, FP32, world_size, variant, epilogue, order))
    return build(tuple(sources), sanitizer, *mutations)


def draw(algorithm: Algorithm, world_size: int, seed: int) -> Drawn:
    """A sequence of calls, and the bytes that each rank must get."""
    choices = random.Random(f"tree {algorithm} {world_size} {seed}")
    made = [_draw_call(algorithm, world_size, choices) for _ in range(CALLS)]
    return Drawn([call for call, _ in made], [parts for _, parts in made])


def _draw_call(algorithm: Algorithm, world_size: int, choices: random.Random) -> tuple[Call, list[torch.Tensor]]:
    way, kind = WAYS[algorithm], choices.choice([*KINDS, *TREES])
    variant = choices.randrange(len(way.variants))
    plain, _ = cases.draw_call(algorithm, world_size, FP32, variant, choices, 0)
    fill = choices.choice([normal, normal, *FLOAT_FILLS])
    first = 10 * choices.randrange(9)
    xs = [fill(first + rank, sum(plain.counts), FP32) for rank in range(world_size)]
    out_dtype = BF16 if kind == "epilogue" else kind or FP32
    order, whole = ("tree" if kind else "rank"), len(plain.counts) == 1
    shares = list(zip(*(x.split(plain.counts) for x in xs), strict=True))
    operands, scalars = (), ()
    if kind == "epilogue":
        form, numel = Pointwise(EXPRESSION, DTYPES_OF_TENSORS, 1), max(plain.counts)
        operands, scalars = (normal(99, numel, BF16),), (0.375,)
        inputs = EpilogueInputs(list(operands), list(scalars))
        sums = [reference.allreduce(one, order=order, out_dtype=FP32) for one in shares]
        parts = [with_canonical_nan(form.apply(one, inputs, 0, numel).to(out_dtype)) for one in sums]
    else:
        parts = [reference.allreduce(one, order=order, out_dtype=out_dtype) for one in shares]
    parts = parts * world_size if whole else parts
    call = replace(
        plain,
        kernel=variant * len(KINDS) + KINDS.index(kind),
        inputs=xs,
        output_nbytes=tuple(part.nbytes for part in parts),
        offset=choices.choice([0, 0, 16, 8, 4]),
        in_place=plain.in_place and out_dtype == FP32,
        operands=operands,
        scalars=scalars,
    )
    return call, parts


def simulate(algorithm, made, world_sizes, world_size: int, seed: int) -> list[str]:
    """Descriptions of all errors of one sequence."""
    drawn, first = draw(algorithm, world_size, seed), world_sizes.index(world_size)
    first *= len(KINDS) * len(WAYS[algorithm].variants)
    return faults(drawn, made, algorithm, world_size, first, seed)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sanitizer", SEEDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size):
    if world_size > MOST_RANKS[sanitizer]:
        pytest.skip("so many threads are more than ThreadSanitizer can take")
    these = tuple(size for size in WORLD_SIZES if size <= MOST_RANKS[sanitizer])
    made = program(algorithm, these, sanitizer)
    for seed in seeds(SEEDS[sanitizer]):
        assert simulate(algorithm, made, these, world_size, seed) == [], f"seed {seed}"


known(Mutation(*one[:3]) for one in MUTANTS.values())


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    file, old, new, name = MUTANTS[mistake]
    algorithm = Algorithm(name)
    made = program(algorithm, (4,), "plain", Mutation(file, old, new))

    assert any(notices(partial(simulate, algorithm, made, (4,), 4, seed)) for seed in range(20))
