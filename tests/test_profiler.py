"""graphar.profile: a trace has every collective called inside, on every rank, and nothing of before and after."""

import gc
import json
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.cli.main import main
from graphar.communicator import Communicator
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import FALLBACK, Config
from graphar.plan.work import Product, TensorTuple
from graphar.runtime.engine import Engine, binders, open_engines
from graphar.runtime.plan import Plan
from graphar.runtime.watch.hook import sinks
from graphar.runtime.watch.profiler import tell_waits
from tests.processes import run_ranks


def slices(path, name=None):
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and name in (None, event["name"])]


def names(path, kind):
    events = json.loads(path.read_text())["traceEvents"]
    return {event["args"]["name"] for event in events if event["name"] == kind}


def test_a_trace_says_what_was_called_on_every_rank(tmp_path):
    xs = [torch.ones(6, dtype=torch.bfloat16) for _ in range(3)]

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce(xs)
        graphar.allreduce(xs, codec="int4")
        graphar.reducescatter(xs)
        graphar.allgather(xs)

    found = slices(tmp_path / "trace.json")
    assert [event["name"] for event in found[::3]] == ["allreduce", "allreduce", "reducescatter", "allgather"]
    assert [event["pid"] for event in found] == [0, 1, 2] * 4
    details = {"algorithm": "fallback", "dtype": "bfloat16", "world_size": 3, "nbytes": 12, "waited_us": 0.0}
    details |= {"ranks": [0, 1, 2], "call": 0}
    assert [event["args"] for event in found[:6:3]] == [details, details | {"call": 1, "codec": "int4"}]
    assert all(event["dur"] > 0 for event in found)
    assert names(tmp_path / "trace.json", "process_name") == {"rank 0", "rank 1", "rank 2"}
    assert names(tmp_path / "trace.json", "thread_name") == {"host"}


def test_a_call_with_a_tuple_has_the_bytes_of_all_its_tensors(tmp_path, monkeypatch):
    monkeypatch.setitem(binders, TensorTuple, lambda engine, call, ranks: Plan(lambda ranks: None, FALLBACK))

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allgather(([torch.ones(2, 4), torch.ones(5, 4)], [torch.ones(2, 1), torch.ones(5, 1)]))

    first, second = (event["args"] for event in slices(tmp_path / "trace.json"))
    assert (first["nbytes"], second["nbytes"]) == (32 + 16, 80 + 32)
    assert first["tensors"] == "(torch.float32 [*, 4], torch.float32 [*, 1]), sizes [2, 5]"


def test_calls_and_matmuls_with_an_epilogue_are_traced(tmp_path):
    xs, a, w = [torch.ones(6)] * 2, [torch.ones(6, 2)] * 2, [torch.ones(8, 2)] * 2

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce(xs, epilogue="-v")
        graphar.reducescatter(xs, epilogue="v + col")
        graphar.fused_matmul_allreduce(a, w, epilogue="-v", partition="split_m")
        graphar.fused_matmul_reducescatter(a, w, epilogue="-v", partition="none")

    found = slices(tmp_path / "trace.json")[::2]
    assert [(event["name"], event["args"]["epilogue"]) for event in found] == [
        ("allreduce", "-v"),
        ("reducescatter", "v + col"),
        ("fused_matmul_allreduce", "-v"),
        ("fused_matmul_reducescatter", "-v"),
    ]


@pytest.mark.parametrize("epilogue", [None, "-v"], ids=["plain", "epilogue"])
def test_a_matmul_in_tiles_is_traced(tmp_path, monkeypatch, epilogue):
    config = Config(Algorithm.MATMUL_ALLREDUCE, 0, 384)
    monkeypatch.setitem(binders, Product, lambda engine, call, ranks: Plan(lambda ranks: None, config))

    with graphar.profile(tmp_path / "trace.json"):
        graphar.fused_matmul_allreduce([torch.ones(4, 2)], [torch.ones(8, 2)], epilogue=epilogue)

    (event,) = slices(tmp_path / "trace.json", "fused_matmul_allreduce")
    assert event["args"]["algorithm"] == "matmul_allreduce"
    assert event["args"].get("epilogue") == epilogue


