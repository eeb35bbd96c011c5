"""The collectives on GPUs as one table: rows of tests.ops.conformance with the kernels that serve them.

test_collectives_gpu.py and test_collective_graphs_gpu.py ask every case the same questions, with all ranks in one
process. To test a new kernel, add a case.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from graphar import Codec
from graphar.numerics import leaf_tree, norms
from graphar.numerics.codecs import FP8, NAMES, codec
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.numerics.partitions import split
from graphar.plan import select
from graphar.plan.algorithms import COPYING, Algorithm, with_kernels
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import PACK_NBYTES, Sizes
from graphar.plan.work import Norm
from tests.cases import FLOAT_FILLS, bit_patterns, integers, normal, raw, same_bits
from tests.gpu import DTYPES, KERNEL_ALGORITHMS, Ranks, fits, poison
from tests.ops import specified as by
from tests.ops.conformance import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    FUSED_ALLGATHER,
    FUSED_ALLREDUCE,
    FUSED_NORM,
    FUSED_REDUCESCATTER,
    FUSED_SCATTERED_NORM,
    NORM,
    REDUCESCATTER,
    SCATTERED_NORM,
    Form,
    as_tree,
    placed,
    scattered_as_tree,
    tree,
)
from tests.ops.specified import Results, Tensors

BF16, FP32 = torch.bfloat16, torch.float32
STEP_NBYTES = Sizes.allgather_blocks * Sizes.allgather_chunk * PACK_NBYTES  # of a part, in one step of the largest grid
LAST_FLAGGED = Sizes.allgather_flagged_nbytes
ON_FIRST_GPU = 1 << 22  # elements, from which the CPU takes too long


@dataclass(frozen=True)
class Case:
    """A collective on GPUs.

    Attributes:
        form: how it is called, and what each rank must get.
        kernels: that serve it, each with the shape of a call that takes it.
        shapes: of small calls, the last of which takes several blocks.
        fills: whose bits are compared.
        dtypes: of the tensors.
        prepared: arguments of ``prepare``; None: a call is made before a graph is captured.
        served: whether its kernels serve a call of this shape and dtype; None: it is not known.
        once: whether a call is one launch.
    """

    form: Form
    kernels: dict[str, tuple[int, ...]]
    shapes: Sequence[tuple[int, ...]] = ()
    fills: Sequence[Callable] = FLOAT_FILLS
    dtypes: Sequence[torch.dtype] = DTYPES
    prepared: dict | None = None
    served: Callable[[tuple[int, ...], torch.dtype], bool | None] = field(default=lambda shape, dtype: None)
    once: bool = False

    def __str__(self) -> str:
        return str(self.form)

    @property
    def is_tree(self) -> bool:
        return self.form.options.get("order") == "tree" or self.form.op in TREE_NORMS

    def skip_unless_served(self, ranks: Ranks) -> None:
        if self.is_tree and ranks.world_size not in (2, 4, 8):
            pytest.skip("a tree has 2, 4 or 8 ranks")

    def fits(self, ranks: Ranks, shape, dtype: torch.dtype) -> bool:
        algorithm, count = (self.form.options.get(name) for name in ("algorithm", "num_partitions"))
        if count is not None:
            rows = -(-shape[0] // ranks.world_size) if "scatter" in str(self) else shape[0]
            return count <= (rows if self.form.options["partition"] == "split_m" else shape[1])
        return algorithm is None or fits(algorithm, ranks.world_size, torch.Size(shape).numel(), dtype)

    def draw(self, ranks: Ranks, shape, dtype: torch.dtype | None = None, fill=None, seed=0) -> Tensors:
        """Every rank's tensors, on the CPU; large ones on the first GPU. Matmuls have integers."""
        dtype, fill = dtype or self.dtypes[0], fill or (small_integers if "w" in self.form.known else normal)
        made = self.form.tensors(ranks.world_size, shape, dtype, lambda rank, *more: fill(seed + rank, *more))
        is_large = torch.Size(shape).numel() > ON_FIRST_GPU
        return {name: [x.to("cuda:0") for x in xs] for name, xs in made.items()} if is_large else made

    def place(self, ranks: Ranks, drawn: Tensors) -> Tensors:
        return {name: ranks.place(xs) for name, xs in drawn.items()}

    def prepare(self, ranks: Ranks, drawn: Tensors) -> None:
        """Has later calls with tensors like these be ready to be captured."""
        if self.prepared is None:
            self.call(ranks, self.place(ranks, drawn))
            return
        of_rank = self.form.arguments({name: xs[0] for name, xs in drawn.items()})
        more = {"epilogues": [of_rank["epilogue"]]} if "epilogue" in of_rank else {}
        ranks.communicator.prepare([BF16], **self.prepared, **more)

    def call(self, ranks: Ranks, tensors: Tensors) -> Results:
        return self.form.in_list(tensors, group=ranks.communicator)

    def call_into(self, ranks: Ranks, tensors: Tensors, outs: list[torch.Tensor]) -> None:
        """A call whose results are written to ``outs``. Of parts the engine makes it, not the op."""
        if self.form.takes_out:
            self.form.op(**self.form.arguments(tensors), out=outs, group=ranks.communicator)
            return
        op, own = self.form.op.__name__, self.form.options.get("codec")
        counts = [x.numel() for x in (tensors["x"] if op == "allgather" else outs)]
        algorithm = self.form.options.get("algorithm", "auto")
        ranks.run_parts(op, tensors["x"], outs, counts, own.text if own else "", algorithm)

    def calls(self, ranks: Ranks) -> int:
        """How many calls its kernels have counted."""
        return sum(ranks.calls_of(kernel) for kernel in self.kernels)

    def is_at_rest(self, ranks: Ranks) -> bool:
        return all(ranks.grid_is_idle(kernel) and ranks.scratch_is_as_before(kernel) for kernel in self.kernels)

    def expected(self, drawn: Tensors, at: int = 0) -> Results:
        """What each rank gets of the call of number ``at``, which random rounding goes by."""
        return self.form.expected(drawn, **({"call": at} if "codec" in self.form.options else {}))

    def check(self, ranks: Ranks, shape, *how, seed: int = 0, view: Callable = lambda name, x: x) -> None:
        """Checks a call. ``how``: dtype and fill. ``view``: of named tensors that the call does not write."""
        drawn, at = self.draw(ranks, shape, *how, seed=seed), self.calls(ranks)
        tensors = self.place(ranks, drawn)
        tensors = {
            name: xs if name in self.form.writes else [view(name, x) for x in xs] for name, xs in tensors.items()
        }
        expected = self.expected(drawn, at)
        poison([own[0].nbytes for own in expected])
        found = self.call(ranks, tensors)
        ranks.communicator.synchronize()
        assert_bits(found, expected, (str(self), shape, *how))
        served, calls = self.served(shape, *(how[:1] or self.dtypes[:1])), self.calls(ranks)
        if served is not None:
            assert calls == at + 1 if served and self.once else (calls != at) == served, (shape, *how)


