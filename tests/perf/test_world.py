"""perf's ranks: their results are not lost if one of them fails or a user interrupts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from perf.harness import ranks
from tests.processes import interruptible

ROOT = Path(__file__).parents[2]


def fail(rank, port):
    yield from range(3)
    raise RuntimeError("out of memory")


@pytest.mark.usefixtures("forked_ranks")
def test_what_was_found_before_a_rank_failed_comes_before_the_failure():
    results = []

    with pytest.raises(ProcessRaisedException, match="out of memory"):
        results.extend(ranks.run(1, fail))

    assert results == [0, 1, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a run on GPUs takes longer to begin")
def test_an_interrupt_ends_all_ranks_in_a_line_and_what_was_measured_is_a_partial_report(tmp_path):
    """Ctrl-C as a terminal gives it, to every process of the group."""
    command = [sys.executable, "-m", "perf", "--out", str(tmp_path), "allreduce", "--world-size", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with interruptible(), subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
        next(line for line in process.stdout if "graphar" in line)  # the first row
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert re.fullmatch(r"perf: interrupted\. .*\n", err)
    assert "Partial: the run was ended before it was done." in out
    page = next(tmp_path.glob("*/index.html")).read_text()
    first = page[: page.index("</section>")]
    assert first.count("the run was ended before it was done") == 2  # in the introduction, and in the table of reports
