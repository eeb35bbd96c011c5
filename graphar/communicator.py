"""Communicator: the ranks that take part in a collective, and everything a call between them needs."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from graphar.errors import CollectiveTimeout, CommunicatorError, GrapharError, UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import Epilogue, Form, form_to_prepare
from graphar.plan import checks, choice
from graphar.plan.algorithms import Algorithm, slices
from graphar.plan.explanation import Explanation
from graphar.plan.tables import Table
from graphar.ranks import fallback
from graphar.ranks.debug import Comparison, is_asked_for
from graphar.ranks.group_calls import GroupCalls
from graphar.ranks.groups import device_of_process, local_devices, process_group
from graphar.ranks.hierarchical import Hierarchy, check_hosts
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous, meet
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import Kept
from graphar.runtime.catalogue import BYTE, MAX_RANKS, TYPE_NAMES
from graphar.runtime.prefetch import without

DEFAULT_TIMEOUT_S = 60.0
_CALLS_KEPT = 4096  # distinct (op, numel, dtype, algorithm, timeout, ...): a few hundred bytes each
NAME_PREFIX = "graphar:"  # no process group's

open_communicators: dict[str, Communicator] = {}  # by name; what keeps them, see the class
_names = itertools.count()


class Communicator:
    """The ranks that take part in a collective.

    One process a rank: ``Communicator(group)``, where calls take this rank's tensor. One process with many devices:
    ``Communicator(devices=[0, 1, 2, 3])``, where calls take a list of tensors, one a device. Every method that is
    marked collective must be called by all ranks in the same order. A communicator lives until it is closed, also when
    nothing refers to it any more or its group is destroyed, since a captured graph, or a peer, may still use its
    memory; so does the one that calls with a mere group share, to the end of the process. It keeps its group's store as
    long, which the shared one lets go with the group. Its eager calls follow each other on any streams; graphs have to
    be ordered by whoever replays them. Once a wait was in vain, what needs all ranks raises the same error again: close
    it, and make another.

    Args:
        group: a torch process group; None is the default one. Its ranks need not share a host, but only those that do
            are served by graphar's kernels.
        devices: the ranks of this process, instead of a group: CUDA devices, or ``"cpu"`` as often as there are ranks.
        timeout_s: the deadline of every wait on another rank, in seconds.
        debug: whether the ranks of a group compare what they call before each call: a mismatch then raises
            CommunicatorError on every rank, saying what each called. Not while a graph is captured. None: as the
            environment says, where GRAPHAR_DEBUG=1 is yes. The same on every rank.
        hosts: each host's ranks, such as [[0, 1], [2, 3]], for the hierarchical algorithm, which adds in this order.
            The same on every rank; None: the processes find out.

    Raises:
        ValueError: neither torch.distributed is initialised nor devices are given, or an argument breaks a rule.
    """

    # Tests set it before the first call: multimem kernels without multimem instructions, which need no multicast.
    _multimem_stand_in = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        debug: bool | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        checks.check_timeout("Communicator", timeout_s)
        if devices is not None and group is not None:
            raise ValueError("Communicator: give a group or devices, not both")
        self.timeout_s = float(timeout_s)
        self.name = f"{NAME_PREFIX}{next(_names)}"
        self.group = group if devices is not None else process_group(group)
        self.devices = None if devices is None else local_devices(devices)
        self.world_size = len(self.devices) if self.devices else self.group.size()
        self.rank = None if self.devices else self.group.rank()  # with devices, all ranks are this process's
        self.hierarchy = Hierarchy(self, check_hosts(hosts, None if self.devices else self.world_size))
        self._runner = None
        self._no_runner = ""  # why there is none, once that is known
        self._table: Table | None = None  # rank 0's, as soon as there is a runner
        self._calls: Kept[Callable] = Kept(_CALLS_KEPT)
        self._symmetric = None  # the runner's symmetric tensors, once there are any
        self._rendezvous: StoreRendezvous | None = None  # as soon as the processes have to meet
        self._group_calls: GroupCalls | None = None
        self._quantized_calls = itertools.count()  # those made without kernels, which count their own
        self._failure: GrapharError | None = None  # what ended this communicator, but for what its kernels report
        self.closed = False
        self._comparison = Comparison(self) if self.group and self.world_size > 1 and is_asked_for(debug) else None
        if self._comparison:
            self._comparison.watch()
        open_communicators[self.name] = self

    # ---- calls ----------------------------------------------------------------------------------------------------

    def allreduce(self, x, **options):
        """:func:`graphar.allreduce` over this communicator, which takes the same options. Collective."""
        from graphar.ops import ops

        return ops.allreduce(x, self, **options)

    def run_allreduce(
        self, x, out, algorithm: str, timeout_s: float | None, codec: str = "", blocks: int | None = None, prefetch=None
    ) -> None:
        """Writes the sum over all ranks into ``out``. Collective.

        ``x`` and ``out`` are contiguous, and checked by the op: a tensor each, or, where this has devices, lists.
        ``codec`` is the text of what is on the wire, or nothing. ``blocks`` is how many a kernel may have that leaves
        the other SMs to something else; None: as many as are good. ``prefetch`` is what kernels that can bring into L2
        meanwhile, without a codec: a tensor, or a list, or None.
        """
        first = x if self.devices is None else x[0]
        way = codec or (self._symmetric and self._symmetric.operands(x, out))
        op = "allreduce" if prefetch is None else "prefetching_allreduce"
        key = (op, first.numel(), first.dtype, first.get_device(), algorithm, timeout_s, way, blocks)
        run = self._calls.get(key) or self._plan(key, first)
        run(x, out) if prefetch is None else run(x, out, prefetch)

    def reducescatter(self, x, **options):
        """:func:`graphar.reducescatter` over this communicator, which takes the same options. Collective."""
        from graphar.ops import scatter

        return scatter.reducescatter(x, self, **options)

    def allgather(self, x, *, axis: int = 0, sizes: Sequence[int] | None = None, timeout_s: float | None = None):
        """:func:`graphar.allgather` over this communicator. Collective."""
        from graphar.ops import scatter

        return scatter.allgather(x, self, axis=axis, sizes=sizes, timeout_s=timeout_s)

    def run_parts(
        self, op: str, x, out, counts: tuple[int, ...], timeout_s, axis: int = 0, codec: str = "", blocks=None
    ) -> None:
        """As :meth:`run_allreduce`, for the ops whose whole consists of a part for each rank. Collective.

        "reducescatter" writes each rank's part of the sum into its ``out``; "allgather" writes the ``x`` of all ranks,
        one after another, into every ``out``. ``counts`` has the elements of each rank's part. ``axis`` is the one that
        comes first in ``x``; only debug mode asks for it. ``codec`` is the text of what a reduce-scatter has on the
        wire, or nothing.
        """
        first = x if self.devices is None else x[0]
        key = (op, counts, first.dtype, first.get_device(), "auto", timeout_s, codec or None, blocks)
        run = self._calls.get(key) or self._plan(key, first)
        run(x, out)

    def run_with_epilogue(
        self, op: str, x, out, counts, form: Form, operands, algorithm: str, timeout_s, axis: int = 0, blocks=None
    ) -> None:
        """As :meth:`run_allreduce` and :meth:`run_parts`, with an epilogue. Collective.

        ``counts`` has the elements of the tensor in an all-reduce, and of each rank's part in a reduce-scatter;
        ``operands`` the Operands of each rank of this process.
        """
        first = x if self.devices is None else x[0]
        way = form, op == "allreduce" and self._symmetric and self._symmetric.operands(x, out)
        key = (f"epilogue_{op}", counts, first.dtype, first.get_device(), algorithm, timeout_s, way, blocks)
        run = self._calls.get(key) or self._plan(key, first)
        run(x, out, operands[0] if self.devices is None else operands)

    def run_matmul(self, op: str, a, w, bias, out, counts, timeout_s=None, epilogue=None, codec: str = "") -> None:
        """As :meth:`run_parts`, for an op of MATMUL_KERNELS, of tensors as MatmulParts.run takes them.

        Collective. ``counts`` has the rows that each rank sums. UnsupportedError says why no kernel serves the call.
        """
        operands = (a, w, bias, out) if self.devices else ([a], [w], [bias], [out])
        checks.check_call(op, "auto", timeout_s)
        with self.keeping_failure():
            if reason := self._why_no_kernel(operands[0][0]):
                raise UnsupportedError(f"{op}: {reason}")
            self._runner.run_matmul(Algorithm(op), *operands, counts, timeout_s or self.timeout_s, epilogue, codec)

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None):
        """:func:`graphar.empty` over this communicator. Collective."""
        with self.keeping_failure():
            like = checks.blueprint("empty", size, dtype)
            devices = self.devices or [device_of_process(self.group)]
            checks.check_not_capturing("empty", devices)
            self._compare("empty", f"of {list(like.shape)} {like.dtype}")
            if self._find_runner(devices[0]):
                tensors = self._runner.symmetric.empty(like)
                self._symmetric = self._runner.symmetric
            else:
                tensors = [torch.empty_like(like, device=device) for device in devices]
            return tensors if self.devices else tensors[0]

    def prepare(
        self,
        dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
        max_nbytes: int | None = None,
        ops: Iterable[str] = ("allreduce",),
        codecs: Iterable[Codec | str] = (),
        epilogues: Iterable[Epilogue | str] = (),
    ) -> None:
        """Compiles, loads and allocates what calls will need, so that none of them has to. Collective.

        This goes for what the hooks of ``graphar.ddp`` and fused matmuls sum, too, but for no matmul: each of another
        size may need another kernel, and loads it at its first call. Once there are symmetric tensors
        (:func:`graphar.empty`), it goes for calls with them.

        Args:
            dtypes: of the tensors to come.
            max_nbytes: the size of the largest one, in bytes; None: any.
            ops: "allreduce", "reducescatter", "allgather", "allreduce_residual_rmsnorm" (+ _static_fp8, _dynamic_fp8).
            codecs: with which codecs those ``ops`` that take one will be called, beside calls without.
            epilogues: likewise: expressions, with arguments of the dtypes to come; a function as its ``traced(x)``.
        """
        rounded = [checks.check_codec("prepare", codec) for codec in codecs]
        forms = [form_to_prepare(epilogue) for epilogue in epilogues]
        named = f", codecs {[codec.text for codec in rounded]}" if rounded else ""
        named += f", epilogues {[form.text for form in forms]}" if forms else ""
        ops, added = checks.check_ops("prepare", ops), [dtype for dtype in dtypes if dtype in TYPE_NAMES]
        with self.keeping_failure():
            self._compare("prepare", f"of {ops} for {added}, max_nbytes {max_nbytes}{named}")
            if not self._find_runner(self.devices[0] if self.devices else device_of_process(self.group)):
                return
            for needed in choice.needed_kernels(self, ops, added, max_nbytes, rounded, forms):
                self._runner.prepare(*needed)

    def explain(self, x, **options) -> Explanation:
        """:func:`graphar.explain` over this communicator, which takes the same options. Collective at first."""
        from graphar.ops import ops

        return ops.explain(x, self, **options)

    def explain_call(self, x, out, algorithm: str, codec: str = "", form: Form | None = None) -> Explanation:
        """Which way a call takes; its arguments as :meth:`run_allreduce` takes them, ``out`` None for a new tensor."""
        symmetric = self._symmetric and self._symmetric.operands(x, out)
        return choice.explain(self, x, algorithm, symmetric, codec_of_text(codec) if codec else None, form)

    # ---- life -----------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits for all work on this process's devices; what graphs report when they are replayed is raised here.

        Raises:
            CollectiveTimeout: a call of this communicator waited past its deadline.
            ConcurrentCallError: two calls of this communicator ran at the same time.
        """
        self.hierarchy.synchronize()
        if self._runner:
            self._runner.synchronize()

    def close(self) -> None:
        """Frees the memory shared with other ranks. Collective; graphs captured from this communicator end with it.

        Ranks whose processes have ended are not waited for.

        Raises:
            CommunicatorError: a rank did not come within ``timeout_s``; its share of the memory is then kept.
        """
        if self.closed:
            return
        try:
            if self._failure is None:
                self._compare("close")
        except RanksAbsent:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self.closed = True
        self._calls.clear()
        del open_communicators[self.name]
        with contextlib.ExitStack() as ends:
            ends.callback(self.let_go_of_group)
            ends.callback(self.hierarchy.close)
            if self._runner:
                self._runner.close()

    def let_go_of_group(self) -> None:
        """Keeps neither the process group nor its store, which calls need: what is left are memory and graphs."""
        self._failure = self._failure or CommunicatorError("the process group of this communicator was destroyed")
        self._calls.clear()
        self.hierarchy.let_go_of_groups()
        if self._rendezvous:
            self._rendezvous.leave()
        self.group = self._group_calls = None

    def __deepcopy__(self, memo: dict) -> Communicator:  # of a model, whose copy has the same ranks
        return self

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- choosing -------------------------------------------------------------------------------------------------

    def _plan(self, key: tuple, x: torch.Tensor) -> Callable:
        op, counts, dtype, _, algorithm, timeout_s, way, blocks = key
        codec = codec_of_text(way) if isinstance(way, str) else None
        checks.check_call(op, "auto" if codec else algorithm, timeout_s)
        (checks.check_strided if op == "allgather" else checks.check_tensor)(op, "x", x)
        with self.keeping_failure():
            run = self._bind(op, counts, dtype, algorithm, timeout_s or self.timeout_s, codec or way, x, blocks)
        return self._calls.keep(key, run)

    def _bind(
        self, op: str, counts, dtype, algorithm: str, timeout_s: float, way, x: torch.Tensor, blocks: int | None
    ) -> Callable:
        """As choice.choose_call has them; ``op`` is the user's, but where it has an epilogue."""
        if isinstance(way, Codec):
            op, way = f"quantized_{op}", way if way.seed is not None else replace(way, seed=secrets.randbits(64))
        shape, parts = choice.choose_call(self, op, counts, x, algorithm, way, blocks)
        if op == "prefetching_allreduce" and not shape.prefetches:
            return without(self._bind("allreduce", counts, dtype, algorithm, timeout_s, way, x, blocks))
        counts = counts if isinstance(counts, tuple) else (counts,)
        if self.world_size == 1:
            return fallback.alone(way, self.devices is not None, **parts)
        if not any(counts):
            return self.keeping_failure()(fallback.do_nothing)
        if shape.blocks:
            shape = replace(shape, blocks=min(shape.blocks, blocks or shape.blocks))
            element = BYTE if op == "allgather" else dtype
            self._runner.prepare(shape.algorithm, element, shape.direct, shape.codec, shape.epilogue)
            launches = slices(shape.algorithm, self.world_size, counts, x.element_size())
            return self._runner.bind(shape, launches, element, timeout_s)
        if self.devices:
            return self.keeping_failure()(partial(fallback.LOCAL[op], **parts))
        self._group_calls = self._group_calls or GroupCalls(self.group, self.rendezvous())
        op = shape.algorithm.op if shape.algorithm is Algorithm.HIERARCHICAL else op
        return self.keeping_failure()(self._group_calls.bind(op, x, timeout_s, parts))

    def _why_no_kernel(self, x: torch.Tensor, op: str = "allreduce") -> str:
        """Why graphar's kernels cannot serve a call, or nothing."""
        reason = choice.why_no_kernel(self.world_size, x, op)
        return reason or ("" if self._find_runner(x.device) else self._no_runner or f"the tensor is on {x.device}")

    # ---- set-up ---------------------------------------------------------------------------------------------------

    def _find_runner(self, device: torch.device) -> bool:
        """Whether graphar's kernels reach all ranks; sets them up the first time, which is collective."""
        if device.type == "cuda" and self._runner is None and not self._no_runner:
            if self.world_size == 1 or self.world_size > MAX_RANKS:
                self._no_runner = f"kernels serve 2 to {MAX_RANKS} ranks, not {self.world_size}"
            else:
                self._set_up(device)
        if self._runner and self.group and device.index != (own := self._runner.members[0].device):
            raise ValueError(f"graphar: this rank's communicator is on cuda:{own}, got {device}")
        return self._runner is not None

    def _set_up(self, device: torch.device) -> None:
        rendezvous = Alone() if self.devices else self.rendezvous()
        try:
            rendezvous.agree_on_none("set-up", missing_software())
            from graphar.runtime.setup import set_up

            self._runner, self._table = set_up(self.group, self.devices, device, rendezvous, self._multimem_stand_in)
        except UnsupportedError as error:
            self._no_runner = str(error)

    def rendezvous(self) -> StoreRendezvous:
        """Where the processes of the group meet."""
        self._rendezvous = self._rendezvous or meet(self.group, self.timeout_s)
        return self._rendezvous

    # ---- failures -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def keeping_failure(self) -> Iterator[None]:
        """What needs all ranks is done inside; where one did not come, whatever follows raises the same.

        Raises:
            CommunicatorError: this communicator is closed.
            GrapharError: what it has failed with.
        """
        self.check_open()
        if self._runner:
            self._runner.raise_failure()
        if self._failure:
            raise self._failure.again()
        try:
            yield
        except (CollectiveTimeout, RanksAbsent) as error:
            self._failure = error.again()
            raise

    def _compare(self, op: str, details: str = "") -> None:
        if self._comparison:
            self._comparison.compare(op, details)

    def check_open(self) -> None:
        """Raises CommunicatorError once this is closed."""
        if self.closed:
            raise CommunicatorError("this communicator is closed")
