"""The public ops and their options as one table: how ranks call each, and what each of them must get.

A row of :data:`FORMS` is an op with some of its options. The tests of test_conformance*.py ask every row the same
questions: with lists, in one process that has all ranks, and with one process per rank. To test a new op or a new
option, add a row.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Codec, Epilogue
from graphar.numerics.partitions import TP_INVARIANT
from tests import inside
from tests.cases import ALL_DTYPES, HALVES, INTEGERS, KERNEL_DTYPES, bit_patterns, integers, normal, raw
from tests.ops import specified as by
from tests.ops.specified import FP8, Results, Tensors


def parameters(op: Callable) -> set[str]:
    """The names of a public function's arguments."""
    return set(inspect.signature(op).parameters)


@dataclass(frozen=True)
class Form:
    """An op with some of its options.

    Attributes:
        op: the public function.
        label: names the options; empty: none.
        make: the tensors of a call, ``make(ranks, shape, dtype, fill)``.
        specify: what each rank gets, by graphar.reference: ``specify(**tensors, **options)`` as a call with lists.
        shapes: that ``make`` takes.
        dtypes: that the form takes.
        fill: of floating-point tensors whose bits are compared.
        options: arguments that are no tensors.
        epilogue: an expression or a function. Its tensors are those that the op has no argument for.
        numbers: of the epilogue.
        of_processes: arguments that a process gives and a list does not, ``of_processes(tensors)``.
        writes: arguments that the call changes. ``specify`` has their new values after the results.
        leaves: arguments that get gradients; none if the form is not differentiable.
        backward: gradients of ``x`` with the bits that they must have, ``backward(gradients)``. None: they are close to
            those that autograd finds for ``specify``.
        twice: whether there are second derivatives.
        one_loss: whether processes share one loss, so that a rank's gradients are those of its own result.
    """

    op: Callable
    label: str
    make: Callable[..., Tensors]
    specify: Callable[..., Results]
    shapes: Sequence[tuple[int, ...]]
    dtypes: Sequence[torch.dtype] = KERNEL_DTYPES
    fill: Callable = bit_patterns
    options: dict = field(default_factory=dict)
    epilogue: str | Callable | None = None
    numbers: dict = field(default_factory=dict)
    of_processes: Callable[[Tensors], dict] = lambda tensors: {}
    writes: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    backward: Callable | None = None
    twice: bool = False
    one_loss: bool = False
    known: frozenset[str] = field(init=False)  # the names of the op's arguments

    def __post_init__(self):
        object.__setattr__(self, "known", frozenset(parameters(self.op)))  # torch.compile traces no signature

    def __str__(self) -> str:
        return f"{self.op.__name__} {self.label}".rstrip().replace(" ", "-")

    def ranks(self, asked: int) -> int:
        """How many ranks a test has that asks for so many: a tree has 4 in place of 3."""
        return 4 if asked == 3 and self.is_tree else asked

    @property
    def is_tree(self) -> bool:
        """Whether results are trees of 8 leaves, which 1, 2, 4 or 8 ranks have."""
        return "logits" in self.known or not {"tree", TP_INVARIANT}.isdisjoint(map(str, self.options.values()))

    @property
    def takes_out(self) -> bool:
        return "out" in self.known and not self.writes

    @property
    def is_random(self) -> bool:
        """Whether each call of a communicator rounds differently."""
        return getattr(self.options.get("codec"), "rounding", "nearest") == "stochastic"

    @property
    def is_steady(self) -> bool:
        """Whether a second call gives the bits of the first."""
        return not self.is_random and not self.writes

    @property
    def small(self) -> tuple[int, ...]:
        """A shape for tests that do not ask for bits: 6 rows and 8 columns, of matmuls of 5 products each.

        With scales for groups of columns, a group in place of 8 columns. Four dimensions if two of them are exchanged.
        """
        if self.options.get("partition") == TP_INVARIANT:
            return (6, 8, 16)
        if len({self.options.get(name) for name in ("scatter_dim", "gather_dim")}) == 2:
            return (6, 4, 8, 2)
        if "logits" in self.known:
            return (6, 16)
        return (6, 8, 5) if "w" in self.known else (6, self.options.get("group_size", 8))

    def tensors(self, ranks: int, shape=None, dtype=None, fill=None) -> Tensors:
        """Every rank's tensors. The last of ``shapes`` is the default shape."""
        dtype = dtype or self.dtypes[0]
        chosen = fill or (integers if dtype in INTEGERS else self.fill)
        return self.make(ranks, self.shapes[-1] if shape is None else shape, dtype, chosen)

    def arguments(self, tensors: dict) -> dict:
        """All arguments of a call with these tensors: lists, or one rank's."""
        found = self.options | {name: one for name, one in tensors.items() if name in self.known}
        if self.epilogue is not None:
            rest = {name: one for name, one in tensors.items() if name not in self.known}
            found["epilogue"] = Epilogue(self.epilogue, **self.numbers, **rest)
        return found

    def in_list(self, tensors: Tensors, **more) -> Results:
        """What each rank gets from a call with lists."""
        found = self.op(**self.arguments(tensors), **more)
        results = list(zip(*found, strict=True)) if isinstance(found, tuple) else [(y,) for y in found]
        return [(*ys, *(tensors[name][rank] for name in self.writes)) for rank, ys in enumerate(results)]

    def of_rank(self, rank: int, tensors: Tensors, **more) -> tuple[torch.Tensor, ...]:
        """What this process gets as one rank."""
        own = {name: ones[rank] for name, ones in tensors.items()}
        found = self.op(**self.arguments(own), **self.of_processes(tensors), **more)
        return (*(found if isinstance(found, tuple) else (found,)), *(own[name] for name in self.writes))

    def expected(self, tensors: Tensors, **more) -> Results:
        """What each rank must get."""
        return self.specify(**self.arguments(tensors), **more)


