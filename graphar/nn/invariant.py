"""The linear layers and the loss of a model made tensor-parallel invariant: graphar.nn.make_tp_invariant.

It changes the class of each layer. Weights stay where torch's ``parallelize_module`` or a plan of transformers
has put them, as DTensors. Hooks of torch's styles give and take DTensors, and hooks of transformers plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel
from torch.nn import functional

from graphar.errors import Reason
from graphar.nn import sequence
from graphar.nn.losses import CausalLoss
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops.linear import linear
from graphar.ops.matmul_sums import SUM as MATMUL_ALLREDUCE
from graphar.runtime.registry import ALONE

# The styles of linear layers in plans of transformers.
_ROWWISE = ("rowwise", "rowwise_rep", "rowwise_split_input")
_COLWISE = ("colwise", "colwise_rep", "colwise_gather_output")
_ONLY_MOVING = ("embedding_rowwise", "embedding_colwise", "replicate")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # an input, a weight and a bias


@dataclass
class Layers:
    """Which layers of a model are invariant. ``print(layers)`` counts them, and has a line for each that is not.

    Attributes:
        row_parallel: the names of layers whose products are added as a tree of 8 leaves of K.
        column_parallel: the names of the other linear layers, whose products are added in the order of K.
        left: by name, modules that may give other bits on another number of ranks, or that only a plan has, and why.
        loss: whether the model's ``loss_function``, of transformers, is :func:`graphar.cross_entropy` now.
    """

    row_parallel: list[str] = field(default_factory=list)
    column_parallel: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    loss: bool = False

    def __str__(self) -> str:
        count = len(self.row_parallel), len(self.column_parallel), len(self.left)
        first = "{} row-parallel and {} other linear layers are invariant, {} modules may not be".format(*count)
        return "\n".join([first, *(f"{name}: {why}" for name, why in self.left.items())])


def make_tp_invariant(model: torch.nn.Module, plan: Mapping[str, object] | None = None) -> Layers:
    """Gives a model's linear layers one set of bits on 1, 2, 4 and 8 ranks, in results and gradients. Works in place.

    Call it after torch's ``parallelize_module``, or transformers' ``DistributedConfig(tp_plan="auto")``, has sharded
    the model; and on the whole model of a single rank, where the plan says which layers are row-parallel. Call it
    before ``fully_shard`` and torch.compile.

    Every torch.nn.Linear becomes one of a subclass. Row-parallel layers sum their products as
    :func:`graphar.fused_matmul_allreduce` does with ``partition="tp_invariant"``, all others as :func:`graphar.linear`.
    So the bits of a layer depend neither on the number of ranks nor on the number of tokens. Other modules stay as they
    are: the result says which of them may change bits. Attention is not a module that can be judged: its kernel has to
    give a head the same bits whatever the number of heads.

    Sequence parallelism: torch.nn.LayerNorm and torch.nn.RMSNorm become subclasses too. If their input is a DTensor
    whose tokens are divided, as ``SequenceParallel`` makes it, the backward pass gathers the tokens, and every rank
    computes the gradients of all; torch.compile breaks its graph there. Other modules with parameters that may see only
    a rank's tokens are in :attr:`Layers.left`. With a ``plan`` that names ``RowwiseParallel(output_layouts=Shard(1))``
    a layer sums by a reduce-scatter, and otherwise by an all-reduce.

    Losses: a causal language model's loss in transformers becomes :func:`graphar.cross_entropy`. Its plan gathers the
    logits. With a ``plan`` in which ``lm_head`` is "colwise" they stay divided, and so does their gradient. In a
    program of your own call :func:`graphar.cross_entropy`, or take :class:`graphar.nn.loss_parallel`.

    Args:
        model: the model. Each layer's weight is a DTensor on a mesh of one dimension, or whole.
        plan: the style of each layer by its name, in which ``*`` stands for a number: a text of transformers, such as
            "rowwise", or a ParallelStyle of torch. None: ``model.tp_plan``, which models of transformers have; without
            it, whole layers are taken as column-parallel.

    Returns:
        The names of the layers, and of modules that may give other bits.

    Raises:
        ValueError: a layer's weight is sharded over several dimensions of a mesh, or in another way than by rows or
            columns. The model is unchanged.
    """
    planned, layers, linears = plan if plan is not None else getattr(model, "tp_plan", None) or {}, Layers(), []
    with_stars = {name: re.sub(r"\b\d+\b", "*", name) for name, _ in model.named_modules(remove_duplicate=False)}
    styles = {name: planned.get(name, planned.get(other)) for name, other in with_stars.items()}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            if why := _why_left(module, styles[name]):
                layers.left[name] = why
            continue
        is_row = _is_row_parallel(name, module, styles[name])
        (layers.row_parallel if is_row else layers.column_parallel).append(name)
        linears.append((module, InvariantRowParallelLinear if is_row else InvariantLinear, styles[name]))
    layers.left |= {name: "no such module" for name in plan or () if name not in {*with_stars, *with_stars.values()}}
    for name, module in model.named_modules():
        if (kind := _NORMS.get(type(module))) and _may_have_own_tokens(module, styles[name]):
            module.__class__ = kind
    for module, kind, style in linears:
        vars(module).pop("forward", None)  # from a plan of transformers
        module.__class__, module.style = kind, style
    of_transformers: Any = model
    head, loss = (getattr(model, name, None) for name in ("lm_head", "loss_function"))
    is_causal = isinstance(loss, CausalLoss) or getattr(loss, "__name__", "") == CausalLoss.replaces
    if isinstance(head, InvariantLinear) and is_causal:
        of_transformers.loss_function, layers.loss = CausalLoss(head), True
    return layers


def in_dtype_of_autocast(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> Operands:
    """Returns operands of a linear layer as torch.autocast wants them: cast, if it is enabled."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, w, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)


