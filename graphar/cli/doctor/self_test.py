"""The self-test: whether each algorithm runs on this machine, and gives the specification's bits."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphar.cli.doctor.findings import REPORT, Finding, note, problem
from graphar.cli.specified import DTYPE, OfRanks, SpecifiedCall, count_wrong, random
from graphar.communicator import Communicator
from graphar.errors import CollectiveTimeout, GrapharError, UnsupportedError
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK
from graphar.plan.matmuls import fused_algorithm
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.select import Facts, select
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import DEFAULT, shipped_table
from graphar.plan.work import Norm, Product
from graphar.runtime.availability import is_available
from graphar.runtime.launcher import architecture
from graphar.runtime.user_tables import find_table

_CPU_RANKS = 4
_DEADLINE_S = 5.0  # for a wait on another rank
_NUMELS = (7, 8199, 262149)  # less than a pack for every rank, a few blocks, many blocks; all with a partial pack
_QUANTIZED_NUMELS = (7, 8199, 65541)  # the same cases, but smaller: the specification is slow
_ROWS = ((1, 1032), (24, 1032), (300, 1032))  # rows and columns of a norm; one-shot up to 24 rows for any world size
_RESULTS = ((7, 264), (64, 4104), (300, 264))  # rows and columns of a matmul; one case for each kernel that sums it
_PARTS = _RESULTS[-1:]
_K = 136
_SPECIAL = (-0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(DTYPE).tiny / 4)

SelfTestCall = tuple["_Op", Any]  # an op and a size
Counts = Mapping[Algorithm, Sequence[int | None]]  # calls of each rank; None: its GPU's memory could not be read


def algorithms() -> list[Algorithm]:
    """Returns the algorithms to test: all of them, or only the fallback if no kernel can run."""
    return list(Algorithm) if is_available() else [FALLBACK.algorithm]


def self_test(algorithm: Algorithm) -> Iterator[Finding]:
    """Yields a line: whether ops by ``algorithm`` gave the specification's bits, or why it cannot run here.

    It runs on all GPUs, or on the CPU if no kernel can run. The kernels count their calls in GPU memory, and these
    counts show which algorithm a call took.
    """
    on_gpus, name = bool(is_available()), algorithm.value
    devices = _devices(on_gpus)
    where = f"{len(devices)} {'GPUs' if on_gpus else 'ranks on the CPU'}"
    calls = calls_on_gpus(algorithm, len(devices)) if on_gpus else calls_on_cpu()
    if reason := _why_not(algorithm, devices, calls):
        yield note(name, f"not here: {reason}")
        return
    begin = time.monotonic()
    try:
        with Communicator(devices=devices, timeout_s=_DEADLINE_S, lossless=True) as communicator:
            faults = _faults(communicator, algorithm, calls)
            scratch_nbytes = communicator.memory().total.reserved_nbytes
    except UnsupportedError as error:
        reason = str(error).removeprefix(f"{algorithm.op}: {name} ").removeprefix("cannot serve this call: ")
        yield note(name, f"not here: {reason}")
    except CollectiveTimeout as error:
        advice = "see NVLinks and peer access above, and whether other processes fill these GPUs"
        yield problem(name, str(error), advice)
    except (GrapharError, RuntimeError) as error:
        advice = f"where memory is lacking, free some{' on these GPUs' if on_gpus else ''}; else {REPORT}"
        yield problem(name, f"{type(error).__name__}: {error}", advice)
    else:
        if faults:
            advice = f"do not rely on what {where} compute together before this is understood: {REPORT}"
            yield problem(name, f"{'; '.join(faults)}, on {where}", advice)
        else:
            ops, took_s = dict.fromkeys(op.name for op, _ in calls), time.monotonic() - begin
            held = f", {format_nbytes(scratch_nbytes)} of scratch on each" if scratch_nbytes else ""
            yield Finding(name, f"the specification's bits on {where}, by {', '.join(ops)} ({took_s:.1f} s{held})")


def _devices(on_gpus: bool) -> list[int] | list[str]:
    return list(range(min(torch.cuda.device_count(), MAX_RANKS))) if on_gpus else ["cpu"] * _CPU_RANKS


def _why_not(algorithm: Algorithm, devices: Sequence[int | str], calls: Sequence[SelfTestCall]) -> str:
    if algorithm.row.across_hosts:
        return "it adds host by host, and there is one"
    if not calls:
        return f"no call of this test takes it between {len(devices)} GPUs"
    if only := algorithm.row.only_arch:
        for device in devices:
            if (arch := architecture(device)) != only:
                return f"needs {only}, cuda:{device} is {arch}"
    return ""


def _faults(communicator: Communicator, algorithm: Algorithm, calls: Sequence[SelfTestCall]) -> list[str]:
    """Makes the calls, and returns a message for each wrong result or wrong algorithm."""
    wrong = Counter()
    for op, size in calls:
        wrong[op.name] += _count_wrong(op, size, algorithm, communicator)
    faults = [f"{count} elements of {op} differ from the specification" for op, count in wrong.items() if count]
    counted = _counted(communicator)
    due = {algorithm: [len(calls)] * communicator.world_size} if algorithm.row.layout else {}
    if counted != due:
        faults.append(f"calls ran by {_told(counted)}, not by {_told(due)}")
    return faults


def _counted(communicator: Communicator) -> Counts:
    begun = communicator.engine.runner.calls_begun() if communicator.engine.runner else {}
    for algorithm in [name for name in begun if name.row.copies]:  # ranks meet twice in a call of one chunk
        begun[algorithm] = [None if count is None else count // 2 for count in begun.pop(MEETING)]
    return begun


def _told(counts: Counts) -> str:
    """Returns counts as text, such as "one_shot 3/3": three calls on each of two GPUs."""
    told = [f"{algorithm.value} {'/'.join(map(str, of_ranks))}" for algorithm, of_ranks in counts.items()]
    return " and ".join(told) or FALLBACK.algorithm.value


# Some calls of every op, all in bf16.
def calls_on_gpus(algorithm: Algorithm, world_size: int) -> list[SelfTestCall]:
    """Returns the calls that take ``algorithm`` on ``world_size`` GPUs, by name or by choice; there may be none."""

    def takes(op: _Op, size: Any) -> bool:
        if chosen := op.kernel(world_size, size):
            return algorithm is chosen
        limit = algorithm.row.limit(world_size)
        fits = limit is None or size * DTYPE.itemsize <= limit
        return fits and algorithm.op == op.function and algorithm.row.takes_codec == op.takes_codec

    return [(op, size) for op, size in calls_on_cpu() if takes(op, size)]


def calls_on_cpu() -> list[SelfTestCall]:
    """Returns calls of every op; on the CPU all of them take the fallback."""
    return [(op, size) for op in _OPS for size in op.sizes]


def _count_wrong(op: _Op, size: Any, algorithm: Algorithm, ranks: Communicator) -> int:
    """Makes a call, and returns how many elements of its results differ from the specification."""
    operands, equal = op.tensors(ranks.world_size, size)
    is_named = algorithm.op == op.function and not op.kernel(ranks.world_size, size)
    named = {"algorithm": algorithm.value} if is_named else {}
    call = SpecifiedCall(op.function, operands, equal, **op.options, **named)
    results = call.over(ranks)()
    ranks.synchronize()
    pairs = [pair for of_rank in zip(results, call.expected(), strict=True) for pair in zip(*of_rank, strict=True)]
    return sum(count_wrong(result.cpu(), expected) for result, expected in pairs)


class _Op(NamedTuple):
    function: str  # the name of graphar's function
    sizes: tuple  # of its calls: elements of a tensor, or rows and columns
    takes_codec: bool = False

    @property
    def name(self) -> str:
        return f"quantized_{self.function}" if self.takes_codec else self.function

    @property
    def options(self) -> dict[str, object]:
        if self.takes_codec:
            return {"codec": "int8"}
        return {"partition": "tiles"} if self.function.startswith("fused") else {}

    def kernel(self, world_size: int, size: Any) -> Algorithm | None:
        """Returns the algorithm that a call takes; None: the one that the call names."""
        table = find_table(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else shipped_table(DEFAULT)
        if self.function.startswith("fused"):
            return fused_algorithm(table, Product(self.function, size[:1], size[1]), world_size)
        if self.function == "allreduce_residual_rmsnorm":
            call = Call(Norm(self.function, (math.prod(size),), size[1]), DTYPE, 0)
            return select(call, Facts(world_size, table, table.chip)).config.algorithm
        able = [one for one in Algorithm if (one.op, one.row.takes_codec) == (self.function, self.takes_codec)]
        return able[0] if len(able) == 1 else None

    def tensors(self, ranks: int, size: Any) -> tuple[list[OfRanks], list[torch.Tensor]]:
        """Returns the tensors of the ranks, and those that are equal on all ranks."""
        if self.function.startswith("fused"):  # small integers, whose products add up to the same bits in any order
            operands: list[OfRanks] = [[_integers(rank, length, _K) for rank in range(ranks)] for length in size]
        elif self.takes_codec or self.function.endswith("rmsnorm"):
            operands = [random(["cpu"] * ranks, size)]
        else:
            operands = [_with_special(ranks, size * ranks if self.function == "alltoall" else size)]
        if not self.function.endswith("rmsnorm"):
            return operands, []
        residual, weight = *random(["cpu"], size, seed=1), *random(["cpu"], size[1], seed=2)
        is_scattered = "reducescatter" in self.function  # each rank has its own rows of the residual
        return ([*operands, residual.tensor_split(ranks)], [weight]) if is_scattered else (operands, [residual, weight])


def _with_special(ranks: int, numel: int) -> OfRanks:
    """Returns normal values with special ones among them; ranks have special values at the same places."""
    xs, special = random(["cpu"] * ranks, numel), torch.tensor(_SPECIAL, dtype=DTYPE)
    for rank, x in enumerate(xs):
        generator = torch.Generator().manual_seed(rank)
        x[::13] = special[torch.randint(len(special), x[::13].shape, generator=generator)]
    return xs


def _integers(seed: int, *shape: int) -> torch.Tensor:
    """Returns integers from -4 to 4 without 0, so that no product is -0."""
    x = torch.randint(-4, 4, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(x < 0, x, x + 1).to(DTYPE)


_OPS = (
    _Op("allreduce", _NUMELS),
    _Op("reducescatter", _NUMELS),
    _Op("allgather", _NUMELS),
    _Op("alltoall", _NUMELS),
    _Op("allreduce", _QUANTIZED_NUMELS, takes_codec=True),
    _Op("reducescatter", _QUANTIZED_NUMELS, takes_codec=True),
    _Op("allreduce_residual_rmsnorm", _ROWS),
    _Op("reducescatter_residual_rmsnorm", _ROWS),
    _Op("fused_matmul_allreduce", _RESULTS),
    _Op("fused_matmul_allreduce_residual_rmsnorm", _RESULTS),
    _Op("fused_matmul_reducescatter", _PARTS),
    _Op("fused_allgather_matmul", _PARTS),
    _Op("fused_matmul_reducescatter_residual_rmsnorm", _PARTS),
)
