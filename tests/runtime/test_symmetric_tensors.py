"""graphar.empty on the CPU, and which calls are direct; host memory stands in for that of GPUs."""

import ctypes

import pytest
import torch

import graphar
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan import select
from graphar.plan.call import Call
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.select import Facts
from graphar.plan.tables import shipped_table
from graphar.plan.work import Sum
from graphar.ranks.rendezvous import Alone
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.launches import put_agreed
from graphar.runtime.memory import symmetric_tensors
from graphar.runtime.memory.peer_memory import SharedBuffer
from graphar.runtime.memory.symmetric_tensors import SymmetricTensors
from graphar.runtime.runner import Runner
from tests.cases import integers, same_bits
from tests.processes import on_ranks

BLOCK_NBYTES = 2 << 20


@pytest.mark.parametrize(
    ("size", "shape"),
    [((3,), (3,)), ((2, 3), (2, 3)), (([2, 3],), (2, 3)), ((torch.Size([4]),), (4,)), (((),), ()), ((0, 5), (0, 5))],
    ids=str,
)
def test_sizes_come_in_the_forms_of_torch(pair, size, shape):
    tensors = pair.empty(*size, dtype=torch.bfloat16)

    assert [(one.shape, one.dtype, one.device.type) for one in tensors] == [(shape, torch.bfloat16, "cpu")] * 2


def test_the_dtype_is_by_default_that_of_torch(pair):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert pair.empty(3)[0].dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_it_serves_as_input_and_output_on_the_cpu(pair):
    xs, outs = pair.empty(100), pair.empty(100)
    parts = [integers(rank, 100, torch.float32) for rank in range(2)]
    for x, part in zip(xs, parts, strict=True):
        x.copy_(part)

    pair.allreduce(xs, out=outs)

    for out in outs:
        assert same_bits(out, graphar.reference.allreduce(parts)) == 0
    assert "symmetric" not in pair.explain(xs, out=outs).reason


@on_ranks(2)
def test_processes_on_the_cpu_get_ordinary_tensors(rank, world_size):
    out = graphar.empty(5, dtype=torch.float32)
    graphar.allreduce(torch.ones(5), out=out)
    assert (out.device.type, out.tolist()) == ("cpu", [2.0] * 5)


@pytest.mark.parametrize(
    ("size", "options", "error", "message"),
    [
        ((-1,), {}, ValueError, "empty: Trying to create tensor with negative dimension -1"),
        ((2, -3), {}, ValueError, "empty: Trying to create tensor with negative dimension -3"),
        ((1 << 62, 4), {}, ValueError, "empty: Storage size calculation overflowed"),
        ((2.5,), {}, TypeError, r"must be tuple of ints, not float|got \(float"),
        ((), {}, TypeError, r'"size"|got \(device'),
        ((2,), {"dtype": "bf16"}, TypeError, r"must be torch.dtype, not str|dtype=str"),
    ],
)
def test_a_tensor_that_torch_would_not_make_is_refused(pair, size, options, error, message):
    with pytest.raises(error, match=message):
        pair.empty(*size, **options)


def test_a_tensor_made_during_capture_is_refused(monkeypatch):
    monkeypatch.setattr("graphar.ranks.capture.is_capturing", lambda device: True)
    communicator = graphar.Communicator(devices=["cuda:0", "cuda:1"])
    try:
        with pytest.raises(graphar.CommunicatorError, match="cannot be captured into a graph"):
            communicator.empty(3)
    finally:
        communicator.close()


def test_explain_takes_the_outputs_a_call_would_take(pair):
    with pytest.raises(ValueError, match="allreduce: out must be a list of 2 tensors"):
        pair.explain([torch.ones(2)] * 2, out=[torch.ones(2)])


