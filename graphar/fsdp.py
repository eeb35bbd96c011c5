"""fully_shard (FSDP2) with graphar: the all-gather of parameters and the reduce-scatter of gradients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphar.integrations.works import GrapharWork
from graphar.numerics.codecs import Codec, CodecName, as_codec
from graphar.plan.algorithms import COPYING
from graphar.plan.call import Call, Operands
from graphar.plan.work import Parts
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.memory.symmetric_tensors import TensorPool
from graphar.runtime.registry import Group, engine_of
from graphar.runtime.side_stream import SideStream

Method = Literal["auto", "copies", "kernels"]
Coded = Literal["auto", "hierarchical"]  # how sums with a codec are made
POOL_NBYTES = 2 << 30  # for gathers of up to 1 GiB


def set_collectives(
    model: nn.Module,
    group: Group = None,
    *,
    codec: Codec | CodecName | None = None,
    error_feedback: bool = False,
    blocks: int | None = None,
    algorithm: Method | Coded = "auto",
    pool_nbytes: int = POOL_NBYTES,
) -> None:
    """Makes all modules of a model that were given to ``fully_shard`` use graphar's all-gather and reduce-scatter.

    Use: ``graphar.fsdp.set_collectives(model)``, after ``fully_shard`` and before the first step. Not collective.

    Parameters are gathered bit for bit. Exact gradients are summed in fp32 in rank order and rounded once, and then
    divided by the number of ranks. Large bf16 gathers are compressed without loss where the tuning table has a size for
    it; ``group=Communicator(lossless=False)`` prevents that. With HSDP both run within the shard groups; the all-reduce
    between replicas stays torch's.

    Args:
        model: a model with modules that were given to ``fully_shard``.
        group: a Communicator, process group or DeviceMesh of one dimension with the ranks that parameters are sharded
            over. None: each module's own group.
        codec: the format of gradients on the wire: a :class:`graphar.Codec`, or the name of one, such as "int8". It
            rounds all gradients of a module. None: gradients are exact.
        error_feedback: with a codec, whether this rank adds the rounding errors of the gradients to the next gradients.
            On every rank this takes memory of the size of the whole gradients.
        blocks: the most thread blocks of an exact call, which is then never compressed; the same on every rank. None:
            64 between 2 ranks and 32 between more, and the whole grid where a gather is compressed.
        algorithm: "copies" for exact calls by copy engines, which leave matmuls all SMs but for short sums and
            meetings; "kernels"; or "auto", which goes by the tuning table, and takes kernels if ``blocks`` is given.
            Where kernels do not reach all ranks, as on the CPU, it has no effect. "hierarchical", with a codec and
            ranks on several hosts: gradients are summed exactly inside a host, and encoded between hosts alone.
        pool_nbytes: with copies, the most bytes of symmetric memory for gathered parameters on each GPU, which is kept
            and used again. Each gather gets at most half of it. Others go through scratch, and are copied once more.

    Raises:
        ValueError: no module was given to ``fully_shard``, a module has parameters on several meshes, the codec or the
            algorithm is not known, or ``error_feedback`` or "hierarchical" is given without a codec, or both are.
    """
    # Import it here: it takes half a second, and a model with such modules has already done it.
    from torch.distributed.fsdp import FSDPModule

    if error_feedback and codec is None:
        raise ValueError("set_collectives: error_feedback needs a codec")
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise ValueError("set_collectives: no module of the model was given to fully_shard")
    if algorithm == "hierarchical" and codec is None:
        raise ValueError("set_collectives: algorithm='hierarchical' needs a codec")
    coded, by = (algorithm, "auto") if algorithm == "hierarchical" else ("auto", algorithm)
    # Of any type: torch's abstract classes, which they implement, take half a second to import.
    gather: Any = AllGather(group, blocks=blocks, algorithm=by, pool_nbytes=pool_nbytes)
    scatter: Any = ExactReduceScatter(group, blocks=blocks, algorithm=by)
    for module in sharded:
        if codec is not None:
            scatter = QuantizedReduceScatter(codec, group, error_feedback=error_feedback, algorithm=coded)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


class _Collective:
    """A collective of fully_shard's. It implements the protocol of torch's Comm, and needs no base class."""

    def __init__(self, group: Group = None, *, blocks: int | None = None, algorithm: Method = "auto") -> None:
        self._name = type(self).__name__
        if algorithm not in get_args(Method):
            raise ValueError(f"{self._name}: algorithm must be one of {', '.join(get_args(Method))}, got {algorithm!r}")
        if blocks is not None and (not isinstance(blocks, int) or blocks < 1):
            raise ValueError(f"{self._name}: blocks must be a positive int or None, got {blocks!r}")
        if group is not None:
            engine_of(group, self._name)  # raises its errors here, not in the first step
        self._group, self._blocks, self._algorithm = group, blocks, algorithm
        self._calls: dict[Hashable, Call] = {}  # by the engine's name and what else a call depends on

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised tensor for an input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _engine(self, group: dist.ProcessGroup) -> Engine:
        if self._group is None:
            return engine_of(group)
        engine = engine_of(self._group, self._name)
        if engine.group is not group:
            mine, asked = map(dist.get_process_group_ranks, (engine.group, group))
            if mine != asked:
                raise ValueError(
                    f"{self._name}: fully_shard communicates over the ranks {asked}, but the given group has {mine}; "
                    "with group=None each module uses its own group"
                )
        return engine

    def _checked(self, group: dist.ProcessGroup, input: Tensor, output: Tensor, *, whole: str, part: str) -> Engine:
        """Returns the engine of a call whose ``whole`` tensor has a part of each rank like its tensor ``part``."""
        engine, numels = self._engine(group), {"input": input.numel(), "output": output.numel()}
        fits = numels[whole] == engine.world_size * numels[part]
        if not fits or (input.dtype, input.device) != (output.dtype, output.device):
            raise ValueError(
                f"{self._name}: the {whole} must be {engine.world_size} times the {part}, got {input.numel()} "
                f"{input.dtype} on {input.device} and {output.numel()} {output.dtype} on {output.device}"
            )
        if not (input.is_contiguous() and output.is_contiguous()):
            raise ValueError(f"{self._name}: the tensors must be contiguous")
        return engine

    def _run(self, engine: Engine, op: str, x: Tensor, out: Tensor, averages: bool = False) -> bool:
        """Makes an exact call, by copies, or in few blocks unless it is compressed; returns whether by copies.

        Copies divide the rounded sum if it ``averages``, as other calls do not.
        """
        symmetric, numel = engine.is_symmetric(out), min(x.numel(), out.numel())
        key = engine.name, op, numel, x.dtype, x.get_device(), symmetric, averages
        if (call := self._calls.get(key)) is None:
            call = self._calls[key] = self._call(engine, op, x, numel, symmetric, averages)
        by_copies = call.algorithm == COPYING[op].value
        numbers = (1 / engine.world_size,) if averages and by_copies else ()
        engine.run(call, [Operands((x,), (out,), numbers)])
        return by_copies

    def _call(self, engine: Engine, op: str, x: Tensor, numel: int, symmetric: bool, averages: bool) -> Call:
        work = Parts(op, (numel,) * engine.world_size)
        call = Call.of(work, x, blocks=self._blocks)
        if self._takes_copies(engine, call, x):
            work = work._replace(beside="divided by the number of ranks") if averages else work
            symmetric = symmetric and COPYING[op].row.direct
            return call._replace(work=work, algorithm=COPYING[op].value, symmetric=symmetric)
        if self._blocks is not None:
            return call
        with engine.keeping_failure():
            compresses = engine.select(call, x).config.algorithm.row.compresses
        # Few blocks would limit a compressed call.
        return call if compresses else call._replace(blocks=engine.table.training.most_blocks(engine.world_size))

    def _takes_copies(self, engine: Engine, call: Call, x: Tensor) -> bool:
        if self._algorithm == "kernels" or (self._algorithm == "auto" and self._blocks is not None):
            return False
        with engine.keeping_failure():
            if engine.why_no_kernel(call.op, x):  # from here on the engine has its tuning table
                return False
        least = engine.table.copies.beside_from_nbytes.get(engine.world_size, math.inf)
        return self._algorithm == "copies" or call.nbytes >= least


class AllGather(_Collective):
    """An all-gather for ``fully_shard``, by graphar's kernels or by copy engines.

    Use: :func:`graphar.fsdp.set_collectives`, or ``module.set_custom_all_gather(graphar.fsdp.AllGather())`` for each
    module that was given to ``fully_shard``. One object may serve all modules. It moves bits, in any dtype.

    Args:
        group: a Communicator, process group or DeviceMesh of one dimension with the ranks that parameters are sharded
            over. None: each module's own group.
        blocks: the most thread blocks of a call, which is then never compressed; the same on every rank. None: 64
            between 2 ranks and 32 between more, and the whole grid where a call is compressed.
        algorithm: "copies", "kernels" or "auto", as in :func:`set_collectives`.
        pool_nbytes: with copies, the most bytes of symmetric memory for gathered parameters on each GPU.

    Raises:
        ValueError: ``blocks`` or ``algorithm`` is invalid.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        blocks: int | None = None,
        algorithm: Method = "auto",
        pool_nbytes: int = POOL_NBYTES,
    ) -> None:
        super().__init__(group, blocks=blocks, algorithm=algorithm)
        self._sides: dict[torch.device, SideStream] = {}
        self._pool_nbytes = pool_nbytes
        # By engine, the pool of calls by copies. With several groups it is not known for which a tensor is.
        self._pools: dict[str, TensorPool] = {}
        self._pooled: Engine | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns an uninitialised tensor for an output: from the pool, after a call by copies. Collective then."""
        if len(self._pools) == 1 and self._pooled and not self._pooled.suspended and device.type == "cuda":
            shape = torch.Size(size)
            taken = self._pools[self._pooled.name].take(shape.numel(), dtype)
            if taken is not None:
                return taken.view(shape)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Writes the inputs of all ranks into ``output_tensor``, in rank order. Collective.

        The input may be this rank's part of the output. With ``async_op`` it runs on a side stream, and returns a Work:
        keep the tensors until a stream has waited for it.
        """
        engine = self._checked(group, input_tensor, output_tensor, whole="output", part="input")
        device = output_tensor.device
        if not async_op or device.type != "cuda":
            self._gather(engine, input_tensor, output_tensor)
            return GrapharWork([output_tensor]) if async_op else None
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = SideStream(device, priority=-1)  # as fully_shard's own streams
        with side.behind_the_caller():
            self._gather(engine, input_tensor, output_tensor)
        return GrapharWork([output_tensor], side.stream)

    def _gather(self, engine: Engine, x: Tensor, out: Tensor) -> None:
        # fully_shard gathers in place. A kernel may do so: it writes this rank's part where and as it has read it.
        if self._run(engine, "allgather", x, out) and engine.name not in self._pools:
            self._pooled, engine.symmetric = engine, runner_of(engine).symmetric
            self._pools[engine.name] = TensorPool(engine.symmetric, x.get_device(), self._pool_nbytes)


