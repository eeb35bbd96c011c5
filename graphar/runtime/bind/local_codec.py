"""Encodes tensors, and adds encoded tensors, by kernels on one GPU, while torch.distributed moves the messages."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.codec_reference import SUM, Noise
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.call import Call
from graphar.plan.scratch import PACK_NBYTES
from graphar.ranks.cpu.reduction import Coder, TorchCoder
from graphar.runtime import launcher
from graphar.runtime.catalogue import KernelSource, local_codec_sources
from graphar.runtime.launcher import Grid, Launch, OwnLaunches, runs_on

_WARPS = 8  # of a block, by the launch bounds of cuda_src/quantized/local_codec.cu: one for each tile
_BLOCKS_AN_SM = 4


class CodecArguments(ctypes.Structure):
    """CodecArguments in cuda_src/quantized/local_codec.cu, byte for byte."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("tensor", "wire", "messages", "pitch", "numel", "first_tile", "seed")),
        *((name, ctypes.c_uint32) for name in ("count", "call", "source")),
    ]


def coder_of(call: Call, codec: Codec, devices: Sequence[torch.device] | None) -> Coder:
    """Returns what encodes for a call without kernels between ranks: these kernels, or torch where they do not run."""
    indices = [device.index for device in devices] if devices else [call.device]
    if call.device < 0 or call.dtype not in TYPE_NAMES or not all(map(runs_on, indices)):
        return TorchCoder(codec)
    coder = LocalCodec(codec, local_codec_sources(call.dtype, codec))
    for device in indices:
        for source in coder.sources:
            _load(device, source)  # now: loading while a kernel waits for other ranks could hang
    return coder


@dataclass(frozen=True)
class LocalCodec:
    """A codec by kernels on the GPU of the tensors, queued on torch's current stream."""

    codec: Codec
    sources: tuple[KernelSource, ...]  # of local_codec_encode, of local_codec_sum, and of local_codec_sum that encodes

    def encode(self, part: torch.Tensor, noise: Noise) -> torch.Tensor:
        wire = self._wire(part)
        self._launch(0, part, wire, (), noise)
        return wire

    def decode(self, wires: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        self._launch(1, target, None, wires, Noise(0, 0, SUM))

    def recode(self, wires: Sequence[torch.Tensor], target: torch.Tensor, noise: Noise) -> torch.Tensor:
        wire = self._wire(target)
        self._launch(2, target, wire, wires, noise)
        return wire

    def _wire(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(self.codec.wire_nbytes(like.numel()), dtype=torch.uint8)

    def _launch(
        self,
        which: int,
        tensor: torch.Tensor,
        wire: torch.Tensor | None,
        messages: Sequence[torch.Tensor],
        noise: Noise,
    ) -> None:
        device, blocks = tensor.device.index, -(-self.codec.tiles(tensor.numel()) // _WARPS)
        launches = _bind(device, self.sources[which], min(blocks, _BLOCKS_AN_SM * launcher.sm_count(device)))
        rows, pitch = _in_rows(messages)
        seed, number, source, begin = noise
        of_wire = {"wire": wire, "messages": rows[0] if messages else None, "pitch": pitch, "count": len(messages)}
        of_noise = {"first_tile": begin // TILE_NUMEL, "seed": seed, "call": number, "source": source}
        launches.run(tensor=tensor, numel=tensor.numel(), **of_wire, **of_noise)


def _in_rows(messages: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], int]:
    """Returns the messages, or copies, equally spaced at packs, and the bytes from each to the next."""
    at = [message.data_ptr() for message in messages]
    pitches = {second - first for first, second in itertools.pairwise(at)} or {0}
    if len(pitches) == 1 and not any(address % PACK_NBYTES for address in (*at[:1], *pitches)) and min(pitches) >= 0:
        return messages, pitches.pop()
    pitch = -(-messages[0].numel() // PACK_NBYTES) * PACK_NBYTES
    rows = messages[0].new_empty(len(messages), pitch).unbind()
    for row, message in zip(rows, messages, strict=True):
        row[: message.numel()].copy_(message)
    return rows, pitch


def _load(device: int, source: KernelSource):
    return launcher.load(source, device, 0, f"local_codec: {source.name}")


@functools.lru_cache(maxsize=1024)
def _bind(device: int, source: KernelSource, blocks: int) -> OwnLaunches:
    arguments = CodecArguments()
    grid = Grid(blocks, _WARPS * 32, 0, overlaps=False)
    return OwnLaunches(device, arguments, [Launch(_load(device, source), [arguments], grid)])
