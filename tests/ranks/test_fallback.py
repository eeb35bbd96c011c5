"""The fallback between processes: pieces are parts of one tensor, and gloo itself has the call's deadline."""

import itertools
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import graphar
from graphar import Codec, Communicator, Epilogue, UnsupportedError, reference
from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK
from graphar.plan.work import Parts, Sum
from graphar.ranks.cpu import fallback, reduction, without_kernels
from graphar.ranks.cpu.messages import Messages
from graphar.ranks.cpu.transport import Group
from tests.cases import normal, same_bits
from tests.processes import on_ranks

RANKS = 2
SHAPE = (12, 301)
STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
PLACES = Epilogue("v + row * 7 - col * 3 + index")


def inputs():
    return [normal(rank, 12 * 301, torch.float32).view(SHAPE) for rank in range(RANKS)]


@pytest.mark.parametrize("by_messages", [True, False], ids=["messages", "process group"])
@on_ranks(RANKS)
def test_neither_random_numbers_nor_places_begin_again_with_a_piece(rank, world_size, by_messages):
    fallback._CHUNK_NUMEL = 1024
    for transport in (Messages, Group):
        transport.small_nbytes, transport.chunk_nbytes, transport.two_shot_nbytes = 0, 1000, 1000
    if not by_messages:
        without_kernels.messages_of = lambda group, name: None
    x, found = inputs()[rank], []
    for options in ({"codec": STOCHASTIC}, {"epilogue": PLACES}, {}):
        for op in (graphar.allreduce, graphar.reducescatter):
            with Communicator() as communicator:  # random numbers depend on the calls before
                found.append(op(x, communicator, **options))
    found = [*found, graphar.allgather(x[: rank + 1], sizes=[1, 2])]
    xs = inputs()
    with Communicator(devices=["cpu"] * RANKS) as whole:
        placed = whole.allreduce(xs, epilogue=PLACES)[0], whole.reducescatter(xs, epilogue=PLACES)
    parts = reference.quantized_reducescatter(xs, STOCHASTIC, STOCHASTIC.seed)
    total = reference.quantized_allreduce(xs, STOCHASTIC, STOCHASTIC.seed)
    plain = [reference.allreduce(xs), reference.reducescatter(xs)[rank]]
    expected = [total, parts[rank], placed[0], placed[1][rank], *plain, torch.cat([xs[0][:1], xs[1][:2]])]
    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * 7


@on_ranks(3)
def test_codes_go_to_owners_alone_and_a_chunk_is_on_its_way_before_the_last_one_is_summed(rank, world_size):
    fallback._CHUNK_NUMEL, sent, order, post = 1024, [0], [], Messages._post
    Messages.small_nbytes = 0

    def counted(self, start, x, peer, tag):
        if start.__name__ == "send":
            sent[0] += x.nbytes
            order.append(tag == self._tag_of_call)
        return post(self, start, x, peer, tag)

    Messages._post = counted
    graphar.allreduce(torch.ones(3 * world_size * 1024), codec="int4")
    of_sum, sent[0] = sent[0], 0
    graphar.reducescatter(torch.ones(3 * world_size * 1024), codec="int4")
    of_parts, order = sent[0], "".join(".S"[one] for one in order)
    coded = graphar.Codec().wire_nbytes(3 * 1024)  # of a rank's shard, in three messages
    assert (of_sum, of_parts) == (coded * 4, coded * 2)
    assert order == "SSSS..SS...." + "S" * 6


INFINITIES = [float("inf"), float("-inf"), float("nan"), -0.0, 1e-40, 65504.0, 3e38]


