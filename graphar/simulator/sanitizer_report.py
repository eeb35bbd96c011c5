"""The report of a sanitizer without what is the simulator's own, and the last steps of threads, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

# ThreadSanitizer's paragraph of a thread, with its name.
_CREATED = re.compile(r"^ +Thread (T\d+)(?: '([^'\n]*)')?.* created by .*\n(?: +#.*\n)*\n?", re.MULTILINE)
_OF_SIMULATOR = (
    r"run\.cpp:|simulator::|std::function<|std_function\.h|bits/invoke\.h|__libc_start| in main | in _start "
)
_FRAME_OF_SIMULATOR = re.compile(rf"^ +#\d+ .*(?:{_OF_SIMULATOR}).*\n", re.MULTILINE)
_PLACE = re.compile(r" \([^()\s]*\+0x[0-9a-f]+\)(?: \(BuildId: \w+\))?$", re.MULTILINE)  # in the program
_OF_PROCESS = re.compile(r"^=+(?:\d+=+)?\n?| \(pid=\d+\)| \(pc 0x[^()]*\)|(?<=#\d )0x[0-9a-f]+ in ", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]{9,16}")
_LOAD, _WAIT = 1, 3  # kinds of steps (sources/scheduler.hpp)
_MOST_STEPS, _MOST_WAITS = 8, 4  # lines of a rank
_BEYOND_NBYTES = 64 << 20  # around the ranks' memory there is nothing else (sources/kept.hpp)

Regions = Mapping[str, tuple[int, int]]  # by name, the first address and the bytes


def shortened(report: str, regions: Regions) -> str:
    """Returns a report without frames of the simulator, in which addresses in ``regions`` or near are in words."""
    names = {number: name for number, name in _CREATED.findall(report) if name}
    for needless in (_CREATED, _FRAME_OF_SIMULATOR, _PLACE, _OF_PROCESS):
        report = needless.sub("", report)
    report = re.sub(r"\bthread (T\d+)\b", lambda match: names.get(match[1], match[0]), report)
    return _ADDRESS.sub(lambda match: _name(int(match[0], 16), regions) or match[0], report).strip()


class _Step(NamedTuple):
    """What threads of a block may do alike: Step in sources/scheduler.hpp, and where."""

    rank: int
    stream: int
    call: int
    block: int
    waits: int  # whether it still does
    kind: int
    nbytes: int
    low: int
    high: int
    address: int
    shared: str  # the address in words, if it is in shared memory
    what: str


def in_words(steps: str, ranks: int, regions: Regions) -> str:
    """Returns the last steps of threads, as sources/scheduler.cpp writes them, by rank. Threads that wait come last."""
    done: dict[_Step, list[tuple[int, ...]]] = {}  # by which thread, the number of the scheduler's step, and how often
    for line in steps.splitlines():
        if line.count("\t") != 3:
            continue  # a sanitizer's warning
        numbers, shared, what, by = line.split("\t")
        step = _Step._make([*map(int, numbers.split()), shared, what])
        done.setdefault(step, []).append(tuple(map(int, by.split())))
    in_order = sorted(done, key=lambda step: max(number for _, number, _ in done[step]))
    lines = []
    for rank in range(ranks):
        waits, others = ([step for step in in_order if (step.rank, step.waits) == (rank, waits)] for waits in (1, 0))
        lines.append(f"rank {rank}:" if waits or others else f"rank {rank}: no steps")
        lines += [_line(step, done[step], regions) for step in (*others[-_MOST_STEPS:], *waits[-_MOST_WAITS:])]
    return "".join(f"{line}\n" for line in lines)


def _line(step: _Step, done: list[tuple[int, ...]], regions: Regions) -> str:
    threads, times = list(dict.fromkeys(thread for thread, _, _ in done)), sum(times for *_, times in done)
    several, loads = len(threads) > 1, step.kind == _LOAD
    text = f"  call {step.call}, block {step.block}, thread{'s' * several} {_runs(threads)}: "
    if step.kind == _WAIT:
        return f"{text}{('wait at' if several else 'waits at') if step.waits else 'passed'} {step.what}"
    text += step.what
    if step.address:
        place = step.shared or _name(step.address, regions) or "other memory"
        text += f" {'of' if loads else 'to'} {place}"
    if step.nbytes:
        text += f" {'sees' if loads else 'of'} {_value(step)}"
    return f"{text} ({times} times)" if times > len(threads) else text


def _runs(numbers: list[int]) -> str:
    """Returns numbers with ranges for adjacent ones: 0, 2-4."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _value(step: _Step) -> str:
    if step.nbytes <= 8:
        return f"0x{step.low:x}"
    words = [f"0x{half >> shift & 0xFFFFFFFF:x}" for half in (step.low, step.high) for shift in (0, 32)]
    return f"{words[0]} in each word" if len(set(words)) == 1 else " ".join(words)


def _name(address: int, regions: Regions) -> str:
    """Returns where an address lies, or an empty string."""
    for name, (begin, nbytes) in regions.items():
        if begin <= address < begin + nbytes:
            return f"{name}, byte {address - begin}"
    beside = {name: max(begin - address, address - begin - nbytes) for name, (begin, nbytes) in regions.items()}
    nearest = min(beside, key=beside.__getitem__, default="")
    if not nearest or beside[nearest] >= _BEYOND_NBYTES:
        return ""
    begin, nbytes = regions[nearest]
    return f"{nearest}, byte {address - begin} of {nbytes}, out of bounds"
