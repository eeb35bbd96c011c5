"""NVTX ranges: GRAPHAR_NVTX=1 puts each call into one, in graphar's domain where the package nvtx is installed."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.runtime.watch import hook


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


def test_a_call_is_a_range_of_graphars_domain(ranges):
    with hook.nvtx_sink(*on_a_gpu()):
        ranges.append("the call")

    assert ranges == [("graphar.allreduce", "graphar"), "the call", None]


def test_without_the_package_a_call_is_a_range_of_torchs_domain(ranges, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)

    with hook.nvtx_sink(*on_a_gpu()):
        ranges.append("the call")

    assert ranges == [("graphar.allreduce", None), "the call", None]


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