@pytest.mark.parametrize("dtype", ACCUMULATION_DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("more", [[], INFINITIES], ids=["finite", "with NaNs"])
@pytest.mark.parametrize("into", [None, 0, 1], ids=["another tensor", "the first", "the second"])
def test_sums_on_the_cpu_have_the_bits_of_the_specification(dtype, world_size, more, into, monkeypatch):
    monkeypatch.setattr(reduction, "_PIECE", 300)
    parts = [normal(rank, 1000, torch.float32).mul(100) for rank in range(world_size)]
    if more and dtype.is_floating_point:
        parts = [torch.cat([part, torch.tensor(more).roll(rank)]) for rank, part in enumerate(parts)]
    parts = [part.to(dtype) for part in parts]
    expected, out = reference.allreduce(parts), torch.empty_like(parts[0]) if into is None else parts[into]

    reduction.sum_into(out, parts)

    assert same_bits(out, expected) == 0


class Waits:
    """Stands in for a process group of two ranks and records its deadlines."""

    def __init__(self):
        self.of_options, self.of_waits = [], []

    def size(self):
        return RANKS

    def rank(self):
        return 0

    def _get_backend(self, device):
        return None

    def alltoall_base(self, received, sent, received_sizes, sent_sizes, options):
        self.of_options.append(options.timeout)
        return SimpleNamespace(wait=self.of_waits.append)

    def allgather(self, received, sent, options):
        return self.alltoall_base(received, sent, [], [], options)


@pytest.mark.parametrize(
    ("op", "codec", "small_nbytes", "messages"),
    [
        ("allreduce", "", 32, 1),
        ("allreduce", "", 31, 2),
        ("allreduce", "int4", 0, 2),
        ("reducescatter", "", 0, 1),
        ("reducescatter", "int4", 0, 1),
        ("allgather", "", 0, 1),
    ],
)
def test_gloo_has_the_deadline_in_its_options_and_waits_no_longer(monkeypatch, op, codec, small_nbytes, messages):
    monkeypatch.setattr(Group, "small_nbytes", small_nbytes)
    group, x, out = Waits(), torch.zeros(8), torch.zeros(16 if op == "allgather" else 8)
    counts = {"reducescatter": (8, 0), "allgather": (8, 8)}.get(op)
    work = Parts(op, counts, codec) if counts else Sum(8, codec)

    fallback.bind(Call.of(work, x), Group(group, 7.0), itertools.count())([Operands((x,), (out,))])

    assert len(group.of_options) == messages
    assert set(group.of_options) == set(group.of_waits) == {timedelta(seconds=7)}


def with_option(kind, **required):
    """A kind of work with one option more, ``halved``, which nothing but its author knows."""
    fields = [*kind.__annotations__.items(), ("halved", "bool")]
    made = NamedTuple(kind.__name__, fields)
    made.__new__.__defaults__ = (*kind._field_defaults.values(), False)
    for name, one in vars(kind).items():
        if name not in vars(made):
            setattr(made, name, one)
    return made(**required)


WORKS = {
    "sum": (with_option(Sum, numel=8), 8),
    "sum with a codec": (with_option(Sum, numel=8, codec="int8"), 8),
    "large sum": (with_option(Sum, numel=1 << 17), 1 << 17),
    "reducescatter": (with_option(Parts, op="reducescatter", parts=(4, 4)), 4),
    "allgather": (with_option(Parts, op="allgather", parts=(8, 8)), 16),
}


@pytest.mark.parametrize("name", WORKS)
def test_an_option_that_only_kernels_know_is_refused(name):
    work, out_numel = WORKS[name]
    x = torch.ones(work.parts[0] if work.op != "reducescatter" else 8)
    operands = [Operands((x,), (torch.empty(out_numel),)) for _ in range(RANKS)]
    with Communicator(devices=["cpu"] * RANKS) as communicator:
        bind = communicator.engine.without_kernels.bind
        bind(Call.of(work, x), x, FALLBACK, 5.0)(operands)
        with pytest.raises(UnsupportedError, match=r"without kernels there is no .*halved=True"):
            bind(Call.of(work._replace(halved=True), x), x, FALLBACK, 5.0)

    assert operands[0].outputs[0].tolist() == pytest.approx([1.0 if name == "allgather" else 2.0] * out_numel, abs=1e-3)
