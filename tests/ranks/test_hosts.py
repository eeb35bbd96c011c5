"""The hierarchical all-reduce, between processes over gloo that are said to be of several hosts."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar import CollectiveTimeout, Communicator, CommunicatorError, UnsupportedError, reference
from graphar.ranks import hierarchical
from tests.cases import ALL_DTYPES, HALVES, KERNEL_DTYPES, bit_patterns, integers, normal, parts_of, same_bits
from tests.processes import on_ranks, run_ranks

TWO_BY_TWO = [[0, 1], [2, 3]]
SPLITS = [TWO_BY_TWO, [[0, 2], [1, 3]], [[2, 3], [0, 1]], [[0, 1, 2, 3]], [[2], [0], [3], [1]]]
CODECS = [graphar.Codec(8), graphar.Codec(4, 128, scheme="minmax")]
CHUNK = 16 << 10  # in tests: a few tiles, with codecs too
NUMELS = (0, 1, 3, 100, CHUNK, CHUNK + 1, 2 * CHUNK + 77)
SHORT_S = 0.5


def summed(communicator, x, **options):
    return communicator.allreduce(x, algorithm="hierarchical", **options)


def wrong_sums(rank, world_size, split, fill, dtypes, codec=None):
    """(dtype, numel) of every sum that has other bits than the specification's."""
    hierarchical._CHUNK_NUMEL = CHUNK
    wrong, turn = [], 0
    with Communicator(hosts=split) as communicator:
        for dtype in dtypes:
            for numel in NUMELS:
                y = summed(communicator, fill(rank, numel, dtype), codec=codec)
                expected = torch.empty_like(y)
                if rank == (turn := (turn + 1) % world_size):  # one works it out for all
                    parts = parts_of(fill, world_size, numel, dtype)
                    expected = reference.hierarchical_allreduce(parts, split, codec)
                dist.broadcast(expected.view(torch.uint8), turn)
                if same_bits(y, expected):
                    wrong.append((str(dtype), numel))
    return wrong


@pytest.mark.promise("`hierarchical` has the bits of its own specification, however ranks are placed on hosts.")
@pytest.mark.parametrize(
    ("ranks", "splits"),
    [(4, SPLITS), (8, [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]])],
    ids=["two by two", "four by two, and two by four"],
)
@on_ranks()
def test_hosts_get_the_specifications_bits_however_ranks_are_placed(rank, ranks, splits):
    assert [wrong_sums(rank, ranks, split, normal, KERNEL_DTYPES) for split in splits] == [[]] * len(splits)


@on_ranks(4)
def test_two_hosts_get_the_specifications_bits_of_any_dtype_bits_and_codec(rank, world_size):
    wrong = {"any bits": wrong_sums(rank, world_size, TWO_BY_TWO, bit_patterns, HALVES)}
    wrong["any dtype"] = wrong_sums(rank, world_size, TWO_BY_TWO, integers, ALL_DTYPES)
    for codec in CODECS:
        wrong[codec.text] = wrong_sums(rank, world_size, TWO_BY_TWO, normal, [torch.bfloat16, torch.float32], codec)
    wrong["any bits, coded"] = wrong_sums(rank, world_size, TWO_BY_TWO, bit_patterns, HALVES, CODECS[0])
    assert {what: found for what, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    ("dtype", "values", "hosts", "total"),
    [
        (torch.bfloat16, (256, 1, 1, 0), TWO_BY_TWO, 258),  # 257 is no bf16: only the sum of the hosts' sums is rounded
        (torch.float32, (2.0**24, 1, 1, 0), [[0, 3], [1, 2]], 2.0**24 + 2),  # the order of hosts decides
        (torch.float32, (2.0**24, 1, 1, 0), [[2, 1, 0], [3]], 2.0**24),  # a host's ranks are added in their own order
    ],
)
def test_the_ranks_of_a_host_are_added_then_the_hosts_and_the_sum_is_rounded_once(dtype, values, hosts, total):
    parts = [torch.tensor([value], dtype=dtype) for value in values]

    assert reference.hierarchical_allreduce(parts, hosts).item() == total