class ExactReduceScatter(_Collective):
    """An exact reduce-scatter for ``fully_shard``, by graphar's kernels or by copy engines.

    Use: :func:`graphar.fsdp.set_collectives`, or
    ``module.set_custom_reduce_scatter(graphar.fsdp.ExactReduceScatter())`` for each module that was given to
    ``fully_shard``. One object may serve all modules. It runs on the current stream, writes into the given output, and
    needs no further memory. An average is the rounded sum, divided by the number of ranks.

    Args:
        group: a Communicator, process group or DeviceMesh of one dimension with the ranks that parameters are sharded
            over. None: each module's own group.
        blocks: the most thread blocks of a call; the same on every rank. None: 64 between 2 ranks and 32 between more.
        algorithm: "copies", "kernels" or "auto", as in :func:`set_collectives`.

    Raises:
        ValueError: ``blocks`` or ``algorithm`` is invalid.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Writes this rank's part of the sum or average over ranks into ``output_tensor``. Collective.

        ``op`` is SUM or AVG, and ``async_op`` False. The input has a part for each rank.
        """
        kind = getattr(op, "op", op)  # torch passes a ReduceOp object or its enum value
        if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"{self._name}: takes ReduceOp.SUM and AVG, got {kind}; with "
                "set_force_sum_reduction_for_comms(True) fully_shard itself divides by any factor"
            )
        if async_op:
            raise ValueError(f"{self._name}: has no async_op; call it on a stream of its own")
        engine = self._checked(group, input_tensor, output_tensor, whole="input", part="output")
        averages = kind == dist.ReduceOp.AVG
        if not self._reduce(input_tensor, output_tensor, engine, averages) and averages:
            output_tensor.div_(engine.world_size)

    def _reduce(self, x: Tensor, out: Tensor, engine: Engine, averages: bool) -> bool:
        """Writes this rank's part of the sum, and returns whether it is divided already if it ``averages``."""
        return self._run(engine, "reducescatter", x, out, averages)


