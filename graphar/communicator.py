"""graphar.Communicator: the ranks that take part in collectives, with their timeout and shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphar.numerics.codecs import Codec, CodecName, as_codec
from graphar.numerics.epilogues.epilogue import Epilogue, form_to_prepare
from graphar.ops.allgather import allgather
from graphar.ops.alltoall import alltoall
from graphar.ops.empty import empty
from graphar.ops.explain import explain
from graphar.ops.options import T, check_removed
from graphar.ops.preparation import prepare
from graphar.ops.sums import allreduce, reducescatter
from graphar.plan.config import Explanation
from graphar.ranks.groups import local_devices, process_group
from graphar.ranks.hierarchical import check_hosts
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import DEFAULT_TIMEOUT_S, check_keep
from graphar.runtime.watch.stats import Memory, Stats


class Communicator:
    """The ranks that take part in collectives, with their shared memory and their deadline.

    With one process per rank, use ``Communicator(group)``; calls take this rank's tensor. With one process for several
    devices, use ``Communicator(devices=[0, 1, 2, 3])``; calls take a list of tensors, one per device. All ranks must
    call collective methods in the same order.

    Lifetime: a communicator lives until :meth:`close`, even if no reference to it is left or its group is destroyed,
    because a captured graph or a peer may still use its memory. Calls that pass a process group share a communicator
    that lives until the process ends; it drops the group's store when the group is destroyed.

    Order: eager calls of a communicator run one after another, even on different streams. You must order replays of
    captured graphs.

    Failure: after a wait has timed out, every call that needs all ranks raises that error again, and is not made.
    Close the communicator, and make another.

    Args:
        group: a torch process group, or a DeviceMesh of one dimension; None: the default group. Its ranks may be on
            several hosts, but graphar's kernels serve only groups whose ranks share a host.
        devices: the devices of this process's ranks, instead of a group: CUDA devices, or ``"cpu"`` once for each rank.
        timeout_s: the deadline of every wait on another rank, in seconds. The default is 60.
        hosts: the ranks of each host, such as [[0, 1], [2, 3]], for the hierarchical algorithm, which adds in this
            order. The same on every rank. None: hosts are found from host names, or a common GRAPHAR_SOCKET_DIR.
        lossless: whether ``auto`` may compress large bf16 tensors without loss. The same on every rank; otherwise
            the first call on GPUs raises CommunicatorError on all of them. None: unless the environment has
            GRAPHAR_LOSSLESS=0.

    Raises:
        ValueError: an argument is invalid, or there are neither devices nor an initialised torch.distributed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        hosts: Sequence[Sequence[int]] | None = None,
        lossless: bool | None = None,
        **removed: object,
    ) -> None:
        check_removed("Communicator", removed)
        call_checks.check_timeout("Communicator", timeout_s)
        if devices is not None and group is not None:
            raise ValueError("Communicator: give a group or devices, not both")
        ranks = None if devices is not None else process_group(group, "give devices, such as devices=[0, 1]")
        local = None if devices is None else local_devices(devices)
        by_host = check_hosts(hosts, None if ranks is None else ranks.size())
        self.engine = Engine(ranks, local, timeout_s, by_host, lossless)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None with ``devices``."""
        return self.engine.group

    @property
    def devices(self) -> tuple[torch.device, ...] | None:
        """The ranks' devices; None with a group."""
        return self.engine.devices

    @property
    def rank(self) -> int | None:
        """This process's rank; None with ``devices``."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.engine.world_size

    @property
    def timeout_s(self) -> float:
        """The deadline of every wait on another rank, in seconds."""
        return self.engine.timeout_s

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self.engine.closed

    def allreduce(self, x: T, **options: Any) -> T:
        """Returns the sum over all ranks, on every rank. Collective.

        Args:
            x: this rank's tensor; with ``devices``, a list with one per device.
            options: ``out``, ``algorithm``, ``codec``, ``residual``, ``epilogue`` and ``timeout_s`` of
                :func:`graphar.allreduce`.
        """
        return allreduce(x, self, **options)

    def reducescatter(self, x: T, **options: Any) -> T:
        """Returns this rank's part of the sum over all ranks. Collective.

        Args:
            x: this rank's tensor; with ``devices``, a list with one per device.
            options: ``axis``, ``algorithm``, ``codec``, ``residual``, ``epilogue`` and ``timeout_s`` of
                :func:`graphar.reducescatter`.
        """
        return reducescatter(x, self, **options)

    @overload
    def allgather(self, x: T, **options: Any) -> T: ...
    @overload
    def allgather(self, x: tuple[T, ...], **options: Any) -> tuple[T, ...]: ...
    def allgather(self, x, **options):
        """Returns the concatenation of all ranks' tensors, on every rank. Collective.

        Args:
            x: this rank's tensor; with ``devices``, a list with one per device. Or a tuple of these.
            options: ``axis``, ``sizes``, ``algorithm`` and ``timeout_s`` of :func:`graphar.allgather`.
        """
        return allgather(x, self, **options)

    def alltoall(self, x: T, **options: Any) -> T:
        """Returns this rank's parts of all ranks' tensors. Collective.

        Args:
            x: this rank's tensor; with ``devices``, a list with one per device.
            options: ``out``, ``sizes``, ``scatter_dim``, ``gather_dim``, ``algorithm`` and ``timeout_s`` of
                :func:`graphar.alltoall`.
        """
        return alltoall(x, self, **options)

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor | list[torch.Tensor]:
        """Returns an uninitialised symmetric tensor, which all ranks can access; see :func:`graphar.empty`. Collective.

        Args:
            size: the shape, the same on every rank.
            dtype: the dtype, the same on every rank; None: torch's default.

        Returns:
            A tensor; with ``devices``, a list with one per device.
        """
        return empty(*size, dtype=dtype, group=self)

    def explain(self, x: torch.Tensor | Sequence[torch.Tensor], **options: Any) -> Explanation:
        """Returns which algorithm a call would take, why, and its expected time. The first call is collective.

        Args:
            x: this rank's tensor; with ``devices``, a list with one per device.
            options: ``out``, ``algorithm``, ``codec`` and ``epilogue`` of :func:`graphar.explain`.
        """
        return explain(x, self, **options)

    def stats(self) -> Stats:
        """Returns counts of this communicator's calls, fallbacks, plans and waits. Not collective.

        Counting costs a call one addition, and cannot be switched off. ``dataclasses.asdict`` makes a dict of the
        result, for a metrics system. :func:`graphar.stats` counts the calls that pass a process group.
        """
        return self.engine.stats()

    def prepare(
        self,
        dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
        max_nbytes: int | None = None,
        ops: Iterable[str] = ("allreduce",),
        codecs: Iterable[Codec | CodecName] = (),
        epilogues: Iterable[Epilogue | str] = (),
        tp_invariant: bool = False,
    ) -> None:
        """Compiles and loads the kernels of later calls, and allocates their scratch. Collective.

        Prepared calls compile and allocate nothing, so they can be captured in a CUDA graph. Preparation covers the
        sums of ``graphar.ddp``'s hooks, and calls with symmetric tensors if there are some already
        (:func:`graphar.empty`). For a fused matmul it loads the fused kernels of all sizes. A matmul that is followed
        by its sum also needs the sum's op, and graphar's own matmul kernel is loaded at the first call that takes it.

        The first time, kernels are compiled into the kernel cache: each by one of the ranks, on all cores of the host.
        The fused kernels of two dtypes take a core a minute.

        Args:
            dtypes: the dtypes of later calls' tensors. With torch.float8_e4m3fn the fused matmuls of such operands are
                prepared, for results of the other dtypes that have 16 bits, or of bf16 if there are none.
            max_nbytes: the size of the largest tensor, in bytes; None: any size.
            ops: names of ops: "allreduce", "reducescatter", "allgather", "alltoall", "allgather_tuple" for a tuple,
                "allreduce_residual_rmsnorm", "reducescatter_residual_rmsnorm", "fused_matmul_allreduce",
                "fused_matmul_reducescatter", "fused_allgather_matmul", "cross_entropy", "log_probs". For FP8 results of
                the two that end in a norm, append "_static_fp8" for calls with a scale, "_grouped_fp8" for calls with a
                group_size, and "_dynamic_fp8" for other calls. Or algorithms from :func:`graphar.load_algorithm`, for
                calls that name them.
            codecs: the codecs of later calls. Calls without a codec are prepared too.
            epilogues: the epilogues of later calls. Calls without an epilogue are prepared too. Give expressions,
                with arguments of the later dtypes. For a function, give its ``traced(x)``.
            tp_invariant: prepare calls with ``partition="tp_invariant"`` too, whose results have ``dtypes``. Name a
                fused matmul together with its sum, such as "allreduce" or "allreduce_residual_rmsnorm".

        Raises:
            TypeError, ValueError: an argument breaks a rule: there is no such op, or an epilogue is a function.
            CommunicatorError: the communicator is closed, or a rank did not arrive in time.
            CompileError: a kernel did not compile.
        """
        types = call_checks.check_prepared("prepare", dtypes, max_nbytes, codecs, epilogues)
        rounded = [as_codec("prepare", codec) for codec in codecs]
        forms = [form_to_prepare(epilogue) for epilogue in epilogues]
        prepare(self.engine, call_checks.check_ops("prepare", ops), types, max_nbytes, rounded, forms, tp_invariant)

    def synchronize(self) -> None:
        """Waits for all work on this process's devices, and raises the errors of calls in replayed graphs.

        Raises:
            CollectiveTimeout: a call of this communicator waited past its deadline.
            ConcurrentCallError: two calls of this communicator ran at the same time.
            CommunicatorError: ranks made different calls. The message has the call of each rank.
        """
        self.engine.synchronize()

    def memory(self) -> Memory:
        """Returns the GPU memory that this communicator shares between ranks, by algorithm. Not collective.

        Scratch is allocated with the first call that needs it, or by :meth:`prepare`. Without GPUs there is none.
        """
        return self.engine.memory()

    def suspend(self, keep: str | None = None) -> None:
        """Gives the GPU memory of scratch and symmetric tensors back until :meth:`resume`. Collective.

        It waits for all work on this process's devices and for the other ranks. The addresses stay reserved, so plans,
        compiled code and captured graphs are valid again after :meth:`resume`. Meanwhile every call raises
        CommunicatorError. The collectives of a graph that is replayed meanwhile do nothing; :meth:`resume` warns of
        that. An access to a symmetric tensor is CUDA's illegal address error, which ends the process's context.
        Multimem scratch, which torch allocates, stays. A suspended communicator stays as it is. While this method or
        :meth:`resume` runs, no thread may replay a graph with the communicator: that is an illegal address error, too.

        Args:
            keep: "symmetric": keep the content of symmetric tensors, in pinned host memory. None: it is undefined after
                :meth:`resume`. The same on every rank.

        Raises:
            ValueError: ``keep`` is neither.
            UnsupportedError: on every rank, if the driver or a sandbox does not let memory go while its addresses stay.
                The message has the reason.
            CommunicatorError: a graph is being captured, the communicator is closed, the ranks differ in ``keep``, or a
                rank did not arrive in time.
            GrapharError: the error of an earlier call.
        """
        check_keep(keep)
        self.engine.suspend(keep)

    def resume(self) -> None:
        """Brings the memory back that :meth:`suspend` gave back, at the same addresses. Collective.

        Afterwards everything is as after :meth:`prepare`, and captured graphs can be replayed. If a GPU has too little
        memory, every rank gets an error and stays suspended; call it again on every rank once there is room. A
        communicator that is not suspended stays as it is.

        Raises:
            DriverError: this rank's GPU has too little memory; torch.cuda.empty_cache() frees what torch keeps.
            CommunicatorError: another rank failed, which the message names; a rank did not arrive in time; or the
                communicator is closed.
        """
        self.engine.resume()

    def close(self) -> None:
        """Frees the memory shared with other ranks. Collective.

        Graphs that were captured with this communicator must not be replayed afterwards. Ranks whose processes have
        ended are not waited for.

        Raises:
            CommunicatorError: a graph is being captured, or a rank did not arrive within ``timeout_s``. Memory that
                such a rank may still use is not freed.
        """
        self.engine.close()

    def __deepcopy__(self, memo: dict) -> Communicator:  # a copied model has the same ranks
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f"devices={[str(device) for device in self.devices]}" if self.devices else f"rank={self.rank}"
        closed = ", closed" if self.closed else ""
        return f"Communicator({where}, world_size={self.world_size}, timeout_s={self.timeout_s:g}{closed})"
