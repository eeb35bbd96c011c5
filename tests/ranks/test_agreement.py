"""A call in words: what ranks must agree on is in them, and what may differ is not. Fingerprints stand for words."""

import itertools
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from graphar.numerics.codecs import Codec, codec
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.norms import NORM_OUTPUTS
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config, Kernel
from graphar.plan.matmuls import tiles_that_serve
from graphar.plan.slices import Slice
from graphar.plan.work import FORMATS, Norm, Parts, Product, Sum, TensorTuple, template_of
from graphar.product.fused import sources_of_tile
from graphar.ranks import agreement
from graphar.ranks.agreement import Fingerprints
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime.catalogue import GATHERING_KERNELS, KERNELS, NORM_KERNELS, SKINNY_KERNELS, SUMMED_TILE_KERNELS
from graphar.runtime.runner import Runner

BF16, NEGATED, DOUBLED = torch.bfloat16, Pointwise("(-v)", (), 8), Pointwise("2 * v", (), 8)
ROWS = (128, 128)
OF_SUMS = [
    {"codec": "int8"},
    {"epilogue": NEGATED},
    {"epilogue": DOUBLED},
    *({"epilogue": Pointwise("v + b[col]", (dtype,), 8)} for dtype in (BF16, torch.float32)),
]
OF_ORDERS = [{"order": "tree"}, {"order": "tree", "out_dtype": BF16}, {"beside": "after products of 64 columns"}]
# A work of each kind, and for each a change of one thing on which ranks must agree.
CHANGES = {
    Sum(8, shape=(2, 4)): [{"numel": 9, "shape": (3, 3)}, {"shape": (4, 2)}, *OF_SUMS, *OF_ORDERS],
    Parts("reducescatter", (8, 8)): [
        {"op": "allgather"},
        {"parts": (9, 7)},
        {"row": (4,)},
        {"axis": 1},
        *OF_SUMS,
        *OF_ORDERS,
    ],
    Norm("allreduce_residual_rmsnorm", (16,), 8): [
        {"op": "reducescatter_residual_rmsnorm"},
        {"parts": (32,)},
        {"columns": 4},
        {"output": "dynamic_fp8"},
        {"eps": 1e-5},
        {"eps": 1.00000001e-6},
        {"weight_offset": 1.0},
        {"row": (2, 8)},
        *OF_ORDERS,
    ],
    TensorTuple((BF16, torch.float32), ((4,), ()), ROWS): [
        {"dtypes": (BF16, BF16)},
        *({"rows": rows} for rows in (((8,), ()), ((2, 2), ()), ((), (4,)))),
        *({"sizes": sizes} for sizes in ((128, 127), (127, 128))),
        {"dtypes": (BF16,), "rows": ((4,),)},
        {"beside": "followed by a matmul"},
    ],
    Product("fused_allgather_matmul", ROWS, 512): [
        {"op": "fused_matmul_allreduce"},
        {"parts": (256, 128)},
        {"columns": 256},
        {"bias": True},
        {"norm": (1e-6, 0.0)},
        *OF_SUMS,
    ],
}
DIFFERENCES = {work: [work._replace(**change) for change in changes] for work, changes in CHANGES.items()}


@pytest.mark.parametrize("work", DIFFERENCES, ids=lambda work: type(work).__name__)
def test_works_that_differ_have_different_words(work):
    words = [agreement.words(Call(one, BF16, 0)) for one in (work, *DIFFERENCES[work])]

    assert len(set(words)) == len(words)


def test_works_of_two_kinds_are_never_equal():
    """They are tuples, and plans are found by them."""
    works = [one for work, others in DIFFERENCES.items() for one in (work, *others)]

    assert len(set(works)) == len(works)


@pytest.mark.parametrize("how", [{"timeout_s": 3.0}, {"blocks": 4}, {"symmetric": True}])
def test_what_may_differ_between_ranks_is_not_in_the_words(how):
    assert agreement.words(Call(Sum(8), BF16, 0, **how)) == agreement.words(Call(Sum(8), BF16, 1))


def test_a_seed_is_not_in_the_words():
    codecs = [f"bits=4, rounding=stochastic, seed={seed}" for seed in (1, 22)]

    assert len({agreement.words(Call(Sum(8, one), BF16, 0)) for one in codecs}) == 1


PUSH = Config(Algorithm.ONE_SHOT_PUSH, 3, 64)
PULL = Config(Algorithm.ONE_SHOT, 3, 64)
WIDE = Call(Sum(8, epilogue=Pointwise("(-v)", (), 4096)), BF16, 0)
UNLIKE = {
    "grids": ((PULL, WIDE), (replace(PULL, blocks=4), WIDE)),
    "grids of a sentinel": ((PUSH, WIDE), (replace(PUSH, threads=128), WIDE)),
    "symmetric memory": ((PULL, WIDE), (replace(PULL, direct=True), WIDE)),
    "columns": ((PULL, WIDE), (PULL, WIDE._replace(work=Sum(8, epilogue=Pointwise("(-v)", (), 8192))))),
}


@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_configurations_in_which_ranks_must_not_differ_have_different_words(pair):
    one, other = (agreement.words_of_launch(call, config, Slice(8)) for config, call in pair)

    assert one != other


EPILOGUES = [None, NEGATED, *(Pointwise("v + b[col]", (dtype,), 8) for dtype in (BF16, torch.float32))]
CODECS = [*map(codec, ("int8", "int4", "fp8_e4m3")), Codec(4, 32, "stochastic", seed=3)]
TREES = [template_of(Sum(8, order="tree", out_dtype=dtype)) for dtype in (BF16, torch.float32)]


