"""Refusals of epilogues, of matmuls and of norms."""

import itertools

import torch

import graphar
from graphar import Epilogue
from tests.ops.refusal import (
    BIAS,
    FP8,
    FUSED,
    FUSED_NORM,
    FUSED_SCATTER,
    FUSED_SCATTERED_NORM,
    NORM,
    REDUCE,
    ROWS,
    SCALE,
    SCATTER,
    SCATTERED_NORM,
    SUMMED,
    SUMMED_WEIGHT,
    WEIGHT,
    A,
    W,
    X,
    row,
)


def of_epilogues(pair):
    xs = [torch.ones(2, 4)] * 2
    ones = {n: [torch.ones(n)] * 2 for n in (1, 2, 3, 4, 5)}
    mixed = [torch.ones(4), torch.ones(4).half()]
    bad = {
        "no number": ("'s'", "v * s"),
        "another number": ("'s'", Epilogue("v", s=1)),
        "a number for a tensor": ("'b'", Epilogue("v + b[col]", b=1.0)),
        "a tensor for a list": ("an epilogue's tensors", Epilogue("v + b[col]", b=torch.ones(4))),
        "a long list": ("an epilogue's tensors", Epilogue("v + b[col]", b=[torch.ones(4)] * 3)),
        "columns": ("b[col]", Epilogue("v + b[col]", b=ones[3])),
        "rows": ("b[row]", Epilogue("v + b[row]", b=ones[4])),
        "elements": ("b[index]", Epilogue("v + b[index]", b=ones[4])),
        "one": ("b[0]", Epilogue("v + b[0]", b=ones[4])),
        "integers": ("b must", Epilogue("v + b[col]", b=[torch.ones(4).int()] * 2)),
        "dtypes": ("the tensors of an epilogue", Epilogue("v + b[col]", b=mixed)),
        "dimensions": ("a tensor of shape [1, 2, 4]", Epilogue(added, b=[torch.ones(1, 2, 4)] * 2)),
        "broadcast": ("a tensor of shape [3]", Epilogue(added, b=ones[3])),
        "text": ("'v +'", "v +"),
    }
    for what, (argument, epilogue) in bad.items():
        yield row(f"allreduce epilogue {what}", argument, ValueError, REDUCE, xs, pair, epilogue=epilogue)
    one = Epilogue("v + b[col]", b=[torch.ones(8)])
    yield row("allreduce epilogue a list for a tensor", "epilogue", ValueError, REDUCE, X, epilogue=one)
    yield row("epilogue no expression", "epilogue", TypeError, REDUCE, xs, pair, epilogue=3)
    yield row("Epilogue reserved", "v", ValueError, Epilogue, "v", v=1)
    yield row("Epilogue argument", "s", TypeError, Epilogue, "v * s", s="1")
    for op, name in itertools.product((REDUCE, SCATTER, graphar.explain), ("codec", "residual")):
        if op is not graphar.explain or name == "codec":
            given = {"codec": "int8"} if name == "codec" else {"residual": [torch.zeros(2, 4)] * 2}
            given["epilogue"] = "-v"
            yield row(f"{op.__name__} epilogue and {name}", "epilogue", ValueError, op, xs, pair, **given)
    outs = [torch.ones(2, 4), torch.ones(2, 4)]
    read = Epilogue("v + r[index]", r=outs)
    yield row("allreduce epilogue out", "out", ValueError, REDUCE, xs, pair, out=outs, epilogue=read)
    unknown = {
        "function": ("a function", torch.relu),
        "number": ("'s'", "v * s"),
        "integers": ("the tensors of an epilogue", Epilogue("v + b[col]", b=torch.ones(3).int())),
    }
    for what, (argument, epilogue) in unknown.items():
        yield row(f"prepare epilogue {what}", argument, ValueError, pair.prepare, epilogues=[epilogue])
    cube = [torch.ones(4, 2, 3)] * 2
    parts = {
        "row axis 1": ("row", 1, "v + row"),
        "index axis 1": ("index", 1, Epilogue("v + r[index]", r=[torch.ones(12)] * 2)),
        "col axis 2": ("col", 2, "v + col"),
        "the whole's elements": ("r[index]", 0, Epilogue("v + r[index]", r=[torch.ones(24)] * 2)),
        "a tensor for a list": ("an epilogue's tensors", 0, Epilogue("v + b[col]", b=torch.ones(3))),
        "broadcast over the first": ("a tensor of shape [1, 2, 3]", 0, Epilogue(added, b=[torch.ones(1, 2, 3)] * 2)),
        "text": ("'v +'", 0, "v +"),
    }
    for what, (argument, axis, epilogue) in parts.items():
        given = {"axis": axis, "epilogue": epilogue}
        yield row(f"reducescatter epilogue {what}", argument, ValueError, SCATTER, cube, pair, **given)


