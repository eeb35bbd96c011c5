"""graphar.simulator.run: what passes, and what it says of mistakes that are planted in kernels."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from graphar import simulator
from graphar.cli.main import main
from graphar.simulator import Mutation
from tests.host.mutants import NOT_RELEASED, PAD, SET

BF16 = torch.bfloat16
PLAIN = {"ranks": [2], "dtypes": [BF16], "sanitizers": ["plain"]}
NEVER_SENT = Mutation(PAD, "peer < N && peer != a.rank, row_", "peer < a.rank, row_")
LEFT_OUT = Mutation(
    "allreduce/one_shot_push.cu",
    "    whole ? output.store_whole(i, sum) : output.store(i, sum);",
    "    if (i != 3) whole ? output.store_whole(i, sum) : output.store(i, sum);",
)
FAR = Mutation("allreduce/one_shot_push.cu", "call, 0, slots, first", "call, 0, slots + 100000, first")
NOT_ORDERED = Mutation(PAD, SET, NOT_RELEASED)


@pytest.mark.host
@pytest.mark.parametrize("algorithm", simulator.ALGORITHMS)
def test_every_algorithm_passes_at_sizes_that_fill_its_scratch(algorithm, capsys):
    """The largest size has its scratch filled: with whole 32 packs, and with any other number of them."""
    for sizes in ("9,1000", "8,333", "1,31", "256"):
        asked = ["--ranks", "2,3", "--dtypes", "bf16", "--sanitizers", "plain", "--seeds", "2", "--numel", sizes]

        status = main(["simulate", algorithm, *asked, "--quiet"])

        said = capsys.readouterr().out
        assert re.fullmatch(rf"{algorithm}: 2 of 2 cases passed in \d+\.\d s\n", said), said
        assert status == 0


@pytest.mark.host
def test_every_case_is_told_once_and_those_that_no_kernel_has_are_skipped():
    told = []

    report = simulator.run(
        "two_shot_lossless",
        ranks=[2, 3],
        dtypes=[BF16, torch.float32],
        sanitizers=["plain"],
        numel=(9,),
        seeds=1,
        progress=told.append,
    )

    assert told == [
        f"two_shot_lossless, {ranks} ranks, {dtype}, plain" for ranks in (2, 3) for dtype in ("bfloat16", "float32")
    ]
    assert [str(case) for case in report.passed] == [told[0], told[2]]
    assert report.skipped == tuple(f"{one}: the algorithm does not take this dtype" for one in (told[1], told[3]))


@pytest.mark.host
def test_a_wrong_element_is_named_and_the_seed_repeats_it():
    found = simulator.run("one_shot_push", **PLAIN, numel=(1000,), mutations=(LEFT_OUT,), seeds=2)

    (failure,) = found.failures
    again = simulator.run("one_shot_push", **PLAIN, numel=(1000,), mutations=(LEFT_OUT,), seeds=[failure.seed])
    same = "8 of 1000 are wrong; the same under another schedule, so look at values and places"
    said = re.match(rf"(rank \d), call 0: element 24 .+ \(0x\w{{4}}\), expected .+; {same}", failure.what)
    assert re.findall(r"^rank \d", failure.last_steps, re.MULTILINE) == [said[1]]
    assert (failure.numel, failure.numels) == (1000, (1000,) * 4)
    assert str(again.failures[0]) == str(failure)
    assert not found.ok


@pytest.mark.host
def test_a_flag_that_is_never_sent_is_told_as_the_wait_for_it():
    (failure,) = simulator.run("one_shot", **PLAIN, numel=(9,), mutations=(NEVER_SENT,), seeds=1).failures

    said = str(failure)
    assert said.startswith(f"one_shot, 2 ranks, bfloat16, plain, seed {failure.seed}, 9 elements in call 0"), said
    assert re.search(r"\nrank 1, call 0, block \d: waited for rank 0 until the deadline; expected 0x1, saw 0x0\n", said)
    wait = r"  call 0, block \d, thread 0: load_acquire_sys of rank 1's scratch, byte \d*0 sees 0x0 \(\d{3,} times\)"
    assert re.search(wait, said.partition("\nrank 1:\n")[2]), said


@pytest.mark.host
@pytest.mark.parametrize("sanitizer", simulator.SANITIZERS)
def test_a_wait_without_a_deadline_is_told(sanitizer):
    uncounted = Mutation(PAD, "  u32 spins = 0;\n", ""), Mutation(PAD, "++spins % spins_a_look != 0", "true")
    asked = PLAIN | {"sanitizers": [sanitizer]}

    (failure,) = simulator.run("one_shot", **asked, numel=(9,), mutations=(NEVER_SENT, *uncounted), seeds=1).failures

    assert failure.what == "stuck: the threads wait without a deadline"
    assert re.search(r"load_acquire_sys of rank 1's scratch, byte \d*0 sees 0x0 \(\d{5,} times\)", failure.last_steps)


@pytest.mark.host
def test_a_race_is_told_with_the_sanitizers_report_and_the_last_steps():
    asked = PLAIN | {"sanitizers": ["thread"]}

    (failure,) = simulator.run("one_shot", **asked, numel=(9,), mutations=(NOT_ORDERED,)).failures

    assert failure.numel is None
    assert "calls of 9, 9, 9, 9 elements" in str(failure)
    assert re.search(
        r"ThreadSanitizer: data race\n  Read of size \d at rank \d's scratch, byte \d+ by rank \d", failure.what
    )
    assert "run.cpp" not in failure.what
    assert "store_relaxed_sys to rank" in failure.last_steps


@pytest.mark.host
@pytest.mark.parametrize("sanitizer", ["plain", "address"])
def test_an_access_far_out_of_bounds_is_told_by_the_memory_that_it_is_nearest_to(sanitizer):
    asked = PLAIN | {"sanitizers": [sanitizer]}

    (failure,) = simulator.run("one_shot_push", **asked, numel=(1000,), mutations=(FAR,)).failures

    assert "SEGV" in failure.what
    assert sanitizer == "plain" or re.search(r"rank \d's scratch, byte \d+ of 8000, out of bounds", failure.what)


@pytest.mark.parametrize(
    ("algorithm", "asked", "said"),
    [
        ("ring", {}, "algorithm must be one of one_shot_push, .*got 'ring'"),
        ("fallback", {}, "algorithm must be one of"),
        ("one_shot", {"ranks": [9]}, "ranks must be numbers from 2 to 8"),
        ("one_shot", {"ranks": []}, "ranks must be numbers from 2 to 8"),
        ("one_shot", {"numel": (0,)}, "numel must be numbers from 1 on"),
        ("one_shot", {"sanitizers": ["memory"]}, "sanitizers must be some of plain, thread, address"),
        ("one_shot", {"seeds": 0}, "there must be a seed"),
        ("two_shot_lossless", {"ranks": [2], "dtypes": [torch.float32]}, "no case is left: .*does not take this dtype"),
    ],
)
def test_an_argument_that_breaks_a_rule_is_refused(algorithm, asked, said):
    with pytest.raises(ValueError, match=said):
        simulator.run(algorithm, **asked)


def test_the_package_is_imported_at_first_use():
    text = "import graphar, sys; assert 'graphar.simulator' not in sys.modules; print(graphar.simulator.run.__name__)"

    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)

    assert done.stdout == "run\n"
