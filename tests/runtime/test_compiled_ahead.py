"""What is prepared is compiled first, on all cores: each kernel on one rank, and the others find it in the cache."""

import functools
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from graphar.errors import CompileError
from graphar.numerics import softmax
from graphar.numerics.codecs import codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.fp8_products import FP8
from graphar.numerics.softmax import Terms
from graphar.ops import preparation
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Kernel
from graphar.plan.tables import shipped_table
from graphar.plan.work import Loss
from graphar.ranks.rendezvous import Alone, StoreRendezvous
from graphar.runtime import catalogue, compiler, launcher
from graphar.runtime.bind import loss
from graphar.runtime.catalogue import KernelSource, softmax_backward_source
from graphar.runtime.runner import PART, Runner, threads_for_compiling
from tests.processes import run_ranks

ARCH = "sm_90a"
BROKEN = KernelSource("allreduce/one_shot_push.cu", "no_such_kernel<bf16>")
NAMED = [KernelSource("allreduce/one_shot_push.cu", f"kernel<{at}>") for at in range(2 * PART + 3)]


@pytest.fixture
def asked(monkeypatch):
    """What is to be compiled, in the order of the calls: sources, architecture and threads."""
    found = []
    monkeypatch.setattr(launcher, "architecture", lambda device: ARCH)
    monkeypatch.setattr(compiler, "compile_at_once", lambda *given: found.append(given))
    return found


def runner_of(rendezvous, chip=None, world_size=2):
    return Runner([SimpleNamespace(rank=rendezvous.rank, device=0)], world_size, chip, None, rendezvous, None)


class OneOfTwo:
    """The rendezvous of a rank of two, whose peer comes at once."""

    world_size = 2

    def __init__(self, rank):
        self.rank, self.purposes = rank, []

    def agree(self, what, step):
        step()
        self.purposes.append(what)


def test_each_rank_compiles_a_share_of_every_part_and_meets_the_others_after_it(asked):
    ranks = [OneOfTwo(rank) for rank in range(2)]
    for rank in ranks:
        runner_of(rank).compile(iter([*NAMED, NAMED[0]]))

    first, second, third, fourth = ([*sources] for sources, _, _ in asked)
    assert (first, second) == (NAMED[: 2 * PART : 2], NAMED[2 * PART :: 2])
    assert (third, fourth) == (NAMED[1 : 2 * PART : 2], NAMED[2 * PART + 1 :: 2])
    assert [rank.purposes for rank in ranks] == [[f"compiling {len(NAMED)} kernels"] * 2] * 2


def test_a_process_that_has_all_ranks_compiles_all_kernels_that_its_devices_have_instructions_for(asked):
    other = KernelSource("matmul/matmul.cu", "kernel", only_arch="sm_100a")

    runner_of(Alone()).compile([*NAMED[:3], other])

    assert [sources for sources, _, _ in asked] == [NAMED[:3]]


@pytest.mark.parametrize(
    ("cores", "bound", "ranks", "threads"),
    [(64, 64, 8, 8), (64, 4, 8, 4), (2, 2, 8, 1), (256, 256, 2, PART), (None, 1, 1, 1)],
)
def test_ranks_share_the_cores_of_the_host(monkeypatch, cores, bound, ranks, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)))

    assert threads_for_compiling(ranks) == threads


def compiled_here(rank, world_size, folder):
    """The kernels that this rank compiles ahead, and how many it compiles when it loads all of them."""
    os.environ["GRAPHAR_CACHE_DIR"] = folder
    wanted = [
        catalogue.source_of(Kernel(algorithm, torch.bfloat16), 2)
        for algorithm in (Algorithm.ONE_SHOT, Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PUSH)
    ]
    store = dist.distributed_c10d._get_default_store()
    rendezvous = StoreRendezvous(store, "t", rank, world_size, timeout_s=60)
    with (
        mock.patch.object(launcher, "architecture", return_value=ARCH),
        mock.patch.object(compiler, "_compile", wraps=compiler._compile) as compile_one,
    ):
        runner_of(rendezvous).compile([*wanted, BROKEN])
        ahead = {call.args[0].name for call in compile_one.call_args_list}
        for source in wanted:
            compiler.compile_kernel(source, ARCH)
        later = compile_one.call_count - len(ahead)
        with pytest.raises(CompileError, match="no_such_kernel"):
            compiler.compile_kernel(BROKEN, ARCH)
    return ahead, later


