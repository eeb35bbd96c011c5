"""The order and the streams in which panels are multiplied and summed. Stand-ins for streams record it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.errors import UnsupportedError
from graphar.matmul import overlap
from graphar.matmul.operands import MatmulOperands
from graphar.matmul.overlap import Beside, Panels
from graphar.matmul.tensor_maps import matrix_of
from graphar.numerics.partitions import panels
from graphar.plan.call import Call, Operands
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, Sum
from graphar.runtime.bind import collective
from graphar.runtime.plan import Plan

ENGINE = SimpleNamespace(table=shipped_table("nvidia_h200"))


class Recorder:
    """Records events in order: (stream, what)."""

    def __init__(self, monkeypatch, operands):
        self.events, self.current, self.operands = [], "main", operands
        streams = {name: self._stream(name) for name in ("main", "side")}
        monkeypatch.setattr(overlap, "streams_of", lambda device: (streams["main"], streams["side"]))
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(overlap, "_bind", lambda engine, one, cut, products, blocks, only_own: self._multiply)

    def _stream(self, name):
        wait = lambda other: self.events.append((name, f"wait for {other.name}"))  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait)

    @contextlib.contextmanager
    def _enter(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def _multiply(self, at):
        self.events.append((self.current, f"multiply {at}"))

    def sum_panel(self, at, beside):
        self.events.append((self.current, f"sum {at} with {beside.blocks if beside else 'all'}"))

    def run(self, partition, count):
        cut = panels("op", partition, count, [8], 8)
        products = [[None] for _ in cut]
        how = Panels(None, cut, beside=Beside(blocks=24))
        how._multiply_and_sum(ENGINE, [self.operands], products, self.sum_panel)


@pytest.fixture
def recorder(monkeypatch):
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0")
    return Recorder(monkeypatch, MatmulOperands(on_gpu, None, None, None))


def test_one_panel_stays_on_the_callers_stream(recorder):
    recorder.run("none", None)

    assert recorder.events == [("main", "multiply 0"), ("main", "sum 0 with all")]


def test_the_next_panel_is_multiplied_while_one_is_summed(recorder):
    recorder.run("split_m", 3)

    assert recorder.events == [
        ("main", "multiply 0"),
        ("side", "wait for main"),
        ("main", "sum 0 with 24"),
        ("side", "multiply 1"),
        ("main", "wait for side"),
        ("main", "sum 1 with 24"),
        ("side", "multiply 2"),
        ("main", "wait for side"),
        ("main", "sum 2 with all"),
        ("main", "wait for side"),
    ]


def test_a_sum_that_fails_leaves_nothing_running_beside_the_callers_stream(recorder):
    def fail(at, beside):
        raise RuntimeError("a rank did not come")

    recorder.sum_panel = fail
    with pytest.raises(RuntimeError, match="a rank did not come"):
        recorder.run("split_m", 2)

    assert recorder.events[-1] == ("main", "wait for side")


@pytest.mark.parametrize("offset", [0, 1])
def test_sums_of_whole_rows_are_made_where_the_result_lies_if_that_is_aligned(offset):
    out = torch.zeros(8 * 16 + 4)[offset : offset + 8 * 16].view(8, 16)
    one = MatmulOperands(torch.ones(8, 2), torch.ones(16, 2), None, out)
    cut = panels("op", "split_m", 2, [8], 16)

    place = overlap._place(one, cut, cut[1], 0, cut[1].shape)

    assert (place.data_ptr() == one.out[4:].data_ptr()) == (offset == 0)
    assert place.data_ptr() % 16 == 0
    assert place.is_contiguous()


def test_a_result_at_any_address_takes_the_sum():
    a, w = [torch.ones(3, 8)] * 2, [torch.ones(16, 8)] * 2
    outs = [torch.zeros(3 * 16 + 1)[1:].view(3, 16) for _ in a]

    for partition in ("none", "split_m", "split_n"):
        graphar.fused_matmul_allreduce(a, w, out=outs, partition=partition)
        assert all((out == 16).all() for out in outs)
        [out.zero_() for out in outs]


# ---- whose matmul ---------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


def on_gpu(*shape):
    return torch.ones(shape).as_subclass(OnGpu)


@pytest.fixture
def own(monkeypatch):
    """Stands in for graphar's matmul and records the operands' shapes and the SMs of each call."""
    made = []

    def bind(a, w, out, sms=None):
        made.append((list(a.shape), list(w.shape), sms))
        return lambda stream: out.copy_(a @ w.t())

    fake = SimpleNamespace(bind=bind, why_not=lambda *step: "", sm_count=lambda device: 132, made=made)
    monkeypatch.setattr(overlap, "gemm", fake)
    monkeypatch.setattr(overlap, "launcher", fake)
    monkeypatch.setattr(overlap, "_missing_software", lambda: "")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return fake


def multiply(a, w, partition, count, parts, only_own=False):
    """The products of all panels."""
    cut = panels("op", partition, count, parts, len(w))
    products = [torch.zeros(panel.shape) for panel in cut]
    run = overlap._bind(ENGINE, MatmulOperands(a, w, None, None), cut, products, 24, only_own)
    for at in range(len(cut)):
        run(at)
    return products


def test_the_first_panel_has_all_sms_and_later_ones_leave_some_to_the_sum(own):
    products = multiply(on_gpu(128, 2), on_gpu(16, 2), "split_m", 3, [128])

    assert own.made == [([42, 2], [16, 2], None), ([42, 2], [16, 2], 108), ([44, 2], [16, 2], 108)]
    assert all((product == 2).all() for product in products)


def test_one_panel_of_many_rows_takes_torchs_matmul_and_cuts_of_it_graphars(own):
    whole = multiply(on_gpu(2048, 2), on_gpu(16, 2), "none", None, [2048])
    assert own.made == []

    cut = multiply(on_gpu(2048, 2), on_gpu(16, 2), "split_m", 2, [2048])
    assert len(own.made) == 2
    assert all((product == 2).all() for product in whole + cut)


@pytest.mark.parametrize("rows", [64, 2047])
def test_one_panel_of_fewer_rows_takes_graphars_matmul(own, rows):
    multiply(on_gpu(rows, 2), on_gpu(16, 2), "none", None, [rows])

    assert own.made == [([rows, 2], [16, 2], None)]


def test_where_graphars_matmul_cannot_multiply_one_panel_torchs_multiplies_all(own):
    own.why_not = lambda a, w, out: "too many rows" if len(a) == 44 else ""

    products = multiply(on_gpu(128, 2), on_gpu(16, 2), "split_m", 3, [128])

    assert own.made == []
    assert all((product == 2).all() for product in products)


def test_a_gpu_without_sms_to_spare_multiplies_on_one(own):
    own.sm_count = lambda device: 24

    multiply(on_gpu(128, 2), on_gpu(16, 2), "split_m", 2, [128])

    assert [sms for *_, sms in own.made] == [None, 1]


def test_a_panel_of_all_ranks_rows_is_several_matmuls(own):
    products = multiply(on_gpu(130, 2), on_gpu(16, 2), "split_m", 2, [65, 65, 0])

    assert own.made == [([32, 2], [16, 2], None)] * 2 + [([33, 2], [16, 2], 108)] * 2
    assert all((product == 2).all() for product in products)


@pytest.mark.parametrize(("rows", "problem"), [(63, ""), (128, "the rows of w must begin at multiples of 16 bytes")])
def test_few_rows_and_what_graphars_matmul_cannot_do_take_torchs(own, rows, problem):
    own.why_not = lambda *step: problem

    products = multiply(on_gpu(rows, 2), on_gpu(16, 2), "split_n", 2, [rows])

    assert own.made == []
    assert all((product == 2).all() for product in products)


# ---- graphar's matmul alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 63, 64, 2047, 2048, 100000])
def test_a_batch_invariant_product_of_any_number_of_rows_is_graphars(own, rows):
    (product,) = multiply(on_gpu(rows, 8).half(), on_gpu(16, 8).half(), "batch_invariant", None, [rows], only_own=True)

    assert own.made == [([rows, 8], [16, 8], None)]
    assert (product == 8).all()


def test_a_batch_invariant_product_of_misaligned_operands_is_graphars_too(own):
    a, w = on_gpu(4, 12).half()[:, 1:6], on_gpu(8, 5).half()
    own.why_not = lambda a, w, out: "" if matrix_of(a) and matrix_of(w) else "rows must begin at multiples of 16 bytes"

    (product,) = multiply(a, w, "batch_invariant", None, [4], only_own=True)

    assert own.made == [([4, 5], [8, 5], None)]
    assert (product == 5).all()


@pytest.mark.parametrize("missing", ["", "cuda-python is not installed"])
def test_a_batch_invariant_product_that_graphars_matmul_cannot_compute_is_an_error(own, monkeypatch, missing):
    own.why_not = lambda *step: "the columns of out must be a multiple of 8, got 12"
    monkeypatch.setattr(overlap, "_missing_software", lambda: missing)

    with pytest.raises(UnsupportedError, match=f"no batch-invariant kernel: {missing or 'the columns of out'}"):
        multiply(on_gpu(4, 8), on_gpu(12, 8), "batch_invariant", None, [4], only_own=True)


def test_a_batch_invariant_product_of_no_columns_is_zero(own):
    own.why_not = lambda *step: "a has no columns"

    (product,) = multiply(on_gpu(4, 0), on_gpu(8, 0), "batch_invariant", None, [4], only_own=True)

    assert (product == 0).all()


def of_two_ranks(op, partition):
    """A call of a fused matmul on the CPU."""
    a, w = [torch.ones(3, 8, dtype=torch.bfloat16)] * 2, [torch.ones(16, 8, dtype=torch.bfloat16)] * 2
    residual, weight = torch.ones(3, 16, dtype=torch.bfloat16), [torch.ones(16, dtype=torch.bfloat16)] * 2
    more = {
        graphar.fused_matmul_allreduce_residual_rmsnorm: ([residual] * 2, weight),
        graphar.fused_matmul_reducescatter_residual_rmsnorm: (list(residual.tensor_split(2)), weight),
    }.get(op, ())
    return op(a, w, *more, partition=partition)


every_op = pytest.mark.parametrize(
    "op",
    [
        graphar.fused_matmul_allreduce,
        graphar.fused_matmul_reducescatter,
        graphar.fused_matmul_allreduce_residual_rmsnorm,
        graphar.fused_matmul_reducescatter_residual_rmsnorm,
    ],
    ids=lambda op: op.__name__,
)


@every_op
@pytest.mark.parametrize("partition", ["auto", "none", "batch_invariant"])
def test_an_op_asks_for_graphars_matmul_alone_if_it_is_to_be_batch_invariant(monkeypatch, op, partition):
    asked, bind = [], overlap._bind

    def recording(engine, one, cut, products, blocks, only_own):
        asked.append(only_own)
        return bind(engine, one, cut, products, blocks, False)

    monkeypatch.setattr(overlap, "_bind", recording)
    of_two_ranks(op, partition)

    assert asked == [partition == "batch_invariant"] * 2


@every_op
def test_a_batch_invariant_call_on_the_cpu_is_an_error(op):
    with pytest.raises(UnsupportedError, match="no batch-invariant kernel: "):
        of_two_ranks(op, "batch_invariant")


# ---- how many blocks ------------------------------------------------------------------------------------------------


@pytest.fixture
def bound(monkeypatch):
    """A communicator that believes in two GPUs, and the configurations that it would launch."""
    configs = []

    def bind_kernel(engine, call, config):
        configs.append(config)
        return Plan(lambda ranks: None, config)

    communicator = graphar.Communicator(devices=["cuda:0", "cuda:1"])
    monkeypatch.setattr(collective, "bind_kernel", bind_kernel)
    monkeypatch.setattr(communicator.engine, "find_runner", lambda device: True)
    communicator.engine.table = shipped_table("nvidia_h200")
    communicator.engine.runner = SimpleNamespace(
        chip=communicator.engine.table.chip,
        kernels=SimpleNamespace(why_no_multicast=lambda: ""),
        raise_failure=lambda: None,
        close=lambda: None,
    )
    yield communicator, configs
    communicator.close()


def operands(xs, outs):
    return [Operands((x,), (out,)) for x, out in zip(xs, outs, strict=True)]


def pair(numel):
    return [torch.empty(numel, dtype=torch.bfloat16, device="meta")] * 2


@pytest.mark.parametrize("numel", [8, 1 << 20, 1 << 24])
@pytest.mark.parametrize("codec", ["", "int8"])
def test_a_sum_beside_something_has_no_more_blocks_than_it_may(bound, numel, codec):
    communicator, configs = bound

    for blocks in (None, 24):
        x, counts = pair(numel)[0], (numel // 2, numel // 2)
        for work, length in ((Sum(numel, codec), numel), (Parts("reducescatter", counts, codec), numel // 2)):
            communicator.engine.run(Call.of(work, x, blocks=blocks), operands(pair(numel), pair(length)))

    free, held = configs[:2], configs[2:]
    assert [one.blocks for one in held] == [min(one.blocks, 24) for one in free]


@pytest.mark.parametrize(("numel", "algorithm"), [(8, "one_shot_push"), (1 << 20, "two_shot_pipelined")])
def test_a_large_sum_of_few_blocks_is_pipelined(bound, numel, algorithm):
    communicator, configs = bound

    communicator.engine.run(Call.of(Sum(numel), pair(numel)[0], blocks=24), operands(pair(numel), pair(numel)))

    assert configs[0].algorithm == algorithm


# ---- what a call asks ------------------------------------------------------------------------------------------------


def test_calls_on_the_cpu_ask_for_no_software_and_all_others_ask_once(monkeypatch):
    asked = []
    monkeypatch.setattr(overlap, "missing_software", lambda: asked.append(True) or "no driver")
    overlap._missing_software.cache_clear()
    matrices = [torch.ones(4, 4)] * 2

    for partition in ("auto", "split_m", "split_n", "none"):
        graphar.fused_matmul_allreduce(matrices, matrices, partition=partition)
    assert asked == []

    assert [overlap._missing_software() for _ in range(3)] == ["no driver"] * 3
    assert len(asked) == 1
    overlap._missing_software.cache_clear()


def fused_sums(op, a, w, bias, **options):
    """The result of two ranks with equal operands, and the calls of the sums that were made for it."""
    with graphar.Communicator(devices=["cpu", "cpu"]) as ranks:
        (first, _) = op([a, a], [w, w], bias=[bias, bias], group=ranks, **options)
        return first, [call for call in ranks.engine.plans if isinstance(call.work, (Sum, Parts))]


@pytest.mark.parametrize("partition", ["none", "split_m", "split_n"])
@pytest.mark.parametrize(
    "op", [graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter], ids=lambda op: op.__name__
)
def test_a_bias_is_added_by_the_sum_whose_products_stay_rounded(op, partition):
    a, w, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((6, 16), (10, 16), (10,)))

    found, sums = fused_sums(op, a, w, bias, partition=partition)

    assert {(call.dtype, call.work.epilogue.text) for call in sums} == {(torch.bfloat16, "v + bias[col]")}
    whole = graphar.reference.fused_matmul_allreduce([a, a], [w, w], bias)
    assert torch.equal(found, whole if op is graphar.fused_matmul_allreduce else whole[:3])


@pytest.mark.parametrize("view", [lambda x: x[:1].expand(10), lambda x: x._neg_view()], ids=["expanded", "negated"])
def test_a_bias_that_does_not_lie_as_it_reads_is_copied_for_the_sum(view):
    a, w, whole = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((6, 16), (10, 16), (10,)))
    bias = view(whole)

    found, _ = fused_sums(graphar.fused_matmul_allreduce, a, w, bias)

    assert torch.equal(found, graphar.reference.fused_matmul_allreduce([a, a], [w, w], bias.clone()))


def test_with_a_codec_a_bias_is_added_to_the_sum_before_it_is_rounded():
    a, w, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((6, 16), (10, 16), (10,)))

    found, sums = fused_sums(graphar.fused_matmul_allreduce, a, w, bias, codec="int8")

    assert [(call.dtype, call.work.epilogue) for call in sums] == [(torch.float32, None)]
    assert torch.equal(found, graphar.reference.fused_matmul_allreduce([a, a], [w, w], bias, codec="int8"))
