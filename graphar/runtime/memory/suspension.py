"""Suspends and resumes the kernels of a communicator: its GPU memory is given back, and its addresses stay.

All ranks first end their work. Each rank then unmaps every rank's memory, so that the memory is free once all have done
so, and maps a guard there: a graph that is replayed meanwhile finds that its call is aborted, sends nothing, and writes
a record. On resumption new memory comes to the same addresses and is armed as at the first call. Plans and captured
graphs hold addresses alone, so they stay valid.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from graphar.errors import DriverError
from graphar.ranks.capture import check_not_capturing
from graphar.runtime.driver import call, driver, on_device
from graphar.runtime.memory.virtual_memory import Guard, VirtualBuffer
from graphar.runtime.runner import REPLAYED, Runner


class Suspension:
    """What a runner needs to go on after it was suspended. All methods are collective, but for :meth:`end`.

    Making it waits for all ranks' work, and with ``keeps_tensors`` saves symmetric tensors in the host's memory. A
    driver call that fails leaves every address of scratch mapped: to its memory, or to the guard.
    """

    def __init__(self, runner: Runner, keeps_tensors: bool) -> None:
        self._runner, self._meet = runner, runner.rendezvous
        # What can be given back: all symmetric tensors, else the suspension was refused, but not torch's memory.
        self._scratch = {of: region for of, region in runner.regions.items() if isinstance(region, VirtualBuffer)}
        self._tensors = [buffer for buffer in runner.symmetric.buffers if isinstance(buffer, VirtualBuffer)]
        self._guard: Guard | None = None
        self._kept: list[tuple[int, int, torch.Tensor]] = []  # devices, the addresses of symmetric buffers, and content
        self._replayed = False  # whether a record that was cleared said so
        self._meet.agree("ending all work", self._end_work)
        if keeps_tensors:
            self._meet.agree("saving symmetric tensors", self._save)

    def give_back(self) -> None:
        """Gives the memory of all ranks back. If that fails on a rank, :meth:`resume` brings it back nevertheless."""
        self._meet.agree("giving memory back", self._withdraw)

    def _end_work(self) -> None:
        check_not_capturing("suspend", [member.device for member in self._runner.members])
        self._runner.synchronize()

    def _save(self) -> None:
        for buffer, member in itertools.product(self._tensors, self._runner.members):
            pointer, host = buffer.pointers[member.rank], _pinned(buffer.nbytes)
            with on_device(member.device):
                call(driver.cuMemcpyDtoH, host.data_ptr(), pointer, buffer.nbytes)
            self._kept.append((member.device, pointer, host))

    def _withdraw(self) -> None:
        """Gives the memory back. A step that fails is tried again once all other memory is free."""
        self._runner.launched, self._runner.suspended = Counter(self._runner.launches()), True
        devices = list(dict.fromkeys(member.device for member in self._runner.members))
        with on_device(devices[0]):
            if self._scratch and self._guard is None:
                self._guard = Guard(devices[0], devices)
            steps = [buffer.clear for buffer in self._tensors]
            if guard := self._guard:
                steps += [partial(buf.map_guard, guard, of.row.takes_copies) for of, buf in self._scratch.items()]
            failed = [step for step in steps if _error_of(step)]
            if errors := [error for step in failed if (error := _error_of(step))]:
                raise errors[0]

    def resume(self) -> None:
        """Brings memory back to all addresses. Warns if a graph was replayed meanwhile.

        If a rank has too little memory, all stay suspended.
        """
        try:
            self._runner.memory.fill([*self._scratch.values(), *self._tensors])
            self._meet.agree("restoring memory", self._restore)
        except Exception as error:
            try:
                self._withdraw()
            except DriverError as another:
                error.add_note(f"Giving the memory back failed, too: {another}")
            raise
        self.end()
        self._runner.suspended = False
        if self._replayed:
            warnings.warn(f"graphar: {REPLAYED}", RuntimeWarning, stacklevel=4)  # the caller of Communicator.resume

    def _restore(self) -> None:
        """Writes what memory must hold, and clears the records; notes whether a kernel has written one."""
        for algorithm, region in self._runner.regions.items():
            self._runner.arm(algorithm, region)
        for device, pointer, host in self._kept:
            with on_device(device):
                call(driver.cuMemcpyHtoD, pointer, host.data_ptr(), host.nbytes)
        for member in self._runner.members:
            self._replayed = member.clear_record() or self._replayed

    def end(self) -> None:
        """Drops the guard and kept tensors; for a runner that was resumed, or is closed."""
        self._kept = []
        if self._guard:
            self._guard.free()
        self._guard = None


def _error_of(step: Callable[[], None]) -> DriverError | None:
    try:
        step()
    except DriverError as error:
        return error
    return None


def _pinned(nbytes: int) -> torch.Tensor:
    """Returns memory of the host that the GPU copies from and to at the full rate."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
