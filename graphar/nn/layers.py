"""Tensor-parallel layers that sum with graphar.allreduce."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.nn import functional

from graphar.nn import sequence
from graphar.nn.fp8 import Input, MayBeFp8, check_linear
from graphar.nn.invariant import in_dtype_of_autocast
from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops.allgather_matmul import fused_allgather_matmul
from graphar.ops.linear import linear
from graphar.ops.matmul_sums import fused_matmul_allreduce, fused_matmul_reducescatter, with_constant_weight
from graphar.ops.replicated import copied, is_recorded, summed
from graphar.ops.sums import allreduce, reducescatter
from graphar.ranks.groups import process_group
from graphar.runtime.registry import Group, engine_name, engine_of_either


class _OfGroup(MayBeFp8):
    """A layer over the ranks of a group. Deep copies of it share the group."""

    weight: torch.nn.Parameter
    _divided: ClassVar[dict[str, int]]  # by name, the axis along which each parameter of 16 bits is divided
    _with_tokens: ClassVar[Callable[..., torch.Tensor]]  # the function of graphar.nn.sequence

    def __init__(
        self,
        linear: torch.nn.Linear,
        group: Group = None,
        *,
        tp_invariant: bool = False,
        sequence_dim: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_linear(type(self).__name__, linear)
        self.tp_invariant, self.group, self.sequence_dim, self.out_dtype = tp_invariant, group, sequence_dim, out_dtype
        self._rank, self._world_size = _place(group, tp_invariant)
        self._parts = dict(self._divided)
        for name, axis in self._parts.items():
            whole = getattr(linear, name)
            setattr(self, name, None if whole is None else self._part(whole, axis))
        if self.weight.dtype == FP8:
            self._take_scales(linear)
        elif out_dtype is not None:
            raise ValueError(f"graphar.nn.{type(self).__name__}: out_dtype is for weights in {FP8}")
        method = "_of_tokens" if sequence_dim is not None else "_of_leaves" if tp_invariant else "_of_whole"
        self._method = getattr(type(self), "_of_fp8" if self.weight.dtype == FP8 else method)

    def _take_scales(self, linear: torch.nn.Linear | SimpleNamespace) -> None:
        """Takes the scales of a whole layer, and keeps this rank's part of those that are divided."""
        super()._take_scales(linear)
        layer, axis, scale = type(self).__name__, self._divided["weight"], getattr(self, self._weight_scale)
        if self.tp_invariant:
            raise ValueError(f"graphar.nn.{layer}: products of {FP8} have no tensor-parallel invariant order")
        if self._world_size > 1 and self._in_blocks and self.weight.shape[axis] % BLOCK:
            raise ValueError(
                f"graphar.nn.{layer}: {self._world_size} ranks cannot divide {linear.weight.shape[axis]} features into "
                f"parts of whole blocks of {BLOCK}"
            )
        self.weight.requires_grad_(False)
        if scale.ndim == 2 and scale.shape[axis] > 1:
            self._parts[self._weight_scale] = axis
            setattr(self, self._weight_scale, self._part(scale, axis))

    def forward(self, x: Input) -> torch.Tensor:
        """Returns the output. Collective."""
        self._check_features(x)
        return self._method(self, x)

    def extra_repr(self) -> str:
        """Returns this rank's features, whether there is a bias, and the number of ranks, for ``print(model)``."""
        out_features, in_features = self.weight.shape
        has_bias = self.bias is not None
        return f"in_features={in_features}, out_features={out_features}, bias={has_bias}, ranks={self._world_size}"

    def _check_features(self, x: Input) -> None:
        columns, features = (x if isinstance(x, torch.Tensor) else x[0]).shape[-1], self.weight.shape[1]
        if columns != features:
            is_whole = self._divided["weight"] == 1 and columns == features * self._world_size
            advice = f"; pass this rank's part, x.chunk({self._world_size}, -1)[rank]" if is_whole else ""
            raise ValueError(f"{type(self).__name__}: takes {features} features on each rank, got {columns}{advice}")

    def _of_tokens(self, x: torch.Tensor) -> torch.Tensor:
        partition = TP_INVARIANT if self.tp_invariant else "auto"
        return self._with_tokens(*in_dtype_of_autocast(x, self.weight, self.bias), self._tokens(x), partition)

    def _tokens(self, x: torch.Tensor) -> sequence.Tokens:
        dim = self.sequence_dim
        if dim is None or not -x.ndim <= dim < x.ndim - 1 or dim == -1:
            raise ValueError(
                f"{type(self).__name__}: sequence_dim must be a dimension before the last one of an input of shape "
                f"{list(x.shape)}, got {dim}"
            )
        name = engine_name(self.group, alone=self.tp_invariant)
        return sequence.Tokens(name, self._rank, self._world_size, dim % x.ndim)

    def _from_checkpoint(self, state_dict: dict, prefix: str) -> dict:
        """Returns a checkpoint of the layer, or of the whole one: then with this rank's part of it."""
        state = super()._from_checkpoint(state_dict, prefix)
        for name, axis in self._parts.items():
            parameter, loaded = getattr(self, name), state.get(prefix + name)
            if parameter is None or not isinstance(loaded, torch.Tensor) or isinstance(loaded, DTensor):
                continue
            shape = parameter.shape
            whole = (*shape[:axis], shape[axis] * self._world_size, *shape[axis + 1 :])
            if loaded.shape == whole != shape:
                state[prefix + name] = self._part(loaded, axis)
        return state

    def _part(self, whole: torch.Tensor, axis: int) -> torch.nn.Parameter:
        if whole.shape[axis] % self._world_size:
            ranks = self._world_size
            raise ValueError(f"graphar.nn: {ranks} ranks cannot divide {whole.shape[axis]} features evenly")
        part = whole.detach().chunk(self._world_size, axis)[self._rank].clone(memory_format=torch.contiguous_format)
        return torch.nn.Parameter(part, requires_grad=whole.requires_grad)

    def __deepcopy__(self, memo: dict) -> _OfGroup:
        memo[id(self.group)] = self.group
        copied = memo[id(self)] = self.__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