class HostMemory:
    """Stands in for the symmetric memory of two ranks: memory of this process on the CPU."""

    def __init__(self) -> None:
        self.nbytes = []
        self._kept = []

    def allocate(self, nbytes):
        both = [torch.empty(nbytes + BLOCK_NBYTES, dtype=torch.uint8) for _ in range(2)]
        self.nbytes.append(nbytes)
        self._kept += both
        return SharedBuffer(nbytes, [-(-one.data_ptr() // BLOCK_NBYTES) * BLOCK_NBYTES for one in both])


@pytest.fixture
def make(monkeypatch):
    """Makes the symmetric tensors of a communicator with the given ranks in this process, over HostMemory."""

    def tensor_at(pointer, device, like):
        raw = (ctypes.c_char * like.nbytes).from_address(pointer)
        return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)

    monkeypatch.setattr(symmetric_tensors, "tensor_at", tensor_at)
    return lambda *ranks: SymmetricTensors({rank: rank for rank in ranks}, HostMemory())


def like(numel):
    return torch.empty(numel, dtype=torch.bfloat16, device="meta")


def test_an_allocation_is_whole_blocks(make):
    symmetric = make(0, 1)

    for numel in (1, BLOCK_NBYTES // 2, BLOCK_NBYTES // 2 + 1):
        symmetric.empty(like(numel))

    assert symmetric._memory.nbytes == [BLOCK_NBYTES, BLOCK_NBYTES, 2 * BLOCK_NBYTES]
    assert len(symmetric.buffers) == 3


def test_symmetric_tensors_are_recognised_among_others(make):
    symmetric = make(1)
    made = [symmetric.empty(like(100))[0] for _ in range(2)]
    ordinary = torch.empty(100, dtype=torch.bfloat16)

    assert [symmetric.hold(out) for out in (*made, ordinary)] == [True, True, False]


def test_a_cached_answer_about_a_place_is_dropped_once_there_is_more_memory(make, monkeypatch):
    symmetric = make(1)
    (memory,) = symmetric.empty(like(100))
    out = memory[1:9]  # 2 bytes in: packs cannot be stored there
    asked, found = [], symmetric._hold
    monkeypatch.setattr(symmetric, "_hold", lambda tensors: asked.append(tensors) or found(tensors))

    for _ in range(2):
        assert not symmetric.hold(out)
    assert len(asked) == 1
    symmetric.empty(like(100))
    assert not symmetric.hold(out)
    assert len(asked) == 2


def test_views_that_packs_can_be_stored_to_are_symmetric(make):
    symmetric = make(0)
    (out,) = symmetric.empty(like(100))

    assert symmetric.hold(out[8:16])
    assert symmetric.hold(out.view(10, 10)[4:])  # from element 40 on
    assert not symmetric.hold(out[1:9])  # 2 bytes in
    assert not symmetric.hold(out[:16:2])  # with gaps


def test_lists_are_symmetric_at_equal_offsets_only(make):
    symmetric = make(0, 1)
    a, b = symmetric.empty(like(100))
    others = symmetric.empty(like(100))
    ordinary = torch.empty(8, dtype=torch.bfloat16)

    assert symmetric.hold([a[8:16], b[8:16]])
    assert not symmetric.hold([a[8:16], b[16:24]])
    assert not symmetric.hold([b, a])
    assert not symmetric.hold([a, others[1]])
    assert not symmetric.hold([a[:8], ordinary])
    assert not symmetric.hold([ordinary, ordinary])


def test_the_memory_past_a_tensor_belongs_to_none(make):
    symmetric = make(0)
    symmetric.empty(like(100))
    start = symmetric.buffers[0].pointers[0]

    assert [bool(symmetric.where(start + at)[0]) for at in (-1, BLOCK_NBYTES - 1, BLOCK_NBYTES)] == [False, True, False]


def test_a_launch_is_told_where_its_output_lies_on_every_rank(make):
    symmetric = make(1)
    (tensor,) = symmetric.empty(like(1000))
    ranks = symmetric.buffers[0].pointers
    arguments = Arguments()
    put = symmetric.put_peers(arguments)

    for offset in (0, 0, 160, 0):
        pointer = tensor.data_ptr() + offset
        arguments.input, arguments.output = 7, pointer
        put()

        assert (arguments.input, arguments.output) == (7, pointer)
        assert list(arguments.peer_output) == [ranks[0] + offset, ranks[1] + offset] + [0] * (MAX_RANKS - 2)


@pytest.mark.parametrize("numbers", [(), (0.5,)], ids=["no numbers", "numbers"])
def test_ranks_agree_on_a_call_only_if_it_accesses_one_tensor_at_one_offset(make, numbers):
    """The tensors of both ranks were made by the same calls, whose memory lies elsewhere in each process."""
    fingerprints = []
    for rank, places in enumerate([(0, 0), (1, 0), (0, 16)] * 2):
        symmetric = make(rank % 2)
        made = [symmetric.empty(like(1000))[0] for _ in range(2)]
        runner, arguments = Runner([], 2, None, None, Alone(), None), Arguments()
        epilogue = numbers and Pointwise("v * a", (), 1000)
        put = put_agreed(runner, arguments, "a call", epilogue, None, symmetric.put_peers(arguments))
        number, offset = places
        for arguments.output in (made[0].data_ptr() + 32, made[number].data_ptr() + offset):
            put((), (), numbers, None)
        fingerprints.append(arguments.fingerprint)

    assert fingerprints[:3] == fingerprints[3:]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize("sizes", [(8, 9), (0, 4)], ids=str)
@on_ranks(2)
def test_ranks_that_ask_for_different_tensors_are_told_so_and_go_on(rank, world_size, sizes):
    with pytest.raises(ValueError, match="empty: ranks must ask for") as error:
        graphar.empty(sizes[rank], dtype=torch.bfloat16)
    asked = [f"[{size}] of torch.bfloat16" for size in sizes]
    said = f"empty: ranks must ask for the same shape and dtype, got, in rank order, {asked}"
    assert (str(error.value), graphar.empty(3).shape) == (said, (3,))


H200 = shipped_table("nvidia_h200")


INTO = " bytes, straight into the symmetric output"


@pytest.mark.parametrize(
    ("algorithm", "numel", "symmetric", "words"),
    [
        ("auto", 64 << 20, True, INTO),
        ("two_shot_pipelined", 8, True, INTO),
        ("auto", 64 << 20, False, ""),
        ("auto", 8, True, ""),
        ("two_shot_pipelined", 8, False, ""),
        ("one_shot", 8, True, ""),
        ("two_shot_push", 8, True, ""),
        ("two_shot_lossless", 64 << 20, True, ""),  # which auto takes for bf16
    ],
)
def test_a_call_is_direct_and_says_so_where_its_algorithm_writes_peers_outputs(algorithm, numel, symmetric, words):
    asked, dtype = ("auto", torch.bfloat16) if algorithm == "two_shot_lossless" else (algorithm, torch.float16)
    call = Call(Sum(numel), dtype, 0, asked, symmetric=symmetric)

    config, reason = select.select(call, Facts(2, H200, H200.chip))

    assert (config.direct, "symmetric" in reason) == (bool(words), bool(words))
    assert reason.endswith(words)
    assert algorithm in ("auto", config.algorithm)
