"""Tensor-parallel layers whose sums over ranks are graphar's; ``import graphar.nn``.

As in torch's own tensor parallelism, every rank computes the same loss from the same replicated activations: the
gradient of what all ranks hold alike is the same on all of them, and is not summed again.

    x, on all ranks --+-- ColumnParallelLinear --> this rank's features -- RowParallelLinear --+--> y, on all ranks
          gradients: summed                                                     outputs: summed
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.nn import functional

from graphar.communicator import Communicator
from graphar.ops.ops import allreduce
from graphar.ops.scatter import reducescatter
from graphar.ranks.groups import process_group
from graphar.reference import ACCUMULATION_DTYPES
from graphar.runtime.registry import communicator_name


class _OfGroup(torch.nn.Module):
    """A layer of some ranks, which its copies share with it."""

    def __deepcopy__(self, memo: dict) -> _OfGroup:
        copied = memo[id(self)] = self.__new__(type(self))
        own = {name: value for name, value in vars(self).items() if name != "group"}
        vars(copied).update(copy.deepcopy(own, memo), group=self.group)
        return copied


class RowParallelLinear(_OfGroup):
    """A linear layer whose input features are divided between ranks; its output is the same on all of them.

    Each rank multiplies its part of the input by its columns of the weight; :func:`graphar.allreduce` adds the
    products, and the bias is added once. In the backward pass nothing is exchanged.

    Args:
        linear: the whole layer, alike on all ranks; this rank's part of its weight is copied. Its ``in_features`` are a
            multiple of the number of ranks.
        group: a process group or Communicator; None is the default group.

    Shape:
        Input ``(*, in_features / ranks)``, output ``(*, out_features)``.

    Raises:
        ValueError: the features cannot be divided evenly, or torch.distributed is not initialised.
    """

    def __init__(self, linear: torch.nn.Linear, group: dist.ProcessGroup | Communicator | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 1, group)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The whole layer's output, from this rank's features of the input. Collective."""
        y = _sum_outputs(functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # which autocast has changed for one of the two


class ColumnParallelLinear(_OfGroup):
    """A linear layer whose output features are divided between ranks; its input is the same on all of them.

    In the forward pass nothing is exchanged; in the backward pass :func:`graphar.allreduce` adds the gradients of the
    input.

    Args:
        linear: the whole layer, alike on all ranks; this rank's part of its weight and bias is copied. Its
            ``out_features`` are a multiple of the number of ranks.
        group: a process group or Communicator; None is the default group.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features / ranks)``.

    Raises:
        ValueError: the features cannot be divided evenly, or torch.distributed is not initialised.
    """

    def __init__(self, linear: torch.nn.Linear, group: dist.ProcessGroup | Communicator | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = _part(linear.weight, 0, group)
        self.bias = None if linear.bias is None else _part(linear.bias, 0, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's features of the output. Its backward pass is collective."""
        return functional.linear(_SumGradients.apply(x, communicator_name(self.group)), self.weight, self.bias)


class RowwiseParallel(TorchRowwiseParallel):
    """torch's RowwiseParallel with graphar's sums, for plans of ``parallelize_module``.

    A replicated output is :func:`graphar.allreduce` of the partial ones, one that is sharded evenly is
    :func:`graphar.reducescatter` of them. What torch does otherwise, as for embeddings and meshes of several
    dimensions, it still does. Takes torch's arguments.
    """

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        if not _serves(outputs, output_layouts[0]):
            return TorchRowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        partial = outputs.to_local(grad_placements=(Replicate(),))
        if isinstance(output_layouts[0], Replicate):
            local = _sum_outputs(partial, device_mesh.get_group())
        else:
            local = reducescatter(partial, device_mesh.get_group(), axis=output_layouts[0].dim)
        return local if use_local_output else DTensor.from_local(local, device_mesh, output_layouts, run_check=False)


def _serves(outputs: DTensor, layout: Placement) -> bool:
    """Whether graphar has the step from a layer's outputs, which lack the other ranks' parts, to ``layout``."""
    placement, *more = outputs.placements
    is_sum = type(placement) is Partial and placement.reduce_op == "sum"  # that of an embedding is a kind of its own
    if more or not is_sum or outputs.dtype not in ACCUMULATION_DTYPES:
        return False
    even = type(layout) is Shard and outputs.shape[layout.dim] % outputs.device_mesh.size() == 0
    return even or isinstance(layout, Replicate)


class _SumOutputs(torch.autograd.Function):
    """Adds up the ranks' outputs; the gradient of the sum, which all ranks have, is that of each."""

    @staticmethod
    def forward(ctx, x, communicator):
        return torch.ops.graphar.allreduce(x, communicator, "auto", None)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """Passes on what all ranks have; each rank's gradient is that of its own use, and they are added up."""

    @staticmethod
    def forward(ctx, x, communicator):
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.graphar.allreduce(gradient, ctx.communicator, "auto", None), None


def _sum_outputs(x: torch.Tensor, group: dist.ProcessGroup | Communicator | None) -> torch.Tensor:
    return _SumOutputs.apply(x, communicator_name(group)) if x.requires_grad else allreduce(x, group)


def _part(whole: torch.nn.Parameter, axis: int, group: dist.ProcessGroup | Communicator | None) -> torch.nn.Parameter:
    """This rank's part of a parameter of the whole layer, copied."""
    if isinstance(group, Communicator):
        rank, world_size = group.rank, group.world_size
    else:
        ranks = process_group(group)
        rank, world_size = ranks.rank(), ranks.size()
    if rank is None:
        raise ValueError("graphar.nn: layers take a process group, or a Communicator of one, not one with devices")
    if whole.shape[axis] % world_size:
        raise ValueError(f"graphar.nn: {world_size} ranks cannot divide {whole.shape[axis]} features evenly")
    part = whole.detach().chunk(world_size, axis)[rank].clone(memory_format=torch.contiguous_format)
    return torch.nn.Parameter(part, requires_grad=whole.requires_grad)
