"""Gradients by graphar: hooks for DistributedDataParallel, and the reduce-scatter of fully_shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from graphar import checks
from graphar.codecs import Codec
from graphar.communicator import Communicator
from graphar.ops import allreduce

Hook = Callable[[object, dist.GradBucket], torch.futures.Future]


def exact_hook(group: dist.ProcessGroup | Communicator | None = None) -> Hook:
    """A hook that averages gradients with :func:`graphar.allreduce`, exactly.

    Use: ``model.register_comm_hook(None, graphar.ddp.exact_hook())``, with the model's own process group.
    """
    return _hook(group, lambda bucket, mean: allreduce(mean, group))


def has_one_dimension(parameter: Tensor) -> bool:
    """Whether it is a bias, or a norm's scale: few elements, and much depends on each."""
    return parameter.dim() <= 1


def quantized_hook(
    codec: Codec | str,
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    error_feedback: bool = False,
    stays_exact: Callable[[Tensor], bool] = has_one_dimension,
) -> Hook:
    """A hook that averages gradients with :func:`graphar.allreduce` and a codec.

    Use: ``model.register_comm_hook(None, graphar.ddp.quantized_hook("int4"))``. Works with gradient accumulation
    (``no_sync``) and ``gradient_as_bucket_view``. One hook serves one model.

    Args:
        codec: as for ``allreduce``.
        group: the model's process group, or a communicator of its ranks.
        error_feedback: adds what rounding took from a gradient on this rank to the next one, at the price of a tensor
            of the gradients' size.
        stays_exact: which parameters' gradients are averaged exactly: those with up to one dimension, unless said
            otherwise.

    Raises:
        ValueError: the codec is not known.
    """
    codec = checks.check_codec("quantized_hook", codec)
    return _hook(group, _Quantized(codec, group, error_feedback, stays_exact))


def _hook(group, sum_up: Callable[[dist.GradBucket, Tensor], Tensor]) -> Hook:
    """Calls ``sum_up(bucket, gradients / world_size)``; on GPUs beside the backward pass, on a stream of its own."""
    streams: dict[torch.device, torch.cuda.Stream] = {}

    def average(state, bucket):  # a function without annotations: torch compares them, and these would be strings
        gradients = bucket.buffer()
        device = gradients.device
        size = group.world_size if isinstance(group, Communicator) else dist.get_world_size(group)
        if device.type != "cuda":
            future = torch.futures.Future()
            future.set_result(sum_up(bucket, gradients.div_(size)))
            return future
        stream = streams.get(device) or streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        # The future notes the stream's work, and whoever waits for it orders a stream of its own behind that.
        future = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream):
            future.set_result(sum_up(bucket, gradients.div_(size)))
        return future

    return average


class _Quantized:
    def __init__(self, codec, group, error_feedback: bool, stays_exact) -> None:
        self._codec, self._group, self._stays_exact = codec, group, stays_exact
        self._residuals: dict[tuple[int, ...], Tensor] | None = {} if error_feedback else None

    def __call__(self, bucket: dist.GradBucket, mean: Tensor) -> Tensor:
        exact = [
            gradient
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True)
            if self._stays_exact(parameter)
        ]
        exact_sum = allreduce(torch.cat([gradient.flatten() for gradient in exact]), self._group) if exact else None
        if exact_sum is not None and exact_sum.numel() == mean.numel():
            return exact_sum
        # The few exact ones are sent along, so that the rest need not be moved together.
        residual = self._residual_of(bucket)
        total = allreduce(mean, self._group, codec=self._codec, residual=residual, out=mean)
        if exact_sum is not None:
            parts = exact_sum.split([gradient.numel() for gradient in exact])
            for gradient, part in zip(exact, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return total

    def _residual_of(self, bucket: dist.GradBucket) -> Tensor | None:
        if self._residuals is None:
            return None
        # By its parameters: which bucket has which changes once, after the first step.
        key = tuple(id(parameter) for parameter in bucket.parameters())
        if key not in self._residuals:
            self._residuals[key] = torch.zeros_like(bucket.buffer())
        return self._residuals[key]
