"""Calls of ops by their schemas, which have arguments that the public functions do not: for layers and compiled graphs.

``order`` and ``out_dtype`` of sums, and ``constant_weight`` of matmuls.
"""

from graphar.numerics.partitions import split
from graphar.ops import matmul_operands, options, parts
from graphar.ops.register import ops_by_name
from graphar.runtime.registry import engine_name


def call(op: str, *tensors, group=None, out=None, residual=None, codec=None, epilogue=None, axis=0, bias=None, **given):
    """Returns the result of an op, given its tensors in order, and other arguments as its public function has them."""
    of_schema, in_list = ops_by_name[op], isinstance(tensors[0], (list, tuple))
    if of_schema.takes("order"):
        options.check_input(op, *tensors)
    else:
        matmul_operands.check(op, *tensors[:2], bias)
    first, ranks = (tensors[0][0], len(tensors[0])) if in_list else (tensors[0], None)
    if of_schema.takes("epilogue"):
        given["codec"], whole = options.codec_option(op, codec), None
        if of_schema.takes("axis"):
            axis, (rank, world_size) = axis % first.ndim, (-1, ranks) if in_list else parts.place(group)
            sizes = split(first.shape[axis], world_size)
            given |= {"rank": rank, "axis": axis, "sizes": sizes}
            first, whole = first.narrow(axis, 0, sizes[max(rank, 0)]), axis
        followed = options.epilogue_option(op, epilogue, first, ranks, whole)
        given |= followed
    if bias is not None:
        given["bias"] = bias if in_list else [bias]
    given["communicator"] = engine_name(group, op)
    if out is None:
        return of_schema(*tensors, **given)
    residuals = [[]] if of_schema.takes("order") else []
    of_schema.into(*tensors, *residuals, out, **given)
    return out


def allreduce(x, group=None, *, out=None, order="rank", **given):
    """graphar.allreduce, whose ``order`` may be "tree", with an ``out_dtype`` of the result."""
    return call("allreduce", x, group=group, out=out, order=order, **given)


def reducescatter(x, group=None, *, order="rank", **given):
    """graphar.reducescatter with these arguments."""
    return call("reducescatter", x, group=group, order=order, **given)


def fused_matmul_allreduce(a, w, *, bias=None, group=None, out=None, constant_weight=False, **given):
    """graphar.fused_matmul_allreduce, whose ``w`` may be constant."""
    return call(
        "fused_matmul_allreduce", a, w, bias=bias, group=group, out=out, constant_weight=constant_weight, **given
    )


def fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, eps=1e-6, *, weight_offset=0.0, **given):
    """The same with a norm."""
    numbers = {"eps": eps, "weight_offset": weight_offset}
    return call("fused_matmul_allreduce_residual_rmsnorm", a, w, residual, weight, **numbers, **given)
