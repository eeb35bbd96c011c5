"""`graphar bench`, in one process and between several: nccl-tests' columns, several backends, and checked results."""

import contextlib
import io
import json
import os
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

import graphar
from graphar.cli import bench, bench_ranks
from graphar.cli.bench_ranks import Measured, Row
from graphar.cli.main import main
from graphar.plan.sizes import KB, MB
from tests.outside import load
from tests.processes import run_ranks

NO_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it measures those")


def benched(*arguments):
    """The exit status and the output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["bench", *arguments])
    return status, out.getvalue()


def document(*arguments):
    status, out = benched(*arguments, "--json")
    assert status == 0
    return json.loads(out)


def check_rows(found, world_size, op, in_place):
    """Checks bandwidths and which calls each backend has."""
    hops = 2 if op == "allreduce" else 1
    for row in found["rows"]:
        both = row["out_of_place"], row["in_place"]
        assert tuple(one is not None for one in both) == in_place[row["backend"]]
        for one in filter(None, both):
            assert one["wrong"] == 0
            assert one["algbw"] == pytest.approx(row["nbytes"] / one["time_us"] / 1e3)
            assert one["busbw"] == pytest.approx(one["algbw"] * hops * (world_size - 1) / world_size)


@NO_GPUS
@pytest.mark.parametrize(
    ("op", "arguments", "nbytes"),
    [
        ("allreduce", ["100", "4K"], [100, 4096]),
        ("allreduce", ["100", "4K", "--codec", "int4", "-n", "2"], [100, 4096]),
        ("reducescatter", ["1.5K", "--dtype", "float32"], [1536]),
        ("allgather", ["4K", "-c", "1", "-d", "float", "-g", "1", "-o", "sum"], [4104]),  # whole parts of each rank
        ("allreduce", ["-b", "1K", "-e", "16K", "-f", "4"], [1024, 4096, 16384]),
    ],
)
def test_the_cpu_is_timed_and_checked(op, arguments, nbytes):
    found = document(*arguments, "--op", op, "--world-size", "3")

    assert (found["device"], found["world_size"], found["op"]) == ("CPU", 3, op)
    assert found["codec"] == ("int4" if "int4" in arguments else None)
    assert [row["nbytes"] for row in found["rows"]] == nbytes
    assert {row["dtype"] for row in found["rows"]} == {"float32" if "float" in "".join(arguments) else "bfloat16"}
    check_rows(found, 3, op, {"graphar": (True, op == "allreduce")})


@NO_GPUS
def test_a_wrong_sum_ends_it_with_status_1(monkeypatch):
    monkeypatch.setattr(graphar, "allreduce", lambda xs, **options: [torch.zeros_like(x) for x in xs])

    status, said = benched("2K", "--world-size", "2", "--quiet")

    head, *_, wrong, _ = said.splitlines()
    assert status == 1
    assert head.startswith("# allreduce, 2 ranks on CPU (torch sees no CUDA device), graphar ")
    assert wrong == "# Wrong elements: 4096 FAILED"  # out of place and in place, on two ranks


@NO_GPUS
def test_an_algorithm_is_compared_with_a_specification_of_its_own(nothing_stays_loaded):
    doubled = load(specification=lambda tensors: 2 * sum(tensors))
    wrong = load(op="allgather", specification=lambda tensors: torch.cat(tensors).zero_())

    for options in (["--algorithm", doubled], ["--op", "allgather", "--algorithm", wrong]):
        assert benched("2K", "--world-size", "2", "--quiet", *options)[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather", "allreduce --codec int8"])
def test_every_op_and_dtype_is_timed_on_gpus(op, dtype):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    found = document("2K", "1.5M", "--op", *op.split(), "--dtype", dtype, "--world-size", "2")

    assert found["device"] == torch.cuda.get_device_name(0)
    assert [row["nbytes"] for row in found["rows"]] == [2 * KB, 3 * MB // 2]
    assert all(1 < row["out_of_place"]["time_us"] < 1000 for row in found["rows"])
    check_rows(found, 2, op.split()[0], {"graphar": (True, op.startswith("allreduce"))})


def of_rank(rank, world_size, *arguments):
    """What a rank prints, and whether its tensors were in place; its process group is there already."""
    os.environ |= {"LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "a test"}
    bench_ranks.dist.init_process_group = bench_ranks.dist.destroy_process_group = lambda *_: None
    places, tensors = [], bench_ranks.Ranks._tensors
    bench_ranks.Ranks._tensors = lambda ranks, count, in_place: (
        places.append(in_place) or tensors(ranks, count, in_place)
    )
    return *benched(*arguments, "-n", "2", "-w", "1", "--json"), places


@pytest.mark.parametrize(
    ("op", "in_place", "sizes"),
    [
        ("allreduce", {"graphar": (True, True), "gloo": (False, True)}, [100, 4096]),
        ("allgather", {"graphar": (True, False), "gloo": (True, True)}, [102, 4098]),
        ("reducescatter", {"graphar": (True, False), "gloo": (True, True)}, [102, 4098]),
    ],
)
def test_backends_are_timed_and_checked_beside_each_other(op, in_place, sizes):
    (status, out, places), *others = run_ranks(of_rank, 3, "100", "4K", "--op", op)

    found = json.loads(out)
    assert (status, others) == (0, [(0, "", places)] * 2)
    asked = [at for has in in_place.values() for at in (False, True) if has[at]] * len(sizes)
    assert places == [at for at in asked for _ in ("checked", "timed")]
    assert [(row["nbytes"], row["backend"]) for row in found["rows"]] == [(n, name) for n in sizes for name in in_place]
    check_rows(found, 3, op, in_place)


def with_a_mistake(rank, world_size):
    graphar.allreduce = lambda x, group, algorithm, out: out.copy_(x)
    return of_rank(rank, world_size, "64", "--backend", "graphar")


def test_wrong_elements_are_counted_over_all_ranks():
    (status, out, _), (other, *_) = run_ranks(with_a_mistake, 2)

    (row,) = json.loads(out)["rows"]
    assert (status, other) == (1, 1)
    assert 32 < row["out_of_place"]["wrong"] <= 64  # of 32 elements on each of 2 ranks; few sums equal an input


def with_an_algorithm_from_outside(rank, world_size):
    twice = load(specification=lambda tensors: sum(tensors))
    return of_rank(rank, world_size, "64", "--backend", "graphar", "--algorithm", twice)


def test_between_processes_graphars_calls_take_an_algorithm_from_outside():
    (status, out, _), _ = run_ranks(with_an_algorithm_from_outside, 2)

    assert (status, [row["backend"] for row in json.loads(out)["rows"]]) == (0, ["graphar"])


def test_torchrun_times_between_its_processes():
    command = "-m torch.distributed.run --nproc-per-node=2 -m graphar bench -b 1K -e 4K -f 4 -n 2 -w 1 --json"
    done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True)

    found = json.loads(done.stdout)
    assert (found["world_size"], found["op"], found["device"]) == (2, "allreduce", "CPU")
    assert [row["nbytes"] for row in found["rows"]] == [1024, 1024, 4096, 4096]


def test_the_table_has_the_columns_of_nccl_tests():
    options = Namespace(op="allreduce", codec="int8", iters=2, warmup_iters=1, check=1)
    rows = [
        Row(2048, 1024, "bfloat16", "sum", "graphar", Measured(2.5, 0.8192, 0.8192, 0), Measured(2.4, 0.853, 0.853, 0)),
        Row(2048, 1024, "bfloat16", "sum", "nccl", None, Measured(11.0, 0.186, 0.186, 3)),
    ]

    table = list(bench.lines(options, rows, "2 ranks on GPU"))

    words = [" ".join(line.split()) for line in table]
    assert words[0].startswith("# allreduce, 2 ranks on GPU, int8 on graphar's wire, graphar ")
    assert words[3] == "# size count type redop backend time algbw busbw #wrong time algbw busbw #wrong"
    assert words[5] == "2048 1024 bfloat16 sum graphar 2.50 0.819 0.819 0 2.40 0.853 0.853 0"
    assert words[6] == "2048 1024 bfloat16 sum nccl N/A N/A N/A N/A 11.00 0.186 0.186 3"
    assert table[7:] == [
        "# Wrong elements: 3 FAILED",
        "# Average bus bandwidth, graphar: 0.8361 GB/s",
        "# Average bus bandwidth, nccl: 0.186 GB/s",
    ]
