"""`graphar bench` between processes: nccl-tests' columns, other backends beside graphar, and checked results."""

import json
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from graphar.cli import bench_ranks
from graphar.cli.bench_ranks import Calls, Measured, Row, lines
from graphar.cli.main import main
from tests.processes import run_ranks

WORLD_SIZE = 3


def options(op, **given):
    fixed = {"op": op, "dtype": "bfloat16", "iters": 2, "warmup_iters": 1, "check": 1, "backend": None, "json": False}
    return Namespace(**{"algorithm": "auto"} | fixed | given)


def measured(rank, world_size, op):
    return bench_ranks.measure(options(op), [100, 4096], torch.device("cpu"))


@pytest.mark.parametrize(
    ("op", "in_place", "sizes"),
    [
        ("allreduce", {"graphar": (True, True), "gloo": (False, True)}, [100, 4096]),
        ("allgather", {"graphar": (True, False), "gloo": (True, True)}, [102, 4098]),
        ("reducescatter", {"graphar": (True, False), "gloo": (True, True)}, [102, 4098]),
    ],
)
def test_backends_are_timed_and_checked_beside_each_other(op, in_place, sizes):
    """Sizes are rounded up to whole parts of each rank."""
    (rows, *_) = run_ranks(measured, WORLD_SIZE, op)

    assert [(row.nbytes, row.backend) for row in rows] == [(size, name) for size in sizes for name in in_place]
    for row in rows:
        assert (row.out_of_place is not None, row.in_place is not None) == in_place[row.backend]
        assert row.count * 2 == row.nbytes
        for one in filter(None, (row.out_of_place, row.in_place)):
            assert one.wrong == 0
            assert one.algbw == pytest.approx(row.nbytes / one.time_us / 1e3)
            assert one.busbw == pytest.approx(one.algbw * (4 / 3 if op == "allreduce" else 2 / 3))


def with_a_mistake(rank, world_size):
    def shifted(x, out):
        out.copy_(x)
        return out

    bench_ranks.calls_of = lambda backend, op, algorithm: Calls(shifted, None)
    (row,) = bench_ranks.measure(options("allreduce", backend=["graphar"]), [64], torch.device("cpu"))
    return row.out_of_place.wrong


def test_wrong_elements_are_counted_over_all_ranks():
    wrong = run_ranks(with_a_mistake, 2)

    assert wrong[0] == wrong[1]
    assert 32 < wrong[0] <= 64  # of 32 elements on each of 2 ranks; few sums equal an input


def test_the_table_has_the_columns_of_nccl_tests(monkeypatch):
    monkeypatch.setattr(bench_ranks.dist, "get_world_size", lambda: 2)
    rows = [
        Row(2048, 1024, "bfloat16", "sum", "graphar", Measured(2.5, 0.8192, 0.8192, 0), Measured(2.4, 0.853, 0.853, 0)),
        Row(2048, 1024, "bfloat16", "sum", "nccl", None, Measured(11.0, 0.186, 0.186, 3)),
    ]

    table = list(lines(options("allreduce"), rows, "GPU"))

    words = [" ".join(line.split()) for line in table]
    assert words[3] == "# size count type redop backend time algbw busbw #wrong time algbw busbw #wrong"
    assert words[5] == "2048 1024 bfloat16 sum graphar 2.50 0.819 0.819 0 2.40 0.853 0.853 0"
    assert words[6] == "2048 1024 bfloat16 sum nccl N/A N/A N/A N/A 11.00 0.186 0.186 3"
    assert table[7:] == [
        "# Wrong elements: 3 FAILED",
        "# Average bus bandwidth, graphar: 0.8361 GB/s",
        "# Average bus bandwidth, nccl: 0.186 GB/s",
    ]


def test_torchrun_times_between_its_processes():
    command = "-m torch.distributed.run --nproc-per-node=2 -m graphar bench -b 1K -e 4K -f 4 -n 2 -w 1 --json"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    assert (found["world_size"], found["op"], found["device"]) == (2, "allreduce", "CPU")
    names = ("graphar", "gloo")
    assert [(row["nbytes"], row["backend"]) for row in found["rows"]] == [
        (n, one) for n in (1024, 4096) for one in names
    ]


def test_a_range_of_sizes_is_timed_in_one_process(capsys):
    assert main(["bench", "-b", "1K", "-e", "16K", "-f", "4", "--world-size", "2", "--json"]) == 0

    assert [row["nbytes"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1024, 4096, 16384]