def copies(tensors: Tensors) -> Tensors:
    return {name: [one.clone() for one in ones] for name, ones in tensors.items()}


SHAPES = ((1,), (8193,), (5, 33), (0, 3), (3, 0), (7, 1, 6))
MATRICES = ((8200,), (0, 4), (5, 3, 70), (6, 700))
ROWS = ((1, 8), (3, 5, 40), (2, 8200), (0, 16), (7,), (5, 24))
SPLIT_ROWS = tuple(shape for shape in ROWS if len(shape) > 1)
GROUPED_ROWS = ((1, 128), (3, 2, 256), (0, 384), (5, 384))
PRODUCTS = ((1, 1, 1), (0, 5, 4), (5, 0, 4), (6, 8, 0), (6, 5, 8, 7), (33, 40, 130), (7, 129, 65))  # [..., N, K]
TREE_PRODUCTS = ((1, 1, 8), (0, 5, 8), (5, 0, 8), (6, 8, 0), (6, 5, 8, 8), (7, 9, 136))  # of whole leaves of K
SCALED_PRODUCTS = ((1, 1, 1), (0, 5, 4), (5, 0, 4), (6, 8, 0), (6, 5, 8, 7), (24, 136, 200))
LARGE_PRODUCTS = ((33, 40, 130), (19, 24, 33))
NORMED_PRODUCTS = ((2, 5, 16, 1), (0, 8, 4), (3, 9, 0), (24, 12), (7, 40, 33))
SPLIT_NORMED_PRODUCTS = tuple(shape for shape in NORMED_PRODUCTS if len(shape) > 2)
MOVED = (torch.bool, torch.uint16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (*KERNEL_DTYPES, torch.int64, torch.float64, *MOVED, torch.float8_e8m0fnu)
MATMUL_DTYPES = (*KERNEL_DTYPES, torch.float64)

STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
MINMAX = Codec(8, 64, scheme="minmax")
FOLLOWED = "relu(v * s - c[col]) + f[index] * r[row] + row * 0.5 - col / 3 + index"
EVERYTHING = "v * s + a[row] - b[col] * c[index] + d[0] + row - 2 * col + index"
PLACES = {"a": "row", "b": "col", "c": "index", "d": "0"}


def biased(v, b, s):
    return torch.relu(v * s + b)


def placed(make: Callable, specify: Callable, **places: str) -> Callable:
    return functools.partial(by.with_places, make, specify, **(places or PLACES))


def sizes_along(axis: int, name: str = "x") -> Callable[[Tensors], dict]:
    return lambda tensors: {"sizes": [x.shape[axis] for x in tensors[name]]}


partial = functools.partial
EVERY_PLACE = {"epilogue": EVERYTHING, "numbers": {"s": 0.3}}
FUNCTION = {"epilogue": biased, "numbers": {"s": 2}}


def tree(out_dtype: torch.dtype | None, **more) -> dict:
    return {"dtypes": (torch.float32,), "options": {"order": "tree", "out_dtype": out_dtype, **more}}


TREE = tree(None)
as_tree = partial(Form, inside.allreduce, make=by.sums, specify=by.allreduced, shapes=SHAPES, leaves=("x",))

allreduce = partial(Form, graphar.allreduce, make=by.sums, specify=by.allreduced, shapes=SHAPES, leaves=("x",))
ALLREDUCE = (
    allreduce("", dtypes=ALL_DTYPES, backward=by.summed, twice=True),
    allreduce("fallback", options={"algorithm": "fallback", "timeout_s": 30.0}, backward=by.summed, twice=True),
    allreduce("int4", options={"codec": "int4"}, backward=partial(by.summed, codec="int4")),
    allreduce("fp8", options={"codec": "fp8_e4m3"}, backward=partial(by.summed, codec="fp8_e4m3")),
    allreduce("minmax", options={"codec": MINMAX}, backward=partial(by.summed, codec=MINMAX)),
    allreduce("stochastic", options={"codec": STOCHASTIC}),
    allreduce("residual", make=by.with_residual, options={"codec": "int4"}, writes=("residual",), leaves=()),
    allreduce(
        "stochastic residual", make=by.with_residual, options={"codec": STOCHASTIC}, writes=("residual",), leaves=()
    ),
    allreduce("epilogue", make=placed(by.sums, by.allreduced), **EVERY_PLACE, leaves=("x", *PLACES)),
    allreduce("function", make=placed(by.sums, by.allreduced, b="col"), **FUNCTION, leaves=("x", "b")),
    as_tree("tree", **TREE, backward=by.summed_as_tree, twice=True),
    as_tree("tree bf16", **tree(torch.bfloat16), backward=by.summed_as_tree),
    as_tree("tree fp16", **tree(torch.float16), fill=normal, backward=by.summed_as_tree),
    as_tree("tree epilogue", **TREE, make=placed(by.sums, by.allreduced), **EVERY_PLACE, leaves=("x", *PLACES)),
)

reducescatter = partial(
    Form, graphar.reducescatter, make=by.sums, specify=by.reducescattered, shapes=MATRICES, leaves=("x",)
)
scattered_as_tree = partial(
    Form, inside.reducescatter, make=by.sums, specify=by.reducescattered, shapes=MATRICES, leaves=("x",)
)
REDUCESCATTER = (
    reducescatter("", dtypes=ALL_DTYPES, shapes=SHAPES, backward=partial(by.joined, 0), twice=True),
    reducescatter("last axis", shapes=SHAPES, options={"axis": -1}, backward=partial(by.joined, -1), twice=True),
    reducescatter("int4", options={"codec": "int4"}, backward=partial(by.joined, 0)),
    reducescatter("fp8 last axis", options={"codec": "fp8_e4m3", "axis": -1}, backward=partial(by.joined, -1)),
    reducescatter("minmax", options={"codec": MINMAX}, backward=partial(by.joined, 0)),
    reducescatter("stochastic", options={"codec": STOCHASTIC}, backward=partial(by.joined, 0)),
    reducescatter("residual", make=by.with_residual, options={"codec": "int4"}, writes=("residual",), leaves=()),
    reducescatter(
        "stochastic residual last axis",
        make=by.with_residual,
        options={"codec": STOCHASTIC, "axis": -1},
        writes=("residual",),
        leaves=(),
    ),
    reducescatter("epilogue", make=placed(by.sums, by.reducescattered), **EVERY_PLACE, leaves=("x", *PLACES)),
    reducescatter("function", make=placed(by.sums, by.reducescattered, b="col"), **FUNCTION, leaves=("x", "b")),
    scattered_as_tree("tree", **TREE, backward=partial(by.joined_in_fp32, 0), twice=True),
    scattered_as_tree("tree bf16 last axis", **tree(torch.bfloat16, axis=-1), backward=partial(by.joined_in_fp32, -1)),
    scattered_as_tree(
        "tree epilogue", **TREE, make=placed(by.sums, by.reducescattered), **EVERY_PLACE, leaves=("x", *PLACES)
    ),
)

allgather = partial(
    Form, graphar.allgather, make=by.sums, specify=by.allgathered, shapes=SHAPES, fill=raw, leaves=("x",)
)
ALLGATHER = (
    allgather("", dtypes=MOVED, backward=partial(by.summed_parts, 0), twice=True),
    allgather("last axis", options={"axis": -1}, backward=partial(by.summed_parts, -1), twice=True),
    *(
        allgather(
            f"sizes axis {axis}",
            make=partial(by.uneven, axis),
            shapes=((4, 3, 2), (17, 8, 5)),
            dtypes=MOVED,
            options={"axis": axis},
            of_processes=sizes_along(axis),
            backward=partial(by.summed_parts, axis),
            twice=True,
        )
        for axis in (0, 1)
    ),
)


def alltoall(x, group=None, *, out=None, shapes=None, scatter_dim=0, gather_dim=0):
    """graphar.alltoall of the shares of ``by.sizes_of``. A process gives the shapes of the ranks' tensors."""
    sizes = by.sizes_of([one.shape for one in x] if isinstance(x, list) else shapes, scatter_dim, gather_dim)
    if scatter_dim != gather_dim:
        sizes = sizes[0], [shape[gather_dim] for shape in shapes or [one.shape for one in x]]
    elif not isinstance(x, list):
        rank = dist.get_rank() if group is None else group.rank
        sizes = sizes[rank], [own[rank] for own in sizes]
    return graphar.alltoall(x, group, out=out, sizes=sizes, scatter_dim=scatter_dim, gather_dim=gather_dim)


exchange = partial(Form, graphar.alltoall, specify=by.exchanged, fill=raw, leaves=("x",), twice=True)
HEADS = ((1, 1, 1, 1), (2, 5, 3, 0), (0, 1, 2, 3), (2, 3, 5, 8))
ALLTOALL = (
    exchange("", make=partial(by.divisible, 0), shapes=SHAPES, dtypes=MOVED, backward=partial(by.exchanged_back, 0, 0)),
    exchange(
        "last dim",
        make=partial(by.divisible, -1),
        shapes=SHAPES,
        options={"scatter_dim": -1, "gather_dim": -1},
        backward=partial(by.exchanged_back, -1, -1),
    ),
    *(
        exchange(
            label,
            make=partial(by.divisible, scatter_dim),
            shapes=HEADS,
            dtypes=MOVED,
            options={"scatter_dim": scatter_dim, "gather_dim": gather_dim},
            backward=partial(by.exchanged_back, scatter_dim, gather_dim),
        )
        for label, scatter_dim, gather_dim in (("heads", 2, 1), ("sequence", 1, 2), ("first and last", 0, 3))
    ),
    *(
        Form(
            alltoall,
            f"sizes {scatter_dim} {gather_dim}",
            make=partial(by.uneven, gather_dim),
            specify=by.exchanged_in_shares,
            shapes=((4, 3, 2), (17, 8, 5)),
            dtypes=MOVED,
            fill=raw,
            options={"scatter_dim": scatter_dim, "gather_dim": gather_dim},
            of_processes=lambda tensors: {"shapes": [x.shape for x in tensors["x"]]},
            leaves=("x",),
            backward=partial(by.shares_back, scatter_dim, gather_dim),
            twice=True,
        )
        for scatter_dim, gather_dim in ((0, 0), (1, 1), (1, 0), (0, 2))
    ),
)


def allgather_tuple(x, scales, **options):
    return graphar.allgather((x, scales), **options)


tuples = partial(
    Form, allgather_tuple, specify=by.gathered_with_scales, dtypes=MOVED, fill=raw, leaves=("x", "scales"), twice=True
)
ALLGATHER_TUPLE = (
    tuples("", make=partial(by.with_scales, by.sums), shapes=SHAPES),
    tuples(
        "sizes",
        make=partial(by.with_scales, partial(by.uneven, 0)),
        shapes=((4, 3, 2), (17, 8, 5)),
        of_processes=sizes_along(0),
    ),
)

norm = partial(
    Form, graphar.allreduce_residual_rmsnorm, make=partial(by.with_norm, by.sums), specify=by.normed, shapes=ROWS
)
NORM = (
    norm("", leaves=("x", "residual", "weight")),
    norm("offset", options={"eps": 1e-5, "weight_offset": 1.0}, leaves=("x", "residual", "weight")),
    norm("fp8 rows", options={"out_dtype": FP8}),
    norm("fp8 scale", make=partial(by.with_scale, by.with_norm), options={"out_dtype": FP8}),
    norm("fp8 groups", shapes=GROUPED_ROWS, options={"out_dtype": FP8, "group_size": 128}),
)

scattered_norm = partial(
    Form,
    graphar.reducescatter_residual_rmsnorm,
    make=partial(by.with_norm_of_parts, by.sums),
    specify=by.scattered_and_normed,
    shapes=SPLIT_ROWS,
)
SCATTERED_NORM = (
    scattered_norm("", leaves=("x", "residual", "weight")),
    scattered_norm("offset", options={"eps": 1e-5, "weight_offset": 1.0}, leaves=("x", "residual", "weight")),
    scattered_norm("fp8 rows", options={"out_dtype": FP8}),
    scattered_norm("fp8 scale", make=partial(by.with_scale, by.with_norm_of_parts), options={"out_dtype": FP8}),
    scattered_norm("fp8 groups", shapes=GROUPED_ROWS, options={"out_dtype": FP8, "group_size": 128}),
)

OPERANDS = {"shapes": PRODUCTS, "fill": normal, "leaves": ("a", "w")}
BIASED = {"make": by.with_bias, "leaves": ("a", "w", "bias")}
INVARIANT = {"options": {"partition": TP_INVARIANT}, "shapes": TREE_PRODUCTS}
UNEVEN = BIASED | {"make": by.uneven_products}


def scaled(of: str, make: Callable = by.products, dtype: torch.dtype = torch.bfloat16, **options) -> dict:
    """Operands in FP8 with scales. ``dtype`` is that of the result."""
    if dtype != torch.bfloat16:
        options["out_dtype"] = dtype
    own = {"make": partial(by.scaled, of, make), "shapes": SCALED_PRODUCTS, "dtypes": (dtype,)}
    return own | {"options": options, "leaves": (), "twice": False}


def matmuls(op: Callable, specify: Callable, **shared) -> tuple[Form, ...]:
    """The forms that both fused matmuls have."""
    form = partial(Form, op, make=by.products, specify=specify, **OPERANDS | shared)
    followed = {"make": placed(by.with_bias, specify, c="col", f="index", r="row"), "numbers": {"s": 0.3}}
    followed |= {"epilogue": FOLLOWED}
    leaves = ("a", "w", "bias", "c", "f", "r")
    thirds, fifths = ({"partition": name, "num_partitions": count} for name, count in (("split_m", 3), ("split_n", 5)))
    return (
        form("", dtypes=MATMUL_DTYPES, twice=True),
        form("bias", **BIASED, dtypes=MATMUL_DTYPES, twice=True),
        form("bias split_m", **BIASED, options={"partition": "split_m"}, twice=True),
        form("bias split_n", **BIASED, options={"partition": "split_n"}, twice=True),
        form("none", options={"partition": "none"}, twice=True),
        form("tiles", options={"partition": "tiles"}, twice=True),
        form("bias thirds", **BIASED, shapes=LARGE_PRODUCTS, options=thirds, twice=True),
        form("fifths", shapes=LARGE_PRODUCTS, options=fifths, twice=True),
        form("int4", options={"codec": "int4"}),
        form("bias stochastic", **BIASED, options={"codec": STOCHASTIC}),
        form("stochastic split_m", options={"codec": STOCHASTIC, "partition": "split_m"}),
        form("bias stochastic fifths", **BIASED, shapes=LARGE_PRODUCTS, options={"codec": STOCHASTIC, **fifths}),
        form("epilogue", **followed, leaves=leaves),
        form("epilogue split_m", **followed, leaves=leaves, options={"partition": "split_m"}),
        form("epilogue fifths", **followed, leaves=leaves, shapes=LARGE_PRODUCTS, options=fifths),
        form("function", make=placed(by.products, specify, b="col"), **FUNCTION, leaves=("a", "w", "b")),
        form("invariant", **INVARIANT, twice=True),
        form("bias invariant", **BIASED, **INVARIANT, twice=True),
        form("epilogue invariant", **followed, **INVARIANT, leaves=leaves),
        form("rows", **scaled("rows", partial(by.with_unequal_columns, by.products))),
        form("rows bias fp16", **scaled("rows", by.with_bias, torch.float16)),
        form("rows split_n", **scaled("rows", partition="split_n")),
        form("rows int8", **scaled("rows", codec="int8")),
        form("rows invariant", **scaled("rows", partition="batch_invariant")),
        form("numbers tiles", **scaled("numbers", partition="tiles")),
        form("blocks bias", **scaled("blocks", partial(by.with_unequal_columns, by.with_bias))),
        form("blocks split_m", **scaled("blocks", partition="split_m")),
        form(
            "blocks epilogue", **scaled("blocks") | followed | {"make": partial(by.scaled, "blocks", followed["make"])}
        ),
    )


fused_normed_form = partial(
    Form,
    graphar.fused_matmul_allreduce_residual_rmsnorm,
    make=partial(by.with_norm, by.products),
    specify=by.fused_normed,
    shapes=NORMED_PRODUCTS,
    fill=normal,
    leaves=("a", "w", "residual", "weight"),
    one_loss=True,
)
FUSED_ALLREDUCE = (
    *matmuls(graphar.fused_matmul_allreduce, by.fused_allreduced, one_loss=True),
    Form(
        inside.fused_matmul_allreduce,
        "bias constant",
        specify=by.fused_allreduced,
        options={"constant_weight": True},
        one_loss=True,
        twice=True,
        **OPERANDS | BIASED,
    ),
)
FUSED_REDUCESCATTER = matmuls(graphar.fused_matmul_reducescatter, by.fused_reducescattered)
FOLLOWED_GATHER = {
    "make": placed(by.with_columns_of_each, by.fused_allgathered, c="col", f="index", r="row"),
    "epilogue": FOLLOWED,
    "numbers": {"s": 0.3},
    "leaves": ("a", "w", "bias", "c", "f", "r"),
    "twice": False,
}
fused_allgather = partial(
    Form, graphar.fused_allgather_matmul, specify=by.fused_allgathered, twice=True, **{"make": by.products, **OPERANDS}
)
FUSED_ALLGATHER = (
    fused_allgather("", dtypes=MATMUL_DTYPES),
    fused_allgather("bias", **BIASED, dtypes=MATMUL_DTYPES),
    fused_allgather("gathered", options={"gathered": True}),
    fused_allgather("none", options={"partition": "none"}),
    fused_allgather("tiles", options={"partition": "tiles"}),
    fused_allgather("bias invariant", **BIASED, **INVARIANT),
    fused_allgather("epilogue", **FOLLOWED_GATHER),
    fused_allgather("epilogue gathered", **FOLLOWED_GATHER, options={"gathered": True}),
    fused_allgather("epilogue tiles", **FOLLOWED_GATHER, options={"partition": "tiles"}),
    fused_allgather(
        "function",
        **FUNCTION | {"make": placed(by.products, by.fused_allgathered, b="col"), "leaves": ("a", "w", "b")},
        twice=False,
    ),
    fused_allgather(
        "bias sizes gathered",
        **UNEVEN,
        options={"gathered": True},
        of_processes=sizes_along(0, "a"),
    ),
    fused_allgather("rows bias", **scaled("rows", by.with_bias)),
    fused_allgather(
        "rows bias sizes gathered",
        **scaled("rows", by.uneven_products, gathered=True) | {"of_processes": sizes_along(0, "a")},
    ),
    fused_allgather("numbers gathered fp16", **scaled("numbers", by.products, torch.float16, gathered=True)),
    fused_allgather("blocks tiles", **scaled("blocks", partition="tiles")),
    fused_allgather("blocks none gathered", **scaled("blocks", partition="none", gathered=True)),
    fused_allgather(
        "blocks epilogue",
        **FOLLOWED_GATHER | scaled("blocks") | {"make": partial(by.scaled, "blocks", FOLLOWED_GATHER["make"])},
    ),
)
SCALED_NORM = {"shapes": ((2, 5, 16, 1), (0, 8, 4), (3, 9, 0), (7, 40, 33), (24, 136, 200)), "dtypes": HALVES}
SCALED_NORMS = {"rows": {"weight_offset": 1.0}, "numbers": {"partition": "none"}, "blocks": {}}
FUSED_NORM = (
    fused_normed_form(""),
    fused_normed_form("invariant", **INVARIANT | {"shapes": ((2, 5, 16, 8), (0, 8, 8), (7, 40, 136))}),
    fused_normed_form("offset none", options={"eps": 1e-5, "weight_offset": 1.0, "partition": "none"}),
    fused_normed_form("tiles", options={"partition": "tiles"}),
    *(
        fused_normed_form(of, **scaled(of, partial(by.with_norm, by.products)) | SCALED_NORM | {"options": options})
        for of, options in SCALED_NORMS.items()
    ),
)

fused_scattered_norm = partial(
    Form,
    graphar.fused_matmul_reducescatter_residual_rmsnorm,
    make=partial(by.with_norm_of_parts, by.products),
    specify=by.fused_scattered_and_normed,
    shapes=SPLIT_NORMED_PRODUCTS,
    fill=normal,
    leaves=("a", "w", "residual", "weight"),
)
FUSED_SCATTERED_NORM = (
    fused_scattered_norm(""),
    fused_scattered_norm("invariant", options={"partition": TP_INVARIANT}, shapes=((4, 5, 16, 8), (8, 40, 136))),
    fused_scattered_norm("offset none", options={"eps": 1e-5, "weight_offset": 1.0, "partition": "none"}),
    fused_scattered_norm("tiles", options={"partition": "tiles"}),
    *(
        fused_scattered_norm(
            of, **scaled(of, partial(by.with_norm_of_parts, by.products)) | SCALED_NORM | {"options": options}
        )
        for of, options in SCALED_NORMS.items()
    ),
)


def cross_entropy(logits, target, temperature=None, **options):
    """graphar.cross_entropy, or with a temperature graphar.log_probs: they share an op."""
    if temperature is None:
        return graphar.cross_entropy(logits, target, **options)
    found = graphar.log_probs(logits, target, temperature=temperature, **options)
    return tuple(found) if options.get("top1") else found


LOGITS = ((1, 8), (3, 5, 24), (0, 16), (16,), (5, 40))
losses = partial(
    Form, cross_entropy, make=by.with_targets, specify=by.of_losses, shapes=LOGITS, leaves=("logits",), fill=normal
)
LOSSES = (
    losses("", options={"reduction": "none"}),
    losses("mean", options={"label_smoothing": 0.1, "lse_square_scale": 1e-3}),
    losses("sum padded", options={"reduction": "sum", "vocab_size": 7}),
    losses("log_probs", options={"temperature": 0.7}),
    losses("log_probs of three", options={"temperature": 2.0, "entropy": True, "top1": True}, leaves=()),
)

BY_OP = {
    forms[0].op: forms
    for forms in (
        *(ALLREDUCE, REDUCESCATTER, ALLGATHER, ALLTOALL, ALLGATHER_TUPLE, NORM, SCATTERED_NORM),
        *(FUSED_ALLREDUCE, FUSED_REDUCESCATTER, FUSED_ALLGATHER, FUSED_NORM, FUSED_SCATTERED_NORM, LOSSES),
    )
}
FORMS = [form for forms in BY_OP.values() for form in forms]

PLAIN = [forms[0] for forms in BY_OP.values()]
SCALED = [one for forms in BY_OP.values() for one in [form for form in forms if form.label.startswith("blocks")][:1]]

every_form = pytest.mark.parametrize("form", FORMS, ids=str)
every_op = pytest.mark.parametrize("op", BY_OP, ids=lambda op: op.__name__)
every_plain_form = pytest.mark.parametrize("form", PLAIN, ids=str)


@pytest.fixture
def compiled():
    """torch.compile without graph breaks, for any size."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):  # else torch compiles twice: ops take floats as they are
        yield partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()


def given(form, shape=None):
    """The tensors of two calls: with one tensor in a world of one, and with lists."""
    return tuple([form.tensors(ranks, shape or form.small, fill=normal) for ranks in (1, 2)])


def both(form, tensors):
    """The results of both calls."""
    one, many = tensors
    return [*form.of_rank(0, one), *flat(form.in_list(many))]


def changed(function, tensors):
    """The tensors of both calls, each changed."""
    return tuple([{name: list(map(function, xs)) for name, xs in of_call.items()} for of_call in tensors])


def flat(of_ranks):
    return [y for ys in of_ranks for y in ys]