def added(v, b):
    return v + b


def of_operands(alone):
    bad = {
        "no tensor": ("a", TypeError, {"a": 1.0}),
        "sparse": ("a", TypeError, {"a": A.to_sparse()}),
        "integers": ("a", TypeError, {"a": A.int(), "w": W.int()}),
        "dtypes": ("w", ValueError, {"w": W.half()}),
        "bias dtype": ("bias", ValueError, {"bias": torch.ones(4).double()}),
        "device": ("w", ValueError, {"w": W.to("meta")}),
        "no dimension": ("a", ValueError, {"a": A[0, 0]}),
        "a weight of three dimensions": ("w", ValueError, {"w": W[None]}),
        "a bias of two": ("bias", ValueError, {"bias": A}),
        "K": ("a", ValueError, {"w": W.t()}),
        "bias length": ("bias", ValueError, {"bias": A[0]}),
    }
    options = {
        "partition": ("partition", {"partition": "split_k"}),
        "no partitions": ("num_partitions", {"partition": "split_m", "num_partitions": 0}),
        "too many rows": ("7 partitions", {"partition": "split_m", "num_partitions": 7}),
        "too many columns": ("5 partitions", {"partition": "split_n", "num_partitions": 5}),
        "no cut": ("num_partitions", {"num_partitions": 2}),
        "codec and epilogue": ("a codec or an epilogue", {"codec": "int8", "epilogue": "-v"}),
        "codec and batch_invariant": ("not both", {"codec": "int8", "partition": "batch_invariant"}),
        "cut of batch_invariant": ("num_partitions", {"num_partitions": 2, "partition": "batch_invariant"}),
        "epilogue partitions": ("9 partitions", {"epilogue": "v", "partition": "split_m", "num_partitions": 9}),
    }
    for op in (FUSED, FUSED_SCATTER):
        name = op.__name__
        for what, (argument, error, one) in bad.items():
            both = {"a": A, "w": W} | one
            lists = {key: [good, both[key]] for key, good in (("a", A), ("w", W), ("bias", BIAS)) if key in both}
            yield row(f"{name} {what}", f"{argument} must", error, op, **both, group=alone)
            yield row(f"{name} {what} list", f"{argument}[1] must", error, op, **lists)
        for what, (argument, given) in options.items():
            yield row(f"{name} {what}", argument, ValueError, op, A, W, group=alone, **given)
        given = {"partition": "split_m", "num_partitions": 2.0}
        yield row(f"{name} partitions are no number", "num_partitions", TypeError, op, A, W, **given)
    yield row("fused scatter rows", "a must", ValueError, FUSED_SCATTER, A[0], W, group=alone)
    yield row("fused scatter rows list", "a must", ValueError, FUSED_SCATTER, [A[0]] * 2, [W] * 2)


