"""Calls that break a rule. Each row is a call, the argument that its error has to name, and the error's type.

The whole messages stand in refusals.json, which `python -m tests.ops.refusals` rewrites.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import graphar
from graphar import Codec, Communicator, Epilogue, UnsupportedError
from graphar.ops import allgather as gather
from graphar.ops import sums
from graphar.plan.algorithms import with_kernels
from tests import inside
from tests.ops.refusal import (
    BIAS,
    FP8,
    FUSED,
    FUSED_GATHER,
    FUSED_NORM,
    FUSED_SCATTER,
    FUSED_SCATTERED_NORM,
    GATHER,
    NORM,
    REDUCE,
    ROWS,
    SCATTER,
    SCATTERED_NORM,
    SUMMED,
    WEIGHT,
    A,
    Refusal,
    W,
    X,
    Y,
    row,
)
from tests.ops.refusals_of_layers import of_epilogues, of_lists_of_operands, of_norms, of_operands

GOLDEN = Path(__file__).with_name("refusals.json")


ROOM = torch.arange(16.0)  # its first 8 elements are an input
META = torch.ones(8, device="meta")

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER

BAD_TENSORS = {
    "no tensor": 3,
    "None": None,
    "sparse": torch.eye(8).to_sparse(),
    "complex": torch.complex(Y, Y),
    "bool": Y > 0,
    "fp8": Y.to(FP8),
}
MOVED = ("complex", "bool", "fp8")  # that an all-gather takes
BAD_LISTS = {
    "empty": [],
    "unequal shapes": [torch.ones(6, 2), torch.ones(6, 5)],
    "unequal dtypes": [Y, Y.half()],
    "mixed devices": [Y, META],
    "another device": [META],
}
BAD_OUTS = {
    "no tensor": (TypeError, lambda x: 3),
    "list": (TypeError, lambda x: [x]),
    "shape": (ValueError, lambda x: torch.full((3, 5), 99.0)),
    "dtype": (ValueError, lambda x: torch.full(x.shape, 99.0, dtype=torch.float16)),
    "device": (ValueError, lambda x: torch.ones(x.shape, device="meta")),
    "gradient": (ValueError, lambda x: torch.full(x.shape, 99.0, requires_grad=True)),
    "negated": (ValueError, lambda x: torch._neg_view(torch.full(x.shape, 99.0))),
    "expanded": (ValueError, lambda x: torch.full(x.shape[-1:], 99.0)[:1].expand(x.shape)),
}
BAD_TIMEOUTS = {
    **{str(one): (ValueError, one) for one in (0, -1.5, float("nan"), float("inf"), 1e7)},
    "in words": (TypeError, "3"),
    "bool": (TypeError, True),
}
BAD_AXES = {str(one): (ValueError, one) for one in (2, -3)} | {repr(one): (TypeError, one) for one in ("0", 0.0, True)}
BAD_CODECS = {
    "name": (ValueError, "int9"),
    "number": (TypeError, 4),
    "feedback": (ValueError, Codec(4, feedback=True)),
    "feedback text": (ValueError, Codec(4, feedback=True).text),
}


def refusals(alone: Communicator, pair: Communicator) -> list[Refusal]:
    """All refusals. ``alone`` is a communicator of a group of one process, ``pair`` one of two ranks in it."""
    with_both = of_tensors, of_outputs, of_algorithms, of_timeouts, of_codecs, of_trees, of_residuals, of_tuples
    by_subject = [of_subject(alone, pair) for of_subject in (*with_both, of_exchanges, of_groups)]
    by_subject += [of(alone) for of in (of_axes, of_trees_of_leaves, of_operands, of_gathered_matmuls)]
    by_subject += [of_epilogues(pair), of_lists_of_operands(), of_norms(), of_removed_options(), of_raw_ops()]
    return [one for rows in by_subject for one in rows]


def of_tensors(alone, pair):
    for op in (REDUCE, SCATTER, GATHER, graphar.explain):
        name = op.__name__
        for what, x in BAD_TENSORS.items():
            if op is not GATHER or what not in MOVED:
                yield row(f"{name} {what}", "x", TypeError, op, x, alone)
                yield row(f"{name} {what} in a list", "tensor 1", TypeError, op, [Y, x], pair)
        for what, xs in BAD_LISTS.items():
            if op is not GATHER or what != "unequal shapes":
                yield row(f"{name} {what}", "tensor", ValueError, op, xs)
    for op in (SCATTER, GATHER):
        yield row(f"{op.__name__} 0-d", "tensors", ValueError, op, torch.tensor(1.0), alone)
        yield row(f"{op.__name__} 0-d list", "tensors", ValueError, op, [torch.tensor(1.0)] * 2)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    yield row("allgather quantized", "tensor 0", TypeError, GATHER, [quantized] * 2)
    yield row("allgather sizes of a list", "sizes", ValueError, GATHER, [Y, Y], sizes=[8, 8])


def of_tuples(alone, pair):
    rows, lists = torch.ones(4, 3), [torch.ones(4, 3)] * 2
    yield row("tuple empty", "tuple", ValueError, GATHER, (), alone)
    yield row("tuple axis", "axis", ValueError, GATHER, (rows, rows), alone, axis=1)
    yield row("tuple sizes", "sizes", ValueError, GATHER, (rows, rows), alone, sizes=[3])
    yield row("tuple no tensor", "tensor 1", TypeError, GATHER, (rows, 3), alone)
    yield row("tuple 0-d", "tensors", ValueError, GATHER, (rows, torch.tensor(1.0)), alone)
    yield row("tuple lengths", "length", ValueError, GATHER, (rows, torch.ones(3, 3)), alone)
    yield row("tuple devices", "device", ValueError, GATHER, (rows, rows.to("meta")), alone)
    yield row("tuple of tensors for devices", "list", ValueError, GATHER, (rows, rows), pair)
    yield row("tuple of lists sizes", "sizes", ValueError, GATHER, (lists, lists), pair, sizes=[4, 4])
    yield row("tuple of lists number", "list", ValueError, GATHER, (lists, lists[:1]), pair)
    yield row("tuple of a list and a tensor", "list", ValueError, GATHER, (lists, rows), pair)
    yield row("tuple of a tensor and a list", "tensor 1", TypeError, GATHER, (rows, lists), alone)
    yield row("tuple of lists lengths", "length", ValueError, GATHER, (lists, [torch.ones(3, 3)] * 2), pair)


def of_exchanges(alone, pair):
    op, rows, even = graphar.alltoall, torch.ones(4, 3), [4, 2]
    for what in BAD_TENSORS.keys() - set(MOVED):
        yield row(f"alltoall {what}", "x", TypeError, op, BAD_TENSORS[what], alone)
        yield row(f"alltoall {what} in a list", "tensor 1", TypeError, op, [Y, BAD_TENSORS[what]], pair)
    for what, xs in BAD_LISTS.items():
        if what != "unequal shapes":
            yield row(f"alltoall {what}", "tensor", ValueError, op, xs)
    yield row("alltoall 0-d", "tensors", ValueError, op, torch.tensor(1.0), alone)
    for name, (what, (error, dim)) in itertools.product(("scatter_dim", "gather_dim"), BAD_AXES.items()):
        yield row(f"alltoall {name} {what}", name, error, op, rows, alone, **{name: dim})
    yield row("alltoall unequal columns", "axis 0", ValueError, op, [rows, rows[:, 1:]], pair)
    yield row("alltoall unequal heads", "axis 1", ValueError, op, [rows, rows[1:]], pair, gather_dim=1)
    yield row("alltoall odd", "equal parts", ValueError, op, [rows[1:], rows], pair)
    for what, (error, sizes) in {
        "number": (TypeError, 4),
        "no pair": (TypeError, [[4]]),
        "no ints": (TypeError, [[4.0], [4]]),
        "no sequences": (TypeError, [4, 4]),
        "of two ranks": (ValueError, [even, even]),
        "negative": (ValueError, [[-4], [4]]),
        "other rows": (ValueError, [[3], [3]]),
        "unlike received": (ValueError, [[4], [3]]),
    }.items():
        yield row(f"alltoall sizes {what}", "sizes", error, op, rows, alone, sizes=sizes)
    yield row("alltoall sizes unlike length", "sizes", ValueError, op, rows, alone, sizes=[[4], [4]], gather_dim=1)
    for what, (error, sizes) in {
        "one list": (ValueError, [even]),
        "no lists": (TypeError, [4, 4]),
        "other rows": (ValueError, [even, even]),
    }.items():
        yield row(f"alltoall sizes of a list {what}", "sizes", error, op, [rows, rows], pair, sizes=sizes)
    heads = {"scatter_dim": 0, "gather_dim": 1}
    yield row("alltoall heads of a list", "sizes", ValueError, op, [rows] * 2, pair, sizes=[[1, 3], [2, 3]], **heads)
    for what, (error, make) in BAD_OUTS.items():
        yield row(f"alltoall out {what}", "out", error, op, rows, alone, out=make(rows))
    yield row("alltoall out as input", "out", ValueError, op, rows, alone, out=rows)
    yield row("alltoall out for a list", "out", ValueError, op, [rows, rows], pair, out=rows)
    for what, out in {"twice": [full(rows)] * 2, "as another rank's input": [full(rows), rows]}.items():
        yield row(f"alltoall out {what}", "out", ValueError, op, [rows, rows.clone()], pair, out=out)
    for algorithm in ("ring", "allgather_push", "fallback", None):
        yield row(f"alltoall algorithm {algorithm}", "algorithm", ValueError, op, rows, alone, algorithm=algorithm)
    for what, (error, timeout_s) in BAD_TIMEOUTS.items():
        yield row(f"alltoall timeout_s {what}", "timeout_s", error, op, rows, alone, timeout_s=timeout_s)
    raw, name = torch.ops.graphar.alltoall, alone.engine.name
    for what, given in {"rank": (1, [0, 4, 0, 4]), "sizes": (0, [3, 4])}.items():
        yield row(f"alltoall raw {what}", "", ValueError, raw, rows, name, None, [], *given, 0, 0, True, "auto")


def of_axes(alone):
    matrix = torch.ones(4, 3)
    for op, (what, (error, axis)) in itertools.product((SCATTER, GATHER), BAD_AXES.items()):
        yield row(f"{op.__name__} axis {what}", "axis", error, op, matrix, alone, axis=axis)
        yield row(f"{op.__name__} axis {what} list", "axis", error, op, [matrix] * 2, axis=axis)
    for axis, shape in ((0, (4, 2)), (1, (3, 3)), (-2, (4, 2)), (0, (4,)), (1, (4,)), (0, (4, 3, 1))):
        unequal = [matrix, torch.ones(shape)]
        yield row(f"allgather axis {axis} beside {list(shape)}", "axis", ValueError, GATHER, unequal, axis=axis)


def of_outputs(alone, pair):
    for what, (error, make) in BAD_OUTS.items():
        yield row(f"allreduce out {what}", "out", error, REDUCE, X, alone, out=make(X))
        yield row(f"allreduce out {what} list", "out", error, REDUCE, [Y, X], pair, out=[full(X), make(X)])
        yield row(f"fused out {what}", "out", error, FUSED, A, W, group=alone, out=make(SUMMED))
        yield row(f"fused out {what} list", "out", error, FUSED, [A] * 2, [W] * 2, out=[full(SUMMED), make(SUMMED)])
    own, beyond = ROOM[:8], ROOM[4:12]
    yield row("allreduce out overlap", "out", ValueError, REDUCE, own, alone, out=beyond)
    yield row("allreduce out overlap list", "out", ValueError, REDUCE, [Y, own], pair, out=[full(Y), beyond])
    for x, w in ((torch.nn.Parameter(X.clone()), torch.nn.Parameter(W.clone())),):
        yield row("allreduce out of a parameter", "out", ValueError, REDUCE, x, alone, out=full(X))
        yield row("fused out of a parameter", "out", ValueError, FUSED, A, w, group=alone, out=full(SUMMED))
    for what, out in {"Tensor": torch.zeros(2, 8), "short": [torch.zeros(8)], "iterator": iter([])}.items():
        yield row(f"allreduce out {what}", "out", ValueError, REDUCE, [X, Y], pair, out=out)
        yield row(f"allreduce int4 out {what}", "out", ValueError, REDUCE, [X, Y], pair, codec="int4", out=out)
        yield row(f"fused out {what}", "out", ValueError, FUSED, [A] * 2, [W] * 2, out=out)
    for what, options in {"": {}, " epilogue": {"epilogue": "-v"}}.items():
        one = full(SUMMED)
        yield row(f"allreduce out twice{what}", "out", ValueError, REDUCE, [X, Y], pair, out=[full(X)] * 2, **options)
        yield row(f"fused out twice{what}", "out", ValueError, FUSED, [A] * 2, [W] * 2, out=[one, one], **options)
    for which in ("a", "w", "bias"):
        given = {"a": torch.ones(5, 5), "w": torch.ones(5, 5), "bias": torch.ones(5)}
        room = torch.zeros(50)
        own = given | {which: room[: given[which].numel()].view(given[which].shape)}
        out, both = room[3:28].view(5, 5), {name: [one, own[name]] for name, one in given.items()}
        said = f"out must share no memory with {which}"
        yield row(f"fused out in {which}", said, ValueError, FUSED, **own, out=out, group=alone)
        for outs in ([torch.zeros(5, 5), out], [out, torch.zeros(5, 5)]):
            name = f"fused out in {which} list{'' if outs[1] is out else ' of another rank'}"
            yield row(name, said, ValueError, FUSED, **both, out=outs)
    for which in ("a_scale", "w_scale"):
        room, fp8 = torch.ones(50), torch.ones(5, 5).to(FP8)
        own = {"a_scale": torch.ones(5, 1), "w_scale": torch.ones(5, 1)} | {which: room[:5].view(5, 1)}
        own |= {"out": room.view(torch.bfloat16)[3:28].view(5, 5), "group": alone}
        yield row(f"fused out in {which}", f"no memory with {which}", ValueError, FUSED, fp8, fp8, **own)


def full(x):
    return torch.full_like(x, 99)


def of_algorithms(alone, pair):
    for algorithm in ("ring", "one_shot_unstaged", "allgather_push", None, "quantized_two_shot_push"):
        name, given = f"allreduce algorithm {algorithm}", {"algorithm": algorithm}
        yield row(name, "algorithm", ValueError, REDUCE, X, alone, **given)
        yield row(f"{name} out", "algorithm", ValueError, REDUCE, X, alone, out=full(X), **given)
        yield row(f"{name} list", "algorithm", ValueError, REDUCE, [X, Y], pair, **given)
    lossless = "reducescatter_lossless"
    yield row(f"reducescatter algorithm {lossless}", "algorithm", ValueError, SCATTER, X, alone, algorithm=lossless)
    for one in with_kernels("allreduce"):
        given = {"algorithm": one.value, "out": [full(X), full(X)]}
        yield row(f"allreduce {one.value} on the CPU", one.value, UnsupportedError, REDUCE, [X, Y], pair, **given)
    exact = {"codec": "int4", "algorithm": "one_shot"}
    yield row("allreduce int4 one_shot", "algorithm", ValueError, REDUCE, [X, Y], pair, **exact)
    yield row("explain int4 one_shot", "algorithm", ValueError, graphar.explain, [X, Y], pair, **exact)
    tma = {"epilogue": "-v", "algorithm": "two_shot_tma"}
    yield row("allreduce epilogue two_shot_tma", "two_shot_tma", UnsupportedError, REDUCE, [X, Y], pair, **tma)
    for ops in ("allgather", ["allgather", "allreduce_out"], [None]):
        yield row(f"prepare ops {ops}", "ops", ValueError, pair.prepare, ops=ops)
    for dtypes in (["bfloat16"], torch.bfloat16):
        yield row(f"prepare dtypes {dtypes}", "dtypes", TypeError, pair.prepare, dtypes=dtypes)
    for name, text in {"codecs": "int8", "epilogues": "-v"}.items():
        yield row(f"prepare {name} {text}", name, TypeError, pair.prepare, **{name: text})
    yield row("prepare max_nbytes 64M", "max_nbytes", TypeError, pair.prepare, max_nbytes="64M")


def of_timeouts(alone, pair):
    for what, (error, timeout_s) in BAD_TIMEOUTS.items():
        given = {"timeout_s": timeout_s}
        for op in (REDUCE, SCATTER, GATHER):
            yield row(f"{op.__name__} timeout_s {what}", "timeout_s", error, op, X, alone, **given)
            yield row(f"{op.__name__} timeout_s {what} list", "timeout_s", error, op, [X, Y], pair, **given)
        yield row(f"allreduce timeout_s {what} out", "timeout_s", error, REDUCE, X, alone, out=full(X), **given)
        yield row(f"allreduce int4 timeout_s {what}", "timeout_s", error, REDUCE, X, alone, codec="int4", **given)
        yield row(f"Communicator timeout_s {what}", "timeout_s", error, Communicator, devices=["cpu"], **given)
        for op in (FUSED, FUSED_SCATTER):
            yield row(f"{op.__name__} timeout_s {what}", "timeout_s", error, op, A, W, group=alone, **given)
        for name, op in (("norm", NORM), ("scattered norm", SCATTERED_NORM)):
            yield row(f"{name} timeout_s {what}", "timeout_s", error, op, ROWS, ROWS, WEIGHT, **given)
        for name, op in (("fused norm", FUSED_NORM), ("fused scattered norm", FUSED_SCATTERED_NORM)):
            yield row(f"{name} timeout_s {what}", "timeout_s", error, op, A, W, SUMMED, BIAS, **given)


def of_codecs(alone, pair):
    for what, (error, codec) in BAD_CODECS.items():
        for op in (REDUCE, SCATTER):
            yield row(f"{op.__name__} codec {what}", "codec", error, op, [X, Y], pair, codec=codec)
        for op in (FUSED, FUSED_SCATTER):
            yield row(f"{op.__name__} codec {what}", "codec", error, op, A, W, group=alone, codec=codec)
    for what in ("name", "number"):
        error, codec = BAD_CODECS[what]
        yield row(f"explain codec {what}", "codec", error, graphar.explain, [X, Y], pair, codec=codec)
        yield row(f"prepare codec {what}", "codec", error, pair.prepare, codecs=["int4", codec])
    for op, dtype in itertools.product((REDUCE, SCATTER), (torch.int32, torch.float64)):
        yield row(f"{op.__name__} codec {dtype}", "codec", ValueError, op, X.to(dtype), alone, codec="int4")
        yield row(f"{op.__name__} codec {dtype} list", "codec", ValueError, op, [X.to(dtype)] * 2, pair, codec="int4")
        yield row(f"{op.__name__} epilogue {dtype}", "epilogue", ValueError, op, [X.to(dtype)] * 2, pair, epilogue="-v")
    for op, given in itertools.product((FUSED, FUSED_SCATTER), ({"codec": "int8"}, {"epilogue": "-v"})):
        (what,) = given
        yield row(f"{op.__name__} {what} float64", what, ValueError, op, [A.double()] * 2, [W.double()] * 2, **given)
    for op in (REDUCE, SCATTER):
        yield row(f"{op.__name__} codec no tensor", "x", TypeError, op, 1.0, alone, codec="int4")
        yield row(f"{op.__name__} codec no tensors", "tensor 0", TypeError, op, [1.0], codec="int4")
        yield row(f"{op.__name__} codec shapes", "shapes", ValueError, op, [Y, Y[:4]], pair, codec="int4")
    yield row("reducescatter codec axis", "axis", ValueError, SCATTER, [X, Y], pair, codec="int4", axis=1)


def of_trees(alone, pair):
    for op, in_list in itertools.product((inside.allreduce, inside.reducescatter), (False, True)):
        x, name = ([X, Y], pair) if in_list else (X, alone), f"{op.__name__}{' list' if in_list else ''}"
        for what, argument, given in (
            ("order ring", "order", {"order": "ring"}),
            ("out_dtype without a tree", "out_dtype", {"out_dtype": FP8}),
            ("tree of FP8", "out_dtype", {"order": "tree", "out_dtype": FP8}),
            ("tree with a codec", "codec", {"order": "tree", "codec": "int8"}),
        ):
            yield row(f"{name} {what}", argument, ValueError, op, *x, **given)
    for op in (inside.allreduce, inside.reducescatter):
        for dtype in (torch.bfloat16, torch.float64, torch.int32):
            yield row(f"{op.__name__} tree {dtype}", "float32", ValueError, op, X.to(dtype), alone, order="tree")
        for ranks in (3, 5, 6, 7):
            yield row(f"{op.__name__} tree between {ranks}", "ranks", ValueError, op, [X] * ranks, order="tree")
    for algorithm in ("hierarchical", "multimem_one_shot", "two_shot_tma", "one_shot"):
        given = {"order": "tree", "algorithm": algorithm}
        yield row(f"allreduce tree {algorithm}", algorithm, UnsupportedError, inside.allreduce, [X, Y], pair, **given)
    out, narrow = ROOM.view(torch.bfloat16)[:8], {"order": "tree", "out_dtype": torch.bfloat16}
    yield row("allreduce tree out memory", "out", ValueError, inside.allreduce, ROOM[:8], alone, out=out, **narrow)


def of_trees_of_leaves(alone):
    """Matmuls that are to be tensor-parallel invariant, but have no whole leaves, or an option that rounds twice."""
    invariant, leaves = {"partition": "tp_invariant"}, torch.ones(8, 16)
    for op in (FUSED, FUSED_SCATTER):
        name = f"{op.__name__} invariant"
        for ranks in (3, 5, 6, 7):
            given = [leaves] * ranks, [leaves] * ranks
            yield row(f"{name} between {ranks}", "ranks", ValueError, op, *given, **invariant)
        narrow, uneven = leaves[:, :12], [leaves, torch.ones(8, 8)]
        yield row(f"{name} columns", "columns", ValueError, op, narrow, narrow, group=alone, **invariant)
        yield row(f"{name} uneven columns", "columns", ValueError, op, uneven, uneven, **invariant)
        yield row(f"{name} fp64", "float64", ValueError, op, *[leaves.double()] * 2, group=alone, **invariant)
        yield row(f"{name} codec", "codec", ValueError, op, leaves, leaves, group=alone, codec="int8", **invariant)
        yield row(f"{name} count", "num_partitions", ValueError, op, leaves, leaves, num_partitions=2, **invariant)
    yield row("gathered invariant fp64", "float64", ValueError, FUSED_GATHER, *[leaves.double()] * 2, **invariant)
    x, gathered = torch.ones(8, 16, requires_grad=True), {"gathered": True, **invariant}
    yield row("gathered invariant gradient", "gathered", ValueError, FUSED_GATHER, x, leaves, **gathered)
    linear = graphar.linear
    yield row("linear no tensor", "a", TypeError, linear, 3, leaves)
    yield row("linear shapes", "a", ValueError, linear, leaves, torch.ones(8, 15))
    yield row("linear fp64", "float64", ValueError, linear, leaves.double(), leaves.double())
    yield row("linear features", "features", ValueError, linear, x, leaves[:7])
    yield row("linear group", "group", TypeError, linear, leaves, leaves, group=3)


def of_residuals(alone, pair):
    xs = [torch.ones(8), torch.ones(8)]
    bad = {
        "twice": [torch.zeros(8)] * 2,
        "shape": [torch.zeros(9)] * 2,
        "dtype": [torch.zeros(8).half()] * 2,
        "no list": torch.zeros(8),
        "gaps": [torch.zeros(16)[::2] for _ in range(2)],
        "x": xs,
        "x of another rank": [torch.zeros(8), xs[0]],
    }
    for op in (REDUCE, SCATTER):
        for what, residual in bad.items():
            given = {"codec": "int4", "residual": residual}
            yield row(f"{op.__name__} residual {what}", "residual", ValueError, op, xs, pair, **given)
        short, zeros = torch.zeros(4), [torch.zeros(8), torch.zeros(8)]
        yield row(f"{op.__name__} residual of one", "residual", ValueError, op, X, alone, codec="int4", residual=short)
        yield row(f"{op.__name__} residual alone", "residual", ValueError, op, xs, pair, residual=zeros)
        yield row(f"{op.__name__} residual bad codec", "codec", ValueError, op, xs, pair, codec="int9", residual=zeros)
    given = {"codec": "int4", "residual": zeros}
    for what, out in {"": zeros, " of another rank": [zeros[1], torch.zeros(8)]}.items():
        yield row(f"allreduce residual out{what}", "residual", ValueError, REDUCE, xs, pair, out=out, **given)
    yield row("allreduce residual algorithm", "algorithm", ValueError, REDUCE, xs, pair, algorithm="ring", **given)


def of_gathered_matmuls(alone):
    for what, (error, timeout_s) in BAD_TIMEOUTS.items():
        given = {"group": alone, "timeout_s": timeout_s}
        yield row(f"gathered timeout_s {what}", "timeout_s", error, FUSED_GATHER, A, W, **given)
    for partition in ("split_m", "batch_invariant", None):
        yield row(f"gathered {partition}", "partition", ValueError, FUSED_GATHER, A, W, partition=partition)
    for what, sizes in {"too many": [4, 4], "wrong": [len(A) + 1], "negative": [-1]}.items():
        yield row(f"gathered sizes {what}", "sizes", ValueError, FUSED_GATHER, A, W, group=alone, sizes=sizes)
        yield row(f"allgather sizes {what}", "sizes", ValueError, GATHER, A, alone, sizes=sizes)
    yield row("allgather sizes number", "sizes", TypeError, GATHER, A, alone, sizes=4)
    yield row("gathered sizes no ints", "sizes", TypeError, FUSED_GATHER, A, W, group=alone, sizes=[1.0])
    yield row("gathered sizes of a list", "sizes", ValueError, FUSED_GATHER, [A, A], [W, W], sizes=[4, 4])
    yield row("gathered vector", "a must have 2", ValueError, FUSED_GATHER, A[0], W, group=alone)
    yield row("gathered other K", "last dimension", ValueError, FUSED_GATHER, A, W[:, 1:], group=alone)
    uneven = [A, A[:, 1:]], [W, W[:, 1:]]
    yield row("gathered other K of a rank", "the rows of a and w", ValueError, FUSED_GATHER, *uneven)
    yield row("gathered bias", "bias", ValueError, FUSED_GATHER, A, W, group=alone, bias=torch.ones(len(W) + 1))
    four = {name: torch.ones(len(W)) for name in "bcde"}
    sums = " + ".join(f"{name}[col]" for name in four)
    epilogues = {
        "text": ("'v +'", "v +"),
        "number": ("'s'", "v * s"),
        "columns": ("b[col]", Epilogue("v + b[col]", b=torch.ones(len(W) + 1))),
        "rows of all ranks": ("b[row]", Epilogue("v + b[row]", b=torch.ones(len(A) + 1))),
        "a list": ("an epilogue's tensors", Epilogue("v + b[col]", b=[torch.ones(len(W))])),
        "four tensors and a bias": ("at most 4", Epilogue(f"v + {sums}", **four)),
    }
    for what, (argument, epilogue) in epilogues.items():
        given = {"group": alone, "epilogue": epilogue, "bias": torch.ones(len(W))}
        yield row(f"gathered epilogue {what}", argument, ValueError, FUSED_GATHER, A, W, **given)
    double = [A.double()] * 2, [W.double()] * 2
    yield row("gathered epilogue float64", "epilogue", ValueError, FUSED_GATHER, *double, epilogue="-v")
    yield row("gathered epilogue none", "epilogue", TypeError, FUSED_GATHER, A, W, group=alone, epilogue=3)


def of_groups(alone, pair):
    devices = {
        "a name": "cpu",
        "a number": 2,
        "none": [],
        "one twice": ["cuda:0", "cuda:1", "cuda:0"],
        "two kinds": ["cpu", "cuda:0"],
        "no index": ["cuda"],
        "another kind": ["meta"],
    }
    for what, one in devices.items():
        yield row(f"Communicator devices {what}", "device", ValueError, Communicator, devices=one)
    world, mesh = dist.group.WORLD, init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    unnamed = init_device_mesh("cpu", (1, 1, 1))
    yield row("Communicator group and devices", "devices", ValueError, Communicator, world, devices=["cpu"])
    yield row("Communicator no group", "group", TypeError, Communicator, "world")
    yield row("Communicator a mesh", "mesh['tp']", ValueError, Communicator, mesh)
    yield row("Communicator an unnamed mesh", "mesh.get_group(2)", ValueError, Communicator, unnamed)
    yield row("Communicator a rank outside the group", "not in the group", ValueError, Communicator, OUTSIDE)
    for op in (REDUCE, SCATTER, GATHER, graphar.explain):
        yield row(f"{op.__name__} no group", "group", TypeError, op, X, "world")
        yield row(f"{op.__name__} a mesh", "mesh['tp']", ValueError, op, X, mesh)
        yield row(f"{op.__name__} a rank outside the group", "not in the group", ValueError, op, X, OUTSIDE)
        yield row(f"{op.__name__} a tensor for devices", "tensor", ValueError, op, X, pair)
        yield row(f"{op.__name__} a list for a group", "list", ValueError, op, [X], alone)
        yield row(f"{op.__name__} a list for the default group", "list", ValueError, op, [X], world)
        yield row(f"{op.__name__} a list too long", "list", ValueError, op, [X] * 3, pair)
    matrix = torch.ones(4, 4)
    for name, op, given in (
        ("epilogue", SCATTER, {"x": matrix, "epilogue": "-v"}),
        ("gradient", SCATTER, {"x": matrix.clone().requires_grad_()}),
        ("sizes", GATHER, {"x": matrix, "sizes": [4, 4]}),
        ("matmul", FUSED_SCATTER, {"a": matrix, "w": matrix, "epilogue": "-v"}),
    ):
        yield row(f"a tensor for devices and {name}", "tensor", ValueError, op, **given, group=pair)


def of_removed_options():
    for op, given, removed in (
        (REDUCE, (X,), {"prefetch": W, "order": "tree", "out_dtype": FP8}),
        (SCATTER, (X,), {"order": "tree"}),
        (FUSED, (A, W), {"prefetch": W, "constant_weight": True}),
        (FUSED_NORM, (A, W, SUMMED, BIAS), {"constant_weight": True}),
        (Communicator, (), {"debug": True}),
    ):
        for name, one in removed.items():
            yield row(f"{op.__name__} {name}", f"{name}= was removed", TypeError, op, *given, **{name: one})
        said = "unexpected keyword argument 'out_type'"
        yield row(f"{op.__name__} unknown", said, TypeError, op, *given, out_type=FP8)


def of_raw_ops():
    """Calls of the dispatcher's ops, as a compiled graph makes them."""
    x = torch.ones(4, 3)
    for op in (sums.SCATTER, gather.OP):
        for sizes in ([3], [5], [-4]):
            yield row(f"op {op.name} sizes {sizes}", "sizes", ValueError, op.one, x, *op.arguments(rank=0, sizes=sizes))
        for rank, sizes in ((1, [4]), (0, [4, 0]), (1, [0, 4])):
            given = op.arguments(rank=rank, sizes=sizes)
            yield row(f"op {op.name} rank {rank} sizes {sizes}", f"rank {rank}", ValueError, op.one, x, *given)
    for order, out_dtype in (("ring", None), ("rank", torch.bfloat16), ("tree", FP8)):
        given = sums.SUM.arguments(order=order, out_dtype=out_dtype)
        yield row(f"op allreduce {order} {out_dtype}", "or", ValueError, sums.SUM.one, x, *given)
    given = sums.SCATTER.arguments(sizes=[2, 3])
    yield row("op reducescatter_list sizes", "sizes", ValueError, sums.SCATTER.list, [x, x], *given)


def message_of(refusal: Refusal) -> str:
    """The type and the text of the error that a call raises."""
    try:
        refusal.call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextlib.contextmanager
def communicators() -> Iterator[tuple[Communicator, Communicator]]:
    """A communicator of a group of one process, and one of two ranks in it. Both must still work at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Communicator() as alone, Communicator(devices=["cpu"] * 2) as pair:
        yield alone, pair
        for op in (REDUCE, SCATTER, GATHER):
            assert op(torch.ones(3), alone).tolist() == [1] * 3
        assert REDUCE([torch.ones(3)] * 2, pair)[1].tolist() == [2] * 3
    dist.destroy_process_group()


def write() -> None:
    with communicators() as both:
        found = {one.name: message_of(one) for one in refusals(*both)}
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    write()
