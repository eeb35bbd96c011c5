"""Every op with every option gives the specification's bits, on the CPU: in lists, and between processes over gloo."""

import functools
import math

import pytest
import torch

import graphar
from graphar.ranks.cpu import fallback
from graphar.ranks.cpu.messages import Messages
from tests.cases import (
    EVERY_16_BIT_PATTERN,
    KERNEL_DTYPES,
    LARGE_NUMEL,
    LAYOUTS,
    bit_patterns,
    lay_out,
    normal,
    same_bits,
)
from tests.ops.conformance import ALLGATHER, ALLREDUCE, FORMS, PLAIN, REDUCESCATTER, copies, every_form
from tests.processes import on_ranks, run_ranks

TREES = [form for form in (*ALLREDUCE, *REDUCESCATTER) if form.label.startswith("tree")]
WITH_OUT = [form for form in FORMS if form.takes_out]
with_out = pytest.mark.parametrize("form", WITH_OUT, ids=str)
VIEWS = {layout: functools.partial(lay_out, layout=layout) for layout in LAYOUTS[1:]}
VIEWS["negated"] = lambda x: torch._neg_view(-x) if x.dtype.is_floating_point and x.dtype.itemsize > 1 else x


def wrong(found, expected):
    """How many elements differ, by rank and result."""
    return [[same_bits(*pair) for pair in zip(*ranks, strict=True)] for ranks in zip(found, expected, strict=True)]


def assert_bits(found, expected, what):
    assert not any(map(any, wrong(found, expected))), what
    assert all(y.is_contiguous() for ys in found for y in ys), what


def viewed(form, tensors, view):
    """The tensors of a call as ``view`` makes them. Tensors that the call writes stay contiguous."""
    return {name: xs if name in form.writes else [view(x) for x in xs] for name, xs in tensors.items()}


def questions(form, world_size):
    """The shapes and dtypes to test: all between three ranks, or four of a tree, else the last shape in one dtype."""
    every = world_size == form.ranks(3)
    yield from ((form.shapes[-1], dtype) for dtype in form.dtypes[: None if every else 1])
    yield from ((shape, form.dtypes[0]) for shape in form.shapes[:-1] if every)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@every_form
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_rank_of_a_list_gets_the_specifications_bits(form, ranks):
    for question in questions(form, form.ranks(ranks)):
        tensors = form.tensors(form.ranks(ranks), *question)
        expected = form.expected(copies(tensors)) if ranks > 1 or not form.writes else None
        given = copies(tensors)

        with graphar.Communicator(devices=["cpu"] * form.ranks(ranks)) as communicator:
            found = form.in_list(given, group=communicator)

        if expected is not None:
            assert_bits(found, expected, question)
        assert_kept_apart(form, given, tensors, found)


def assert_kept_apart(form, given, tensors, found):
    """Tensors that the call does not write are unchanged, and no result shares memory with a tensor."""
    kept = [name for name in tensors if name not in form.writes]
    assert not any(map(any, wrong([given[name] for name in kept], [tensors[name] for name in kept])))
    of_calls = [x for xs in given.values() for x in xs] + [y for ys in found for y in ys[: len(ys) - len(form.writes)]]
    memory = [x.untyped_storage().data_ptr() for x in of_calls if x.numel()]
    assert len(set(memory)) == len(memory)


@every_form
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_list_takes_tensors_however_they_lie_in_memory(form, view):
    tensors = form.tensors(form.ranks(3), fill=normal)
    expected = form.expected(copies(tensors))

    with graphar.Communicator(devices=["cpu"] * form.ranks(3)) as communicator:
        found = form.in_list(viewed(form, tensors, view), group=communicator)

    assert_bits(found, expected, form)


@pytest.mark.promise("The CPU gives the same bits, and so do compiled, captured and replayed calls.")
@pytest.mark.parametrize("form", PLAIN[:3], ids=str)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_list_takes_any_bits(form, ranks):
    for dtype in KERNEL_DTYPES:
        tensors = form.tensors(ranks, (EVERY_16_BIT_PATTERN,), dtype, bit_patterns)

        assert_bits(form.in_list(tensors), form.expected(tensors), dtype)


@pytest.mark.parametrize("form", PLAIN[:3], ids=str)
def test_a_list_takes_large_tensors(form):
    tensors = form.tensors(2, (LARGE_NUMEL,), torch.bfloat16, normal)

    assert_bits(form.in_list(tensors), form.expected(tensors), form)


@with_out
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_list_is_written_to_out_and_nowhere_else(form, layout):
    tensors = form.tensors(form.ranks(3))
    expected = form.expected(tensors)
    with graphar.Communicator(devices=["cpu"] * form.ranks(3)) as communicator:
        outs = [lay_out(torch.full_like(y, 99), layout) for (y,) in expected]
        rooms = [out.untyped_storage() for out in outs]
        beside = [torch.tensor([], dtype=y.dtype).set_(room) for (y,), room in zip(expected, rooms, strict=True)]
        for room in beside:
            room.fill_(99)

        returned = form.op(**form.arguments(tensors), out=outs, group=communicator)

    assert [one is out for one, out in zip(returned, outs, strict=True)] == [True] * len(outs)
    assert not any(map(any, wrong([(out,) for out in outs], expected)))
    assert [int((room != 99).sum()) <= out.numel() for room, out in zip(beside, outs, strict=True)] == [True] * len(
        outs
    )
    assert all(bool((out.fill_(99) == 99).all()) for out in outs)
    assert all(bool((room == 99).all()) for room in beside)  # with the outs as they were, nothing else has changed