@on_ranks(4)
def test_every_kind_of_call_has_the_same_bits_and_closing_ends_the_groups(rank, world_size):
    hierarchical._CHUNK_NUMEL = CHUNK
    parts = parts_of(normal, world_size, 2 * CHUNK + 6, torch.bfloat16)
    expected = reference.hierarchical_allreduce(parts, TWO_BY_TWO)
    found = {}
    with Communicator(hosts=TWO_BY_TWO) as communicator:
        out = torch.empty_like(parts[rank])
        found["out"] = summed(communicator, parts[rank], out=out)
        inplace = parts[rank].clone()
        found["in place"] = summed(communicator, inplace, out=inplace)
        gaps = torch.zeros(len(expected), 2, dtype=torch.bfloat16)[:, 0].copy_(parts[rank])
        found["gaps"] = summed(communicator, gaps)
        found["shape"] = summed(communicator, parts[rank].view(2, -1)).view(-1)
        needs_gradient = parts[rank].clone().requires_grad_()
        summed(communicator, needs_gradient).backward(parts[rank])
        found["gradient"] = needs_gradient.grad
        found["codec to eight bits"] = summed(communicator, parts[rank], codec="int8")
        said = communicator.explain(parts[rank], algorithm="hierarchical")
        auto = communicator.explain(parts[rank]).algorithm
    with_codec = reference.hierarchical_allreduce(parts, TWO_BY_TWO, graphar.Codec(8))
    for what, y in found.items():
        assert same_bits(y, with_codec if "codec" in what else expected) == 0, what
    assert not with_codec.equal(expected)
    assert str(said) == "hierarchical: asked for: 2 host(s) of 2 rank(s), sums inside, then across"
    assert auto == "fallback"
    assert groups_left() == 1


def groups_left():
    return len(dist.distributed_c10d._world.pg_names)


@on_ranks(4)
def test_hosts_are_found_in_any_group_and_must_have_equally_many_ranks(rank, world_size):
    """In the default group, in a group of some ranks, and between hosts of unequal size."""
    hierarchical.host = lambda: f"host {rank % 2}"
    with Communicator() as communicator:
        said = communicator.explain(torch.ones(1), algorithm="hierarchical").reason
    assert said == "asked for: 2 host(s) of 2 rank(s), sums inside, then across"
    some = dist.new_group([0, 1, 3])
    if rank != 2:
        with Communicator(some) as communicator:
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=r": hosts must have equally many ranks, got \[1, 2\]$"):
                    summed(communicator, torch.ones(1))
        with Communicator(some, hosts=[[2], [0], [1]]) as communicator:
            assert summed(communicator, torch.full((5,), float(rank))).tolist() == [4.0] * 5
    with (
        Communicator(hosts=TWO_BY_TWO if rank else SPLITS[1]) as communicator,
        pytest.raises(CommunicatorError, match="ranks were given different hosts"),
    ):
        summed(communicator, torch.ones(1))


def averaged(rank, world_size, codec=None, bias=True):
    def gradients(model, ranks):
        ranks(normal(rank, 64, torch.float32).view(2, 32)).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias), nn.ReLU(), *([nn.Linear(48, 3)] if bias else []))
    alone = [gradient / world_size for gradient in gradients(model, model)]
    model.zero_grad()
    with Communicator(hosts=TWO_BY_TWO) as communicator:
        ranks, by = DistributedDataParallel(model), {"group": communicator, "algorithm": "hierarchical"}
        hook = graphar.ddp.quantized_hook(codec, **by) if codec else graphar.ddp.exact_hook(**by)
        ranks.register_comm_hook(None, hook)
        return alone, gradients(model, ranks)


@pytest.mark.promise("`hierarchical` has the bits of its own specification, however ranks are placed on hosts.")
@pytest.mark.parametrize(
    ("codec", "bias"),
    [(None, False), ("int4", False), ("int4", True)],
    ids=["exact", "rounded between hosts", "rounded beside exact ones"],
)
def test_gradients_are_the_specifications_bit_for_bit(codec, bias):
    results = run_ranks(averaged, 4, codec, bias)

    parts = list(zip(*(alone for alone, _ in results), strict=True))
    for _, found in results:
        for of_ranks, gradient in zip(parts, found, strict=True):
            if gradient.dim() > 1 and bias:  # the bucket also has the biases, at places that torch chooses
                continue
            of_hosts = None if gradient.dim() == 1 else codec
            assert same_bits(gradient, reference.hierarchical_allreduce(of_ranks, TWO_BY_TWO, of_hosts)) == 0


