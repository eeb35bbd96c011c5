"""Losses of models over a divided vocabulary: in place of transformers' losses, and of torch's loss_parallel."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphar.ops.losses import cross_entropy


class CausalLoss:
    """Takes the place and arguments of transformers' ForCausalLMLoss, for logits of ``head``, whole or divided."""

    replaces = "ForCausalLMLoss"

    def __init__(self, head: torch.nn.Linear) -> None:
        self.head = head

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **unused,
    ) -> torch.Tensor:
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        target, weight, group = shift_labels.to(logits.device).view(logits.shape[:-1]), self.head.weight, "alone"
        if logits.shape[-1] != weight.shape[0] and isinstance(weight, DTensor):
            group = weight.device_mesh
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = cross_entropy(logits, target, group, ignore_index=ignore_index, reduction=reduction)
        return total if num_items_in_batch is None else total / num_items_in_batch


class loss_parallel(TorchFunctionMode):
    """Takes the place of ``torch.distributed.tensor.parallel.loss_parallel``, with :func:`graphar.cross_entropy`.

    Within it ``torch.nn.functional.cross_entropy`` of a DTensor of logits has the same bits on 1, 2, 4 and 8 ranks, and
    so have its gradients. The backward pass may run outside of it, too.

    The logits are [rows, classes] or [classes], replicated or evenly sharded by classes over a mesh of one dimension.
    The result is a replicated DTensor. A weight of classes, probabilities as targets, and ``size_average`` and
    ``reduce`` raise ValueError or TypeError.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is functional.cross_entropy and isinstance(args[0] if args else kwargs.get("input"), DTensor):
            return _cross_entropy(*args, **kwargs)
        return function(*args, **kwargs)


def _cross_entropy(
    input: DTensor, target, weight=None, size_average=None, ignore_index=-100, reduce=None, **options
) -> DTensor:
    if weight is not None or size_average is not None or reduce is not None:
        raise ValueError("loss_parallel: cross_entropy takes no weight, size_average or reduce")
    if input.ndim > 2:
        raise ValueError(f"loss_parallel: logits must be [rows, classes] or [classes], got {list(input.shape)}")
    loss = cross_entropy(input, target, ignore_index=ignore_index, **options)
    return DTensor.from_local(loss, input.device_mesh, [Replicate()], run_check=False)