def _is_row_parallel(name: str, layer: torch.nn.Linear, style: object) -> bool:
    weight = layer.weight
    if not isinstance(weight, DTensor):
        return style in _ROWWISE or isinstance(style, RowwiseParallel)
    if len(weight.placements) == 1:
        (placement,), ranks = weight.placements, weight.device_mesh.size()
        if placement.is_replicate() or (type(placement) is Shard and weight.shape[placement.dim] % ranks == 0):
            return placement.is_shard(1)
    raise ValueError(
        f"make_tp_invariant: the weight of {name} must be whole, or evenly sharded by rows or columns over a mesh "
        f"of one dimension, got {list(weight.shape)} with {weight.placements}"
    )


def _why_left(module: torch.nn.Module, style: object) -> Reason | None:
    """Returns why a module that is no linear layer may change bits with the number of ranks."""
    if style == "replicated_with_grad_allreduce":
        return "the gradients of its parameters are summed in the order of ranks"
    if isinstance(module, torch.nn.Embedding) or type(module) in _NORMS:
        return None
    if _may_have_own_tokens(module, style):
        return "if it sees only a rank's tokens, the gradients of its parameters are summed in the order of ranks"
    if isinstance(style, str) and style not in (*_ONLY_MOVING, *_ROWWISE, *_COLWISE, "sequence_parallel"):
        return f"its style {style!r} has no invariant form"
    multiplies = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    return "it multiplies by parameters, and is no torch.nn.Linear" if multiplies else None


def _may_have_own_tokens(module: torch.nn.Module, style: object) -> bool:
    """Whether a module has parameters, and may be given a rank's tokens: a plan says so, or they are DTensors."""
    parameters = list(module.parameters(recurse=False))
    is_planned = style == "sequence_parallel" or isinstance(style, SequenceParallel)
    are_whole = all(isinstance(x, DTensor) and x.placements == (Replicate(),) for x in parameters)
    return bool(parameters) and (is_planned or are_whole)


class InvariantLinear(torch.nn.Linear):
    """A torch.nn.Linear that adds products in the order of K. Its output features may be divided between ranks."""

    style: object = None  # what the plan calls it

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, weight, bias = self._operands(input, Replicate())
        y = linear(x, weight, bias, group=self._mesh.get_group() if self._is_divided else None)
        gathers = self.style in _COLWISE[1:] and self._is_divided
        if not (gathers or isinstance(input, DTensor)):
            return y
        y = self._with_mesh(y, Shard(-1) if self._is_divided else Replicate())
        return y.redistribute(placements=[Replicate()]).to_local() if gathers else y

    @property
    def _is_divided(self) -> bool:
        return isinstance(self.weight, DTensor) and self.weight.placements[0].is_shard()

    @property
    def _mesh(self) -> DeviceMesh:
        assert isinstance(self.weight, DTensor)
        return self.weight.device_mesh

    def _operands(self, x: torch.Tensor, placement: Placement) -> Operands:
        x = x.redistribute(placements=[placement]) if isinstance(x, DTensor) else x
        return in_dtype_of_autocast(_local(x), _local(self.weight), None if self.bias is None else _local(self.bias))

    def _with_mesh(self, y: torch.Tensor, placement: Placement) -> DTensor:
        return DTensor.from_local(y, self._mesh, [placement], run_check=False)


