"""Ranges around calls: those of torch.profiler, with the metadata of Kineto's events, and those of NVTX."""

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import graphar
from graphar.runtime.watch import hook
from tests.processes import on_ranks

HEADER = Path(torch.__file__).parent / "include/torch/csrc/profiler/util.h"


def traced(path, call, record_shapes=True) -> list[dict]:
    """graphar's ranges in the trace of a call."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes) as found:
        call()
    found.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["name"].startswith("graphar:") and event["name"][8] != ":"]


def metadata(event: dict) -> dict:
    of_every_event = ("External id", "Record function id", "Ev Idx")
    return {name: value for name, value in event["args"].items() if name not in of_every_event}


@on_ranks(2)
def test_a_range_has_the_metadata_of_the_collective(rank, world_size, tmp_path):
    folder = str(tmp_path)
    group = dist.new_group([0, 1], group_desc="tensor parallel")
    x = torch.ones(6, dtype=torch.bfloat16)

    (event,) = traced(Path(folder, f"{rank}.json"), lambda: graphar.allgather(x, group))

    assert event["name"] == "graphar:allgather"
    assert metadata(event) == {
        "Collective name": "allgather",
        "In msg nelems": 6,
        "Out msg nelems": 12,
        "dtype": "BFloat16",
        "Group size": 2,
        "Process Group Name": group.group_name,
        "Process Group Description": "tensor parallel",
        "Process Group Ranks": "[0, 1]",
        "Algorithm": "fallback",
    }


def test_the_names_of_the_metadata_are_those_that_torch_has(pair, tmp_path):
    (event,) = traced(tmp_path / "trace.json", lambda: pair.allreduce([torch.ones(4)] * 2))

    known = set(re.findall(r'= "([^"]+)"', HEADER.read_text()))
    assert metadata(event).keys() - known == {"Algorithm"}


def test_every_call_has_a_range_whether_its_plan_is_new_or_known(pair, tmp_path):
    xs = [torch.ones(4)] * 2
    pair.allreduce(xs)

    found = traced(tmp_path / "trace.json", lambda: [pair.allreduce(xs), pair.allreduce(xs), pair.reducescatter(xs)])

    assert [event["name"] for event in found] == ["graphar:allreduce", "graphar:allreduce", "graphar:reducescatter"]


def test_without_shapes_a_range_has_its_name_alone(pair, tmp_path):
    (event,) = traced(tmp_path / "trace.json", lambda: pair.allreduce([torch.ones(4)] * 2), record_shapes=False)

    assert event["name"] == "graphar:allreduce"
    assert metadata(event) == {}


def test_a_fused_matmul_is_one_range(pair, tmp_path):
    a, w = [torch.ones(6, 2)] * 2, [torch.ones(8, 2)] * 2

    found = traced(tmp_path / "trace.json", lambda: graphar.fused_matmul_allreduce(a, w, group=pair))

    assert [event["name"] for event in found] == ["graphar:fused_matmul_allreduce"]


def test_a_call_of_a_compiled_function_has_a_range(pair, tmp_path):
    compiled = torch.compile(lambda x, y: pair.allreduce([x, y]), backend="aot_eager")
    compiled(torch.ones(4), torch.ones(4))

    found = traced(tmp_path / "trace.json", lambda: compiled(torch.ones(4), torch.ones(4)))

    assert [event["name"] for event in found] == ["graphar:allreduce"]


@pytest.fixture
def ranges(monkeypatch):
    """The ranges that were opened so far, as (text, domain), each followed by None at its end."""
    opened = []

    @contextlib.contextmanager
    def annotate(text, domain=None):
        opened.append((text, domain))
        yield
        opened.append(None)

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    monkeypatch.setattr(torch.cuda.nvtx, "range", annotate)
    hook._nvtx_range.cache_clear()
    yield opened
    hook._nvtx_range.cache_clear()


def on_a_gpu():
    return None, SimpleNamespace(op="allreduce"), [SimpleNamespace(inputs=[SimpleNamespace(is_cuda=True)])]


@pytest.mark.parametrize("domain", ["graphar", None])
def test_a_call_is_a_range_of_graphars_domain_or_without_the_package_of_torchs(ranges, monkeypatch, domain):
    if domain is None:
        monkeypatch.setitem(sys.modules, "nvtx", None)

    with hook.nvtx_sink(*on_a_gpu()):
        ranges.append("the call")

    assert ranges == [("graphar.allreduce", domain), "the call", None]


def test_a_call_on_the_cpu_is_no_range(ranges):
    with hook.watching(hook.nvtx_sink):
        graphar.allreduce([torch.ones(4)] * 2)

    assert ranges == []


@pytest.mark.parametrize(("given", "watched"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_switch_of_the_environment_puts_all_later_calls_into_ranges(monkeypatch, given, watched):
    monkeypatch.setattr(hook, "sinks", found := [])
    monkeypatch.delenv(hook.NVTX_SWITCH, raising=False)
    if given is not None:
        monkeypatch.setenv(hook.NVTX_SWITCH, given)

    hook.start_nvtx()

    assert found == ([hook.nvtx_sink] if watched else [])


def test_calls_inside_graphars_profile_are_ranges(ranges, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(hook, "nvtx_sink", lambda engine, call, ranks: contextlib.nullcontext(seen.append(call.op)))

    with graphar.profile(tmp_path / "trace.json"):
        graphar.allreduce([torch.ones(4)] * 2)

    assert seen == ["allreduce"]
