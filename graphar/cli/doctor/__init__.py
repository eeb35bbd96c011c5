"""`python -m graphar doctor`: examines this machine, and says for each problem what to do about it."""

from __future__ import annotations

import argparse

from graphar.cli.doctor import examination
from graphar.cli.options import add_command


def add(commands) -> None:
    add_command(
        commands,
        "doctor",
        run,
        summary="what this machine has, what is wrong with it, and what to do",
        description="Examines GPUs, links, versions and settings, and tests every algorithm against the specification.",
        quiet="print problems alone",
    )


def run(options: argparse.Namespace) -> int:
    return examination.run(options.json, options.quiet)