def of_lists_of_operands():
    twice = {"A": [A, A], "W": [W, W]}
    bad = {
        "empty": ("tensor", [], [], None),
        "a short w": ("w", twice["A"], [W], None),
        "a tensor for w": ("w", twice["A"], W, None),
        "as many rows of w": ("w", twice["A"], W[:2], None),
        "no w": ("w", twice["A"], None, None),
        "meta": ("tensors", [A.to("meta")], [W.to("meta")], None),
        "a tensor for bias": ("bias", twice["A"], twice["W"], A[0]),
        "other rows": ("K", [A, A[1:]], twice["W"], None),
        "other columns": ("K", twice["A"], [W, W[1:]], None),
        "dtypes": ("dtypes", [A, A.double()], [W, W.double()], None),
        "devices": ("tensors", [A, A.to("meta")], [W, W.to("meta")], None),
    }
    four = Epilogue("v + a[0] + b[0] + c[0] + d[0]", **{name: [torch.ones(1)] * 2 for name in "abcd"})
    epilogues = {
        "no expression": (TypeError, "epilogue", 3),
        "a tensor for a list": (ValueError, "epilogue", Epilogue("v + b[col]", b=torch.ones(4))),
        "columns": (ValueError, "b[col]", Epilogue("v + b[col]", b=[torch.ones(3)] * 2)),
        "rows": (ValueError, "b[row]", Epilogue("v + b[row]", b=[torch.ones(5)] * 2)),
        "dtypes": (ValueError, "epilogue", Epilogue("v + b[col]", b=[torch.ones(4), torch.ones(4).half()])),
    }
    for op in (FUSED, FUSED_SCATTER):
        for what, (argument, a, w, bias) in bad.items():
            yield row(f"{op.__name__} list {what}", argument, ValueError, op, a, w, bias=bias)
        for what, (error, argument, epilogue) in epilogues.items():
            yield row(f"{op.__name__} epilogue {what}", argument, error, op, *twice.values(), epilogue=epilogue)
        five = {"bias": [BIAS] * 2, "epilogue": four}
        yield row(f"{op.__name__} five tensors", "bias", ValueError, op, *twice.values(), **five)
    outs = [torch.ones(6, 4), torch.ones(6, 4)]
    read = Epilogue("v + r[index]", r=outs)
    yield row("fused epilogue out", "out", ValueError, FUSED, *twice.values(), out=outs, epilogue=read)


def of_norms():
    def wanting(x):
        return x.clone().requires_grad_()

    x, w, fp8 = ROWS, WEIGHT, {"out_dtype": FP8}
    bad = {
        "weight length": ("weight", ValueError, (x, x, w[:7]), {}),
        "residual shape": ("residual", ValueError, (x, x[:3], w), {}),
        "residual dtype": ("residual", ValueError, (x, x.half(), w), {}),
        "weight dtype": ("weight", ValueError, (x, x, w.double()), {}),
        "float64": ("x", ValueError, (x.double(), x.double(), w.double()), {}),
        "integers": ("x", ValueError, (x.long(), x.long(), w.long()), {}),
        "0-d": ("x", ValueError, (torch.ones(()),) * 3, {}),
        "no columns": ("x", ValueError, (x[:, :0], x[:, :0], w[:0]), {}),
        "eps": ("eps", ValueError, (x, x, w, float("nan")), {}),
        "endless eps": ("eps", ValueError, (x, x, w, float("inf")), {}),
        "bool eps": ("eps", ValueError, (x, x, w, True), {}),
        "negative eps": ("eps", ValueError, (x, x, w, -1), {}),
        "offset": ("weight_offset", ValueError, (x, x, w), {"weight_offset": "1"}),
        "no residual": ("residual", TypeError, (x, None, w), {}),
        "e5m2": ("out_dtype", ValueError, (x, x, w), {"out_dtype": torch.float8_e5m2}),
        "float16": ("out_dtype", ValueError, (x, x, w), {"out_dtype": torch.float16}),
        "scale alone": ("scale", ValueError, (x, x, w), {"scale": SCALE}),
        "groups alone": ("group_size", ValueError, (x, x, w), {"group_size": 128}),
        "groups of 64": ("group_size", ValueError, (x, x, w), {"group_size": 64} | fp8),
        "part of a group": ("group_size", ValueError, (x, x, w), {"group_size": 128} | fp8),
        "groups and scale": ("group_size", ValueError, (x, x, w), {"group_size": 128, "scale": SCALE} | fp8),
        "scale number": ("scale", TypeError, (x, x, w), {"scale": 0.5} | fp8),
        "scale dtype": ("scale", ValueError, (x, x, w), {"scale": SCALE.double()} | fp8),
        "scale shape": ("scale", ValueError, (x, x, w), {"scale": torch.ones(4, 1)} | fp8),
        "scale device": ("scale", ValueError, (x, x, w), {"scale": SCALE.to("meta")} | fp8),
        "scale for a list": ("scale", ValueError, ([x], [x], [w]), {"scale": SCALE} | fp8),
        "gradient": ("FP8", ValueError, (x, x, wanting(w)), fp8),
        "gradient list": ("FP8", ValueError, ([x], [x], [wanting(w)]), fp8),
        "residual list": ("residual", ValueError, ([x, x], x, [w, w]), {}),
        "weight list": ("weight", ValueError, ([x, x], [x, x], [w]), {}),
    }
    for what, (argument, error, given, options) in bad.items():
        yield row(f"norm {what}", argument, error, NORM, *given, **options)
    yield from of_scattered_norms()
    yield from of_fused_norms()


