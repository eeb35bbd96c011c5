"""Symmetric tensors: memory of every rank that all ranks reach, so that an all-reduce needs no copy of its own."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

import torch

from graphar.runtime.arguments import Arguments
from graphar.runtime.bounded_cache import Kept
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory, SharedBuffer

# CUDA IPC shares whole blocks of this size: an allocation of whole ones shows peers nothing else of this process.
_BLOCK_NBYTES = 2 << 20
_ALIGNMENT = 16  # a pack's


class SymmetricTensors:
    """The symmetric tensors of one communicator, and the memory they lie in.

    Args:
        devices: the CUDA device index of each rank of this process, in rank order.
        memory: where allocations come from.
        rendezvous: where the processes of the group meet.
    """

    def __init__(self, devices: dict[int, int], memory: ProcessMemory | LocalMemory, rendezvous) -> None:
        self._devices, self._memory, self._rendezvous = devices, memory, rendezvous
        self.buffers: list[SharedBuffer] = []
        self._starts: list[int] = []  # of this process's allocations, sorted; no two devices share an address
        self._buffer_at: dict[int, SharedBuffer] = {}
        self._operands: Kept[tuple[str, ...]] = Kept()  # of calls with one tensor, until there is more memory

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Collective: an uninitialised tensor like ``like`` for each rank of this process.

        Raises:
            ValueError: on every rank, where they ask for different tensors.
        """
        mine = f"{list(like.shape)} of {like.dtype}"
        asked = [word.decode() for word in self._rendezvous.exchange("making a symmetric tensor", mine.encode())]
        if len(set(asked)) > 1:
            raise ValueError(f"empty: ranks must ask for the same shape and dtype, got, in rank order, {asked}")
        if like.numel() == 0:
            return [torch.empty_like(like, device=f"cuda:{device}") for device in self._devices.values()]
        buffer = self._memory.allocate(math.ceil(like.nbytes / _BLOCK_NBYTES) * _BLOCK_NBYTES)
        self.buffers.append(buffer)
        self._operands.clear()
        for rank in self._devices:
            insort(self._starts, buffer.pointers[rank])
            self._buffer_at[buffer.pointers[rank]] = buffer
        return [_tensor_at(buffer.pointers[rank], device, like) for rank, device in self._devices.items()]

    def on_every_rank(self, pointer: int) -> list[int] | None:
        """Where on each rank the place lies that is ``pointer`` on one of this process; None: it is not symmetric."""
        index = bisect_right(self._starts, pointer)
        if index == 0:
            return None
        start = self._starts[index - 1]
        buffer = self._buffer_at[start]
        if pointer - start >= buffer.nbytes:
            return None
        return [base + pointer - start for base in buffer.pointers]

    def describe(self, x: torch.Tensor, out: torch.Tensor) -> str:
        """Where a call's operands lie, in words that are the same on every rank."""
        return f", x at {self._place(x.data_ptr())}, out at {self._place(out.data_ptr())}"

    def _place(self, pointer: int) -> str:
        for number, buffer in enumerate(self.buffers):
            for rank in self._devices:
                offset = pointer - buffer.pointers[rank]
                if 0 <= offset < buffer.nbytes:
                    return f"byte {offset} of symmetric tensor {number}"
        return "no symmetric tensor"

    def operands(self, x, out) -> tuple[str, ...]:
        """Which of "input" and "output" kernels may reach on every rank: what lies in symmetric memory.

        An input that is the output too is not among them, since peers would read what is being overwritten.

        Args:
            x: a call's inputs: a tensor, or, for several ranks of this process, a list.
            out: likewise its outputs, or None for new tensors.
        """
        if not (isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor)):
            return self._find_operands([x] if isinstance(x, torch.Tensor) else x, out or [])
        key = x.data_ptr(), x.is_contiguous(), out.data_ptr(), out.is_contiguous()
        found = self._operands.get(key)
        if found is None:
            found = self._operands.keep(key, self._find_operands([x], [out]))
        return found

    def _find_operands(self, xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        output = ("output",) if outs and self._hold(outs) else ()
        if self._hold(xs) and {one.data_ptr() for one in xs}.isdisjoint(one.data_ptr() for one in outs):
            return ("input", *output)
        return output

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of them lie without gaps at one offset, a multiple of a pack, of one allocation."""
        pointer = tensors[0].data_ptr()
        there = self.on_every_rank(pointer)
        if there is None or pointer % _ALIGNMENT or not tensors[0].is_contiguous():
            return False
        others = zip(list(self._devices)[1:], tensors[1:], strict=True)
        return all(one.data_ptr() == there[rank] and one.is_contiguous() for rank, one in others)

    def make_direct_launch(self, launch: Callable, arguments: Arguments, operand: str) -> Callable:
        """``launch``, with the kernel told where its symmetric ``operand`` lies on every rank.

        Args:
            launch: from launcher.make_launch, with these ``arguments``; so is what this returns.
            operand: "input" or "output".
        """
        is_input = operand == "input"
        peers = arguments.peer_input if is_input else arguments.peer_output
        last = None

        def launch_direct(input_pointer: int, output_pointer: int, stream: int) -> None:
            nonlocal last
            pointer = input_pointer if is_input else output_pointer
            if pointer != last:
                for rank, there in enumerate(self.on_every_rank(pointer)):
                    peers[rank] = there
                last = pointer
            launch(input_pointer, output_pointer, stream)

        return launch_direct


class _Bytes:
    """Device memory as torch.as_tensor takes it: the CUDA array interface."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def _tensor_at(pointer: int, device: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like`` over memory of ``device`` that it does not own."""
    raw = torch.as_tensor(_Bytes(pointer, like.nbytes), device=f"cuda:{device}")
    return raw.view(like.dtype).view(like.shape)