def wait_for_rank_three(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    communicator = Communicator(hosts=TWO_BY_TWO)
    summed(communicator, torch.ones(8))
    if rank == 3:
        store.wait(["gave up 0", "gave up 1", "gave up 2"])
        communicator.engine._failure = CommunicatorError("not with the others")
        communicator.close()
        return None
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout) as raised:
        summed(communicator, torch.ones(8), timeout_s=SHORT_S)
    took_s = time.monotonic() - begin
    store.set(f"gave up {rank}", "")
    with pytest.raises(CollectiveTimeout):
        summed(communicator, torch.ones(8))
    communicator.close()
    record = raised.value.record
    return took_s, record.algorithm, record.peer


@pytest.mark.promise("`hierarchical` has the bits of its own specification, however ranks are placed on hosts.")
def test_a_rank_that_does_not_come_is_named_on_both_hosts_in_bounded_time():
    *waited, _ = run_ranks(wait_for_rank_three, 4)

    for took_s, algorithm, peer in waited:
        assert took_s < 10
        assert (algorithm, peer) == ("hierarchical", 3)


@on_ranks(4)
def test_a_call_after_one_that_could_not_connect_has_the_right_groups(rank, world_size):
    make, left = hierarchical._new_group, ["across"] if rank % 2 else []

    def make_or_fail(communicator, what, ranks):
        if what in left:
            left.remove(what)
            raise RuntimeError("connection refused")
        return make(communicator, what, ranks)

    hierarchical._new_group = make_or_fail
    with Communicator(hosts=TWO_BY_TWO) as communicator:
        with pytest.raises(RuntimeError, match="connection refused"):
            summed(communicator, torch.ones(8))
        found = summed(communicator, torch.full((3,), float(rank)))
    assert (found.tolist(), groups_left()) == ([6.0] * 3, 1)


def test_devices_of_one_process_have_no_hosts():
    with Communicator(devices=["cpu", "cpu"]) as communicator, pytest.raises(UnsupportedError, match="of one host"):
        summed(communicator, [torch.ones(3), torch.ones(3)])
    with pytest.raises(ValueError, match="hosts needs a process group"):
        Communicator(devices=["cpu", "cpu"], hosts=[[0], [1]])


@pytest.mark.parametrize(
    ("bad", "kind", "message"),
    [
        (2, TypeError, "a list with each host's ranks, got 2"),
        ("01", TypeError, "got '01'"),
        ([0, 1], TypeError, r"got \[0, 1\]"),
        ([[0, 1.0]], TypeError, "got"),
        ([[0]], ValueError, "each of 2 ranks once"),
        ([[0, 1], []], ValueError, "each of 2 ranks once"),
        ([[0, 1], [1]], ValueError, "each of 2 ranks once"),
        ([[0], [2]], ValueError, "each of 2 ranks once"),
    ],
    ids=str,
)
def test_hosts_that_are_none_are_refused(bad, kind, message):
    with pytest.raises(kind, match=message):
        hierarchical.check_hosts(bad, 2)


def test_the_ranks_of_a_host_are_known_in_their_order_and_hosts_as_they_are_named():
    assert hierarchical.check_hosts(([3, 2], (1, 0)), 4) == [[2, 3], [0, 1]]


def refusals(rank, world_size):
    stochastic = graphar.Codec(4, rounding="stochastic")
    x, found = torch.ones(2048), []
    with Communicator(hosts=[[0], [1]]) as communicator:
        for options in ({"codec": stochastic}, {"codec": "int8", "residual": torch.zeros(2048)}, {"epilogue": "-v"}):
            with pytest.raises(UnsupportedError) as raised:
                summed(communicator, x, **options)
            found.append(str(raised.value))
    return found


def test_what_a_hierarchy_cannot_do_is_refused():
    (stochastic, residual, epilogue), _ = run_ranks(refusals, 2)

    assert "without stochastic rounding" in stochastic
    assert "without a residual" in residual
    assert "hierarchical has no kernel with an epilogue" in epilogue


@pytest.mark.parametrize("lossless", [True, False])
def test_the_communicator_inside_a_host_has_the_same_setting_of_lossless_compression(group_of, lossless):
    group_of(4)
    with Communicator(lossless=lossless) as communicator:
        inside = communicator.engine.hierarchy._make_kernels(dist.group.WORLD, 1.0)

        assert inside.lossless is lossless
        inside.close()
