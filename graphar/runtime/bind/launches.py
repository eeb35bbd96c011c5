"""Binds a kernel's launch to its arguments: the path that every call of every op takes to the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan.call import Operands
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments, Put
from graphar.runtime.launcher import Launch as KernelLaunch
from graphar.runtime.member import Member
from graphar.runtime.plan import Launch
from graphar.runtime.runner import Runner


def bind_launch(
    runner: Runner, member: Member, launch: KernelLaunch, arguments: Arguments, put: Put | None = None
) -> Launch:
    """Returns the function that launches a kernel of one member on torch's current stream.

    It writes the addresses of the first input and output into ``arguments``, and ``put`` everything else.
    """
    device, record = member.device, member.record
    acquire, release = runner.lock.acquire, runner.lock.release  # `with` takes twice as long
    current_stream = torch._C._cuda_getCurrentRawStream
    launch_kernel, launch_arguments = launcher.launch_kernel(), launch.arguments

    def launch_one(inputs, outputs, numbers=(), corner=None) -> None:
        acquire()
        try:
            if record.kind:
                runner.raise_failure()
            stream = current_stream(device)
            if follows := stream != member.stream:
                member.follow(stream)
            arguments.input, arguments.output = inputs[0].data_ptr(), outputs[0].data_ptr()
            if put is not None:
                put(inputs, outputs, numbers, corner)
            if stream != launch.stream:
                launch.on(stream)
            if status := launch_kernel(*launch_arguments):
                launcher.launch_again(status, launch_arguments)
            if follows:
                member.leave()
        finally:
            release()

    return launch_one


def put_agreed(
    runner: Runner,
    arguments: Arguments,
    words: str,
    epilogue: Pointwise | None,
    put: Put | None,
    put_peers: Callable[[], str] | None = None,
) -> Put | None:
    """Returns ``put`` for launches in which ranks must agree on more than ``words``, which may change in each call.

    These are the numbers of an epilogue, and where a symmetric tensor lies, whose addresses ``put_peers`` writes. The
    words of the first call are published at once: most calls never have other words.
    """
    if put_peers is None and (epilogue is None or not epilogue.expression.scalars):
        return put
    last: tuple[str, tuple[float, ...]] | None = None

    def put_and_agree(inputs, outputs, numbers, corner) -> None:
        nonlocal last
        place = put_peers() if put_peers else ""
        if (place, numbers) != last:
            arguments.fingerprint = runner.fingerprint(f"{words}{place}", numbers, tells=last is None)
            last = place, numbers
        if put:
            put(inputs, outputs, numbers, corner)

    return put_and_agree


def on_own_device(device: int, launch: Callable) -> Callable:
    """For callers whose current device may be another device."""
    current_device = torch._C._cuda_getDevice

    def launch_there(*arguments) -> None:
        if current_device() == device:
            launch(*arguments)
        else:
            with torch.cuda.device(device):
                launch(*arguments)

    return launch_there


def of_members(runner: Runner, launches: Sequence[Launch]) -> Callable[[Sequence[Operands]], None]:
    """Returns a function of all members' operands that launches for each of them, in order, on its own device."""
    on_devices = [on_own_device(member.device, launch) for member, launch in zip(runner.members, launches, strict=True)]
    if len(on_devices) == 1:
        (only,) = on_devices
        return lambda ranks: only(*ranks[0])

    def launch_all(ranks: Sequence[Operands]) -> None:
        with runner.lock:
            runner.raise_failure()  # before any member launches
            for launch, operands in zip(on_devices, ranks, strict=True):
                launch(*operands)

    return launch_all