def test_calls_stand_in_the_order_of_a_clock(tmp_path):
    xs = [torch.ones(4), torch.ones(4)]

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce(xs)
        graphar.allreduce(xs)

    first, second = [event for event in slices(tmp_path / "trace.json") if event["pid"] == 0]
    assert first["ts"] + first["dur"] <= second["ts"]


def test_a_path_that_cannot_be_written_is_refused_before_the_block_runs(tmp_path):
    ran = []
    with pytest.raises(FileNotFoundError), graphar.profile(tmp_path / "nowhere" / "trace.json"):
        ran.append(True)

    assert ran == sinks == []


def test_a_call_and_its_backward_are_traced(tmp_path):
    xs = [torch.ones(4, requires_grad=True) for _ in range(2)]

    with graphar.profile(tmp_path / "trace.json"):
        sum(y.sum() for y in graphar.allreduce(xs)).backward()

    assert len(slices(tmp_path / "trace.json", "allreduce")) == 2 * 2


def test_nothing_of_before_or_after_is_traced_and_nothing_stays_behind(tmp_path):
    xs = [torch.ones(4), torch.ones(4)]
    graphar.allreduce(xs)

    with graphar.profile(tmp_path / "trace.json"):
        pass
    graphar.allreduce(xs)

    assert slices(tmp_path / "trace.json") == []
    assert sinks == []
    assert all(engine.warm is engine.plans for engine in open_engines.values())