def every_kernel():
    """Kernels of all algorithms, with whatever each of them can have."""
    for algorithm in (*KERNELS, *NORM_KERNELS):
        row = algorithm.row
        ways = [{"codec": one} for one in CODECS] if row.takes_codec else [{}]
        ways += [{"direct": True}] if row.direct else []
        ways += [{"epilogue": one} for one in EPILOGUES[1:]] if row.takes_epilogue else []
        if algorithm in NORM_KERNELS:
            norms = [
                Norm(row.op, (16,), 8, output, order=order) for output in NORM_OUTPUTS for order in ("rank", "tree")
            ]
            ways = [{"template": template_of(norm, cluster)} for norm in norms for cluster in (1, 2)]
        elif row.adds_tree:
            ways += [{"template": one} for one in TREES]
        if BYTE in row.dtypes:
            ways.append({"template": template_of(TensorTuple((), (), ()))})
        yield from (Kernel(algorithm, dtype, **way) for dtype in row.dtypes for way in ways)


def every_tile():
    """All that a fused matmul loads for a tile: algorithm, dtype of the result, tile and work."""
    for algorithm in (*SUMMED_TILE_KERNELS, *SKINNY_KERNELS, *GATHERING_KERNELS):
        works = [
            Product(algorithm.op, ROWS, 512, epilogue=one) for one in EPILOGUES[: 1 if algorithm.row.is_skinny else 4]
        ]
        works += (
            [Product(algorithm.op, ROWS, 512, codec=one.text) for one in CODECS] if algorithm.row.sends_tiles else []
        )
        for dtype, tile in itertools.product((BF16, torch.float16), algorithm.row.tiles):
            yield from ((algorithm, dtype, tile, work) for work in works)
        for format in FORMATS:
            work = Product(algorithm.op, ROWS, 512, format=format)
            yield from ((algorithm, BF16, tile, work) for tile in tiles_that_serve(algorithm, work, 2).tiles)


@pytest.mark.parametrize("kind", ["kernels", "tiles"])
def test_ranks_that_load_other_sources_say_so(kind):
    runner = Runner([], 2, None, None, None, None)
    if kind == "kernels":
        found = {(runner.source_of(one), agreement.words_of_kernel(one)) for one in every_kernel()}
    else:
        found = {(tuple(sources_of_tile(2, *one).items()), agreement.words_of_tile(*one)) for one in every_tile()}
    sources, words = (len({pair[at] for pair in found}) for at in range(2))

    assert sources == words == len(found) > 100


def test_launches_of_a_matmul_that_differ_have_different_words():
    call = Call(Product("fused_matmul_allreduce", ROWS, 512), BF16, 0)
    summed, scattered = Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_REDUCESCATTER
    launches = [
        (call, summed, Slice(8)),
        (call._replace(dtype=torch.float16), summed, Slice(8)),
        (call, scattered, Slice(8)),
        (call, summed, Slice(8, offset=4)),
        (call, summed, Slice(8), 512),
        (call, summed, Slice(8), 256),
    ]

    assert len({agreement.words_of_matmul_launch(*one) for one in launches}) == len(launches)


def of_two_ranks(store):
    return [Fingerprints(StoreRendezvous(store, "test", rank, 2, 1.0)) for rank in range(2)]


def test_different_words_have_different_fingerprints_which_other_ranks_look_up():
    first, second = of_two_ranks(dist.HashStore())
    launches = [agreement.words_of_launch(WIDE, PULL, Slice(8, offset=offset)) for offset in (0, 4)]
    words = [launches[0], "a norm", launches[1]]
    asked = [*map(first.of, words), second.of(words[0])]

    assert len(set(asked)) == 3
    assert asked[0] == asked[3]
    assert [second.words(one, 0) for one in asked[:3]] == words
    assert words[2].endswith(", from element 4 of each part on")
    assert second.words(asked[1], 1) == second.words(1, 0) == "another call"


def test_words_that_are_not_told_yet_are_waited_for():
    first, second = of_two_ranks(dist.HashStore())
    number = first.of("a call", tells=False)

    assert first.words(number, 0) == "a call"
    assert second.words(number, 0) == "another call"
    later = threading.Timer(0.1, first.tell, [number])
    later.start()
    assert second.words(number, 0, patience_s=60) == "a call"
    later.join()


def test_words_that_are_not_told_touch_no_store_and_displace_none_that_are(monkeypatch):
    monkeypatch.setattr(agreement, "_KEPT_CALLS", 2)
    store = dist.HashStore()
    first, second = of_two_ranks(store)
    told = [first.of(words) for words in ("one", "two")]
    keys = store.num_keys()
    monkeypatch.setattr(first, "_rendezvous", None)

    untold = [first.of(f"two, numbers {at}", tells=False) for at in range(5)]

    assert [second.words(number, 0) for number in told] == ["one", "two"]
    assert store.num_keys() == keys
    assert [first.words(number, 0) for number in untold[3:]] == ["two, numbers 3", "two, numbers 4"]


def test_numbers_are_alike_where_kernels_take_the_same():
    numbers = [(0.1,), (0.1 + 1e-12,), (0.1 + 1e-8,), (0.1, 2.0)]

    first, close, other, more = (agreement.words_with_numbers("a call", one) for one in numbers)

    assert first == close == "a call, numbers 0.100000001"
    assert len({first, other, more}) == 3


def test_only_the_last_calls_are_kept_in_words(monkeypatch):
    monkeypatch.setattr(agreement, "_KEPT_CALLS", 2)
    store = dist.HashStore()
    first, second = of_two_ranks(store)
    keys = store.num_keys()

    asked = [first.of(words) for words in ("one", "two", "two", "three")]

    assert [second.words(one, 0) for one in asked] == ["another call", "two", "two", "three"]
    assert store.num_keys() == keys + 2
