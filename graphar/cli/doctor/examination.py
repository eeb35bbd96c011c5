"""The command `doctor`: runs its sections one after another, and prints each when it is done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial

from graphar.cli.doctor import findings, sections, self_test
from graphar.cli.doctor.findings import PROBLEM, Section, examine
from graphar.cli.options import INTERRUPTED, add_command

_DEADLINE_S = 20.0  # for a section; a driver may never answer
_ALGORITHM_DEADLINE_S = 120.0  # for an algorithm; the first run compiles its kernels

SECTIONS = {
    "GPUs": sections.gpus,
    "NVLinks": sections.links,
    "Peer access": sections.peers,
    "Multicast": sections.multicast_state,
    "Software": sections.versions,
    "Environment": sections.environment,
    "Between processes": sections.sharing,
    "Kernel cache": sections.kernel_cache,
    "Tuning table": sections.tuning,
}


def add(commands) -> None:
    add_command(
        commands,
        "doctor",
        run,
        summary="what this machine has, what is wrong with it, and what to do",
        description="Examines GPUs, links, versions and settings, and tests every algorithm against the specification.",
        quiet="print only problems",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the findings and returns the exit status: 1 if there is a problem, 130 after an interrupt.

    The JSON document is ``{"healthy": ..., "complete": ..., "sections": {title: [{"name", "found", "status",
    "advice"}]}}``. It is complete if no interrupt ended the examination.
    """
    examined, quiet = [], options.quiet
    for section in examine_all():
        examined.append(section)
        printed = tuple(finding for finding in section.findings if finding.status == PROBLEM or not quiet)
        if not options.json and (printed or not quiet):
            print(findings.text_of(replace(section, findings=printed)), flush=True)
    problems = sum(finding.status == PROBLEM for section in examined for finding in section.findings)
    interrupted = any(section.interrupted for section in examined)
    if options.json:
        content = {section.title: [asdict(finding) for finding in section.findings] for section in examined}
        document = {"healthy": not problems, "complete": not interrupted, "sections": content}
        print(json.dumps(document, indent=1), flush=True)
    elif not quiet or interrupted:
        told = f'{problems} problem{"s" * (problems > 1)} found, marked with "!"' if problems else "no problem found"
        print(f"interrupted: {told} until then" if interrupted else told, flush=True)
    status = INTERRUPTED if interrupted else int(problems > 0)
    if any(section.hung or section.interrupted for section in examined):
        sys.stderr.flush()
        os._exit(status)  # an ordinary exit would wait for a hanging thread, and abort while one computes
    return status


def examine_all() -> Iterator[Section]:
    """Yields every section, each examined with a deadline. It stops after one that was interrupted."""
    for title, find in SECTIONS.items():
        section = examine(title, find, _DEADLINE_S)
        yield section
        if section.interrupted:
            return
    yield examine_algorithms()


def examine_algorithms() -> Section:
    """Returns the self-test's section. It stops after an algorithm that hangs or was interrupted."""
    whole = Section("Self-test", ())
    for algorithm in self_test.algorithms():
        tested = examine(algorithm.value, partial(self_test.self_test, algorithm), _ALGORITHM_DEADLINE_S)
        whole = replace(tested, title=whole.title, findings=whole.findings + tested.findings)
        if tested.hung or tested.interrupted:
            break
    return whole