def test_a_call_that_fails_is_traced_with_its_error(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise graphar.CommunicatorError("rank 1 is absent")

    monkeypatch.setattr(Engine, "plan", fail)
    path, refusal = tmp_path / "trace.json", pytest.raises(graphar.CommunicatorError)
    with Communicator(devices=["cpu"] * 2) as pair, refusal, graphar.profile(path):
        pair.allreduce([torch.ones(4), torch.ones(4)])

    assert [event["args"]["error"] for event in slices(tmp_path / "trace.json")] == ["CommunicatorError"] * 2


def trace_here(rank, world_size, folder):
    communicator = Communicator()
    with graphar.profile(folder / "trace.json"):
        graphar.allreduce(torch.ones(8), communicator)
    communicator.close()


def test_each_process_writes_a_file_of_its_own(tmp_path):
    run_ranks(trace_here, 2, tmp_path)

    for rank, name in enumerate(("trace.json", "trace.rank1.json")):
        (event,) = slices(tmp_path / name)
        assert (event["name"], event["pid"], event["args"]["nbytes"]) == ("allreduce", rank, 32)


LATE_S = 0.3


def trace_with_one_late(rank, world_size, folder):
    communicator = Communicator()
    communicator.allreduce(torch.ones(8))
    with graphar.profile(folder / "trace.json"):
        for late in (1, 0):
            dist.barrier()
            time.sleep(LATE_S * (rank == late))
            graphar.allreduce(torch.ones(8), communicator)
    communicator.close()


def test_joined_traces_say_who_waited_for_whom(tmp_path, capsys):
    run_ranks(trace_with_one_late, 2, tmp_path)
    files = [str(tmp_path / name) for name in ("trace.json", "trace.rank1.json")]

    assert main(["trace", *files, "--out", str(tmp_path / "joined.json")]) == 0

    found = {(event["args"]["call"], event["pid"]): event["args"] for event in slices(tmp_path / "joined.json")}
    assert len(found) == 4
    assert [found[call, on_time]["for_rank"] for call, on_time in ((0, 0), (1, 1))] == [1, 0]
    assert all(
        0.8 * LATE_S < found[call, on_time]["waited_us"] / 1e6 < 10 * LATE_S for call, on_time in ((0, 0), (1, 1))
    )
    assert [found[call, late]["waited_us"] for call, late in ((0, 1), (1, 0))] == [0, 0]
    assert "waited_us" not in slices(tmp_path / "trace.json")[0]["args"]
    _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["allreduce", "32", "B", "2"]
    assert line.endswith("rank 0: 1, rank 1: 1")


def test_without_a_file_to_write_the_summary_alone_is_printed(tmp_path, capsys):
    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce([torch.ones(4)] * 2)
    before = (tmp_path / "trace.json").read_text()

    assert main(["trace", str(tmp_path / "trace.json")]) == 0

    said = capsys.readouterr().out
    assert "allreduce" in said
    assert "--out FILE writes the joined trace" in said
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == before


def test_missing_files_are_named_by_their_ranks_and_the_others_are_joined(tmp_path, capsys):
    def trace(name, rank, ranks):
        one = {"name": "allreduce", "ph": "X", "pid": rank, "tid": 7, "ts": 0.0, "dur": 1.0}
        one["args"] = {"ranks": ranks, "call": 0, "nbytes": 32}
        (tmp_path / name).write_text(json.dumps({"traceEvents": [one]}))
        return str(tmp_path / name)

    files = [trace("trace.json", 0, [0, 1, 3]), trace("trace.rank3.json", 3, [0, 1, 3])]
    joined = tmp_path / "joined.json"

    assert main(["trace", *files, "--out", str(joined)]) == 1

    assert "the files hold nothing of rank(s) 1, which took part in calls" in capsys.readouterr().err
    assert len(slices(joined)) == 2
    assert main(["trace", *files, trace("trace.rank1.json", 1, [0, 1, 3]), "--out", str(joined), "--quiet"]) == 0


def test_waits_are_told_by_the_devices_where_these_have_times():
    def slice_of(rank, track, begin):
        return {"ph": "X", "pid": rank, "tid": track, "ts": begin, "args": {"ranks": [0, 1], "call": 0}}

    events = [slice_of(0, 7, 0.0), slice_of(0, 1 << 24, 50.0), slice_of(1, 7, 10.0), slice_of(1, (1 << 24) + 1, 20.0)]
    tell_waits(events)

    assert [event["args"].get("waited_us") for event in events] == [None, 0.0, None, 30.0]
    assert events[3]["args"]["for_rank"] == 0


def test_a_call_of_which_ranks_are_missing_has_no_waits():
    events = [{"ph": "X", "pid": 0, "tid": 7, "ts": 0.0, "args": {"ranks": [0, 1], "call": 0}}]
    tell_waits(events)

    assert "waited_us" not in events[0]["args"]


@pytest.mark.parametrize("text", ["[]", '{"traceEvents": [{"ph": "X", "ts": 0}]}'])
def test_what_is_no_trace_is_named(tmp_path, capsys, text):
    (tmp_path / "notes.json").write_text(text)

    assert main(["trace", str(tmp_path / "notes.json"), "--out", str(tmp_path / "joined.json")]) == 2
    assert "notes.json is no trace of graphar.profile" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_a_trace_has_the_devices_times(tmp_path):
    xs = [torch.ones(1 << 24, device=device) for device in range(2)]
    graphar.allreduce(xs)

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce(xs)

    on_host, on_device = slices(tmp_path / "trace.json")[::2], slices(tmp_path / "trace.json")[1::2]
    assert [event["pid"] for event in on_device] == [0, 1]
    assert names(tmp_path / "trace.json", "thread_name") == {"host", "cuda:0", "cuda:1"}
    assert {event["args"]["algorithm"] for event in on_host + on_device} == {graphar.explain(xs).algorithm}
    for host, device in zip(on_host, on_device, strict=True):
        assert 20 < device["dur"] < 1e5
        assert device["ts"] + device["dur"] > host["ts"]
        assert device["args"]["waited_us"] >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_call_that_a_graph_captures_is_traced_on_the_host_alone(tmp_path):
    xs, alone = [torch.ones(1024, device="cuda:0")], Communicator(devices=[0])
    alone.allreduce(xs)
    gc.collect()  # the end of an older graph would end this capture

    with graphar.profile(tmp_path / "trace.json"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        alone.allreduce(xs)

    alone.close()
    assert names(tmp_path / "trace.json", "thread_name") == {"host"}
