"""What each rank gives an op and must get from it, by graphar.reference: the columns of tests.ops.conformance."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from graphar import reference
from graphar.numerics.codec_reference import Noise, encode, error_of_wire
from graphar.numerics.codecs import as_codec
from graphar.numerics.partitions import TP_INVARIANT
from tests.cases import left_after_scatter, normal

FP8 = torch.float8_e4m3fn
Tensors = dict[str, list[torch.Tensor]]  # by argument, a tensor a rank
Results = list[tuple[torch.Tensor, ...]]  # by rank, what it gets


def sums(ranks: int, shape, dtype, fill) -> Tensors:
    return {"x": [fill(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(ranks)]}


def uneven(axis: int, ranks: int, shape, dtype, fill) -> Tensors:
    """Tensors whose lengths along the axis differ: the second rank has the longest, and the eighth an empty one."""
    lengths = [0 if rank == 7 else max(0, shape[axis] + 3 * (rank == 1) - rank) for rank in range(ranks)]
    shapes = [torch.Size((*shape[:axis], length, *shape[axis + 1 :])) for length in lengths]
    return {"x": [fill(rank, one.numel(), dtype).view(one) for rank, one in enumerate(shapes)]}


def divisible(axis: int, ranks: int, shape, dtype, fill) -> Tensors:
    """Tensors with so many times the length along the axis as there are ranks."""
    return sums(ranks, [one * ranks if at == axis % len(shape) else one for at, one in enumerate(shape)], dtype, fill)


def shares(length: int, ranks: int, rank: int = 0) -> list[int]:
    """Unequal shares of a length for each rank, some of them 0, as ``rank`` divides it."""
    weights = [(to + rank) % 3 + (to == ranks - 1) for to in range(ranks)]
    ends = [length * sum(weights[:to]) // sum(weights) for to in range(ranks + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def sizes_of(lengths: Sequence[Sequence[int]], scatter_dim: int, gather_dim: int) -> list[list[int]]:
    """By rank, the shares of each rank's tensor, whose shapes are ``lengths``."""
    own = scatter_dim == gather_dim
    return [shares(one[scatter_dim], len(lengths), rank * own) for rank, one in enumerate(lengths)]


