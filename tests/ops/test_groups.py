"""Groups and communicators on the CPU: whose ranks take part, how long a communicator lives, and what explain says."""

import gc
import inspect
import random
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphar
from graphar import Communicator, UnsupportedError
from graphar.runtime.registry import engine_of
from tests.cases import ALL_DTYPES, integers, normal, parts_of, same_bits
from tests.ops.conformance import PLAIN
from tests.processes import on_ranks, run_ranks

MATRICES = [torch.ones(2, 2)] * 2
SUBGROUPS = ([1, 3], [0, 2, 3], [2], [0, 1])


def assert_sum(y, parts, what=""):
    assert same_bits(y, graphar.reference.allreduce(parts)) == 0, what


def call_over(world_size, mine, groups):
    """How many elements differ in each plain call of rank ``mine`` over each of the groups, all of ``world_size``."""
    found = []
    for form in [form for form in PLAIN if form.ranks(world_size) == world_size]:
        tensors = form.tensors(world_size, (5, *form.small[1:]))
        expected = form.expected(tensors)[mine]
        for given in groups:
            ys = form.of_rank(mine, tensors, group=given, timeout_s=20)
            found += [same_bits(*pair) for pair in zip(ys, expected, strict=True)]
    return found


@on_ranks(4, timeout_s=100)
def test_a_subgroup_is_its_own_ranks_only(rank, world_size):
    found = []
    for members in SUBGROUPS:
        group = dist.new_group(members)
        if rank in members:
            with Communicator(group) as communicator:
                found += call_over(len(members), members.index(rank), (group, communicator))
    assert not any(found), rank
    assert len(found) >= 2 * len([form for form in PLAIN if not form.is_tree])


