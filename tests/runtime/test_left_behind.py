"""What remains after a call: tensors that it wrote or refused to write, and a communicator that was closed."""

import copy
import itertools
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import Communicator, CommunicatorError, UnsupportedError
from graphar.plan.call import Call, Operands
from graphar.plan.work import Sum
from graphar.product.then import Then
from graphar.runtime import registry
from graphar.runtime.engine import Engine, open_engines
from graphar.runtime.registry import engine_of_group
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_ranks


def tensors(*shape, count=2):
    return [torch.ones(shape) for _ in range(count)]


@pytest.fixture
def kernels(monkeypatch):
    """Replaces kernels by nothing, which is all that torch sees of them."""
    monkeypatch.setattr(Engine, "run", lambda *_: None)


# For each: a call of one rank of two, and of a list.
WRITING = {
    "exact": {},
    "codec": {"codec": "int8"},
    "residual": {"codec": "int8", "residual": ...},
    "epilogue": {"epilogue": "-v"},
}


@pytest.mark.parametrize("options", WRITING.values(), ids=WRITING)
def test_an_output_that_a_backward_pass_needs_cannot_change_unnoticed(kernels, group_of, options):
    group_of(2)
    weight, out = torch.ones(8, requires_grad=True), torch.ones(8)
    loss = (weight * out).sum()

    given = {name: torch.zeros(8) if value is ... else value for name, value in options.items()}
    graphar.allreduce(torch.ones(8), out=out, **given)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", WRITING.values(), ids=WRITING)
def test_outputs_of_a_list_cannot_change_unnoticed(kernels, pair, options):
    outs = tensors(8)
    before = [out._version for out in outs]

    given = {name: tensors(8) if value is ... else value for name, value in options.items()}
    graphar.allreduce(tensors(8), pair, out=outs, **given)

    assert all(out._version > version for out, version in zip(outs, before, strict=True))


@pytest.mark.parametrize("options", [{}, {"epilogue": "-v"}], ids=["exact", "epilogue"])
def test_an_output_of_a_matmul_cannot_change_unnoticed(monkeypatch, group_of, pair, options):
    group_of(2)
    monkeypatch.setattr(Then, "run", lambda *_: None)
    out, outs = torch.ones(4, 8), tensors(4, 8)
    before = out._version

    graphar.fused_matmul_allreduce(torch.ones(4, 2), torch.ones(8, 2), out=out, **options)
    graphar.fused_matmul_allreduce(tensors(4, 2), tensors(8, 2), group=pair, out=outs, **options)

    assert out._version > before
    assert all(one._version > before for one in outs)


def test_an_output_of_inference_mode_is_written_too(pair):
    with torch.inference_mode():
        outs = tensors(3)
        graphar.allreduce(tensors(3), pair, out=outs)

    assert [out.tolist() for out in outs] == [[2.0] * 3] * 2


@pytest.mark.parametrize("algorithm", ["hierarchical", "quantized_two_shot_push"])
def test_a_refused_call_leaves_the_residuals_as_they_were(pair, algorithm):
    xs, residuals = ([normal(at + rank, 100, torch.float32) for rank in range(2)] for at in (0, 7))
    before = [residual.clone() for residual in residuals]

    with pytest.raises(UnsupportedError):
        graphar.allreduce(xs, pair, codec="int4", residual=residuals, algorithm=algorithm)

    assert [same_bits(*one) for one in zip(residuals, before, strict=True)] == [0, 0]


@pytest.mark.parametrize("of_group", [True, False])
def test_a_backward_pass_after_the_end_is_told_that_the_communicator_is_closed(group_of, of_group):
    group_of(1)
    x = torch.ones(3, requires_grad=True)
    with Communicator() if of_group else Communicator(devices=["cpu"] * 2) as communicator:
        y = communicator.allreduce(x) if of_group else communicator.allreduce([x, torch.ones(3)])[0]

    with pytest.raises(CommunicatorError, match="allreduce: this communicator is closed; make another"):
        y.sum().backward()


def test_the_copy_of_a_model_has_the_same_communicator(pair):
    assert copy.deepcopy({"group": pair})["group"] is pair