def test_a_kernel_is_compiled_by_one_process_and_a_mistake_is_told_to_all_that_load_it(tmp_path):
    (first, later), (second, last) = run_ranks(compiled_here, 2, str(tmp_path))

    assert first & second == set()
    assert len(first | second) == 4
    assert (later, last) == (0, 0)


FIRST = """
import torch
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Kernel
from graphar.runtime import cache, catalogue, compiler
sources = [catalogue.source_of(Kernel(Algorithm.ONE_SHOT_PUSH, torch.bfloat16), ranks) for ranks in range(2, 6)]
compiler.compile_at_once(sources, "sm_90a", 4)
print(len(cache.survey().keys))
"""


def test_several_threads_compile_the_first_kernels_of_a_process(tmp_path):
    environment = os.environ | {"GRAPHAR_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", FIRST], env=environment, capture_output=True, text=True, check=True)

    assert found.stdout == "4\n"


OPS = ("allreduce", "allgather_tuple", "allreduce_residual_rmsnorm", "fused_matmul_allreduce", "log_probs")
OPTIONS = ({"label_smoothing": 0.1}, {"temperature": 0.7}, {"entropy": True}, {})
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def loaded(monkeypatch):
    """The kernels that are loaded, and on which GPU."""
    found = []
    load = functools.cache(lambda source, device, *_: found.append((source, device)) or 1)
    monkeypatch.setattr(launcher, "load", load)
    monkeypatch.setattr(launcher, "chip", lambda device: shipped_table("nvidia_h200").chip)
    monkeypatch.setattr(Runner, "_allocate", lambda self, algorithm: None)
    monkeypatch.setattr(loss, "runs_on", lambda device: True)
    monkeypatch.setattr(loss, "_bind_forward", loss._bind_forward.__wrapped__)
    return found


@pytest.mark.parametrize("ops", [OPS[:1], OPS], ids=["one op", "many ops"])
def test_all_that_is_loaded_was_compiled_ahead(asked, loaded, ops):
    table = shipped_table("nvidia_h200")
    engine = mock.MagicMock(world_size=2, table=table, lossless=True, symmetric=None, devices=GPUS)
    engine.runner = runner_of(Alone(), table.chip)

    preparation.prepare(
        engine, ops, [torch.bfloat16, FP8], None, [codec("int8")], [form_to_prepare("-v")], len(ops) > 1
    )

    ahead = [source for sources, _, _ in asked for source in sources]
    assert len(ahead) == len(set(ahead))
    assert set(ahead) == {source for source, _ in loaded}
    assert any(source.file.startswith("loss") for source in ahead) == ("log_probs" in ops)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", TYPE_NAMES)
def test_later_losses_and_their_backward_passes_load_nothing(asked, loaded, ranks, dtype):
    table = shipped_table("nvidia_h200")
    engine = mock.MagicMock(world_size=ranks, table=table, symmetric=None, devices=GPUS[:ranks])
    engine.runner = runner_of(Alone(), table.chip)
    engine.find_runner.return_value = ranks > 1
    preparation.prepare(engine, softmax.PREPARED, [dtype], None)
    prepared = list(loaded)

    with mock.patch.multiple(launcher, sm_count=lambda device: 132, can_overlap=lambda device: True):
        for rows, options in itertools.product((1, 64, 4096), OPTIONS):
            work = Loss("loss", rows, 1024 // ranks, Terms(1024, **options))
            loss._bind_forward(0, dtype, work, 0, ranks)
            loss.load(softmax_backward_source(dtype), 0)

    assert loaded == prepared
    assert {device for source, device in loaded if source.file.startswith("loss")} == {*range(ranks)}
    assert any("allgather" in source.file for source, _ in loaded) == (ranks > 1)