def of_scattered_norms():
    x, own, w, fp8 = ROWS, ROWS[:2], WEIGHT, {"out_dtype": FP8}
    wanting = w.clone().requires_grad_()
    bad = {
        "one dimension": ("x", ValueError, (x[0], x[0], w), {}),
        "no tensor": ("x", TypeError, (1.0, x, w), {}),
        "float64": ("x", ValueError, (x.double(), x.double(), w.double()), {}),
        "no columns": ("x", ValueError, (x[:, :0], x[:, :0], w[:0]), {}),
        "residual rows": ("residual", ValueError, (x, x[:3], w), {}),
        "the whole residual": ("residual", ValueError, ([x, x], [x, x], [w, w]), {}),
        "residual list": ("residual", ValueError, ([x, x], own, [w, w]), {}),
        "weight length": ("weight", ValueError, ([x, x], [own, own], [w, w[:7]]), {}),
        "eps": ("eps", ValueError, (x, x, w, float("inf")), {}),
        "offset": ("weight_offset", ValueError, (x, x, w), {"weight_offset": "1"}),
        "e5m2": ("out_dtype", ValueError, (x, x, w), {"out_dtype": torch.float8_e5m2}),
        "scale list": ("scale", ValueError, ([x, x], [own, own], [w, w]), {"scale": [SCALE]} | fp8),
        "gradient": ("FP8", ValueError, ([x, x], [own, own], [w, wanting]), fp8),
    }
    for what, (argument, error, given, options) in bad.items():
        yield row(f"scattered norm {what}", argument, error, SCATTERED_NORM, *given, **options)


def of_fused_norms():
    a, w, r, g = A, W, SUMMED, SUMMED_WEIGHT
    bad = {
        "K": ("a", ValueError, (a, w[:, :3], r, g), {}),
        "residual shape": ("residual", ValueError, (a, w, r[:5], g), {}),
        "weight length": ("weight", ValueError, (a, w, r, g[:3]), {}),
        "residual dtype": ("residual", ValueError, (a, w, r.half(), g), {}),
        "no residual": ("residual", TypeError, (a, w, None, g), {}),
        "float64": ("a", ValueError, (a.double(), w.double(), r.double(), g.double()), {}),
        "no rows": ("w", ValueError, (a, w[:0], r[:, :0], g[:0]), {}),
        "eps": ("eps", ValueError, (a, w, r, g, float("inf")), {}),
        "negative eps": ("eps", ValueError, (a, w, r, g, -1e-6), {}),
        "offset": ("weight_offset", ValueError, (a, w, r, g), {"weight_offset": "1"}),
        "partition": ("partition", ValueError, (a, w, r, g), {"partition": "split_m"}),
        "a tensor for w": ("w", ValueError, ([a, a], w[:2], [r] * 2, [g] * 2), {}),
        "a tensor for residual": ("residual", ValueError, ([a, a], [w, w], r[:2], [g] * 2), {}),
        "a short weight": ("weight", ValueError, ([a, a], [w, w], [r] * 2, [g]), {}),
    }
    for what, (argument, error, given, options) in bad.items():
        yield row(f"fused norm {what}", argument, error, FUSED_NORM, *given, **options)
    own = r[:3]
    bad = {
        "rows": ("a", ValueError, (a[0], w, r[0], g), {}),
        "the whole residual": ("residual", ValueError, ([a, a], [w, w], [r, r], [g, g]), {}),
        "residual dtype": ("residual", ValueError, ([a, a], [w, w], [own, own.half()], [g, g]), {}),
        "weight length": ("weight", ValueError, (a, w, r, g[:3]), {}),
        "eps": ("eps", ValueError, (a, w, r, g, float("inf")), {}),
        "partition": ("partition", ValueError, (a, w, r, g), {"partition": "split_m"}),
        "a short weight": ("weight", ValueError, ([a, a], [w, w], [own, own], [g]), {}),
    }
    for what, (argument, error, given, options) in bad.items():
        yield row(f"fused scattered norm {what}", argument, error, FUSED_SCATTERED_NORM, *given, **options)
