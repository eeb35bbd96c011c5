"""What encodes where there are no kernels between ranks: which coder a call gets, and what a launch is given."""

import ctypes
import re
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.codec_reference import Noise
from graphar.numerics.codecs import TILE_NUMEL, codec
from graphar.plan.call import Call
from graphar.plan.work import Sum
from graphar.ranks.cpu.reduction import TorchCoder
from graphar.runtime.bind import local_codec
from graphar.runtime.bind.local_codec import CodecArguments, LocalCodec, coder_of
from graphar.runtime.catalogue import local_codec_sources
from graphar.runtime.compiler import source_directory
from graphar.runtime.launcher import OwnLaunches

INT4 = codec("int4")


def test_the_arguments_are_those_of_the_source_in_order_and_size():
    text = (source_directory() / "quantized/local_codec.cu").read_text()
    struct = re.search(r"struct CodecArguments \{(.*?)\};", text, re.DOTALL)[1]

    declared = re.findall(r"^  (.+?)[ *](\w+);", struct, re.MULTILINE)
    sizes = {"u32": ctypes.c_uint32}
    assert [(name, sizes.get(kind, ctypes.c_uint64)) for kind, name in declared] == CodecArguments._fields_
    assert f"sizeof(CodecArguments) == {ctypes.sizeof(CodecArguments)}" in text


@pytest.mark.parametrize(
    ("device", "dtype", "runs", "by_kernels"),
    [
        (-1, torch.bfloat16, True, False),
        (1, torch.bfloat16, True, True),
        (1, torch.float64, True, False),
        (1, torch.float32, False, False),
    ],
)
def test_kernels_encode_on_gpus_that_have_them_and_are_loaded_at_once(device, dtype, runs, by_kernels, monkeypatch):
    loaded = []
    monkeypatch.setattr(local_codec, "runs_on", lambda index: runs)
    monkeypatch.setattr(local_codec, "_load", lambda index, source: loaded.append((index, source)))

    made = coder_of(Call(Sum(8, "int4"), dtype, device), INT4, None)

    if not by_kernels:
        assert made == TorchCoder(INT4)
        assert loaded == []
        return
    assert made == LocalCodec(INT4, local_codec_sources(dtype, INT4))
    assert loaded == [(device, source) for source in made.sources]


def test_they_are_loaded_on_each_device_of_a_process(monkeypatch):
    loaded = []
    monkeypatch.setattr(local_codec, "runs_on", lambda index: True)
    monkeypatch.setattr(local_codec, "_load", lambda index, source: loaded.append(index))

    coder_of(Call(Sum(8, "int4"), torch.float16, 0), INT4, [torch.device("cuda", 0), torch.device("cuda", 2)])

    assert loaded == [0] * 3 + [2] * 3


@pytest.fixture
def launched(monkeypatch):
    """The arguments of launches, which do nothing, and the bytes of their messages."""
    found = []

    def bind(device, source, blocks):
        arguments = CodecArguments()

        def enqueue(stream):
            given = SimpleNamespace(kernel=source, blocks=blocks)
            vars(given).update({name: getattr(arguments, name) for name, _ in CodecArguments._fields_})
            given.bytes = ctypes.string_at(given.messages, given.count * given.pitch)
            found.append(given)

        return OwnLaunches(device, arguments, [SimpleNamespace(enqueue=enqueue)])

    monkeypatch.setattr(local_codec, "_bind", bind)
    monkeypatch.setattr(local_codec.launcher, "sm_count", lambda device: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


def test_a_launch_has_a_warp_for_each_tile_up_to_what_runs_at_once(launched):
    made, noise = LocalCodec(INT4, local_codec_sources(torch.float32, INT4)), Noise(7, 5, 3, 2 * TILE_NUMEL)

    wires = [made.encode(torch.zeros(numel), noise) for numel in (1, 9 * TILE_NUMEL, 1 << 20)]

    assert [one.blocks for one in launched] == [1, 2, 8]
    assert [one.wire for one in launched] == [wire.data_ptr() for wire in wires]
    assert {one.kernel for one in launched} == {made.sources[0]}
    assert {(one.seed, one.call, one.source, one.first_tile, one.count) for one in launched} == {(7, 5, 3, 2, 0)}


def test_messages_are_read_where_they_lie_if_packs_may_be_and_else_copied_in_order(launched):
    made = LocalCodec(INT4, local_codec_sources(torch.float32, INT4))
    rows, target = torch.arange(3 * 640, dtype=torch.int16).view(torch.uint8).view(3, -1), torch.zeros(1024)
    size = INT4.wire_nbytes(1024)
    at_packs, backwards = [row[:size] for row in rows], [row[:size] for row in rows.flip(0)][::-1]
    between = [row[8 : size + 8] for row in rows]

    made.decode(at_packs, target)
    made.decode(backwards, target)
    made.recode(between, target, Noise(1, 2, 255))

    assert [one.kernel for one in launched] == [made.sources[1], made.sources[1], made.sources[2]]
    assert (launched[0].messages, launched[0].pitch) == (rows.data_ptr(), rows.stride(0))
    for given, messages in zip(launched, (at_packs, backwards, between), strict=True):
        assert (given.count, given.messages % 16, given.pitch % 16) == (3, 0, 0)
        for at, message in enumerate(messages):
            assert given.bytes[at * given.pitch :][:size] == bytes(message.tolist())
