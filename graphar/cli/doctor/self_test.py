"""The self-test: whether each algorithm runs on this machine, and gives the specification's bits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from graphar.cli.doctor.calls import SelfTestCall, calls_on_cpu, calls_on_gpus
from graphar.cli.doctor.findings import REPORT, Finding, note, problem
from graphar.cli.specified import count_wrong
from graphar.communicator import Communicator
from graphar.errors import CollectiveTimeout, GrapharError, UnsupportedError
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.config import FALLBACK
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.sizes import MB
from graphar.runtime.availability import is_available
from graphar.runtime.launcher import architecture

_CPU_RANKS = 4
_DEADLINE_S = 5.0  # for a wait on another rank

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
            faults, scratch_nbytes = _faults(communicator, calls), communicator.memory().total.reserved_nbytes
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
            ops, took_s = dict.fromkeys(call.op for call in calls), time.monotonic() - begin
            held = f", {scratch_nbytes / MB:.1f} MB of scratch on each" if scratch_nbytes else ""
            yield Finding(name, f"the specification's bits on {where}, by {', '.join(ops)} ({took_s:.1f} s{held})")


def _devices(on_gpus: bool) -> list[int] | list[str]:
    """Returns the ranks' devices: all GPUs, at most MAX_RANKS, or the CPU for several ranks."""
    return list(range(min(torch.cuda.device_count(), MAX_RANKS))) if on_gpus else ["cpu"] * _CPU_RANKS


def _why_not(algorithm: Algorithm, devices: Sequence[int | str], calls: Sequence[SelfTestCall]) -> str:
    """Returns why ``algorithm`` cannot be tested on this machine, or an empty string."""
    if algorithm.row.across_hosts:
        return "it adds host by host, and there is one"
    if not calls:
        return f"no call of this test takes it between {len(devices)} GPUs"
    if only := algorithm.row.only_arch:
        for device in devices:
            if (arch := architecture(device)) != only:
                return f"needs {only}, cuda:{device} is {arch}"
    return ""


def _faults(communicator: Communicator, calls: Sequence[SelfTestCall]) -> list[str]:
    """Makes the calls, and returns a message for each wrong result or wrong algorithm."""
    wrong = Counter()
    for call in calls:
        results = call.make(communicator)
        communicator.synchronize()
        wrong[call.op] += sum(count_wrong(found.cpu(), expected) for found, expected in results)
    faults = [f"{count} elements of {op} differ from the specification" for op, count in wrong.items() if count]
    counted, of_a_rank = _counted(communicator), Counter(call.kernel for call in calls if call.kernel)
    due = {algorithm: [count] * communicator.world_size for algorithm, count in of_a_rank.items()}
    if counted != due:
        faults.append(f"calls ran by {_told(counted)}, not by {_told(due)}")
    return faults


def _counted(communicator: Communicator) -> Counts:
    begun = communicator.engine.runner.calls_begun() if communicator.engine.runner else {}
    for algorithm in [one for one in begun if one.row.copies]:  # ranks meet twice in a call of one chunk
        begun[algorithm] = [None if count is None else count // 2 for count in begun.pop(MEETING)]
    return begun


def _told(counts: Counts) -> str:
    """Returns counts as text, such as "one_shot 3/3": three calls on each of two GPUs."""
    told = [f"{algorithm.value} {'/'.join(map(str, of_ranks))}" for algorithm, of_ranks in counts.items()]
    return " and ".join(told) or FALLBACK.algorithm.value