@pytest.mark.parametrize("has_kernels", [True, False])
@on_ranks(2)
def test_a_groups_shared_communicator_outlives_it_with_its_kernels_and_a_callers_own_can_be_closed(
    rank, world_size, has_kernels
):
    """The shared communicator's memory is never freed: other ranks may have ended, and a graph may yet be replayed."""
    graphar.allreduce(torch.ones(3))
    shared, own = engine_of_group(""), Communicator()
    shared.runner = object() if has_kernels else None
    graphar.allreduce(torch.ones(3), own)
    own.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graphar.allreduce(torch.ones(3))
    assert (shared.name in open_engines, own.engine.name in open_engines) == (has_kernels, False)


def count_what_stays(rank, world_size, use):
    """How many keys and engines each of three communicators or groups leaves, beyond what torch's own call leaves."""
    store = dist.distributed_c10d._get_default_store()

    def left_by(use):
        counts = []
        for _ in range(4):
            use()
            dist.barrier()
            counts.append((store.num_keys(), len(open_engines)))
            dist.barrier()
        return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in itertools.pairwise(counts)]

    return left_by(use), left_by(partial(use_a_group, dist.all_reduce))


def use_a_group(call):
    group = dist.new_group([0, 1])
    call(torch.ones(3), group=group)
    dist.destroy_process_group(group)


def test_a_closed_communicator_leaves_no_key_in_the_store_and_no_engine():
    use = call_one_of_the_callers_and_close

    assert [ours for ours, _ in run_ranks(count_what_stays, 2, use)] == [[(0, 0)] * 3] * 2


def test_a_destroyed_group_leaves_no_more_keys_than_torch_leaves_and_no_engine():
    for ours, of_torch in run_ranks(count_what_stays, 2, partial(use_a_group, graphar.allreduce)):
        assert ours == of_torch


@on_ranks(2)
def test_first_calls_in_threads_make_one_engine(rank, world_size):
    make, made = registry.Engine, []

    def make_slowly(*given):
        time.sleep(0.02)
        made.append(make(*given))
        return made[-1]

    registry.Engine = make_slowly
    try:
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: registry.engine_of_group(""), range(8))]
            of_devices = [*pool.map(lambda _: registry.engine_of_devices("", (torch.device("cpu"),) * 3), range(8))]
            met = [*pool.map(lambda _: found[0].rendezvous(), range(8))]
            pool.map(lambda _: Communicator(devices=["cpu"]), range(50))
            for _ in range(50):
                registry._usable_engines()
    finally:
        registry.Engine = make
    assert ([len({*map(id, ones)}) for ones in (found, of_devices, met)], len(made)) == ([1, 1, 1], 2)


def call_one_of_the_callers_and_close():
    communicator = Communicator()
    communicator.allreduce(torch.ones(3))
    communicator.close()
    return communicator


def call_a_part():
    graphar.allreduce(torch.ones(3), dist.new_group([0, 1]))


# What a user may do with a group. Some uses return a communicator that stays alive.
USES = {
    "default": partial(graphar.allreduce, torch.ones(3)),
    "another": call_a_part,
    "hierarchical": partial(graphar.allreduce, torch.ones(3), algorithm="hierarchical"),
    "closed": call_one_of_the_callers_and_close,
}


def use_and_destroy(rank, world_size, use):
    """Whether rank 0 serves the store of a group before and after the group is destroyed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    said = [store and store.port]
    dist.broadcast_object_list(said)
    port = said[0]
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    del store

    def serves():
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    kept = USES[use]()
    dist.barrier()
    before = serves()
    dist.destroy_process_group()
    after = serves()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    del kept
    return (before, after) if rank == 0 else None


@pytest.mark.parametrize("use", USES)
def test_the_store_of_a_destroyed_group_is_served_no_more(use):
    """Otherwise a group initialised again on the same port would find the old server and its old addresses."""
    assert run_ranks(use_and_destroy, 2, use)[0] == (True, False)


@on_ranks(2)
def test_a_call_after_the_end_of_the_group_is_told_so(rank, world_size):
    graphar.allreduce(torch.ones(3))
    shared = engine_of_group("")
    dist.destroy_process_group()
    told = []
    for call in (graphar.allreduce, lambda x: shared.run(Call.of(Sum(x.numel()), x), [Operands((x,), (x,))])):
        try:
            call(torch.ones(3))
        except (ValueError, CommunicatorError) as error:
            told.append(str(error))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    uninitialised, destroyed = told
    assert "torch.distributed is not initialised" in uninitialised
    assert destroyed == "the process group of this communicator was destroyed"
