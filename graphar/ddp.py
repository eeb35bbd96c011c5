"""Gradients by graphar: hooks for DistributedDataParallel, and the reduce-scatter of fully_shard."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from graphar.communicator import Communicator
from graphar.matmul.overlap import BESIDE
from graphar.numerics.codecs import Codec
from graphar.plan import checks
from graphar.runtime.registry import communicator_name, communicator_of_group

Hook = Callable[[object, dist.GradBucket], torch.futures.Future]


def exact_hook(group: dist.ProcessGroup | Communicator | None = None, *, algorithm: str = "auto") -> Hook:
    """A hook that averages gradients with :func:`graphar.allreduce`, exactly.

    Use: ``model.register_comm_hook(None, graphar.ddp.exact_hook())``, with the model's own process group. Over several
    hosts ``algorithm="hierarchical"`` sends less between them.

    Raises:
        ValueError: there is no such algorithm.
    """
    checks.check_call("exact_hook", algorithm, None)
    return _hook(group, lambda ranks, bucket, mean: _sum_up(ranks, mean, algorithm=algorithm))


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
    return _hook(group, _Quantized(codec, error_feedback, stays_exact))


def _hook(group, sum_up: Callable[[Communicator, dist.GradBucket, Tensor], Tensor]) -> Hook:
    """Calls ``sum_up(ranks, bucket, gradients / world_size)``; on GPUs beside the backward pass."""
    sides: dict[torch.device, _Side] = {}

    def average(state, bucket):  # a function without annotations: torch compares them, and these would be strings
        gradients, ranks = bucket.buffer(), communicator_of_group(communicator_name(group))
        device = gradients.device
        if device.type != "cuda":
            future = torch.futures.Future()
            future.set_result(sum_up(ranks, bucket, gradients.div_(ranks.world_size)))
            return future
        side = sides.get(device) or sides.setdefault(device, _Side(device))
        # The future notes the stream's work, and whoever waits for it orders a stream of its own behind that.
        future = torch.futures.Future(devices=[device])
        with side.behind_the_caller():
            future.set_result(sum_up(ranks, bucket, gradients.div_(ranks.world_size)))
        return future

    return average


class _Side:
    """A stream beside the caller's. Changing to it costs the host a fourth of what torch's context manager does."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream, self._event = device, torch.cuda.Stream(device), torch.cuda.Event()
        self._callers: dict[int, torch.cuda.Stream] = {}  # by what CUDA calls them

    @contextlib.contextmanager
    def behind_the_caller(self) -> Iterator[None]:
        """Inside, it is the current stream, and waits for what the caller's holds so far."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        caller = self._callers.get(handle)
        if caller is None:
            caller = self._callers[handle] = torch.cuda.current_stream(self._device)
        self._event.record(caller)
        self._event.wait(self._stream)
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(caller)


@dataclass
class _Bucket:
    """One of a model's buckets, as long as it holds the same parameters.

    Attributes:
        parameters: whose gradients it holds, one after another.
        runs: how many elements stay exact, perhaps none, how many then do not, how many do again, and so on.
        residual: what rounding took from the gradients, where that is kept.
    """

    parameters: list[Tensor]
    runs: list[int]
    residual: Tensor | None


class _Quantized:
    def __init__(self, codec: Codec, error_feedback: bool, stays_exact: Callable[[Tensor], bool]) -> None:
        self._plain, self._fed_back = (replace(codec, feedback=feedback).text for feedback in (False, True))
        self._error_feedback, self._stays_exact = error_feedback, stays_exact
        self._buckets: dict[int, _Bucket] = {}

    def __call__(self, ranks: Communicator, bucket: dist.GradBucket, mean: Tensor) -> Tensor:
        known = self._known(bucket)
        if len(known.runs) == 1:
            return _sum_up(ranks, mean)
        exact, sizes = mean.split_with_sizes(known.runs)[::2], known.runs[::2]
        # The few exact ones are sent along, so that the rest need not be moved together.
        exact_sum = _sum_up(ranks, torch.cat(exact)) if any(sizes) else None
        if known.residual is None:
            _sum_up(ranks, mean, self._plain)
        else:
            _sum_up(ranks, known.residual.add_(mean), self._fed_back, mean)
        if exact_sum is not None:
            torch._foreach_copy_(exact, exact_sum.split_with_sizes(sizes))
        return mean

    def _known(self, bucket: dist.GradBucket) -> _Bucket:
        """Which bucket has which parameters changes once, after the first step."""
        parameters, known = bucket.parameters(), self._buckets.get(bucket.index())
        if known is None or not _same(known.parameters, parameters):
            residual = torch.zeros_like(bucket.buffer()) if self._error_feedback else None
            known = self._buckets[bucket.index()] = _Bucket(parameters, self._runs(parameters), residual)
        return known

    def _runs(self, parameters: list[Tensor]) -> list[int]:
        """As :class:`_Bucket` has them."""
        runs = [0]
        for parameter in parameters:
            in_exact_run = len(runs) % 2 == 1
            if in_exact_run != bool(self._stays_exact(parameter)):
                runs.append(0)
            runs[-1] += parameter.numel()
        return runs


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _sum_up(
    ranks: Communicator, x: Tensor, codec: str = "", out: Tensor | None = None, algorithm: str = "auto"
) -> Tensor:
    """The sum of a contiguous tensor over all ranks, in its place or in ``out``.

    An exact one leaves SMs to the backward pass: that made VGG16 on four H200s 8 % faster. One with a codec needs them,
    and is sooner done: that lost 8 % with few.
    """
    if codec:
        checks.check_quantized_call("quantized_hook", codec, "auto", x)
    out, blocks = x if out is None else out, None if codec else BESIDE.blocks
    ranks.run_allreduce(x, out, algorithm, None, codec, blocks)
    return out


# ---- fully_shard ----------------------------------------------------------------------------------------------------


class ExactReduceScatter:
    """The reduce-scatter of ``fully_shard`` by :func:`graphar.reducescatter`, exactly.

    Use: ``module.set_custom_reduce_scatter(graphar.ddp.ExactReduceScatter())``, for each module that was given to
    ``fully_shard``. It runs on the stream that is current, writes where it is told to, and needs no memory of its own.
    An average is the sum, rounded, divided by the number of ranks.

    It has the form of torch's ReduceScatter, which torch asks for no more than that.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes this rank's part of the ranks' sum or average into ``output_tensor``; both are contiguous.

        Raises:
            ValueError: ``op`` is neither SUM nor AVG, ``async_op`` is asked for, or the tensors do not fit each other.
        """
        name, kind = type(self).__name__, getattr(op, "op", op)  # a ReduceOp has a kind, or is one
        if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"{name}: takes ReduceOp.SUM and AVG, got {kind}; with set_force_sum_reduction_for_comms(True) "
                "fully_shard itself divides by any factor"
            )
        if async_op:
            raise ValueError(f"{name}: has no async_op; call it on a stream of its own")
        ranks = communicator_of_group(communicator_name(group))
        self._check(output_tensor, input_tensor, ranks.world_size)
        self._reduce(input_tensor, output_tensor, ranks)
        if kind == dist.ReduceOp.AVG:
            output_tensor.div_(ranks.world_size)

    def _check(self, out: Tensor, x: Tensor, world_size: int) -> None:
        if (x.numel(), x.dtype, x.device) != (world_size * out.numel(), out.dtype, out.device):
            raise ValueError(
                f"{type(self).__name__}: the input must be {world_size} times the output, got {x.numel()} {x.dtype} on "
                f"{x.device} and {out.numel()} {out.dtype} on {out.device}"
            )
        if not (x.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"{type(self).__name__}: the tensors must be contiguous")

    def _reduce(self, x: Tensor, out: Tensor, ranks: Communicator) -> None:
        _reducescatter(x, out, ranks)


def _reducescatter(x: Tensor, out: Tensor, ranks: Communicator, codec: str = "") -> None:
    ranks.run_parts("reducescatter", x, out, (out.numel(),) * ranks.world_size, None, codec=codec)


class QuantizedReduceScatter(ExactReduceScatter):
    """The reduce-scatter of ``fully_shard`` by :func:`graphar.reducescatter` and a codec.

    Use: ``module.set_custom_reduce_scatter(graphar.ddp.QuantizedReduceScatter("int8"))``, one for each module that was
    given to ``fully_shard``. It sees a module's gradients as one tensor and rounds all of them; what is to stay exact,
    such as a norm, is a module with a ``fully_shard`` of its own.

    Args:
        codec: as for ``reducescatter``.
        error_feedback: adds what rounding took from the gradients on this rank to the next ones, at the price of a
            tensor of the size of the module's whole gradients on every rank.

    Raises:
        ValueError: the codec is not known.
    """

    def __init__(self, codec: Codec | str, *, error_feedback: bool = False) -> None:
        found = checks.check_codec("QuantizedReduceScatter", codec)
        self._codec = replace(found, feedback=error_feedback).text
        self._error_feedback, self._residual = error_feedback, None

    def _reduce(self, x: Tensor, out: Tensor, ranks: Communicator) -> None:
        checks.check_quantized_call("QuantizedReduceScatter", self._codec, "auto", x)
        _reducescatter(self._with_residual(x) if self._error_feedback else x, out, ranks, self._codec)

    def _with_residual(self, x: Tensor) -> Tensor:
        """The input plus what was taken from those before: in the residual, where what is taken now will be left."""
        if self._residual is None:
            self._residual = torch.zeros_like(x)
        if (self._residual.shape, self._residual.dtype) != (x.shape, x.dtype):
            raise ValueError(
                "QuantizedReduceScatter: with error_feedback each module needs one of its own; this one's has "
                f"{self._residual.numel()} {self._residual.dtype}, got {x.numel()} {x.dtype}"
            )
        return self._residual.add_(x)