@on_ranks(4, timeout_s=100)
def test_a_mesh_of_one_dimension_is_a_group(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for name, mine in (("dp", rank // 2), ("tp", rank % 2)):
        with Communicator(mesh[name]) as communicator:
            assert (communicator.rank, communicator.world_size) == (mine, 2)
            found += call_over(2, mine, (mesh[name], communicator))
        assert graphar.empty(3, group=mesh[name]).shape == (3,)
        assert graphar.explain(torch.ones(3), mesh[name]).algorithm == "fallback"
    assert not any(found), rank
    assert len(found) >= 4 * len(PLAIN)


def call_outside_a_mesh(rank, world_size):
    mesh = DeviceMesh("cpu", [0, 1])
    try:
        return graphar.allreduce(torch.ones(3), mesh).tolist()
    except ValueError as error:
        return str(error)


def test_a_rank_outside_a_mesh_is_refused():
    inside, same, outside = run_ranks(call_outside_a_mesh, 3)

    assert inside == same == [2, 2, 2]
    assert outside == "graphar: this rank is not in the DeviceMesh; only its ranks call its collectives"


@on_ranks(4)
def test_communicators_of_overlapping_groups_take_turns(rank, world_size):
    pairs = [[0, 1], [2, 3]]
    pair, group = pairs[rank // 2], [dist.new_group(pair) for pair in pairs][rank // 2]
    with graphar.Communicator() as everyone, graphar.Communicator(group) as two:
        for numel in (7, 8199, 64, 8192):
            parts = parts_of(normal, world_size, numel, torch.float16)
            assert_sum(everyone.allreduce(parts[rank]), parts, "everyone")
            assert_sum(two.allreduce(parts[rank]), [parts[member] for member in pair], "the pair")
            assert_sum(graphar.allreduce(parts[rank]), parts, "the default group")


def test_another_group_of_all_ranks_has_a_communicator_of_its_own(group_of):
    group_of(3)
    groups = dist.group.WORLD, dist.new_group([0, 1, 2])
    engines = [engine_of(group) for group in groups]

    assert [engine.group for engine in engines] == [*groups]
    assert [engine_of(group) for group in (None, *groups)] == [engines[0], *engines]  # each is kept


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of every group"
)
@on_ranks(3)
def test_the_ranks_of_a_group_of_all_come_in_its_own_order(rank, world_size):
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    assert graphar.allgather(torch.tensor([rank]), group=group).tolist() == [2, 0, 1]


@on_ranks(2)
def test_a_default_group_made_anew_is_the_one_used(rank, world_size):
    x = torch.full((3,), 2.0)
    first = graphar.allreduce(x)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert (first.tolist(), graphar.allreduce(x).tolist()) == ([4.0] * 3, [2.0] * 3)


@on_ranks(3)
def test_sizes_and_dtypes_may_change_from_call_to_call(rank, world_size):
    choose = random.Random(7)
    for call in range(300):
        numel, dtype = choose.randrange(choose.choice([10, 1000, 30_000])), choose.choice(ALL_DTYPES)
        parts = parts_of(integers, world_size, numel, dtype)
        assert_sum(graphar.allreduce(parts[rank]), parts, f"call {call}: {numel} elements of {dtype}")


@on_ranks(2)
def test_a_communicator_of_processes_ends_with_its_context(rank, world_size):
    with graphar.Communicator() as communicator:
        communicator.prepare()
        total = communicator.allreduce(torch.ones(2))
        communicator.synchronize()
    communicator.close()
    with pytest.raises(graphar.CommunicatorError, match="closed"):
        communicator.allreduce(torch.ones(2))
    with pytest.raises(graphar.CommunicatorError, match="closed"):
        graphar.allreduce(torch.ones(2), communicator)
    assert (total.tolist(), graphar.allreduce(torch.ones(2)).tolist()) == ([2.0, 2.0], [2.0, 2.0])


def test_a_closed_communicator_refuses_every_call():
    xs = [torch.ones(2)] * 2
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        communicator.allreduce(xs)
    communicator.close()

    assert communicator.closed
    calls = {
        "allreduce": communicator.allreduce,
        "reducescatter": communicator.reducescatter,
        "allgather": communicator.allgather,
        "empty": lambda xs: communicator.empty(3),
        "prepare": lambda xs: communicator.prepare(),
        "fused_matmul_allreduce": lambda xs: graphar.fused_matmul_allreduce(MATRICES, MATRICES, group=communicator),
    }
    for op, call in calls.items():
        with pytest.raises(graphar.CommunicatorError, match=f"^{op}: this communicator is closed; make another, and"):
            call(xs)
    with pytest.raises(graphar.CommunicatorError, match=r"^allreduce: this communicator is closed"):
        communicator.explain(xs)


def test_a_communicator_is_kept_until_it_is_closed():
    engine = weakref.ref(graphar.Communicator(devices=["cpu"] * 2).engine)
    gc.collect()
    assert engine() is not None

    engine().close()
    gc.collect()

    assert engine() is None


@pytest.mark.parametrize(
    ("world_size", "algorithm", "reason"),
    [(1, "auto", "one rank has nothing to add"), (2, "auto", "the tensor is on the CPU"), (2, "fallback", "asked for")],
)
def test_explain_says_why_a_list_takes_the_fallback(world_size, algorithm, reason):
    explanation = graphar.explain([torch.ones(2)] * world_size, algorithm=algorithm)

    assert explanation == graphar.Explanation("fallback", blocks=0, threads=0, reason=reason)
    assert str(explanation) == f"fallback: {reason}"


def test_an_explanation_shows_the_grid_of_a_kernel():
    explanation = graphar.Explanation("one_shot_push", blocks=16, threads=128, reason="the fastest")

    assert str(explanation) == "one_shot_push (16 blocks of 128): the fastest"


A_LIST, DEVICES = ", or pass a list with one tensor a device", ", or give devices, such as devices=[0, 1]"


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        *((op, A_LIST) for op in (*(form.op for form in PLAIN[:3]), graphar.explain)),
        (lambda x: Communicator(), DEVICES),
        (lambda x: graphar.stats(), ", or give a Communicator"),
        (lambda x: graphar.empty(3), ", or pass a Communicator with devices as the group"),
        (lambda x: graphar.nn.RowParallelLinear(torch.nn.Linear(2, 2)), ""),
        (lambda x: graphar.enable(), ""),
    ],
)
def test_without_a_process_group_a_tensor_is_refused_with_advice_that_fits(call, instead):
    begin = "graphar: torch.distributed is not initialised; call torch.distributed.init_process_group()"
    with pytest.raises(ValueError, match=f"^{re.escape(begin + instead)}$"):
        call(torch.ones(3))


def test_cpu_devices_may_carry_an_index():
    with Communicator(devices=["cpu:0", "cpu:0"]) as communicator:
        assert communicator.allreduce([torch.ones(1)] * 2)[0].item() == 2


@on_ranks(2)
def test_a_group_without_a_backend_for_the_device_is_named(rank, world_size):
    group, out = dist.new_group(backend="cuda:gloo"), torch.full((3,), 99.0)
    calls = [(graphar.allreduce, {"out": out}), (graphar.reducescatter, {}), (graphar.allgather, {})]
    for op, given in calls:
        with pytest.raises(UnsupportedError, match="the group has no backend for cpu tensors"):
            op(torch.ones(3), group, **given)
    assert (out.tolist(), graphar.allreduce(torch.ones(3)).tolist()) == ([99.0] * 3, [2.0] * 3)
