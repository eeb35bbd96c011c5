"""A call's own deadline: every cache that a call goes through keeps calls with other deadlines apart. Needs no GPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import LAYOUTS
from graphar.plan.work import (
    ALLGATHER_MATMUL,
    MATMUL_ALLREDUCE,
    MATMUL_REDUCESCATTER,
    Norm,
    Parts,
    Product,
    Sum,
    TensorTuple,
)
from graphar.product import fused, gathered_chunks, products, then
from graphar.product.gathered_chunks import GatheredChunks
from graphar.runtime import engine as engines
from graphar.runtime import launcher
from graphar.runtime.bind import by_copies, collective, launches
from graphar.runtime.plan import Plan
from tests.cases import normal
from tests.fake_gpu import OnGpu
from tests.ops.conformance import FUSED_ALLREDUCE, FUSED_REDUCESCATTER, PLAIN
from tests.ops.test_warm_calls import OPS, zeros

OWN = 60.0  # the deadline of a communicator
ASKED = (None, None, None, 3.0, 3.0, 3.0, None, 0.5, 3.0, None)  # equal calls and new ones, in turns
IN_FORCE = [OWN if timeout_s is None else timeout_s for timeout_s in ASKED]


@pytest.mark.parametrize("name", OPS)
def test_a_warm_call_repeats_no_call_with_another_deadline(communicator, monkeypatch, name):
    made, repeated = [], []

    def bind(engine, call, ranks):
        def repeat(*given):
            repeated.append(call.timeout_s)
            made.append(call.timeout_s)

        run = lambda ranks: made.append(call.timeout_s)  # noqa: E731
        return Plan(run, Config(Algorithm.ONE_SHOT_PUSH, 2, 32), launch_like=lambda own: repeat)

    communicator.engine.plans.clear()
    for kind in engines.binders:
        monkeypatch.setitem(engines.binders, kind, bind)

    for timeout_s in ASKED:
        OPS[name](communicator, timeout_s=timeout_s)

    assert made == list(ASKED)
    assert {None, 3.0} <= set(repeated)


OF_TWO = [form for form in (*PLAIN, *FUSED_ALLREDUCE[2:4], *FUSED_REDUCESCATTER[2:4]) if form.leaves]


@pytest.fixture
def two_ranks(monkeypatch):
    """A communicator on the CPU, and the deadlines of the calls in the process that it runs, in order."""
    with graphar.Communicator(devices=["cpu", "cpu"], timeout_s=OWN) as communicator:
        ran, bind = [], communicator.engine.without_kernels.bind

        def noting(call, x, config, timeout_s):
            run = bind(call, x, config, timeout_s)
            return lambda ranks: ran.append(timeout_s) or run(ranks)

        monkeypatch.setattr(communicator.engine.without_kernels, "bind", noting)
        yield communicator, ran


@pytest.mark.parametrize("form", OF_TWO, ids=str)
def test_what_a_call_is_made_of_and_its_backward_pass_have_its_deadline(two_ranks, form):
    communicator, ran = two_ranks
    for timeout_s, seconds in zip(ASKED, IN_FORCE, strict=True):
        tensors = form.tensors(2, form.small, fill=normal)
        for name in form.leaves:
            tensors[name] = [x.requires_grad_() for x in tensors[name]]
        (first, *_), *_ = form.in_list(tensors, group=communicator, timeout_s=timeout_s)
        first.float().sum().backward()

        assert ran
        assert set(ran) == {seconds}
        ran.clear()


@pytest.mark.parametrize("name", OPS)
def test_every_step_of_a_call_without_a_kernel_has_its_deadline(group, name):
    with graphar.Communicator(group) as communicator:
        OPS[name](communicator, timeout_s=3.0)

        assert {call.timeout_s for call in communicator.engine.plans} == {3.0}


REGIONS = {Algorithm.ALLGATHER_MATMUL: SimpleNamespace(pointers=[0, 0])}


def on_gpu(*shape):
    return zeros(*shape).as_subclass(OnGpu)


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count} here")
def gpus(monkeypatch, request):
    """An engine of two ranks that believes in GPUs, with one or both in this process, and the deadlines of launches."""
    launched = []
    members = [SimpleNamespace(rank=rank, device=rank, leave=lambda: None) for rank in range(request.param)]

    def load(*given):
        return [None for _ in members]

    def load_tile(runner, algorithm, dtype, tile, work):
        return [dict.fromkeys([(tile, layout) for layout in LAYOUTS]) for _ in members]

    def bind_launch(runner, member, launch, arguments, put=None):
        return lambda *given: launched.append(arguments.timeout_s)

    def arguments(member, algorithm, one, timeout_s, words, kind=None):
        epilogue = SimpleNamespace(put=None)
        return SimpleNamespace(timeout_s=timeout_s, epilogue=epilogue, bind=lambda *given: None)

    for module in (collective, fused):
        monkeypatch.setattr(module, "KernelLaunch", lambda *given: None)
        monkeypatch.setattr(module, "bind_launch", bind_launch)
    for module in (launches, fused):
        monkeypatch.setattr(module, "on_own_device", lambda device, launch: launch)
    for kind in (fused.Summed, fused.Skinny, fused.Gathered):
        monkeypatch.setattr(kind, "parameters", lambda *given: ([], None))
    monkeypatch.setattr(fused, "load_tile", load_tile)
    monkeypatch.setattr(fused, "why_not", lambda *given: "")
    monkeypatch.setattr(launcher, "sm_count", lambda device: 132)
    monkeypatch.setattr(launcher, "can_overlap", lambda device: True)
    monkeypatch.setattr(GatheredChunks, "_run_slice", lambda self, lanes, rows, one: self._meet())
    for module in (gathered_chunks, then):
        monkeypatch.setattr(module, "streams_of", lambda device: (None, None))
    monkeypatch.setattr(by_copies, "tensor_at", lambda pointer, device, like: torch.zeros_like(like, device="cpu"))
    for name in ("load", "norm"):
        monkeypatch.setattr(products.residual_norm, name, lambda *given: None)

    communicator = graphar.Communicator(devices=["cuda:0", "cuda:1"], timeout_s=OWN)
    engine = communicator.engine
    monkeypatch.setattr(engine, "why_no_kernel", lambda op, x: "")
    engine.table = shipped_table("nvidia_h200")
    engine.runner = SimpleNamespace(
        world_size=2,
        members=members,
        chip=Chip(132, MATMUL_ARCH),
        lock=contextlib.nullcontext(),
        why_no_multicast=str,
        prepare=load,
        prepare_all=load,
        regions=REGIONS,
        symmetric=None,
        arguments=arguments,
        raise_failure=lambda: None,
        announced=lambda words: contextlib.nullcontext(),
        close=lambda: None,
    )
    if request.param == 1:
        engine.devices, engine.rank = None, 0
    yield engine, launched
    communicator.close()


M, N, K = 32, 64, 128
OF_PRODUCT = (on_gpu(M, K), on_gpu(N, K)), (on_gpu(M, N),)
OF_PARTS = (on_gpu(M, K), on_gpu(N, K)), (on_gpu(M // 2, N),)
NORMED = (on_gpu(M, N), on_gpu(N)), (on_gpu(M, N), on_gpu(M, N))
NORMED_PARTS = (on_gpu(M // 2, N), on_gpu(N)), (on_gpu(M // 2, N), on_gpu(M // 2, N))
OF_GATHER = (on_gpu(M // 2, K), on_gpu(N, K)), (on_gpu(M, N),)
NUMBERS = (1e-6, 0.0)


def with_norm(of_product, normed):
    return (*of_product[0], *normed[0]), normed[1]


# Works, and the operands of each rank.
WORKS = {
    "sum": (Sum(M * N), ((on_gpu(M, N),), (on_gpu(M, N),))),
    "sum with a codec": (Sum(M * N, "int8"), ((on_gpu(M, N),), (on_gpu(M, N),))),
    "reduce-scatter": (Parts("reducescatter", (M * N // 2,) * 2), ((on_gpu(M, N),), (on_gpu(M // 2, N),))),
    "all-gather": (Parts("allgather", (M * N // 2,) * 2), ((on_gpu(M // 2, N),), (on_gpu(M, N),))),
    "tuple": (
        TensorTuple((torch.bfloat16,) * 2, ((N,), (K,)), (M // 2,) * 2),
        ((on_gpu(M // 2, N), on_gpu(M // 2, K)), (on_gpu(M, N), on_gpu(M, K))),
    ),
    "tuple in windows": (
        TensorTuple((torch.bfloat16,) * 5, ((N,),) * 5, (M // 2,) * 2),
        ((on_gpu(M // 2, N),) * 5, (on_gpu(M, N),) * 5),
    ),
    "norm": (Norm(ALLREDUCE_NORM, (M * N,), N), ((on_gpu(M, N), *NORMED[0]), NORMED[1])),
    "norm of parts": (
        Norm(REDUCESCATTER_NORM, (M * N // 2,) * 2, N),
        ((on_gpu(M, N), *NORMED_PARTS[0]), NORMED_PARTS[1]),
    ),
    "matmul in panels": (Product(MATMUL_ALLREDUCE, (M // 2,) * 2, N, partition="none"), OF_PRODUCT),
    "matmul of parts in panels": (Product(MATMUL_REDUCESCATTER, (M // 2,) * 2, N, partition="none"), OF_PARTS),
    "skinny matmul": (Product(MATMUL_ALLREDUCE, (M // 2,) * 2, N, partition="tiles"), OF_PRODUCT),
    "matmul in tiles": (
        Product(MATMUL_ALLREDUCE, (128,) * 2, N, partition="tiles"),
        ((on_gpu(256, K), on_gpu(N, K)), (on_gpu(256, N),)),
    ),
    "matmul of parts in tiles": (Product(MATMUL_REDUCESCATTER, (M // 2,) * 2, N, partition="tiles"), OF_PARTS),
    "matmul and norm": (
        Product(f"{MATMUL_ALLREDUCE}_residual_rmsnorm", (M // 2,) * 2, N, partition="none", norm=NUMBERS),
        with_norm(OF_PRODUCT, NORMED),
    ),
    "matmul in tiles and norm": (
        Product(f"{MATMUL_ALLREDUCE}_residual_rmsnorm", (M // 2,) * 2, N, partition="tiles", norm=NUMBERS),
        with_norm(OF_PRODUCT, NORMED),
    ),
    "matmul of parts and norm": (
        Product(f"{MATMUL_REDUCESCATTER}_residual_rmsnorm", (M // 2,) * 2, N, partition="none", norm=NUMBERS),
        with_norm(OF_PARTS, NORMED_PARTS),
    ),
    "all-gather and matmul": (Product(ALLGATHER_MATMUL, (M // 2,) * 2, K, partition="none"), OF_GATHER),
    "all-gather and matmul in tiles": (Product(ALLGATHER_MATMUL, (M // 2,) * 2, K, partition="tiles"), OF_GATHER),
    "the meeting of chunks": (Product(ALLGATHER_MATMUL, (M // 2,) * 2, K, partition="chunks"), OF_GATHER),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_launch_has_the_deadline_of_its_call_whatever_was_launched_before(gpus, name):
    (engine, launched), (work, operands) = gpus, WORKS[name]

    for timeout_s, seconds in zip(ASKED, IN_FORCE, strict=True):
        call, ranks = (
            Call(work, torch.bfloat16, 0, timeout_s=timeout_s),
            [Operands(*operands)] * len(engine.runner.members),
        )
        engine.run(call, ranks)
        repeat = engine.plan(call, ranks).launch_like(ranks[0])
        if repeat is not None:
            repeat(*ranks[0])

        assert launched
        assert set(launched) == {seconds}
        launched.clear()