class InvariantRowParallelLinear(InvariantLinear):
    """A torch.nn.Linear that adds products as a tree of 8 leaves of K. Its input features may be divided."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        has_mesh = isinstance(input, DTensor)
        if self._is_divided and self.style in _ROWWISE[1:] and not has_mesh:
            input = self._with_mesh(input, Replicate())
        x, weight, bias = self._operands(input, Shard(-1) if self._is_divided else Replicate())
        if has_mesh and (axis := self._axis_of_tokens(x)) is not None:
            y = sequence.row_parallel(x, weight, bias, _tokens(self._mesh, axis), TP_INVARIANT)
            return self._with_mesh(y, Shard(axis))
        name = self._mesh.get_group().group_name if self._is_divided else ALONE
        call = {"a": x, "w": weight, "bias": [] if bias is None else [bias], "communicator": name}
        y = MATMUL_ALLREDUCE.dispatched(partition=TP_INVARIANT, **call)
        return self._with_mesh(y, Replicate()) if has_mesh else y

    def _axis_of_tokens(self, x: torch.Tensor) -> int | None:
        """Returns the dimension of tokens that the plan divides after the sum; None if it does not, or not evenly."""
        (layout,) = self.style.output_layouts if isinstance(self.style, RowwiseParallel) else (None,)
        if not (self._is_divided and type(layout) is Shard):
            return None
        axis = layout.dim % x.ndim
        return axis if axis < x.ndim - 1 and x.shape[axis] % self._mesh.size() == 0 else None


class _InvariantNorm(torch.nn.Module):
    """A norm whose parameters get the gradients of one rank, if ranks divide the tokens of its input."""

    normalized_shape: tuple[int, ...]
    eps: Any
    _torchs: ClassVar[Callable[..., torch.Tensor]]  # the function of torch

    def _of_tokens(self, x: torch.Tensor, plain: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the norm of this rank's tokens; ``plain`` is torch's."""
        learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())
        if not (learns and self._has_whole_rows(x)):
            return plain(x)
        local, *parameters = map(_local, (x, *self.parameters()))
        device, tokens, length = local.device.type, None, 0
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        autocast = torch.autocast(device, dtype=dtype, enabled=enabled)

        def function(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            with autocast:
                return self._torchs(x, self.normalized_shape, *parameters, eps=self.eps)

        if isinstance(x, DTensor) and isinstance(placement := x.placements[0], Shard):
            tokens, length = _tokens(x.device_mesh, placement.dim % x.ndim), x.shape[placement.dim]
        y = sequence.of_own_tokens(function, tokens, length, local, *parameters)
        if not isinstance(x, DTensor):
            return y
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())

    def _has_whole_rows(self, x: torch.Tensor) -> bool:
        """Whether each token that this rank has is whole."""
        placement, *more = x.placements if isinstance(x, DTensor) else [Replicate()]
        is_of_tokens = type(placement) is Shard and placement.dim % x.ndim < x.ndim - len(self.normalized_shape)
        return not more and (is_of_tokens or placement.is_replicate())


class InvariantLayerNorm(_InvariantNorm, torch.nn.LayerNorm):
    _torchs = staticmethod(functional.layer_norm)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._of_tokens(input, super().forward)


class InvariantRMSNorm(_InvariantNorm, torch.nn.RMSNorm):
    _torchs = staticmethod(functional.rms_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._of_tokens(x, super().forward)


_NORMS = {torch.nn.LayerNorm: InvariantLayerNorm, torch.nn.RMSNorm: InvariantRMSNorm}


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _tokens(mesh: DeviceMesh, axis: int) -> sequence.Tokens:
    """Returns how the ranks of a mesh of one dimension divide tokens."""
    return sequence.Tokens(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size(), axis)