class QuantizedReduceScatter(ExactReduceScatter):
    """A reduce-scatter for ``fully_shard`` with a codec on the wire, by graphar's kernels.

    Use: :func:`graphar.fsdp.set_collectives` with ``codec=``, or
    ``module.set_custom_reduce_scatter(graphar.fsdp.QuantizedReduceScatter("int8"))``, with one object for each module
    that was given to ``fully_shard``. It takes a module's gradients as one tensor and rounds all of them. To keep the
    gradients of a submodule exact, such as a norm's, wrap the submodule in a separate ``fully_shard``, and give it an
    :class:`ExactReduceScatter`. It runs on the current stream. An average is the rounded sum, divided by the number of
    ranks.

    Args:
        codec: the format on the wire: a :class:`graphar.Codec`, or the name of one, such as "int8".
        group: a Communicator, process group or DeviceMesh of one dimension with the ranks that parameters are sharded
            over. None: each module's own group.
        error_feedback: whether this rank adds the rounding errors of the gradients to the next gradients. On every
            rank this takes memory of the size of the module's whole gradients.
        algorithm: "hierarchical" is exact inside a host and encodes between hosts alone, with the bits of
            ``graphar.reference.hierarchical_reducescatter``. It rounds to nearest, without error feedback.

    Raises:
        ValueError: the codec or the algorithm is not known, or "hierarchical" is given with ``error_feedback``.
    """

    def __init__(
        self, codec: Codec | CodecName, group: Group = None, *, error_feedback: bool = False, algorithm: Coded = "auto"
    ) -> None:
        super().__init__(group)
        if algorithm not in get_args(Coded):
            raise ValueError(f"{self._name}: algorithm must be one of {', '.join(get_args(Coded))}, got {algorithm!r}")
        if error_feedback and algorithm == "hierarchical":
            raise ValueError(f"{self._name}: algorithm='hierarchical' has no error_feedback")
        self._coded, self._error_feedback = algorithm, error_feedback
        self._codec = replace(as_codec(self._name, codec), feedback=error_feedback).text
        self._residual: Tensor | None = None  # a call adds it to its input, and replaces it by its rounding errors

    def _reduce(self, x: Tensor, out: Tensor, engine: Engine, averages: bool) -> bool:
        call_checks.check_quantized_call(self._name, self._codec, "auto", x)
        residuals = ()
        if self._error_feedback:
            residual = self._residual = torch.zeros_like(x) if self._residual is None else self._residual
            if (residual.shape, residual.dtype) != (x.shape, x.dtype):
                raise ValueError(
                    f"{self._name}: with error_feedback each module needs one of its own; this one's has "
                    f"{residual.numel()} {residual.dtype}, got {x.numel()} {x.dtype}"
                )
            residuals = (residual,)
        # The full grid: with few blocks a codec's all-reduce was 8 % slower in DistributedDataParallel.
        work = Parts("reducescatter", (out.numel(),) * engine.world_size, self._codec)
        engine.run(Call.of(work, x, algorithm=self._coded), [Operands((x, *residuals), (out,))])
        return False
