"""perf calls its peers as their packages require. Stand-ins for the packages check these calls."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphar.plan.sizes import KB, MB
from perf.harness import sweep
from perf.harness.cases import Case, Plan
from perf.harness.ranks import InProcessRanks
from perf.harness.sweep import measure
from perf.peers import flashinfer, sglang, torch_distributed

PLAN = Plan("cuda", 2, "process", ("bfloat16",), (), 64 * KB)


class OneOfTwo(InProcessRanks):
    """The first of two ranks with equal data, without a GPU."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__(2)

    def random(self, case):
        return super().random(case)[0]

    def gather(self, data, window):
        return [data[window]] * 2


class Handle:
    """A handle of symmetric memory by which this rank is its own peer."""

    offset = 0

    def __init__(self, tensor):
        self.tensor = tensor
        self.buffer_ptrs = [tensor.data_ptr()] * 2

    def get_buffer(self, rank, sizes, dtype, offset=0):
        return self.tensor.view(dtype)[offset : offset + sizes[0]]


def symmetric(nbytes, dtype=torch.uint8):
    tensor = torch.zeros(nbytes // dtype.itemsize, dtype=dtype)
    return tensor, Handle(tensor)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    for module in (flashinfer, sglang, torch_distributed):
        monkeypatch.setattr(module, "symmetric", symmetric)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(sweep, "GRAPH_MODES", ())


def install(monkeypatch, name, **content):
    """Installs a module of that name, and the packages that contain it."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    if "." in name:
        package, leaf = name.rsplit(".", 1)
        if package not in sys.modules:
            install(monkeypatch, package)
        monkeypatch.setattr(sys.modules[package], leaf, module, raising=False)
    return module


def results(methods, mode, nbytes=32 * KB):
    """The number of wrong elements of each method."""
    case = Case(2, "process", mode, "bfloat16", nbytes)
    rows, refusals = measure(case, methods, OneOfTwo())
    assert refusals == []
    return {row.method: row.wrong for row in rows}


class Vllm:
    """vLLM's all-reduce: a communicator is the address of its table, which names the buffers of one registration."""

    def __init__(self):
        self.registered, self.tables, self.compiled = {}, {}, 0

    def get_vllm_comm_module(self):
        self.compiled += 1

    def meta_size(self):
        return 4096

    def init_custom_ar(self, signals, table, rank, full_nvlink):
        assert len(signals) == 2
        self.tables[table.data_ptr()] = table
        return table.data_ptr()

    def register_buffer(self, handle, pointers):
        self.registered[handle] = pointers[0]

    def all_reduce(self, handle, x, out, staging, staging_nbytes, blocks):
        assert (staging or x.data_ptr()) == self.registered[handle]
        assert not staging or x.nbytes <= staging_nbytes
        assert blocks <= 36
        torch.add(x, x, out=out)


@pytest.fixture
def vllm(monkeypatch):
    fake = Vllm()
    names = [name for name in vars(Vllm) if not name.startswith("_")]
    install(monkeypatch, "flashinfer.comm.vllm_ar", **{name: getattr(fake, name) for name in names})
    return fake


@pytest.mark.parametrize("mode", ["graph", "chain"])
def test_vllm_reads_what_is_registered_with_the_communicator_it_is_called_with(vllm, mode):
    methods = flashinfer.make_vllm(PLAN, OneOfTwo())

    assert results(methods, mode) == {"vllm": 0, "vllm_unregistered": 0}


def test_every_captured_call_of_vllms_finds_the_registered_buffers_in_its_table(vllm):
    flashinfer.make_vllm(PLAN, OneOfTwo())

    for handle, table in vllm.tables.items():
        rows = table.view(torch.int64).view(-1, 8)
        assert rows[:, :2].unique().tolist() == [vllm.registered[handle]]
        assert rows[:, 2:].count_nonzero() == 0


def test_vllms_kernels_are_compiled_when_they_are_loaded(vllm):
    flashinfer.load_vllm(PLAN)

    assert vllm.compiled == 1


class Pattern(IntEnum):
    kAllReduce = 0


@pytest.fixture
def trtllm(monkeypatch):
    calls = []

    def allreduce_fusion(x, workspace, pattern, launch_with_pdl, use_oneshot):
        tokens, hidden = x.shape
        assert tokens * hidden <= workspace["max_token_num"] * workspace["hidden_dim"]
        assert use_oneshot or tokens > workspace["world_size"]
        calls.append((pattern, launch_with_pdl, use_oneshot, hidden))
        return x + x

    install(
        monkeypatch,
        "flashinfer.comm",
        AllReduceFusionPattern=Pattern,
        allreduce_fusion=allreduce_fusion,
        create_allreduce_fusion_workspace=lambda **options: options,
    )
    return calls


@pytest.mark.parametrize("mode", ["graph", "chain"])
@pytest.mark.parametrize("nbytes", [2 * KB, 8 * KB, 32 * KB, 64 * KB])
def test_flashinfers_kernels_are_given_as_many_rows_as_they_want(trtllm, mode, nbytes):
    methods = flashinfer.make_trtllm(PLAN, OneOfTwo())

    served = results(methods, mode, nbytes)

    assert served == {"flashinfer_one_shot": 0} | ({"flashinfer_two_shot": 0} if nbytes > 4 * KB else {})
    assert {(pattern, pdl) for pattern, pdl, _, _ in trtllm} == {(Pattern.kAllReduce, True)}


def test_a_one_shot_and_a_two_shot_are_told_apart(trtllm):
    for method in flashinfer.make_trtllm(PLAN, OneOfTwo()):
        method.call(torch.zeros(32 * KB, dtype=torch.bfloat16))

    assert [(one_shot, hidden) for _, _, one_shot, hidden in trtllm] == [(True, 8192), (False, 8192)]


@pytest.mark.parametrize("mode", ["graph", "chain"])
def test_the_fp8_all_reduce_allocates_for_its_largest_size_first(monkeypatch, mode):
    sizes = []

    def quantized_all_reduce(x, group):
        sizes.append(x.nbytes)
        total = x.float() * 2
        scale = total.abs().amax() / 448
        return ((total / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)

    install(monkeypatch, "flashinfer.comm.quantized_allreduce", quantized_all_reduce=quantized_all_reduce)
    methods = flashinfer.make_fp8(PLAN, OneOfTwo())

    assert results(methods, mode, 64 * KB) == {"flashinfer_fp8": 0}
    assert sizes[0] == PLAN.max_nbytes
    assert not methods[0].serves(32 * KB)


@pytest.fixture
def sgl(monkeypatch):
    def custom_all_reduce(communicator, x, algo):
        push, pull = communicator["push"][1], communicator["pull"][1]
        assert x.nbytes <= {"push": push["workspaces"][0].shape[1], "pull": pull["workspaces"][0].shape[0]}[algo[-4:]]
        return x + x

    return install(
        monkeypatch,
        "sglang.kernels.ops.communication.all_reduce",
        AllReduceAlgo=SimpleNamespace(ONE_SHOT_PUSH="one push", TWO_SHOT_PUSH="two push", TWO_SHOT_PULL="two pull"),
        Communicator=lambda **planes: planes,
        PushPlane=lambda *where, **parts: (where, parts),
        PullPlane=lambda *where, **parts: (where, parts),
        custom_all_reduce=custom_all_reduce,
    )


@pytest.mark.parametrize("mode", ["graph", "chain"])
def test_sglang_is_called_with_one_communicator(sgl, mode):
    methods = sglang.make(PLAN, OneOfTwo())

    assert results(methods, mode) == {"sglang_one_shot_push": 0, "sglang_two_shot_push": 0, "sglang_two_shot_pull": 0}


@pytest.mark.usefixtures("sgl")
def test_sglangs_planes_share_one_allocation_without_overlap():
    communicator, (mine, _, counter) = sglang.make_communicator(PLAN, OneOfTwo())
    (where, push), (_, pull) = communicator["push"], communicator["pull"]
    parts = (push["workspaces"][0], pull["workspaces"][0], pull["semaphores"][0])

    assert where == (0, 2)
    assert sum(part.nbytes for part in parts) == mine.nbytes
    assert [part.data_ptr() - mine.data_ptr() for part in parts] == [0, parts[0].nbytes, mine.nbytes - parts[2].nbytes]
    assert (counter.shape, push["counter"].shape) == ((8, 1), (8, 4))
    assert all(part.data_ptr() % 128 == mine.data_ptr() % 128 for part in parts)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_slot_of_sglangs_takes_what_is_pushed_to_it(world_size):
    slot = sglang.slot_nbytes(replace(PLAN, max_nbytes=2048 * MB), world_size)

    assert slot >= sglang.ONE_SHOT_MAX_NBYTES
    assert slot * world_size >= 2 * sglang.TWO_SHOT_MAX_NBYTES
    assert 2 * world_size * slot < 1 << 32  # its kernels count in 32 bits


@pytest.mark.parametrize("mode", ["graph", "chain"])
def test_torchs_one_shot_goes_to_and_fro_in_a_chain(monkeypatch, mode):
    def one_shot_all_reduce_out(x, operation, group, out):
        return torch.add(x, x, out=out)

    kernels = SimpleNamespace(
        one_shot_all_reduce_out=one_shot_all_reduce_out, two_shot_all_reduce_=lambda x, *_: x.mul_(2)
    )
    monkeypatch.setattr(torch_distributed.torch.ops, "symm_mem", kernels, raising=False)
    monkeypatch.setattr(
        torch_distributed, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(group_name="0")))
    )

    methods = torch_distributed.make_symm(PLAN, OneOfTwo())

    assert results(methods, mode) == {"symm_one_shot": 0, "symm_two_shot": 0}