def with_scales(make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    """Tensors, and 3 columns of fp32 for each row."""
    xs = make(ranks, shape, dtype, fill)["x"]
    return {"x": xs, "scales": [normal(40 + rank, 3 * len(x), torch.float32).view(-1, 3) for rank, x in enumerate(xs)]}


def products(ranks: int, shape, dtype, fill) -> Tensors:
    """Operands of matmuls: the shape is [..., N, K]."""
    *lead, n, k = shape
    a = [fill(rank, torch.Size(lead).numel() * k, dtype).view(*lead, k) for rank in range(ranks)]
    return {"a": a, "w": [fill(100 + rank, n * k, dtype).view(n, k) for rank in range(ranks)]}


def with_columns_of_each(ranks: int, shape, dtype, fill) -> Tensors:
    """Operands of matmuls and biases. The second rank has three columns more than others, and the third none."""
    n, k = shape[-2:]
    columns = [n + 3 * (rank == 1) if rank != 2 else 0 for rank in range(ranks)]
    weights = [fill(100 + rank, own * k, dtype).view(own, k) for rank, own in enumerate(columns)]
    biases = [fill(200 + rank, own, dtype) for rank, own in enumerate(columns)]
    return products(ranks, shape, dtype, fill) | {"w": weights, "bias": biases}


def uneven_products(ranks: int, shape, dtype, fill) -> Tensors:
    """Operands of matmuls whose rows differ between ranks as those of :func:`uneven` do, and biases."""
    *lead, _, k = shape
    return with_bias(ranks, shape, dtype, fill) | {"a": uneven(0, ranks, (*lead, k), dtype, fill)["x"]}


def with_bias(ranks: int, shape, dtype, fill) -> Tensors:
    bias = fill(200, shape[-2], dtype)
    return products(ranks, shape, dtype, fill) | {"bias": [bias.clone() for _ in range(ranks)]}


def scaled(of: str, make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    """Operands of matmuls in FP8, with scales of "rows", of "blocks" of 128, or "numbers": one of a whole tensor."""
    tensors = make(ranks, shape, dtype, fill)
    for at, name in enumerate(("a", "w")):
        tensors[name] = [one.to(FP8) for one in tensors[name]]
        tensors[f"{name}_scale"] = [
            normal(60 + 10 * at + rank, one.numel(), torch.float32).view(one).abs() + 0.1
            for rank, one in enumerate(torch.Size(scale_shape(of, x, is_weight=name == "w")) for x in tensors[name])
        ]
    return tensors


def scale_shape(of: str, x: torch.Tensor, is_weight: bool) -> tuple[int, ...]:
    if of == "numbers":
        return (1,) if is_weight else ()
    *rows, columns = x.shape
    if of == "rows":
        return (1, *rows) if is_weight else (*rows, 1)
    return (*[-(-one // 128) if is_weight else one for one in rows], -(-columns // 128))


def with_unequal_columns(make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    """Operands of matmuls of which every other rank has a third of K less."""
    tensors = make(ranks, shape, dtype, fill)
    columns = [shape[-1] - shape[-1] // 3 * (rank % 2) for rank in range(ranks)]
    own = {name: [x[..., :k].clone() for x, k in zip(tensors[name], columns, strict=True)] for name in ("a", "w")}
    return tensors | own


def with_norm(make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    """Tensors of a sum, and the residual and the weight of its norm."""
    tensors = make(ranks, shape, dtype, fill)
    shape = (*shape[:-2], shape[-2]) if "w" in tensors else shape
    residual, weight = normal(20, torch.Size(shape).numel(), dtype).view(shape), normal(21, shape[-1], dtype)
    return tensors | {
        name: [one.clone() for _ in range(ranks)] for name, one in (("residual", residual), ("weight", weight))
    }


def with_norm_of_parts(make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    """The same, with each rank's own rows of the residual."""
    tensors = with_norm(make, ranks, shape, dtype, fill)
    return tensors | {"residual": [one.clone() for one in tensors["residual"][0].tensor_split(ranks)]}


def with_residual(ranks: int, shape, dtype, fill) -> Tensors:
    tensors = sums(ranks, shape, dtype, fill)
    return tensors | {
        "residual": [normal(50 + rank, x.numel(), dtype).view(shape) for rank, x in enumerate(tensors["x"])]
    }


def with_scale(make: Callable, ranks: int, shape, dtype, fill) -> Tensors:
    return make(sums, ranks, shape, dtype, fill) | {"scale": [torch.tensor([0.3]) for _ in range(ranks)]}


def with_places(
    make: Callable, specify: Callable, ranks: int, shape, dtype, fill, dtypes=(torch.float16,), **places: str
) -> Tensors:
    """Tensors of an epilogue, each with as many elements as the result has rows, columns or elements.

    They are the same on all ranks that get the same result. Their dtypes are ``dtypes`` in turn.
    """
    tensors = make(ranks, shape, dtype, fill)
    of_ranks = [y for y, *_ in specify(**{name: [torch.zeros_like(x) for x in xs] for name, xs in tensors.items()})]
    is_own = specify in (reducescattered, fused_reducescattered, fused_allgathered)
    for at, (name, place) in enumerate(places.items()):
        numels = [
            {"row": y.shape[:-1].numel(), "col": y.shape[-1], "index": y.numel(), "0": 1}[place] for y in of_ranks
        ]
        tensors[name] = [
            normal(30 + at + 10 * rank * is_own, numel, dtypes[at % len(dtypes)]) for rank, numel in enumerate(numels)
        ]
    return tensors


def with_targets(ranks: int, shape, dtype, fill) -> Tensors:
    """Logits, and a column of the first 7 for each row."""
    logits = [fill(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(ranks)]
    rows = torch.arange(torch.Size(shape[:-1]).numel())
    target = (rows * 7919 + 3) % min(7, ranks * shape[-1])
    return {"logits": logits, "target": [target.view(shape[:-1]).clone() for _ in range(ranks)]}


def everyone(x: torch.Tensor | tuple[torch.Tensor, ...], ranks: int) -> Results:
    return [x if isinstance(x, tuple) else (x,)] * ranks


def each(xs: Sequence[torch.Tensor]) -> Results:
    return [(x,) for x in xs]


def allreduced(x, codec=None, residual=None, epilogue=None, order="rank", out_dtype=None, call=0, **choices) -> Results:
    """``call``: the number of this call, for rounding at random."""
    if codec is None:
        return everyone(reference.allreduce(x, epilogue and epilogue.of_rank(0), order, out_dtype), len(x))
    codec = as_codec("allreduce", codec)
    if residual is None:
        return everyone(reference.quantized_allreduce(x, codec, codec.seed or 0, call), len(x))
    parts = [one + other for one, other in zip(x, residual, strict=True)]
    total = reference.quantized_allreduce(parts, codec, codec.seed or 0, call)
    noises = [Noise(codec.seed or 0, call, rank) for rank in range(len(x))]
    wires = [encode(part.reshape(-1), codec, noise) for part, noise in zip(parts, noises, strict=True)]
    return [(total, error_of_wire(*pair, codec)) for pair in zip(parts, wires, strict=True)]


def reducescattered(
    x, axis=0, codec=None, residual=None, epilogue=None, order="rank", out_dtype=None, call=0, algorithm="auto"
) -> Results:
    if codec is None:
        return each(reference.reducescatter(x, axis, epilogue, order, out_dtype))
    codec = as_codec("reducescatter", codec)
    if residual is None:
        return each(reference.quantized_reducescatter(x, codec, codec.seed or 0, call, axis=axis))
    parts = [one + other for one, other in zip(x, residual, strict=True)]
    received = reference.quantized_reducescatter(parts, codec, codec.seed or 0, call, axis=axis)
    counts, left = [one.numel() for one in received], []
    for rank, part in enumerate(parts):
        rows = part.movedim(axis, 0).contiguous()
        errors = left_after_scatter(rows.view(-1), codec, Noise(codec.seed or 0, call, rank), counts)
        left.append(errors.view(rows.shape).movedim(0, axis).contiguous())
    return list(zip(received, left, strict=True))


def allgathered(x, axis=0, algorithm="auto") -> Results:
    return everyone(reference.allgather(x, axis), len(x))


def exchanged(x, scatter_dim=0, gather_dim=0, algorithm="auto") -> Results:
    return each(reference.alltoall(x, scatter_dim, gather_dim))


def exchanged_in_shares(x, scatter_dim=0, gather_dim=0) -> Results:
    return each(
        reference.alltoall(x, scatter_dim, gather_dim, sizes_of([one.shape for one in x], scatter_dim, gather_dim))
    )


def gathered_with_scales(x, scales, axis=0) -> Results:
    return everyone((reference.allgather(x, axis), reference.allgather(scales, axis)), len(x))


def normed(x, residual, weight, scale=None, **numbers) -> Results:
    own = {} if scale is None else {"scale": scale[0]}
    of_ranks = zip(residual, weight, strict=True)  # equal, but each has gradients of its own
    return [reference.allreduce_residual_rmsnorm(x, *pair, **own, **numbers) for pair in of_ranks]


def scattered_and_normed(x, residual, weight, scale=None, **numbers) -> Results:
    own = {} if scale is None else {"scale": scale[0]}
    of_ranks = [reference.reducescatter_residual_rmsnorm(x, residual, one, **own, **numbers) for one in weight]
    return [found[rank] for rank, found in enumerate(of_ranks)]  # each weight has gradients of its own


def _seeded(codec) -> dict:
    return {} if codec is None else {"codec": codec, "seed": as_codec("fused", codec).seed or 0}


def _cut(partition: str = "auto", num_partitions: int | None = None, **scaled) -> dict:
    """How the specification takes a partition. Scales, and the dtype of the result, it takes as they are."""
    if partition == TP_INVARIANT:
        return {"tp_invariant": True}
    return {"partition": partition, "num_partitions": num_partitions, **scaled}


def fused_allreduced(a, w, bias=None, epilogue=None, codec=None, constant_weight=False, **options) -> Results:
    call = functools.partial(reference.fused_matmul_allreduce, a, w, **_cut(**options), **_seeded(codec))
    follow = [(bias and bias[rank], epilogue and epilogue.of_rank(rank)) for rank in range(len(a))]
    own = [bias, *(epilogue.tensors.values() if epilogue else ())]
    if not any(one.requires_grad for ones in own for one in ones or ()):  # equal, and without gradients of their own
        return everyone(call(follow[0][0], epilogue=follow[0][1]), len(a))
    return each([call(one, epilogue=followed) for one, followed in follow])


def fused_reducescattered(a, w, bias=None, codec=None, epilogue=None, **options) -> Results:
    how = _cut(**options) | _seeded(codec)
    call = functools.partial(reference.fused_matmul_reducescatter, a, w, epilogue=epilogue, **how)
    if not bias or not bias[0].requires_grad:
        return each(call(bias and bias[0]))
    return each([call(one)[rank] for rank, one in enumerate(bias)])


def fused_allgathered(
    a, w, bias=None, gathered=False, partition="auto", epilogue=None, a_scale=None, w_scale=None, out_dtype=None
) -> Results:
    how = {"tp_invariant": partition == TP_INVARIANT, "a_scale": a_scale, "out_dtype": out_dtype}
    products = []
    for rank, own in enumerate(w):
        follow = bias and bias[rank], epilogue and epilogue.of_rank(rank), w_scale and w_scale[rank]
        products.append(reference.fused_allgather_matmul(a, own, *follow[:2], w_scale=follow[2], **how))
    if not gathered:
        return each(products)
    rows = reference.allgather(a)
    if a_scale is None:
        return [(product, rows) for product in products]
    wide = [of if of.ndim else of.expand(*x.shape[:-1], 1) for x, of in zip(a, a_scale, strict=True)]
    return [(product, rows, torch.cat(wide)) for product in products]


def fused_normed(a, w, residual, weight, partition="auto", **numbers) -> Results:
    numbers |= {"tp_invariant": partition == TP_INVARIANT}
    call = functools.partial(reference.fused_matmul_allreduce_residual_rmsnorm, a, w, **numbers)
    return [call(*pair) for pair in zip(residual, weight, strict=True)]


def fused_scattered_and_normed(a, w, residual, weight, partition="auto", **numbers) -> Results:
    numbers |= {"tp_invariant": partition == TP_INVARIANT}
    call = functools.partial(reference.fused_matmul_reducescatter_residual_rmsnorm, a, w, residual, **numbers)
    return [call(one)[rank] for rank, one in enumerate(weight)]


def of_losses(logits, target, temperature=None, **options) -> Results:
    if temperature is None:
        return everyone(reference.cross_entropy(logits, target[0], **options), len(logits))
    return everyone(reference.log_probs(logits, target[0], temperature=temperature, **options), len(logits))


def joined(axis: int, gradients: Sequence[torch.Tensor], tensors: Tensors) -> list[torch.Tensor]:
    return [y for (y,) in allgathered(gradients, axis)]


def exchanged_back(scatter_dim: int, gather_dim: int, gradients: Sequence[torch.Tensor], tensors: Tensors):
    return reference.alltoall(gradients, gather_dim, scatter_dim)


def shares_back(scatter_dim: int, gather_dim: int, gradients: Sequence[torch.Tensor], tensors: Tensors):
    shapes = [x.shape for x in tensors["x"]]
    received = [[shape[gather_dim] for shape in shapes]] * len(shapes)
    if scatter_dim == gather_dim:
        received = list(zip(*sizes_of(shapes, scatter_dim, gather_dim), strict=True))
    return reference.alltoall(gradients, gather_dim, scatter_dim, received)


def summed(gradients: Sequence[torch.Tensor], tensors: Tensors, **options) -> list[torch.Tensor]:
    return [y for (y,) in allreduced(gradients, **options)]


def summed_as_tree(gradients: Sequence[torch.Tensor], tensors: Tensors) -> list[torch.Tensor]:
    return summed([one.float() for one in gradients], tensors, order="tree")


def joined_in_fp32(axis: int, gradients: Sequence[torch.Tensor], tensors: Tensors) -> list[torch.Tensor]:
    return joined(axis, [one.float() for one in gradients], tensors)


def summed_parts(axis: int, gradients: Sequence[torch.Tensor], tensors: Tensors) -> list[torch.Tensor]:
    return list(reference.allreduce(gradients).split([x.shape[axis] for x in tensors["x"]], axis))
