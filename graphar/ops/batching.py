"""torch.func's transforms of an op: vmap makes a call for each slice; those that differentiate are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_functorch = torch._C._functorch  # type: ignore[attr-defined]
transforms, _TRANSFORMS = _functorch.peek_interpreter_stack, _functorch.TransformType


def over_batch(op: str, call: Callable, is_one: bool, batch_size: int, dims: Sequence, arguments: Sequence) -> tuple:
    """Implements vmap: makes a call for each slice in order, so that every rank makes the same calls.

    ``is_one`` says that a call returns a tensor, not a list.
    """
    if not batch_size:
        raise ValueError(f"{op}: vmap over no slices")
    results = [call(*_slices(arguments, dims, at)) for at in range(batch_size)]
    if is_one:
        return torch.stack(results), 0
    return [torch.stack(of_calls) for of_calls in zip(*results, strict=True)], [0] * len(results[0])


def _slices(arguments: Sequence, dims: Sequence, at: int) -> list:
    """Returns slice ``at`` of each tensor that has a batch dimension, and all other arguments unchanged."""
    return [
        _slices(value, dim, at) if isinstance(dim, (list, tuple)) else value if dim is None else value.select(dim, at)
        for value, dim in zip(arguments, dims, strict=True)
    ]


def check_transform(op: str, arguments: Sequence) -> None:
    """Raises NotImplementedError if a transform of torch.func, such as grad and jacrev, differentiates a tensor."""
    within = transforms()
    if within is None or within.key() not in (_TRANSFORMS.Grad, _TRANSFORMS.Jvp):
        return
    tensors = [x for argument in arguments for x in (argument if isinstance(argument, (list, tuple)) else [argument])]
    if any(isinstance(x, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        raise NotImplementedError(
            f"{op}: torch.func.{within.key().name.lower()} cannot differentiate it, nor can vjp, jacrev and the like; "
            "use torch.autograd.grad() or backward(), and torch.autograd.functional.jacobian() for all rows"
        )
