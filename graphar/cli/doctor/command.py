"""The command: every section in turn, as it is found."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial

from graphar.cli.doctor import gpus, host, self_test, software
from graphar.cli.doctor.report import Section, examine, is_healthy, problems_of, summary, text_of, to_json

_DEADLINE_S = 20.0  # of a section: a driver that does not answer takes for ever
_ALGORITHM_DEADLINE_S = 120.0  # of an algorithm: the first time, its kernels are compiled

SECTIONS = {
    "GPUs": gpus.gpus,
    "NVLinks": gpus.links,
    "Peer access": gpus.peers,
    "Multicast": gpus.multicast_state,
    "Software": software.versions,
    "Environment": software.environment,
    "Between processes": host.sharing,
    "Kernel cache": host.kernel_cache,
    "Tuning table": host.tuning,
}


def run(as_json: bool, quiet: bool = False) -> int:
    """Prints what was found, or, quietly, the problems alone; returns the exit status: 1 where there is a problem."""
    sections = []
    for section in examine_all():
        sections.append(section)
        shown = problems_of(section) if quiet else section
        if not as_json and (shown.findings or not quiet):
            print(text_of(shown), flush=True)
    if as_json:
        print(to_json(sections), flush=True)
    elif not quiet:
        print(summary(sections), flush=True)
    status = 0 if is_healthy(sections) else 1
    if any(section.hung for section in sections):
        sys.stderr.flush()
        os._exit(status)  # an ordinary exit would wait for what hangs
    return status


def examine_all() -> Iterator[Section]:
    """Every section, each in bounded time."""
    for title, find in SECTIONS.items():
        yield examine(title, find, _DEADLINE_S)
    yield examine_algorithms()


def examine_algorithms() -> Section:
    """The self-test: a line for each algorithm; after one that hangs, no other is tried."""
    title = "Self-test"
    findings, tested = [], Section(title, ())
    for algorithm in self_test.algorithms():
        tested = examine(algorithm.value, partial(self_test.self_test, algorithm), _ALGORITHM_DEADLINE_S)
        findings += tested.findings
        if tested.hung:
            break
    return Section(title, tuple(findings), tested.hung)