class RowParallelLinear(_OfGroup):
    """A linear layer whose input features are divided between ranks. Every rank gets the whole output.

    Each rank multiplies its part of the input by its columns of the weight. :func:`graphar.allreduce` sums the
    products. The bias is added once, after the sum. The backward pass does not communicate.

    ``state_dict`` has this rank's part of the weight. ``load_state_dict`` takes it, or cuts it from the whole weight.

    Args:
        linear: the whole layer, equal on all ranks. This rank's columns of its weight are copied, and its bias is
            shared. ``in_features`` must be a multiple of the number of ranks. A weight in FP8 makes a layer for
            inference, which takes the inputs of :class:`Fp8Linear`, sums by :func:`graphar.fused_matmul_allreduce`, and
            adds the bias before the sum is rounded. With scales of blocks each rank has a multiple of 128 features.
        group: a process group, a DeviceMesh of one dimension, or a Communicator of a group; None: the default group.
        constant_weight: use :func:`graphar.fused_matmul_allreduce` in inference, whose kernels for at most 64 rows load
            the weight before the previous kernel ends. Outputs may have other bits. True promises that nothing writes
            the weight while the layer runs, or while a CUDA graph with it is replayed. FSDP breaks that: it gathers
            weights just before the layer. Ignored while gradients of the weight are recorded, and under autocast, which
            casts it. In compiled models prefer ``graphar.enable(constant_weights=True)``, which also fuses norms.
        tp_invariant: sum by :func:`graphar.fused_matmul_allreduce` with ``partition="tp_invariant"``: output and
            gradients have the same bits on 1, 2, 4 and 8 ranks. The bias is added before the sum is rounded. Without
            torch.distributed the layer has a single rank.
        sequence_dim: the dimension of tokens, for sequence parallelism: each rank gets its part of the tokens, by
            :func:`graphar.fused_matmul_reducescatter`. Gradients of weight and bias are of all tokens. The bias is
            added before the sum is rounded, and ``constant_weight`` is ignored. None: every rank gets all tokens.
        out_dtype: for a weight in FP8, torch.bfloat16 or torch.float16. None: as in :class:`Fp8Linear`.

    Shape:
        Input ``(*, in_features / ranks)``, output ``(*, out_features)``. With ``sequence_dim`` the output has
        1 / ranks of the input's tokens, whose number must be a multiple of the ranks.

    Raises:
        ValueError: the features cannot be divided evenly, or torch.distributed is not initialised.
    """

    _divided: ClassVar = {"weight": 1}
    _with_tokens = staticmethod(sequence.row_parallel)

    def __init__(
        self,
        linear: torch.nn.Linear,
        group: Group = None,
        *,
        constant_weight: bool = False,
        tp_invariant: bool = False,
        sequence_dim: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(linear, group, tp_invariant=tp_invariant, sequence_dim=sequence_dim, out_dtype=out_dtype)
        self.constant_weight = constant_weight
        self.bias = linear.bias

    def _of_whole(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_constant(x):
            y = with_constant_weight(x, self.weight, group=self.group)
        else:
            y = _sum_outputs(functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias.to(y.dtype)  # autocast changes the dtype of y alone

    def _of_leaves(self, x: torch.Tensor) -> torch.Tensor:
        a, w, bias = in_dtype_of_autocast(x, self.weight, self.bias)
        multiply = with_constant_weight if self._is_constant(x) else fused_matmul_allreduce
        return multiply(a, w, bias=bias, group=self.group, partition=TP_INVARIANT)

    def _is_constant(self, x: torch.Tensor) -> bool:
        """Whether nothing writes the weight that is multiplied by ``x``: no gradient is recorded, and no cast made."""
        learns = self.weight.requires_grad and torch.is_grad_enabled()
        return self.constant_weight and not learns and not torch.is_autocast_enabled(x.device.type)

    def _of_fp8(self, x: Input) -> torch.Tensor:
        a, a_scale, how = self._scaled(x)
        if self.sequence_dim is None:
            multiply = with_constant_weight if self.constant_weight else fused_matmul_allreduce
            return multiply(a, self.weight, a_scale=a_scale, group=self.group, **how)
        tokens = self._tokens(a)
        tokens.check_even(a)
        a, a_scale = tokens.first(a), tokens.first(a_scale) if a_scale.ndim == a.ndim else a_scale
        return tokens.back(fused_matmul_reducescatter(a, self.weight, a_scale=a_scale, group=self.group, **how))


class ColumnParallelLinear(_OfGroup):
    """A linear layer whose output features are divided between ranks. Every rank has the whole input.

    The forward pass does not communicate. In the backward pass :func:`graphar.allreduce` sums the input's gradients.

    ``state_dict`` has this rank's part of weight and bias. ``load_state_dict`` takes it, or cuts it from the whole.

    Args:
        linear: the whole layer, equal on all ranks. This rank's part of its weight and bias is copied. ``out_features``
            must be a multiple of the number of ranks. A weight in FP8 makes a layer for inference, which takes the
            inputs of :class:`Fp8Linear`, and gives the bits of the whole layer. With scales of blocks each rank has a
            multiple of 128 features.
        group: a process group, a DeviceMesh of one dimension, or a Communicator of a group; None: the default group.
        tp_invariant: multiply by :func:`graphar.linear`: output and gradients have the same bits on 1, 2, 4 and 8
            ranks. Without torch.distributed the layer has a single rank.
        sequence_dim: the dimension of tokens, for sequence parallelism: each rank has its part of the input's tokens,
            which :func:`graphar.fused_allgather_matmul` gathers. The gradients of weight and bias count all
            tokens. None: every rank has all tokens.
        out_dtype: for a weight in FP8, torch.bfloat16 or torch.float16. None: as in :class:`Fp8Linear`.

    Shape:
        Input ``(*, in_features)``, output ``(*, out_features / ranks)``. With ``sequence_dim`` all ranks have equally
        many tokens, and the output has the tokens of all ranks.

    Raises:
        ValueError: the features cannot be divided evenly, or torch.distributed is not initialised.
    """

    _divided: ClassVar = {"weight": 0, "bias": 0}
    _with_tokens = staticmethod(sequence.column_parallel)

    def _of_whole(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(copied(x, engine_name(self.group)), self.weight, self.bias)

    def _of_leaves(self, x: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD if self.group is None and dist.is_initialized() else self.group
        return linear(*in_dtype_of_autocast(x, self.weight, self.bias), group=group)

    def _of_fp8(self, x: Input) -> torch.Tensor:
        a, a_scale, how = self._scaled(x)
        if self.sequence_dim is None:
            return linear(a, self.weight, a_scale=a_scale, **how)
        tokens = self._tokens(a)
        a, a_scale = tokens.first(a), tokens.first(a_scale) if a_scale.ndim == a.ndim else a_scale
        return tokens.back(fused_allgather_matmul(a, self.weight, a_scale=a_scale, group=self.group, **how))


class RowwiseParallel(TorchRowwiseParallel):
    """torch's ``RowwiseParallel`` with graphar's sums, for plans of ``parallelize_module``; takes torch's arguments.

    A replicated output is summed by :func:`graphar.allreduce`, and an evenly sharded output by
    :func:`graphar.reducescatter`. Other cases, such as embeddings and meshes of several dimensions, run in torch.
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
    """Whether graphar can sum a layer's partial ``outputs`` into ``layout``."""
    placement, *more = outputs.placements
    is_sum = type(placement) is Partial and placement.reduce_op == "sum"  # embeddings have a subclass of Partial
    if more or not is_sum or outputs.dtype not in ACCUMULATION_DTYPES:
        return False
    even = type(layout) is Shard and outputs.shape[layout.dim] % outputs.device_mesh.size() == 0
    return even or isinstance(layout, Replicate)


def _sum_outputs(x: torch.Tensor, group: Group) -> torch.Tensor:
    return summed(x, engine_name(group)) if is_recorded(x) else allreduce(x, group)


def _place(group: Group, alone: bool = False) -> tuple[int, int]:
    """Returns this rank, and the number of ranks: with ``alone``, a single one without a group."""
    if alone and group is None and not dist.is_initialized():
        return 0, 1
    if group is None or isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        ranks = process_group(group)
        return ranks.rank(), ranks.size()
    engine = engine_of_either(group, "graphar.nn")
    if engine.rank is None:
        raise ValueError("graphar.nn: layers take a process group, or a Communicator of one, not one with devices")
    return engine.rank, engine.world_size
