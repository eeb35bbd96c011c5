"""Work: what a call computes, as one value of a type for each kind of work.

The types are tuples, so that a call is hashed and compared without Python code. All have these attributes:

    op        the public op that the work is of
    unit      what ``parts`` count: "elements", "bytes" or "rows"
    parts     the units of each rank's part, in rank order; one number for work without parts
    codec     the text of the codec on the wire, or an empty string
    epilogue  the epilogue of the sum or product, or None
    amount    a function from the dtype to the work's size in words
    options   what else ranks must agree on, in words
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.fp8_products import BLOCK
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT, Panel, length
from graphar.numerics.softmax import Terms
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.tiles import LAYOUTS

MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER = "fused_matmul_allreduce", "fused_matmul_reducescatter"
ALLGATHER_MATMUL = "fused_allgather_matmul"
MOVING = ("allgather", "alltoall")  # the ops that move bits, of any dtype
MAX_TENSORS = 4  # of one launch: `max_tensors` in cuda_src/device/arguments.cuh

_SEED = re.compile(", seed=[0-9]+")


def without_seeds(text: str) -> str:
    """Returns a text without the seeds of the codecs in it, which may differ between ranks."""
    return _SEED.sub("", text)


def _in_rows(row: tuple[int, ...]) -> str:
    return f" in rows of {list(row)}" if row else ""


def _numbers_of_norm(eps: float, weight_offset: float) -> str:
    return f"eps {eps:.9g}, weight offset {weight_offset:.9g}"  # fp32 has no more digits


def _options(work: Sum | Parts | Norm | TensorTuple | Product) -> list[str]:
    """Returns in words the options that several types of work have."""
    is_tree = work.order == "tree"
    words = (
        f"codec {without_seeds(work.codec)}" if work.codec else "",
        f"epilogue {work.epilogue.words}" if work.epilogue else "",
        "added as a tree" if is_tree else "",
        f"result {work.out_dtype}" if is_tree and work.out_dtype else "",
        work.beside,
    )
    return list(filter(None, words))


class Sum(NamedTuple):
    """An all-reduce: the sum over all ranks of one tensor."""

    numel: int  # the elements of the tensor
    codec: str = ""
    epilogue: Pointwise | None = None
    shape: tuple[int, ...] = ()  # of the user's tensor, if the ranks must have the same
    order: str = "rank"  # in which the ranks' elements are added: "rank", or "tree" for a binary tree of fp32
    out_dtype: torch.dtype | None = None  # the dtype of the result; None: the tensor's
    beside: str = ""  # what every rank does beside it, in words, or an empty string

    op = "allreduce"
    unit = "elements"
    options = property(_options)

    @property
    def is_plain(self) -> bool:
        """Whether no option changes the result: it is the sum in rank order, in the dtype of the tensor."""
        return self._replace(shape=(), beside="") == type(self)(self.numel)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.numel,)

    def amount(self, dtype: torch.dtype) -> str:
        return f"{list(self.shape)} {dtype}" if self.shape else f"{self.numel} elements of {dtype}"


class Parts(NamedTuple):
    """A reduce-scatter, or an all-gather of one tensor: each rank has a part of the whole."""

    op: str  # "reducescatter" or "allgather"
    parts: tuple[int, ...]  # the elements of each rank's part
    codec: str = ""
    epilogue: Pointwise | None = None
    axis: int = 0  # the dimension of the user's tensor that is the first dimension of the call's tensors
    beside: str = ""  # what every rank does beside it, in words, or an empty string
    row: tuple[int, ...] = ()  # the shape of the user's tensor without the axis, if the ranks must have the same
    order: str = "rank"  # of a reduce-scatter, in which the ranks' elements are added: "rank" or "tree"
    out_dtype: torch.dtype | None = None  # the dtype of the result; None: the tensor's

    unit = "elements"
    options = property(_options)

    @property
    def is_plain(self) -> bool:
        """Whether no option changes the result: sums are in rank order, in the dtype of the tensor."""
        return self._replace(axis=0, beside="", row=()) == type(self)(self.op, self.parts)

    def amount(self, dtype: torch.dtype) -> str:
        axis = f" along axis {self.axis}" if self.axis else ""
        return f"parts of {list(self.parts)} elements of {dtype}{_in_rows(self.row)}{axis}"


class Norm(NamedTuple):
    """An all-reduce or a reduce-scatter, whose sum is added to a residual and normed by rows (RMSNorm).

    A sum in rank order is rounded before the residual is added. A sum as a tree stays in fp32.
    """

    op: str  # numerics.norms.ALLREDUCE_NORM or REDUCESCATTER_NORM
    parts: tuple[int, ...]  # the elements of the tensor, one number; for a reduce-scatter, of each rank's part
    columns: int  # the columns of the tensor
    output: str = "like_input"  # the format of the normed rows, one of NORM_OUTPUTS
    eps: float = 1e-6  # is added to the mean square
    weight_offset: float = 0.0  # is added to the weight
    row: tuple[int, ...] = ()  # the shape of the user's tensor without its first dimension, if ranks must have the same
    order: str = "rank"  # in which the ranks' elements are added: "rank", or "tree" for a binary tree of fp32
    out_dtype: torch.dtype | None = None  # the dtype of residual, weight and results; None: the tensor's
    beside: str = ""  # what every rank does beside it, in words, or an empty string

    unit = "elements"
    codec = ""
    epilogue = None

    def amount(self, dtype: torch.dtype) -> str:
        numbers = self.parts[0] if len(self.parts) == 1 else f"parts of {list(self.parts)}"
        return f"{numbers} elements of {dtype}{_in_rows(self.row)}"

    @property
    def options(self) -> list[str]:
        how = [] if self.output == "like_input" else [self.output]
        numbers = _numbers_of_norm(self.eps, self.weight_offset)
        return [f"{self.columns} columns", *how, numbers, *_options(self)]


class TensorTuple(NamedTuple):
    """An all-gather of several tensors, which have equally many rows on a rank."""

    dtypes: tuple[torch.dtype, ...]  # of each tensor
    rows: tuple[tuple[int, ...], ...]  # the shape of a row of each tensor
    sizes: tuple[int, ...]  # the rows of each rank
    beside: str = ""  # what every rank does beside it, in words, or an empty string

    op = "allgather"
    unit = "bytes"
    codec = ""
    epilogue = None
    order = "rank"
    out_dtype = None
    options = property(_options)

    @property
    def row_nbytes(self) -> tuple[int, ...]:
        """The bytes of a row of each tensor."""
        return tuple([math.prod(row) * dtype.itemsize for row, dtype in zip(self.rows, self.dtypes, strict=True)])

    @property
    def parts(self) -> tuple[int, ...]:
        """The bytes of each rank's part, in which each tensor has whole packs."""
        each = self.row_nbytes
        return tuple([sum(-(-size * row // PACK_NBYTES) for row in each) * PACK_NBYTES for size in self.sizes])

    def amount(self, dtype: torch.dtype) -> str:
        pairs = zip(self.dtypes, self.rows, strict=True)
        tensors = [f"{dtype} [{', '.join(map(str, ('*', *row)))}]" for dtype, row in pairs]
        return f"({', '.join(tensors)}), sizes {list(self.sizes)}"


Lengths: TypeAlias = tuple[tuple[int, ...], ...]  # by rank of this process, the lengths of each rank's part


class Exchange(NamedTuple):
    """An all-to-all of one tensor: each rank sends each rank a part of it along one dimension, and joins what comes.

    If the dimensions differ, ``sends`` and ``receives`` are the same on all ranks: what a rank sends has its own length
    along ``gather_dim``.
    """

    rank: int  # the first of this process's ranks
    row: tuple[int, ...]  # the shape of a tensor, with 1 for both dimensions
    sends: Lengths  # along scatter_dim, of the part for each rank
    receives: Lengths  # along gather_dim, of the part from each rank
    scatter_dim: int = 0  # the dimension that is divided
    gather_dim: int = 0  # the dimension along which parts are joined
    known: bool = True  # whether every rank knows the lengths of all parts, also of those between other ranks

    op = "alltoall"
    unit = "elements"
    codec = ""
    epilogue = None
    order = "rank"
    is_plain = True

    @property
    def is_even(self) -> bool:
        """Whether all ranks are known to send and to receive parts of one length."""
        return self.known and all(len(set(lengths)) == 1 for lengths in (self.sends, self.sends[0], self.receives[0]))

    @property
    def parts(self) -> tuple[int, ...]:
        """The elements of the part for each rank, from the rank that sends it the most, as far as it is known."""
        in_a_row = math.prod(self.row) * (max(self.receives[0]) if self.scatter_dim != self.gather_dim else 1)
        return tuple([max(lengths) * in_a_row for lengths in zip(*self.sends, strict=True)])

    @property
    def is_in_order(self) -> bool:
        """Whether all ranks are known to have parts of one length, which follow one another in memory."""
        return self.is_even and self.scatter_dim == self.gather_dim and math.prod(self.row[: self.scatter_dim]) == 1

    def shapes(self, at: int) -> tuple[list[int], list[int]]:
        """Returns the shapes of the tensor and of the result of rank ``at`` of this process."""
        x, result, me = list(self.row), list(self.row), self.rank + at
        x[self.gather_dim], result[self.scatter_dim] = self.receives[at][me], self.sends[at][me]
        x[self.scatter_dim], result[self.gather_dim] = sum(self.sends[at]), sum(self.receives[at])
        return x, result

    def amount(self, dtype: torch.dtype) -> str:
        either = self.scatter_dim, self.gather_dim
        lengths = self.shapes(0)[0] if self.is_even else ["*" if at in either else n for at, n in enumerate(self.row)]
        return f"[{', '.join(map(str, lengths))}] {dtype}"

    @property
    def options(self) -> list[str]:
        moved = self.scatter_dim != self.gather_dim or self.scatter_dim
        along = [f"scatter_dim {self.scatter_dim}, gather_dim {self.gather_dim}"] if moved else []
        both = f"sizes {list(self.sends[0])}, {list(self.receives[0])}" if self.known else "sizes of each rank"
        return along + ([] if self.is_even else [both])


FORMATS = ("rows", "blocks")  # what each scale of e4m3 operands is for


class Factors(NamedTuple):
    """What a product multiplies, and what depends on the format of its operands: no other module knows the formats.

    ``str()`` is in the names of kernels, and in the words on which ranks agree.
    """

    format: str = ""  # one of FORMATS: operands are e4m3, results have 16 bits; an empty string: both have one dtype
    template: str = ""  # the format's class in cuda_src/device/matmul/scaled_products.cuh
    inputs: int = 2  # the tensors of a rank's factors
    itemsize: int = 2  # the bytes of an element
    layouts: tuple[str, ...] = LAYOUTS  # of W that kernels load: tensor cores cannot transpose e4m3
    # The most rows that a skinny kernel multiplies fast; None: as many as it takes. With scales of blocks it has
    # registers for the sums of one block of 64 rows only, and adds them while nothing is multiplied: 74 us for
    # 64 x 8192 x 14336 between two H200s, and 34 with scales of rows.
    most_skinny_rows: int | None = None
    clustered: float | None = None  # the cost of clusters of a matmul alone, as TileCost has it; None: as with 16 bits

    def __str__(self) -> str:
        return self.template

    @property
    def is_plain(self) -> bool:
        """Whether operands have the dtype of results, and no scales."""
        return not self.format

    def k_of_16_bits(self, k: int) -> int:
        """Returns the columns of 16-bit operands that take as long: 128 of e4m3 have the bytes of 64."""
        return max(k * self.itemsize // 2, 1) if self.format else k

    def row_nbytes(self, k: int) -> int:
        """Returns the bytes of a row of A with ``k`` columns on its way to another rank, in whole packs."""
        packs = -(-k * self.itemsize // PACK_NBYTES)
        of_row = {"": 0, "rows": 1, "blocks": -(-k // BLOCK)}[self.format]  # `of_row` in scaled_products.cuh
        return packs * PACK_NBYTES + 4 * of_row


PLAIN = Factors()
FACTORS = {  # by format; what was measured of blocks is of an H100
    "": PLAIN,
    "rows": Factors("rows", "RowScales", 4, 1, LAYOUTS[:1]),
    "blocks": Factors("blocks", "BlockScales", 4, 1, LAYOUTS[:1], most_skinny_rows=32, clustered=0.92),
}


class Product(NamedTuple):
    """A matmul A W^T, and the sum of its products over ranks, or the all-gather of the ranks' rows of A before it."""

    op: str  # "fused_matmul_allreduce" or another op that begins with "fused_"
    parts: tuple[int, ...]  # the rows of the result that each rank sums; of an all-gather, the rows of each rank
    columns: int  # what all ranks have alike: the columns of the result; of an all-gather, the columns of A
    bias: bool = False  # whether a bias is added
    codec: str = ""
    epilogue: Pointwise | None = None
    partition: str = "auto"  # how the work is divided: the op's ``partition``
    num_partitions: int | None = None
    norm: tuple[float, float] | None = None  # of an op with residual and RMSNorm, its eps and weight offset
    gathered: bool = False  # of an all-gather, whether the gathered rows are wanted as well
    # Whether W is constant: (26) in cuda_src/device/sync/kernel_order.cuh. Ranks may differ in it.
    constant_weight: bool = False
    format: str = ""  # as Factors has it; the call has the result's dtype

    unit = "rows"
    out_dtype = None  # the call has it

    @property
    def factors(self) -> Factors:
        """What is multiplied."""
        return FACTORS[self.format]

    @property
    def is_invariant(self) -> bool:
        """Whether only graphar's kernels may multiply, so that a row's bits depend on no other row."""
        return self.partition in (BATCH_INVARIANT, TP_INVARIANT)

    @property
    def beside(self) -> str:
        """What every rank does beside its sum, in words, or an empty string."""
        return f"products of e4m3 operands with scales of {self.format}" if self.format else ""

    @property
    def summing_op(self) -> str:
        """The op without residual and norm."""
        return self.op.removesuffix("_residual_rmsnorm")

    @property
    def scattered(self) -> bool:
        """Whether each rank gets its own rows of the sum only."""
        return self.summing_op == MATMUL_REDUCESCATTER

    @property
    def owns_rows(self) -> bool:
        """Whether each rank sums rows of its own, as in a reduce-scatter and with an epilogue."""
        return self.scattered or self.epilogue is not None

    @property
    def as_tree(self) -> bool:
        """Whether leaves of K are added in fp32 as a tree; else rounded products, in the order of ranks."""
        return self.partition == TP_INVARIANT

    @property
    def sent_nbytes(self) -> int:
        """The bytes of the whole product as ranks send it to be summed, if its elements have 16 bits."""
        return sum(self.parts) * self.columns * (4 if self.as_tree else 2)

    def leaves(self, world_size: int) -> int:
        """The number of leaves into which each rank cuts its K. They are added in the order of K, or as a tree."""
        return LEAVES // world_size if self.as_tree and self.op != ALLGATHER_MATMUL else 1

    def with_bias_in_epilogue(self, dtype: torch.dtype) -> Product:
        """Returns the product whose bias is an epilogue of the sum, where sums of ``dtype`` take one.

        It has the same bits in one kernel, and half the bytes on the wire, since products stay rounded there.
        """
        if not self.bias or self.codec or dtype not in TYPE_NAMES:
            return self
        return self._replace(bias=False, epilogue=Pointwise("v + bias[col]", (dtype,), self.columns))

    def of_panel(self, panel: Panel) -> Product:
        """Returns the part of a product that is a panel of its result."""
        counts, columns = tuple(map(length, panel.rows)), length(panel.columns)
        epilogue = self.epilogue and replace(self.epilogue, columns=columns)
        return self._replace(parts=counts, columns=columns, epilogue=epilogue)

    def then(self, k: int, dtype: torch.dtype) -> Sum | Parts | Norm:
        """Returns the work that sums the ranks' products of ``k`` columns, with results of ``dtype``."""
        counts = tuple([rows * self.columns for rows in self.parts])
        counts = counts if self.scattered else (sum(counts),)
        if self.norm:
            op = REDUCESCATTER_NORM if self.scattered else ALLREDUCE_NORM
            work = Norm(op, counts, self.columns, "like_input", *self.norm)
        elif self.scattered:
            work = Parts("reducescatter", counts, self.codec, self.epilogue)
        else:
            work = Sum(counts[0], self.codec, self.epilogue)
        beside = f"after products of {k} columns" if self.as_tree else self.beside
        return work._replace(order=self.order, out_dtype=dtype if self.as_tree else None, beside=beside)

    @property
    def order(self) -> str:
        return "tree" if self.as_tree else "rank"

    def amount(self, dtype: torch.dtype) -> str:
        bias = " with a bias" if self.bias else ""
        return f"parts of {list(self.parts)} rows of {self.columns} columns of {dtype}{bias}"

    @property
    def options(self) -> list[str]:
        norm = [_numbers_of_norm(*self.norm)] if self.norm else []
        return norm + _options(self)


class Loss(NamedTuple):
    """Cross-entropy losses, or log-probabilities, of rows of logits over a vocabulary that ranks divide."""

    op: str  # "cross_entropy" or "log_probs"
    rows: int
    columns: int  # of each rank's logits
    terms: Terms  # what is computed of a row

    unit = "elements"
    codec = ""
    epilogue = None
    order = "tree"

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.rows * self.columns,)

    @property
    def exchanged(self) -> Parts:
        """The all-gather of the ranks' partials, which are fp32, without the number of ranks."""
        return Parts("allgather", (self.rows * self.terms.width,), beside=", ".join([self.op, *self.options]))

    def amount(self, dtype: torch.dtype) -> str:
        return f"{self.rows} rows of {self.columns} columns of {dtype}"

    @property
    def options(self) -> list[str]:
        unused = Terms(self.terms.vocab_size)._asdict()
        others = [f"{name} {value}" for name, value in self.terms._asdict().items() if value != unused[name]]
        return [f"vocabulary of {self.terms.vocab_size}", *others]


Work: TypeAlias = Sum | Parts | Norm | TensorTuple | Exchange | Product | Loss


def template_of(work: Work, cluster: int = 1) -> str | None:
    """Returns the template arguments by which a work's kernels differ, for so many blocks of a cluster, or None."""
    if isinstance(work, TensorTuple):
        return "TupleArguments"
    arguments = [str(cluster), work.output] if isinstance(work, Norm) else []
    if isinstance(work, (Sum, Parts, Norm)) and work.order == "tree":
        arguments += ["TreeOrder", TYPE_NAMES[work.out_dtype or torch.float32]]
    return ", ".join(arguments) or None
