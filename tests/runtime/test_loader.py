"""Loading kernels: by which module, on which devices, and when. Needs no GPU."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar import UnsupportedError
from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Kernel
from graphar.plan.tiles import MATMUL_TILES
from graphar.product import gemm
from graphar.runtime import launcher
from graphar.runtime.bind import local_codec, residual_norm
from graphar.runtime.catalogue import local_codec_sources
from graphar.runtime.compiler import source_directory
from graphar.runtime.runner import Runner

DEVICE = 1


def load_for_a_communicator():
    members = [SimpleNamespace(rank=0, device=DEVICE)]
    runner = Runner(members, 2, None, None, None, None)
    return runner._load(Kernel(Algorithm.TWO_SHOT_TMA, torch.bfloat16), members[0])


CODED = local_codec_sources(torch.bfloat16, codec("int4"))[0]
# By the kernel's name in errors: a load of a kernel that is not in a cache.
LOADS = {
    "allreduce: two_shot_tma": load_for_a_communicator,
    "residual_rmsnorm for torch.bfloat16": lambda: residual_norm.load(DEVICE, torch.bfloat16),
    f"matmul: {MATMUL_TILES[0]} for torch.bfloat16": lambda: gemm._function.__wrapped__(
        DEVICE, torch.bfloat16, MATMUL_TILES[0], "by_rows", torch.bfloat16, ""
    ),
    f"local_codec: {CODED.name}": lambda: local_codec._load(DEVICE, CODED),
}
every_load = pytest.mark.parametrize(("what", "load"), LOADS.items(), ids=LOADS)


@pytest.fixture
def device(monkeypatch):
    """A device whose architecture and capture state a test may set, and a list of what was loaded there."""
    state = SimpleNamespace(arch="sm_90a", capturing=False, loaded=[])
    monkeypatch.setattr(launcher, "architecture", lambda device: state.arch)
    monkeypatch.setattr(launcher, "load_cubin", lambda cubin, device, nbytes: state.loaded.append((cubin, device)))
    monkeypatch.setattr(launcher, "is_capturing", lambda device: state.capturing)
    monkeypatch.setattr(launcher, "load", launcher.load.__wrapped__)
    monkeypatch.setattr(launcher, "compile_kernel", lambda source, arch: (source.file, arch))
    return state


@every_load
def test_a_kernel_is_compiled_for_its_device_and_loaded_there(device, what, load):
    load()

    (((file, arch), where),) = device.loaded
    assert (arch, where) == ("sm_90a", DEVICE)
    name = re.search(r"two_shot_tma|residual_rmsnorm|matmul|local_codec", what)
    assert Path(file).name == f"{name.group()}.cu"
    assert (source_directory() / file).is_file()


@every_load
def test_nothing_is_loaded_while_a_graph_is_captured(device, what, load):
    device.capturing = True

    with pytest.raises(UnsupportedError, match=f"^{re.escape(what)} is not loaded and cannot be during graph capture"):
        load()

    assert device.loaded == []


@every_load
def test_a_device_without_the_kernels_instructions_is_named_also_where_a_graph_is_captured(device, what, load):
    device.arch, device.capturing = "sm_75", True

    with pytest.raises(UnsupportedError, match=f"^{re.escape(what)} needs sm_[0-9a]+( or newer)?, cuda:1 is sm_75$"):
        load()


def test_only_the_launcher_compiles_and_loads():
    package = Path(graphar.__file__).parent
    users = {path.name for path in package.rglob("*.py") if re.search(r"\bcompile_kernel\b", path.read_text())}

    assert users == {"compiler.py", "launcher.py"}
