"""Gradient averaging with graphar: hooks for DistributedDataParallel. graphar.fsdp serves fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from graphar.fsdp import ExactReduceScatter as ExactReduceScatter
from graphar.fsdp import QuantizedReduceScatter as QuantizedReduceScatter
from graphar.numerics.codecs import Codec, CodecName, as_codec
from graphar.numerics.epilogues.epilogue import bind
from graphar.plan.algorithms import COPYING, WITHOUT_KERNEL, AllReduceAlgorithm
from graphar.plan.call import Call, Operands
from graphar.plan.work import Sum
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name, engine_of
from graphar.runtime.side_stream import SideStream

Hook = Callable[[object, GradBucket], torch.futures.Future]


def exact_hook(group: Group = None, *, algorithm: AllReduceAlgorithm = "auto", overlap: bool = True) -> Hook:
    """Returns a DDP communication hook that averages gradients with :func:`graphar.allreduce`, exactly.

    Use: ``model.register_comm_hook(None, graphar.ddp.exact_hook())``.

    Args:
        group: the model's process group, a DeviceMesh of one dimension, or a Communicator of its ranks; None: the
            default group.
        algorithm: "auto", or one of :class:`graphar.Algorithm`. "two_shot_copies" sums by copy engines. With several
            hosts, "hierarchical" sends less data between them.
        overlap: whether buckets are summed beside the backward pass, in few blocks on GPUs. False: all after it, by the
            whole GPU, which is faster where the sums take less time than they would cost the backward pass.

    Raises:
        ValueError: there is no such algorithm.
    """
    call_checks.check_call("exact_hook", algorithm, None)
    return _Hook(group, _Exact(algorithm, overlap))


def has_one_dimension(parameter: Tensor) -> bool:
    """Whether a parameter has at most one dimension, as biases and norm weights. Their few gradients matter most."""
    return parameter.dim() <= 1


def quantized_hook(
    codec: Codec | CodecName,
    group: Group = None,
    *,
    error_feedback: bool = False,
    stays_exact: Callable[[Tensor], bool] = has_one_dimension,
    algorithm: AllReduceAlgorithm = "auto",
) -> Hook:
    """Returns a DDP communication hook that averages gradients with :func:`graphar.allreduce` and a codec.

    Use: ``model.register_comm_hook(None, graphar.ddp.quantized_hook("int4"))``. It works with gradient accumulation
    (``no_sync``) and ``gradient_as_bucket_view``. One hook serves one model.

    Args:
        codec: the format on the wire: a :class:`graphar.Codec`, or the name of one, such as "int8".
        group: the model's process group, a DeviceMesh of one dimension, or a Communicator of its ranks; None: the
            default group.
        error_feedback: whether this rank adds the rounding error of each gradient to the next gradient. This takes
            memory of the size of the gradients.
        stays_exact: a function of a parameter that says whether its gradients are averaged exactly. Default: parameters
            with at most one dimension.
        algorithm: "auto", or one of :class:`graphar.Algorithm`. "hierarchical" is exact inside a host and sends codes
            between hosts; it rounds to nearest and has no error feedback.

    Raises:
        ValueError: the codec is not known, or there is no such algorithm.
    """
    codec = as_codec("quantized_hook", codec)
    call_checks.check_call("quantized_hook", algorithm, None)
    return _Hook(group, _Quantized(codec, error_feedback, stays_exact, algorithm))


class _Hook:
    """A hook that calls ``average(engine, bucket, gradients)``; on GPUs, on a side stream.

    If ``average`` does not overlap, this is done for all buckets of a backward pass in the hook of the last one.

    A model is pickled with its hook, which needs a group that can be pickled, as None can.
    """

    def __init__(self, group: Group, average: _Exact | _Quantized) -> None:
        engine_name(group, "hook")  # raises its errors here, not in the first step
        self._group, self._average = group, average
        self._waiting: list[tuple[torch.futures.Future, Tensor]] = []
        self._sides: dict[torch.device, SideStream] = {}
        self.__name__ = self.__qualname__ = f"graphar{type(average).__name__}"  # torch asks a hook for them

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_sides": {}, "_waiting": []}  # streams are a process's own

    def __call__(self, state, bucket):  # no annotations: torch compares them with types, and here they would be strings
        gradients, engine = bucket.buffer(), engine_of(self._group)
        device = gradients.device
        # The future records the current stream's work; a stream that waits for the future waits for that work.
        future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if not self._average.overlap:
            earlier = self._waiting if bucket.index() else []  # an error may have ended the pass before
            self._waiting = [*earlier, (future, gradients)]
            while bucket.is_last() and self._waiting:
                waiting, of_bucket = self._waiting.pop(0)
                waiting.set_result(self._average(engine, bucket, of_bucket))
            return future
        if device.type != "cuda":
            future.set_result(self._average(engine, bucket, gradients))
            return future
        side = self._sides.get(device)
        if side is None:
            side = self._sides.setdefault(device, SideStream(device, self._average.priority))
        with side.behind_the_caller():
            future.set_result(self._average(engine, bucket, gradients))
        return future


class _Exact:
    """Exact averages. The times of what else was tried are in reports/h200x2/notes.md.

    Few blocks leave SMs to the backward pass, and each kernel waits until that leaves it an SM. So the stream has a
    high priority, and the division is a part of the sum where that changes subnormals alone. By copies a bucket that
    fits a place of the scratch is one chunk, and a local sum takes all SMs for its short time.
    """

    priority = -1

    def __init__(self, algorithm: str, overlap: bool = True) -> None:
        self.algorithm, self.overlap = algorithm, overlap
        self._calls: dict[Hashable, tuple[Call, str]] = {}  # what `_call` has returned

    def __reduce__(self):
        return type(self), (self.algorithm, self.overlap)  # names of engines are a process's own

    def __call__(self, engine: Engine, bucket: GradBucket, x: Tensor) -> Tensor:
        key = engine.name, x.numel(), x.dtype, x.get_device(), engine.is_symmetric(x)
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = self._call(engine, x)
        call, divided = known
        if divided == "parts":
            x.div_(engine.world_size)
        engine.run(call, [Operands((x,), (x,), (1 / engine.world_size,) if divided == "sum" else ())])
        return x.div_(engine.world_size) if divided == "result" else x

    def _call(self, engine: Engine, x: Tensor) -> tuple[Call, str]:
        """Returns the call for a bucket, and what is divided: the "parts" before, the "sum" in it, or its "result"."""
        ranks, by_copies = engine.world_size, self.algorithm == COPYING["allreduce"].value
        with engine.keeping_failure("allreduce"):
            is_served = not engine.why_no_kernel("allreduce", x)  # from here on the engine has its tuning table
        work, divided = Sum(x.numel()), "parts"
        # Not of fp16: its sums may overflow, and its halves are often subnormal.
        is_exact = x.dtype in (torch.float32, torch.bfloat16) and ranks.bit_count() == 1
        if is_exact and (by_copies or self.algorithm == "auto"):
            divided = "sum" if is_served else "result"  # of fp32 these have the same bits, subnormals included
        if divided == "sum" and by_copies:
            work = work._replace(beside="divided by the number of ranks")
        elif divided == "sum":
            work = work._replace(epilogue=bind("allreduce", "v * scale", x, [], (1 / ranks,))[0])
        few = engine.table.training.most_blocks(ranks) if self.overlap else None
        blocks = engine.table.chip.sms if by_copies else few
        how = {"algorithm": self.algorithm, "blocks": blocks, "symmetric": engine.is_symmetric(x)}
        return Call.of(work, x, **how), divided


@dataclass
class _Bucket:
    """A gradient bucket of a model; valid while it holds the same parameters."""

    parameters: list[Tensor]  # the parameters whose gradients the bucket holds, in order
    # The lengths of alternating exact and quantized runs, in elements; the first is exact and may be empty.
    runs: list[int]
    residuals: tuple[Tensor, ...]  # the rounding errors of the gradients; empty without error feedback


class _Quantized:
    priority, overlap = 0, True

    def __init__(
        self, codec: Codec, error_feedback: bool, stays_exact: Callable[[Tensor], bool], algorithm: str = "auto"
    ) -> None:
        self._codec, self._error_feedback = replace(codec, feedback=error_feedback).text, error_feedback
        self._stays_exact, self._algorithm = stays_exact, algorithm
        self._exact = _Exact(algorithm if algorithm == WITHOUT_KERNEL[True] else "auto")  # others need a codec
        self._buckets: dict[int, _Bucket] = {}

    def __call__(self, engine: Engine, bucket: GradBucket, gradients: Tensor) -> Tensor:
        known = self._known(bucket)
        if len(known.runs) == 1:
            return self._exact(engine, bucket, gradients)
        exact, sizes = gradients.split_with_sizes(known.runs)[::2], known.runs[::2]
        # The exact elements are also sent with the codec: cheaper than compacting the others.
        exact_mean = self._exact(engine, bucket, torch.cat(exact)) if any(sizes) else None
        mean = gradients.div_(engine.world_size)
        call_checks.check_quantized_call("quantized_hook", self._codec, self._algorithm, mean)
        # The full grid: in few blocks it made the steps of VGG16 on 4 H200s 8 % slower.
        call = Call.of(Sum(mean.numel(), self._codec), mean, algorithm=self._algorithm)
        engine.run(call, [Operands((mean, *known.residuals), (mean,))])
        if exact_mean is not None:
            torch._foreach_copy_(exact, exact_mean.split_with_sizes(sizes))  # type: ignore[attr-defined]
        return mean

    def _known(self, bucket: GradBucket) -> _Bucket:
        """Returns the state of a bucket; made again if its parameters changed, as DDP does after the first step."""
        parameters, known = bucket.parameters(), self._buckets.get(bucket.index())
        if known is None or [*map(id, known.parameters)] != [*map(id, parameters)]:
            residuals = (torch.zeros_like(bucket.buffer()),) if self._error_feedback else ()
            known = self._buckets[bucket.index()] = _Bucket(parameters, self._runs(parameters), residuals)
        return known

    def _runs(self, parameters: list[Tensor]) -> list[int]:
        runs = [0]
        for parameter in parameters:
            in_exact_run = len(runs) % 2 == 1
            if in_exact_run != bool(self._stays_exact(parameter)):
                runs.append(0)
            runs[-1] += parameter.numel()
        return runs
