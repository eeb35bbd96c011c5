"""A communicator whose calls with CPU tensors launch on a stand-in for the driver."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.ops import repeats
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.work import Sum
from graphar.ranks.rendezvous import Alone
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments, Record
from graphar.runtime.bind.launches import bind_launch, of_members
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.memory import symmetric_tensors
from graphar.runtime.memory.peer_memory import SharedBuffer
from graphar.runtime.plan import Plan
from graphar.runtime.runner import Runner

NUMEL = 24
PLAIN = Call(Sum(NUMEL, shape=(4, 6)), torch.bfloat16, -1)


@pytest.fixture
def machine(monkeypatch):
    """The current device and stream, and what was launched: the stream, and the addresses of input and output."""
    state = SimpleNamespace(device=-1, stream=5, launched=[], repeated=[])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state.stream, raising=False)
    monkeypatch.setattr(repeats, "_current_device", lambda: state.device)
    monkeypatch.setattr(repeats, "_new_on_current_device", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return state


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def communicator(machine, group, monkeypatch):
    """A communicator whose plain all-reduces of NUMEL elements, by "auto" and bf16, launch on the stand-in."""
    made = graphar.Communicator(group)
    member = SimpleNamespace(rank=0, device=-1, stream=5, record=Record(), followed=[], free=lambda: None)
    member.follow, member.leave = member.followed.append, lambda: None
    made.engine.runner = runner = Runner([member], 4, Chip(132, "sm_90a"), None, Alone(), None)
    arguments = Arguments()
    launch = Launch(1, [arguments], Grid(2, 32, 0, True))

    def launch_kernel(*given):
        machine.launched.append((launch.stream, arguments.input, arguments.output))
        return 0

    monkeypatch.setattr(launcher, "launch_kernel", lambda: launch_kernel)
    bound = bind_launch(runner, member, launch, arguments)

    def noted(inputs, outputs, numbers):
        machine.repeated.append((inputs[0].data_ptr(), outputs[0].data_ptr()))
        bound(inputs, outputs, numbers)

    config = Config(Algorithm.ONE_SHOT_PUSH, 2, 32)
    plan = Plan(of_members(runner, [bound]), config, launch_like=lambda own: noted)
    made.engine.plans.keep(PLAIN, plan)
    monkeypatch.setattr(runner, "close", lambda: None)
    yield made
    made.close()


@pytest.fixture
def symmetric(communicator, monkeypatch):
    """Returns tensors that the communicator takes for symmetric. Host memory stands in for that of a GPU."""
    kept = []

    def allocate(nbytes):
        kept.append(torch.empty(nbytes, dtype=torch.uint8))
        return SharedBuffer(nbytes, [kept[-1].data_ptr()])

    def tensor_at(pointer, device, like):
        return kept[-1][: like.nbytes].view(like.dtype).view(like.shape)

    monkeypatch.setattr(symmetric_tensors, "tensor_at", tensor_at)
    made = symmetric_tensors.SymmetricTensors({0: -1}, SimpleNamespace(allocate=allocate))
    communicator.engine.symmetric = made
    return lambda like: made.empty(like)[0]


@pytest.fixture(scope="module")
def world_of_one():
    """This process is the only rank of the default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