def answer(rank, world_size):
    """The results of each form on this rank: for each question, for strided tensors, in repeated calls and in ``out``.

    The last of three equal calls repeats the second.
    """
    found = {}
    for form in [form for form in FORMS if world_size in (2, form.ranks(3))]:
        calls = [form.tensors(world_size, *question) for question in questions(form, world_size)]
        calls.append(viewed(form, form.tensors(world_size, fill=normal), VIEWS["transposed"]))
        results = [call_anew(form, rank, tensors) for tensors in calls]
        if form.takes_out:
            results.append(written_to_out(form, rank, form.tensors(world_size)))
        results += [form.of_rank(rank, calls[0]) for _ in range(2 * form.is_steady)]
        found[str(form)] = [list(map(packed, ys)) for ys in results]
    return found


def packed(y):
    """A result in a form that pickle takes: it refuses tensors of some dtypes."""
    assert y.is_contiguous()
    return str(y.dtype), tuple(y.shape), y.reshape(-1).view(torch.uint8)


def call_anew(form, rank, tensors):
    if form.is_steady:
        return form.of_rank(rank, tensors)
    with graphar.Communicator() as communicator:
        return form.of_rank(rank, tensors, group=communicator)


def written_to_out(form, rank, tensors):
    (like,) = call_anew(form, rank, tensors)
    outs = [lay_out(torch.full_like(like, 99), layout) for layout in LAYOUTS]
    with graphar.Communicator() as communicator:
        assert form.of_rank(rank, tensors, out=outs[0], group=communicator)[0] is outs[0]
    for out in outs[1:]:
        with graphar.Communicator() as communicator:
            form.of_rank(rank, tensors, out=out, group=communicator)
        assert same_bits(out, outs[0]) == 0
    return (outs[0],)


@pytest.fixture(scope="module")
def answers():
    """The answers of all ranks by world size. The ranks of a world are started once."""
    return functools.cache(lambda world_size: run_ranks(answer, world_size, timeout_s=120))


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.promise("An epilogue has the bits of its specification; only expressions reach the compiler.")
@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@pytest.mark.parametrize(
    ("form", "world_size"),
    [(form, world_size) for form in FORMS for world_size in (2, form.ranks(3))],
    ids=str,
)
def test_every_process_gets_the_specifications_bits(answers, form, world_size):
    given = [form.tensors(world_size, *question) for question in questions(form, world_size)]
    given.append(form.tensors(world_size, fill=normal))
    given += [form.tensors(world_size)] * form.takes_out

    expected = [form.expected(tensors) for tensors in given]
    expected += expected[:1] * 2 * form.is_steady

    for rank, found in enumerate(answers(world_size)):
        for mine, wanted in zip(found[str(form)], expected, strict=True):
            for (*kind, data), (*wanted_kind, wanted_data) in zip(mine, map(packed, wanted[rank]), strict=True):
                assert kind == wanted_kind
                assert torch.equal(data, wanted_data)


@on_ranks(2, timeout_s=120)
def test_processes_send_large_tensors_in_chunks(rank, world_size):
    found = {}
    fallback._CHUNK_NUMEL = 1024
    for form in (*ALLREDUCE, *REDUCESCATTER, *ALLGATHER):
        for shape in form.shapes:
            nbytes = 100 if math.prod(shape) < 1024 else 1000  # a piece takes as long as a call
            Messages.chunk_nbytes = Messages.two_shot_nbytes = nbytes
            tensors = form.tensors(world_size, shape)
            expected = form.expected(copies(tensors))[rank]
            ys = call_anew(form, rank, tensors)
            found.setdefault(str(form), []).extend(same_bits(*pair) for pair in zip(ys, expected, strict=True))
    assert {name for name, differ in found.items() if any(differ)} == set()
    assert len(found) == len(ALLREDUCE) + len(REDUCESCATTER) + len(ALLGATHER)


def of_many(world_size):
    return [form for form in (*PLAIN, *TREES) if world_size != 5 or not form.is_tree]


@pytest.mark.parametrize("world_size", [4, 5, 8])
@on_ranks(timeout_s=120)
def test_many_processes_get_the_specifications_bits(rank, world_size):
    found = {}
    for small_nbytes in (Messages.small_nbytes, 0):
        Messages.small_nbytes = small_nbytes
        for form in of_many(world_size):
            tensors = form.tensors(world_size)
            pairs = zip(form.of_rank(rank, tensors), form.expected(tensors)[rank], strict=True)
            found.setdefault(str(form), []).extend(same_bits(*pair) for pair in pairs)
    assert {name for name, differ in found.items() if any(differ)} == set()
    assert len(found) == len(of_many(world_size))
