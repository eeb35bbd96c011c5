"""The plugins of vLLM and SGLang, where neither is installed: when they are active, and which calls are graphar's."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graphar import CommunicatorError, reference
from graphar.integrations import sglang, tensor_parallel, vllm
from tests.processes import on_ranks

ROOT = Path(__file__).parents[2]
PLUGINS = {"vllm.platform_plugins": vllm.platform, "sglang.srt.plugins": sglang.register}

# Records which modules are looked for, whether they are installed or not.
LOOKED_FOR = """
import json, os, sys
class Recorder:
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])
sys.meta_path.insert(0, Recorder())
import graphar, graphar.integrations.vllm, graphar.integrations.sglang
answers = []
for asked in ({}, {"GRAPHAR_VLLM": "0", "GRAPHAR_SGLANG": "0"}):
    os.environ.update(asked)
    answers += graphar.integrations.vllm.platform(), graphar.integrations.sglang.register()
print(json.dumps([answers, sorted(Recorder.names & {"graphar", "sglang", "vllm"})]))
"""


def test_without_its_variable_or_with_a_0_a_plugin_imports_nothing_of_the_program(new_interpreter):
    done = new_interpreter(LOOKED_FOR, {"PATH": ""})

    assert json.loads(done.stdout) == [[None] * 4, ["graphar"]]


@pytest.mark.parametrize("group", PLUGINS)
def test_the_entry_points_lead_to_the_plugins(group):
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = points[group]["graphar"].partition(":")

    assert getattr(import_module(module), name) is PLUGINS[group]


@pytest.mark.parametrize(("cuda", "cpu", "own"), [("a.Cuda", None, "a.Cuda"), (None, "a.Cpu", "a.Cpu")])
def test_the_platform_is_vllms_with_another_class_of_communicators(monkeypatch, cuda, cpu, own):
    stand_in_for_vllm(monkeypatch, cuda, cpu)
    mine = type("Own", (), {"get_device_communicator_cls": classmethod(lambda cls: "a.Communicator"), "kept": own})
    communicator = type("Communicator", (), {})
    monkeypatch.setitem(sys.modules, "a", SimpleNamespace(Cuda=mine, Cpu=mine, Communicator=communicator))

    for made in ("Platform", "DeviceCommunicator"):
        monkeypatch.setattr(vllm, made, None, raising=False)  # they are made anew, and forgotten after the test

    assert vllm.platform() == "graphar.integrations.vllm.Platform"
    platform = vllm.__getattr__("Platform")

    assert issubclass(platform, mine)
    assert platform.kept == own
    assert platform.get_device_communicator_cls() == "graphar.integrations.vllm.DeviceCommunicator"
    assert vllm.__getattr__("DeviceCommunicator").__mro__[1:3] == (vllm.TensorParallel, communicator)


def test_platforms_that_graphar_does_not_know_are_left_as_they_are(monkeypatch):
    stand_in_for_vllm(monkeypatch, None, None)

    assert vllm.platform() is None


def stand_in_for_vllm(monkeypatch, cuda: str | None, cpu: str | None) -> None:
    monkeypatch.setenv("GRAPHAR_VLLM", "1")
    package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    package.platforms = platforms
    platforms.cuda_platform_plugin, platforms.cpu_platform_plugin = lambda: cuda, lambda: cpu
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)


def test_sglang_is_given_a_hook_around_each_method(monkeypatch):
    monkeypatch.setenv("GRAPHAR_SGLANG", "1")
    given = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda *hook: given.append(hook))
    registry.HookType = SimpleNamespace(AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)

    sglang.register()

    of_class = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    assert given == [(method, hook, "around") for method, hook in sglang.HOOKS.items()]
    assert (f"{of_class}.all_reduce", sglang.all_reduce, "around") in given


GROUP = SimpleNamespace(size=lambda: 2)


class Recorded:
    """A communicator whose kernels reach all ranks or, for a reason, do not."""

    def __init__(self, reason: str) -> None:
        self.done: list = []
        self.engine = SimpleNamespace(why_no_runner=reason, find_runner=lambda device: not reason)

    def __call__(self, group, timeout_s: float) -> Recorded:
        self.done.append((group, timeout_s))
        return self

    def prepare(self, ops) -> None:
        self.done.append(ops)

    def close(self) -> None:
        self.done.append("closed")


def test_kernels_are_loaded_when_the_group_is_made(monkeypatch):
    recorded = Recorded(reason="")
    monkeypatch.setattr(tensor_parallel, "Communicator", recorded)

    assert tensor_parallel.communicator_of("tp:0", ("tp",), GROUP, torch.device("cuda", 0)) is recorded
    assert recorded.done == [(GROUP, 600.0), ("allreduce", "reducescatter", "allgather")]


@pytest.mark.parametrize("name", ["tpx:0", "tp_draft:0", "t:0", "xtp:0", "pp:0", ""])
def test_a_name_that_begins_like_that_of_a_tensor_parallel_group_is_another(name):
    assert tensor_parallel.communicator_of(name, ("tp",), GROUP, torch.device("cuda", 0)) is None


def test_a_group_that_no_kernel_reaches_stays_the_programs(monkeypatch):
    recorded = Recorded(reason="no peer access")
    monkeypatch.setattr(tensor_parallel, "Communicator", recorded)

    with pytest.warns(RuntimeWarning, match="does not serve a tensor-parallel group: no peer access"):
        assert tensor_parallel.communicator_of("tp", ("tp",), GROUP, torch.device("cuda", 0)) is None
    assert recorded.done[-1] == "closed"


class OwnCommunicator:
    """What vLLM's communicators are to the plugin's base class: every call says that it was made here."""

    def __init__(self, device_group, unique_name: str) -> None:
        self.device_group, self.unique_name, self.device = device_group, unique_name, torch.device("cpu")
        self.world_size = device_group.size()

    def all_reduce(self, input_):
        return "own"

    def reduce_scatter(self, input_, dim=-1):
        return "own", dim

    def all_gather(self, input_, dim=-1):
        return "own", dim

    def suspend(self):
        self.said = ["suspend"]

    def resume(self):
        self.said.append("resume")

    def checkpoint_prepare(self):
        self.said = ["checkpoint_prepare"]

    def checkpoint_restore(self):
        self.said.append("checkpoint_restore")

    def destroy(self):
        self.is_destroyed = True


class Mixed(vllm.TensorParallel, OwnCommunicator):
    pass


def of_rank(rank: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.arange(4 * 6 * 3).reshape(4, 6, 3) * (1 + 0.1 * rank) + 100 * rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@on_ranks(2)
def test_vllms_collectives_of_a_tensor_parallel_group_are_graphars(rank, world_size, dtype):
    communicator = Mixed(dist.group.WORLD, "tp:0")
    x = of_rank(rank, dtype)
    results = [communicator.all_reduce(x)]
    results += [communicator.reduce_scatter(x, dim) for dim in (0, 1, -2)]
    results += [communicator.all_gather(x, dim) for dim in (0, 1, -1)]
    used = communicator.graphar
    communicator.destroy()
    closed, destroyed = used.closed, communicator.is_destroyed
    xs = [of_rank(rank, dtype) for rank in range(2)]
    total = reference.allreduce(xs)
    expected = [total] + [total.chunk(2, dim)[rank] for dim in (0, 1, -2)] + [torch.cat(xs, d) for d in (0, 1, -1)]
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert all(result.is_contiguous() for result in results)
    assert closed
    assert destroyed


@pytest.mark.parametrize("methods", [("suspend", "resume"), ("checkpoint_prepare", "checkpoint_restore")], ids="-".join)
@on_ranks(2)
def test_while_vllm_sleeps_graphars_communicator_is_suspended(rank, world_size, methods):
    sleep, wake_up = methods
    communicator, other = Mixed(dist.group.WORLD, "tp:0"), Mixed(dist.group.WORLD, "pp:0")
    x = of_rank(rank)
    for one in (communicator, other):
        getattr(one, sleep)()
    with pytest.raises(CommunicatorError, match="allreduce: this communicator is suspended; call its resume"):
        communicator.all_reduce(x)
    for one in (communicator, other):
        getattr(one, wake_up)()
    assert torch.equal(communicator.all_reduce(x), reference.allreduce([of_rank(0), of_rank(1)]))
    assert communicator.said == other.said == [*methods]


@on_ranks(2)
def test_other_groups_dtypes_and_uneven_parts_go_to_vllms_own(rank, world_size):
    served, other = Mixed(dist.group.WORLD, "tp:0"), Mixed(dist.group.WORLD, "pp:0")
    x, counts = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int64)
    of_group = [other.all_reduce(x), other.reduce_scatter(x, 1), other.all_gather(x, 1)]
    of_dtype = [served.all_reduce(counts), served.reduce_scatter(counts, 0), served.all_gather(counts, 0)]
    of_shape = served.reduce_scatter(torch.ones(3, 2), 0)
    other.destroy()
    expected = ["own", ("own", 1), ("own", 1)], ["own", ("own", 0), ("own", 0)], ("own", 0), True
    assert (of_group, of_dtype, of_shape, other.is_destroyed) == expected


@on_ranks(1)
def test_a_group_of_one_rank_stays_the_programs(rank, world_size):
    assert (Mixed(dist.group.WORLD, "tp:0").graphar, coordinator_of("tp:0").graphar) == (None, None)


def own_init(coordinator, name: str) -> None:
    coordinator.unique_name, coordinator.world_size = name, dist.get_world_size()
    coordinator.device_group, coordinator.device = dist.group.WORLD, torch.device("cpu")


def coordinator_of(name: str) -> SimpleNamespace:
    made = SimpleNamespace()
    sglang.init(own_init, made, name)
    return made


def own(*_):
    return "own"


@on_ranks(2)
def test_sglangs_collectives_of_a_tensor_parallel_group_are_graphars(rank, world_size):
    x, coordinator = of_rank(rank), coordinator_of("attention_tp:3")
    in_place, part, whole = x.clone(), torch.empty(2, 6, 3), torch.empty(8, 6, 3)
    sglang.all_reduce_in_place(own, coordinator, in_place)
    results = [
        sglang.all_reduce(own, coordinator, x),
        sglang.all_reduce(own, coordinator, x, "auto"),
        in_place,
        sglang.reduce_scatter_tensor(own, coordinator, part, x),
    ]
    sglang.all_gather_into_tensor(own, coordinator, whole, x)
    overlapping = x.clone()
    sglang.reduce_scatter_tensor(own, coordinator, overlapping[rank * 2 : rank * 2 + 2], overlapping)
    results.append(overlapping[rank * 2 : rank * 2 + 2])
    used = coordinator.graphar
    said = []
    sglang.destroy(said.append, coordinator)
    results, closed, destroyed = [*results, whole], used.closed, said == [coordinator]
    xs = [of_rank(rank) for rank in range(2)]
    total = reference.allreduce(xs)
    expected = [total, total, total, *[total.chunk(2)[rank]] * 2, torch.cat(xs)]
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert closed
    assert destroyed


@on_ranks(2)
def test_while_sglang_has_released_its_memory_communicators_are_suspended(rank, world_size):
    coordinator, x = coordinator_of("tp:0"), of_rank(rank)
    said = [sglang.release_memory_occupation(own, None, "request") for _ in range(2)]
    with pytest.raises(CommunicatorError, match="is suspended; call its resume"):
        sglang.all_reduce(own, coordinator, x)
    said += [sglang.resume_memory_occupation(own, None, "request") for _ in range(2)]
    result = sglang.all_reduce(own, coordinator, x)
    total = reference.allreduce([of_rank(rank) for rank in range(2)])
    assert said == ["own"] * 4
    assert torch.equal(result, total)


@on_ranks(2)
def test_other_groups_dtypes_and_sizes_go_to_sglangs_own(rank, world_size):
    def every_call(coordinator, whole, part):
        return [
            sglang.all_reduce(own, coordinator, whole),
            sglang.all_reduce(own, coordinator, whole, "auto"),
            sglang.reduce_scatter_tensor(own, coordinator, part, whole),
        ]

    def leaves_to_own(hook, coordinator, *tensors):
        calls = []
        hook(lambda *call: calls.append(len(call)), coordinator, *tensors)
        return calls == [1 + len(tensors)]

    served, other = coordinator_of("tp:0"), coordinator_of("pp:0")
    whole = torch.ones(4, 6)
    answers = every_call(other, whole, torch.empty(2, 6)) + every_call(served, whole.long(), torch.empty(2, 6).long())
    answers.append(sglang.reduce_scatter_tensor(own, served, torch.empty(3, 6), whole))
    assert (
        set(answers),
        [
            leaves_to_own(sglang.all_reduce_in_place, served, whole.long()),
            leaves_to_own(sglang.all_reduce_in_place, other, whole),
            leaves_to_own(sglang.all_gather_into_tensor, other, torch.empty(8, 6), whole),
            leaves_to_own(sglang.all_gather_into_tensor, served, torch.empty(8, 6, dtype=torch.int64), whole.long()),
            leaves_to_own(sglang.all_gather_into_tensor, served, torch.empty(4, 6), whole),
            leaves_to_own(sglang.destroy, other),
        ],
    ) == ({"own"}, [True] * 6)