def small_integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers from -4 to 4 without 0: fp32 holds any sum of fewer than 2^20 products, so all matmuls have its bits.

    With zeros, a sum of one product could be -0, which some of torch's matmuls turn into 0.
    """
    x = integers(rank, numel, torch.int64)
    return torch.where(x < 0, -1 - x % 4, 1 + x % 4).to(dtype)


def assert_bits(found: Results, expected: Results, what: object = "") -> None:
    for rank, (ys, wanted) in enumerate(zip(found, expected, strict=True)):
        wrong = [same_bits(y.to(one.device), one) for y, one in zip(ys, wanted, strict=True)]
        assert wrong == [0] * len(wanted), f"rank {rank}, {what}"


def settle(ranks: Ranks) -> None:
    for device in range(ranks.world_size):
        torch.cuda.synchronize(device)


def if_not_empty(shape, dtype) -> bool:
    return torch.Size(shape).numel() > 0


def if_rows_fit(shape, dtype) -> bool:
    return select.has_norm_kernel(shape[-1] * dtype.itemsize)


def named(form: Form, names: Sequence[str], of=(8199,), **how) -> list[Case]:
    """A case for each algorithm."""
    return [
        Case(replace(form, label=f"{form.label} {name}", options=form.options | {"algorithm": name}), {name: of}, **how)
        for name in names
    ]


NUMELS = [(n,) for n in (0, 1, 3, 7, 8, 64, 8192, 8193, 8199, 8200, 8216, 131072, 262144, 262149)]
MATRICES = ((16, 128), (15, 128), (9, 7168), (32, 256), (5, 3, 7), (3, 1), (1, 5), (3, 0), (0, 4))
PUSHED = {"reducescatter_push": (8199,)}
GATHERS = {"allgather_flagged": (8199,), "allgather_push": (STEP_NBYTES,)}  # of one byte an element
NBYTES = (
    *(1, 15, 16, 17, 2047, 2048, 2049, LAST_FLAGGED - 1, LAST_FLAGGED, LAST_FLAGGED + 1, 524304),
    *(STEP_NBYTES - 1, STEP_NBYTES, STEP_NBYTES + 1),
)
SUMS = named(ALLREDUCE[0], KERNEL_ALGORITHMS, shapes=NUMELS)
SUM = Case(ALLREDUCE[0], {}, NUMELS, prepared={})
SCATTER = Case(REDUCESCATTER[0], PUSHED, NUMELS[1:], prepared={"ops": ["reducescatter"]})
COPIED = [
    case
    for form in (ALLREDUCE[0], REDUCESCATTER[0], ALLGATHER[0], ALLTOALL[0])
    for one in [COPYING[form.op.__name__]]
    for case in named(form, [one.value], shapes=[*NUMELS[1:], ((1 << 24) + 77,)])  # the last in several chunks
    for case in [replace(case, kernels={})]  # its own kernel counts no calls
]
ALONG_AXES = [
    Case(replace(REDUCESCATTER[0], label=f"axis {axis}", options={"axis": axis}), PUSHED, shapes, [bit_patterns])
    for axis, shapes in ((0, MATRICES), (1, MATRICES), (2, MATRICES[4:5]), (-3, MATRICES[4:5]), (-1, MATRICES))
]
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8, *DTYPES, torch.float64, torch.int64)
GATHER = Case(
    ALLGATHER[0],
    GATHERS,
    [(n,) for n in NBYTES],
    [raw],
    (*MOVED, torch.complex64, torch.complex128),
    {"ops": ["allgather"]},
    if_not_empty,
    once=True,
)
GATHERED_ALONG_AXES = [
    Case(
        replace(
            ALLGATHER[2],
            make=functools.partial(by.uneven, axis % 3),
            label=f"sizes axis {axis}",
            options={"axis": axis},
        ),
        GATHERS,
        [(5, 5, 5)],
        [raw],
        GATHER.dtypes,
    )
    for axis in (0, 1, 2, -1)
]

STOCHASTIC = Codec(4, 128, "stochastic", seed=0xFEDCBA9876543210)
CODECS = (
    *(codec(name) for name in NAMES),
    STOCHASTIC,
    Codec(FP8, 1024, "stochastic", seed=1),
    Codec(8, 64, scheme="minmax"),
    Codec(2, 512, "stochastic", "minmax", torch.float32, seed=2),
)
QUANTIZED = tuple(one.value for one in with_kernels("allreduce", codec=True))


def any_bits_of_few(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (bit_patterns if numel < 10000 else normal)(rank, numel, dtype)


def coded(one: Codec) -> list[Case]:
    """Sums by each kernel that serves the codec, and parts of a sum."""
    names = [name for name in QUANTIZED if one.spares_a_word or name != Algorithm.QUANTIZED_TWO_SHOT_PUSH]
    how = {"shapes": [(n,) for n in (1, 7, 1024, 1025, 8199, 131072, 262149)], "fills": [any_bits_of_few]}
    how |= {"prepared": {"codecs": [one]}, "served": if_not_empty, "once": True}
    own = {"label": one.type_name, "options": {"codec": one}}
    parts = how | {"prepared": {"codecs": [one], "ops": ["reducescatter"]}}
    of_parts = Case(replace(REDUCESCATTER[2], **own), {Algorithm.QUANTIZED_REDUCESCATTER.value: (8199,)}, **parts)
    return [*named(replace(ALLREDUCE[2], **own), names, **how), of_parts]


CODED = [case for one in CODECS for case in coded(one)]
OF_INT4, RANDOM = coded(codec("int4")), coded(STOCHASTIC)

ROW_SHAPES = ((16, 128), (15, 128), (9, 7168), (5, 3, 7), (3, 1), (1, 5), (3, 0))
TREES = [
    case
    for dtype in DTYPES
    for how in [{"shapes": [*NUMELS, (4,), (5,)], "dtypes": (FP32,)}]
    for form in [as_tree(f"tree {dtype}".replace("torch.", ""), **tree(dtype))]
    for case in [
        *named(form, [one.value for one in with_kernels("allreduce") if one.row.adds_tree], **how),
        Case(form, {}, **how),
    ]
]
TREE = Case(as_tree("tree bf16", **tree(BF16)), {}, NUMELS, dtypes=(FP32,), prepared={"tp_invariant": True})
SCATTERED_TREES = [
    Case(
        scattered_as_tree(f"tree {dtype} axis {axis}".replace("torch.", ""), **tree(dtype, axis=axis)),
        {},
        shapes,
        dtypes=(FP32,),
    )
    for dtype in DTYPES
    for axis, shapes in ((0, ROW_SHAPES), (1, ROW_SHAPES), (2, ROW_SHAPES[3:4]))
]

EXACT = {
    "-v": ({}, {}),
    "v * scale + bias[col]": ({"bias": "col"}, {"scale": 0.1}),
    "max(v - a[row], b[col]) / (abs(c[index]) + 1) * d[0]": (
        dict(zip("abcd", ("row", "col", "index", "0"), strict=True)),
        {},
    ),
    "row > col ? bf16(v) : clamp(fp16(v * 3), -low, 2.5) + rint(v) * isnan(v) - sqrt(index)": ({}, {"low": 1.5}),
    "v + c[index] - row + b[col]": ({"c": "index", "b": "col"}, {}),
}
EPILOGUE_KERNELS = tuple(one.value for one in with_kernels("allreduce") if one.row.takes_epilogue)
FOLLOWED_SHAPES = ((1, 1), (3, 5), (1, 8192), (15, 128), (64, 128), (9, 7168), (17, 4099), (4097, 64))


def followed(form: Form, specify: Callable, what: str) -> Form:
    places, numbers = EXACT[what]
    of = {"dtypes": (torch.float16, BF16, FP32)} if places else {}
    make = functools.partial(placed(by.sums, specify, **places), **of) if places else by.sums
    return replace(form, label=what, make=make, epilogue=what, numbers=numbers)


OF_FOLLOWED = {"shapes": FOLLOWED_SHAPES, "fills": (normal, bit_patterns), "served": if_not_empty, "once": True}
FOLLOWED = {
    what: [
        *named(followed(ALLREDUCE[0], by.allreduced, what), EPILOGUE_KERNELS, of=(17, 65), prepared={}, **OF_FOLLOWED),
        Case(
            followed(REDUCESCATTER[0], by.reducescattered, what),
            PUSHED,
            prepared={"ops": ["reducescatter"]},
            **OF_FOLLOWED,
        ),
    ]
    for what in EXACT
}

# By op: few rows, many, and rows of several launches; long rows, and rows without a kernel. Ranks may have no row.
NORM_SHAPES = (
    *((1, 4096), (8, 4096), (1, 8192), (8, 8192), (1, 16384), (1024, 4096), (4096, 8192), (8192, 8192)),
    *((17, 16384), (20, 16384), (48, 8192), (1, 2048), (1, 7168), (8, 7168), (16, 7168), (32, 1024), (4, 8192)),
    *((1, 8), (5, 24), (300, 264), (133, 1032), (700, 32768), (3, 40000), (9, 7)),
)
PART_SHAPES = (
    *((1, 8), (1, 8192), (2, 4096), (7, 16384), (8, 8192), (33, 1024), (131, 7168), (1027, 4096)),
    *((4099, 8192), (40001, 128), (700, 32768), (5, 24), (300, 264), (9, 7)),
)
TREE_SHAPES = (*PART_SHAPES[:10], (5, 24), (300, 264), (9, 12), (9, 7), (3, 20000), (1, 4096))
NUMBERS = (1e-5, 1.0)


def of_groups(form: Form, shapes) -> list[tuple[int, int]]:
    return [shape for shape in shapes if shape[1] % form.options.get("group_size", 1) == 0]


def normed(form: Form, kernels: dict, shapes) -> Case:
    fp8 = {"": "", "rows": "_dynamic_fp8", "scale": "_static_fp8", "groups": "_grouped_fp8"}
    kind = form.label.split()[-1] if "fp8" in form.label else ""
    return Case(
        form, kernels, of_groups(form, shapes), prepared={"ops": [form.op.__name__ + fp8[kind]]}, served=if_rows_fit
    )


NORMS = [
    *(
        normed(
            form, dict(zip(map(str, with_kernels(ALLREDUCE_NORM)), ((1, 4096), (1024, 4096)), strict=True)), NORM_SHAPES
        )
        for form in NORM
    ),
    *(normed(form, {"reducescatter_rmsnorm": (81, 4096)}, PART_SHAPES) for form in SCATTERED_NORM),
]


def tree_call(op: str, x: torch.Tensor, world_size: int, dtype: torch.dtype | None) -> Call:
    """The call of a sum as a tree with a norm. No public op of one tensor makes it."""
    sizes = [len(x)] if op == ALLREDUCE_NORM else split(len(x), world_size)
    counts = tuple(size * x.shape[1] for size in sizes)
    work = Norm(op, counts, x.shape[1], "like_input", *NUMBERS, order="tree", out_dtype=dtype)
    return Call(work, FP32, x.get_device())


def normed_as_tree(op: str, x, residual, weight, group) -> tuple[list[torch.Tensor], ...]:
    ranks = [
        Operands(own, (torch.full_like(own[1], 7), torch.full_like(own[1], 7)))
        for own in zip(x, residual, weight, strict=True)
    ]
    group.engine.run(tree_call(op, x[0], len(x), weight[0].dtype), ranks)
    return tuple(list(ys) for ys in zip(*[own.outputs for own in ranks], strict=True))


def allreduced_and_normed_as_tree(x, residual, weight, group):
    return normed_as_tree(ALLREDUCE_NORM, x, residual, weight, group)


def scattered_and_normed_as_tree(x, residual, weight, group):
    return normed_as_tree(REDUCESCATTER_NORM, x, residual, weight, group)


TREE_NORMS = {allreduced_and_normed_as_tree: ALLREDUCE_NORM, scattered_and_normed_as_tree: REDUCESCATTER_NORM}


def tree_norm(op: Callable) -> Case:
    is_whole, kernels = op is allreduced_and_normed_as_tree, with_kernels(TREE_NORMS[op])

    def make(ranks, shape, dtype, fill) -> Tensors:
        beside = (by.with_norm if is_whole else by.with_norm_of_parts)(by.sums, ranks, shape, dtype, normal)
        return beside | by.sums(ranks, shape, FP32, fill)

    def specify(x, residual, weight) -> Results:
        whole = residual[0] if is_whole else torch.cat(residual)
        found = norms.specification(leaf_tree.tree_sum(x), whole, weight[0], *NUMBERS)
        return [found] * len(x) if is_whole else list(zip(*(one.tensor_split(len(x)) for one in found), strict=True))

    def served(shape, dtype) -> bool:
        work = Norm(TREE_NORMS[op], shape[:1], shape[1], "like_input", *NUMBERS, order="tree", out_dtype=dtype)
        return select.has_kernel_for_rows(work, FP32)

    of = {str(one): shape for one, shape in zip(kernels, ((1, 4096), (1024, 4096)), strict=False)}
    prepared = {"ops": [TREE_NORMS[op]], "tp_invariant": True}
    return Case(Form(op, "", make, specify, TREE_SHAPES), of, TREE_SHAPES, prepared=prepared, served=served)


NORMS_OF_TREES = [tree_norm(op) for op in TREE_NORMS]


WAYS = {way: {"partition": way} for way in ("none", "split_m", "split_n", "tiles")}
WAYS |= {
    "thirds": {"partition": "split_m", "num_partitions": 3},
    "fifths": {"partition": "split_n", "num_partitions": 5},
}
SIZES = list(itertools.product((1, 7, 129, 520), repeat=3))  # [M, N, K]
OF_NOTHING = [(0, 8, 8), (8, 0, 8), (8, 8, 0)]
OF_MATMUL = "max(v * scale, c[col]) + f[index] * r[row] + row * 0.5 - col + bf16(index)"
FOLLOWED_SIZES = ((7, 129, 65), (129, 136, 72), (520, 264, 40), (1500, 1032, 136))


def in_way(form: Form, way: str, shapes, dtypes=DTYPES, **more) -> Case:
    form = replace(form, label=f"{form.label} {way}".strip(), options=form.options | WAYS.get(way, {}), **more)
    return Case(form, {}, shapes, [small_integers], dtypes)


def with_epilogue_of_matmul(form: Form) -> Form:
    make = placed(by.with_bias, form.specify, c="col", f="index", r="row")
    return replace(form, label="epilogue", make=make, epilogue=OF_MATMUL, numbers={"scale": 0.375})


SUMMED = [
    in_way(form, way, SIZES[at :: len(WAYS)] + OF_NOTHING, (*DTYPES, torch.float64))
    for forms in (FUSED_ALLREDUCE, FUSED_REDUCESCATTER)
    for form in forms[:2]  # without and with a bias
    for at, way in enumerate(WAYS)
]
SUMMED_FOLLOWED = [
    in_way(with_epilogue_of_matmul(form), way, FOLLOWED_SIZES)
    for form in (FUSED_ALLREDUCE[0], FUSED_REDUCESCATTER[0])
    for way in WAYS
]
OFFSET = {"eps": 1e-5, "weight_offset": 1.0}
SUMMED_AND_NORMED = [
    in_way(replace(form, options=OFFSET), way, shapes)
    for form, shapes in (
        (FUSED_NORM[0], [(*rows, k) for rows in itertools.product((1, 7, 129, 520), (8, 264, 1032)) for k in (1, 136)]),
        (FUSED_SCATTERED_NORM[0], [(m, 1032, 136) for m in (1, 129, 2051)]),
    )
    for way in ("", "none", "tiles")
]
(UNEVEN_ROWS,) = [form for form in FUSED_ALLGATHER if form.label == "bias sizes gathered"]
GATHERED_SIZES = [(1, 8, 8), (64, 136, 72), (700, 264, 1032), (1500, 128, 520)]  # torch's matmul of others rounds sums
GATHERED = [
    in_way(replace(form, options=form.options | {"partition": way}), way, shapes + more * (way == "tiles"))
    for form, shapes, more in (
        (UNEVEN_ROWS, GATHERED_SIZES, [(65, 129, 67), (7, 1, 1000)]),
        (with_epilogue_of_matmul(FUSED_ALLGATHER[0]), [(100, 136, 264), (130, 136, 264)], []),
    )
    for way in ("none", "tiles", "chunks")
]
