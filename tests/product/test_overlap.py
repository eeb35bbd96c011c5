"""The order and the streams in which panels are multiplied and summed. Stand-ins for streams record it."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.errors import UnsupportedError
from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import Shape, Sms, alone, best_tile
from graphar.plan.policy import MeasuredMatmul, TileCost
from graphar.plan.tables import shipped_table
from graphar.plan.work import MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Parts, Product, Sum
from graphar.product import multiply as multiplying
from graphar.product import then
from graphar.product.multiply import ByTorch, Own, choose
from graphar.product.operands import MatmulOperands, Step
from graphar.product.tensor_maps import matrix_of
from graphar.product.then import Then
from graphar.runtime import launcher
from graphar.runtime.bind import collective
from graphar.runtime.plan import Plan
from tests.fake_gpu import OnGpu

ENGINE = SimpleNamespace(table=shipped_table("nvidia_h200"))


class Recorder:
    """Records events in order: (stream, what)."""

    def __init__(self, monkeypatch):
        self.events, self.current = [], "main"
        streams = {name: self._stream(name) for name in ("main", "side")}
        monkeypatch.setattr(then, "streams_of", lambda device: (streams["main"], streams["side"]))
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(Then, "_bind", lambda then, one, products: self._multiply)
        monkeypatch.setattr(Then, "_take", lambda then, at, is_beside, *rest: self.sum_panel(at, then, is_beside))

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

    def sum_panel(self, at, then, is_beside):
        call = (then._beside if is_beside else then._alone)[at]
        self.events.append((self.current, f"sum {at} with {call.blocks or 'all'}"))

    def run(self, partition, count):
        a = on_gpu(8, 8)
        then_of(a, a, partition, count, [8]).run([Operands((a, a), (a,))])


def then_of(a, w, partition, count, parts, engine=ENGINE):
    """A product whose rows are summed by ranks that own so many."""
    op = MATMUL_ALLREDUCE if len(parts) == 1 else MATMUL_REDUCESCATTER
    work = Product(op, tuple(parts), len(w), partition=partition, num_partitions=count)
    return Then(engine, Call(work, a.dtype, 0, blocks=24), Operands((a, w), ()))


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


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
    def fail(at, then, is_beside):
        raise RuntimeError("a rank did not come")

    recorder.sum_panel = fail
    with pytest.raises(RuntimeError, match="a rank did not come"):
        recorder.run("split_m", 2)

    assert recorder.events[-1] == ("main", "wait for side")


@pytest.mark.parametrize("offset", [0, 1])
def test_sums_of_whole_rows_are_made_where_the_result_lies_if_that_is_aligned(offset):
    out = torch.zeros(8 * 16 + 4)[offset : offset + 8 * 16].view(8, 16)
    one = MatmulOperands(torch.ones(8, 2), torch.ones(16, 2), None, out)
    then = then_of(one.a, one.w, "split_m", 2, [8])

    place = then._place(one, then._panels[1], 0)

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


def on_gpu(*shape):
    return torch.ones(shape).as_subclass(OnGpu)


@pytest.fixture
def gemm(monkeypatch):
    """Stands in for graphar's matmul and records the operands' shapes, the SMs and the tile of each call."""
    made, tiles = [], []

    def bind(step, sms, tile=None, leaves=1):
        a, w, out, *_ = step
        made.append((list(a.shape), list(w.shape), sms))
        tiles.append(tile)
        return lambda stream: out.copy_(a @ w.t())

    fake = SimpleNamespace(bind=bind, why_not=lambda *step: "", sm_count=lambda device: 132, made=made, tiles=tiles)
    fake.layout_of = lambda w: "by_rows"
    monkeypatch.setattr(multiplying, "gemm", fake)
    monkeypatch.setattr(multiplying, "lacks_software", lambda: None)
    monkeypatch.setattr(launcher, "sm_count", lambda device: fake.sm_count(device))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return fake


def multiply(a, w, partition, count, parts, engine=ENGINE):
    """The products of all panels."""
    then = then_of(a, w, partition, count, parts, engine)
    products = [torch.zeros(panel.shape) for panel in then._panels]
    run = then._bind(MatmulOperands(a, w, None, None), products)
    for at in range(len(products)):
        run(at)
    return products


def test_the_first_panel_has_all_sms_and_later_ones_leave_some_to_the_sum(gemm):
    products = multiply(on_gpu(128, 2), on_gpu(16, 2), "split_m", 3, [128])

    assert gemm.made == [([42, 2], [16, 2], 132), ([42, 2], [16, 2], 108), ([44, 2], [16, 2], 108)]
    assert all((product == 2).all() for product in products)


def with_matmul(**changes):
    """An engine with another policy of matmuls."""
    return SimpleNamespace(table=replace(ENGINE.table, matmul=replace(ENGINE.table.matmul, **changes)))


MEASURED = with_matmul(against_torch=(MeasuredMatmul(64, 16, 2, 0.5), MeasuredMatmul(64, 16, 8, 1.5)))


def test_one_panel_takes_the_matmul_that_was_measured_to_be_faster_and_cuts_of_it_graphars(gemm):
    whole = multiply(on_gpu(64, 8), on_gpu(16, 8), "none", None, [64], engine=MEASURED)
    assert gemm.made == []

    cut = multiply(on_gpu(64, 8), on_gpu(16, 8), "split_m", 2, [64], engine=MEASURED)
    assert len(gemm.made) == 2
    assert all((product == 8).all() for product in whole + cut)


@pytest.mark.parametrize(("torchs", "own"), [((64, 8), (64, 2)), ((131 * 128, 8), (131 * 128 + 1, 8))])
def test_ranks_with_different_k_may_take_different_matmuls_and_a_wave_of_tiles_is_graphars(gemm, torchs, own):
    for rows, k in (torchs, own):
        multiply(on_gpu(rows, k), on_gpu(16, k), "none", None, [rows], engine=MEASURED)

    assert gemm.made == [([*own], [16, own[1]], 132)]


def test_tiles_are_those_of_the_engines_table(gemm):
    costs = [ENGINE.table.matmul.cost, TileCost(0.001, 99.0, 1.0, *[0.001] * 7)]
    for cost in costs:
        multiply(on_gpu(8192, 8), on_gpu(1536, 8), "split_m", 2, [8192], engine=with_matmul(cost=cost))

    assert gemm.tiles == [
        best_tile(alone(), Shape((4096,), 1536, 8), cost, Sms(sms)) for cost in costs for sms in (132, 108)
    ]
    assert len(set(gemm.tiles)) > 2


@pytest.mark.parametrize(
    ("rows", "partition", "count", "problem"),
    [
        (128, "split_m", 3, lambda a: "too many rows" if len(a) == 44 else ""),  # of one panel
        (63, "split_n", 2, lambda a: ""),  # few rows
        (128, "split_n", 2, lambda a: "the rows of w must begin at multiples of 16 bytes"),
    ],
)
def test_few_rows_and_what_graphars_matmul_cannot_do_take_torchs_for_all_panels(gemm, rows, partition, count, problem):
    gemm.why_not = lambda a, w, out, leaves: problem(a)

    products = multiply(on_gpu(rows, 2), on_gpu(16, 2), partition, count, [rows])

    assert gemm.made == []
    assert all((product == 2).all() for product in products)


def test_a_gpu_without_sms_to_spare_multiplies_on_one(gemm):
    gemm.sm_count = lambda device: 24

    multiply(on_gpu(128, 2), on_gpu(16, 2), "split_m", 2, [128])

    assert [sms for *_, sms in gemm.made] == [24, 1]


def test_a_panel_of_all_ranks_rows_is_several_matmuls(gemm):
    products = multiply(on_gpu(130, 2), on_gpu(16, 2), "split_m", 2, [65, 65, 0])

    assert gemm.made == [([32, 2], [16, 2], 132)] * 2 + [([33, 2], [16, 2], 108)] * 2
    assert all((product == 2).all() for product in products)


@pytest.mark.parametrize("parts", [[65, 65, 0], [0, 1, 64], [64]])
def test_rows_that_follow_each_other_are_one_matmul(gemm, parts):
    a, w, engine = on_gpu(sum(parts), 2), on_gpu(16, 2), with_matmul(against_torch=())

    (product,) = multiply(a, w, "none", None, parts, engine=engine)

    assert gemm.made == [([sum(parts), 2], [16, 2], 132)]
    assert (product == 2).all()


@pytest.mark.parametrize("rows", [1, 63, 64, 2047, 2048, 100000])
def test_a_batch_invariant_product_of_any_number_of_rows_is_graphars(gemm, rows):
    (product,) = multiply(on_gpu(rows, 8).half(), on_gpu(16, 8).half(), "batch_invariant", None, [rows])

    assert gemm.made == [([rows, 8], [16, 8], 132)]
    assert (product == 8).all()


def test_a_batch_invariant_product_of_misaligned_operands_is_graphars_too(gemm):
    a, w = on_gpu(4, 12).half()[:, 1:6], on_gpu(8, 5).half()
    gemm.why_not = lambda a, w, out, leaves: "" if matrix_of(a) and matrix_of(w) else "rows must begin at 16 bytes"

    (product,) = multiply(a, w, "batch_invariant", None, [4])

    assert gemm.made == [([4, 5], [8, 5], 132)]
    assert (product == 5).all()


@pytest.mark.parametrize("missing", ["", "cuda-python is not installed"])
def test_a_batch_invariant_product_that_graphars_matmul_cannot_compute_is_an_error(gemm, monkeypatch, missing):
    gemm.why_not = lambda *step: "the columns of out must be a multiple of 8, got 12"
    monkeypatch.setattr(multiplying, "lacks_software", lambda: missing)

    with pytest.raises(UnsupportedError, match=f"no batch-invariant kernel: {missing or 'the columns of out'}"):
        multiply(on_gpu(4, 8), on_gpu(12, 8), "batch_invariant", None, [4])


def test_a_batch_invariant_product_of_no_columns_is_zero(gemm):
    gemm.why_not = lambda *step: "a has no columns"

    (product,) = multiply(on_gpu(4, 0), on_gpu(8, 0), "batch_invariant", None, [4])

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
    asked = []

    def recording(*given):
        asked.append(replace(choose(*given), reason="") == Own(given[0].table.matmul.cost, is_invariant=True))
        return ByTorch()

    monkeypatch.setattr(then, "choose", recording)
    of_two_ranks(op, partition)

    assert asked == [partition == "batch_invariant"] * 2


@every_op
def test_a_batch_invariant_call_on_the_cpu_is_an_error(op):
    with pytest.raises(UnsupportedError, match="no batch-invariant kernel: "):
        of_two_ranks(op, "batch_invariant")


@pytest.fixture
def bound(monkeypatch):
    """A communicator that believes in two GPUs, whose kernels launch nothing."""
    communicator = graphar.Communicator(devices=["cuda:0", "cuda:1"])
    monkeypatch.setattr(collective, "bind_kernel", lambda engine, call, config: Plan(lambda ranks: None, config))
    monkeypatch.setattr(communicator.engine, "find_runner", lambda device: True)
    communicator.engine.table = shipped_table("nvidia_h200")
    does_nothing = {"raise_failure": lambda: None, "announced": contextlib.nullcontext, "close": lambda: None}
    stand_in = SimpleNamespace(chip=communicator.engine.table.chip, members=(), why_no_multicast=str, **does_nothing)
    communicator.engine.runner = stand_in
    yield communicator
    communicator.close()


def pair(numel):
    return [torch.empty(numel, dtype=torch.bfloat16, device="meta")] * 2


SUMMED = Product("fused_matmul_allreduce", (64,), 16, partition="none")
NORMED = Product("fused_matmul_allreduce_residual_rmsnorm", (64,), 16, partition="none", norm=(1e-6, 0.0))


def planned(communicator, work, k):
    """The plan of a product of [64, k] and [16, k], and one rank's operands."""
    more = [(64, 16), (16,)] if work.norm else []  # the residual and the norm's weight
    inputs = [on_gpu(*shape).bfloat16() for shape in ((64, k), (16, k), *more)]
    outputs = [on_gpu(64, 16).bfloat16() for _ in range(1 + bool(more))]
    own = Operands(tuple(inputs), tuple(outputs))
    return communicator.engine.plan(Call.of(work, inputs[0]), [own] * 2), own


def explained(communicator, work, k):
    plan, own = planned(communicator, work, k)
    return plan.explain(own).reason


@pytest.mark.parametrize(
    ("partition", "k", "words"),
    [
        ("none", 8, "torch's matmul, which was measured to be 1.50 times as fast at 64 x 16 x 8"),
        ("none", 2, "graphar's matmul, which was measured to take 0.50 of torch's time at 64 x 16 x 2"),
        ("split_m", 8, "graphar's matmul, for all panels"),
    ],
)
def test_it_is_told_whose_matmul_multiplies_and_why_also_if_k_alone_differs(bound, gemm, partition, k, words):
    bound.engine.table = MEASURED.table
    work = SUMMED._replace(partition=partition)

    explained(bound, work, 4)  # makes the plan of all K

    reason = explained(bound, work, k)
    assert reason.startswith("multiplied, then summed: the fastest by table 'nvidia_h200'")
    assert reason.endswith(f"; {words}")


def test_it_is_told_for_a_norm_too(bound, gemm):
    bound.engine.table = MEASURED.table

    reason = explained(bound, NORMED, 8)

    assert reason.endswith("; torch's matmul, which was measured to be 1.50 times as fast at 64 x 16 x 8")


def test_what_graphars_matmul_cannot_multiply_is_torchs_for_that_reason(bound, gemm):
    gemm.why_not = lambda *step: "the kernel has no torch.float32"

    reason = explained(bound, SUMMED._replace(partition="split_m"), 8)

    assert reason.endswith("; torch's matmul: the kernel has no torch.float32")


@pytest.mark.parametrize("work", [SUMMED, NORMED], ids=["summed", "normed"])
@pytest.mark.parametrize(
    ("k", "problem", "is_own"), [(8, "", False), (2, "", True), (2, "the kernel has no torch.float32", False)]
)
def test_a_repeated_call_multiplies_as_the_call_did(bound, gemm, monkeypatch, work, k, problem, is_own):
    bound.engine.table = MEASURED.table
    gemm.why_not = lambda *step: problem
    launched = []

    def bind(engine, call, *more):
        return Plan(
            None, *engine.select(call, pair(8)[0]), launch_like=lambda own: lambda *given: launched.append(given)
        )

    monkeypatch.setattr(collective, "bind_kernel", bind)
    plan, operands = planned(bound, work, k)
    plan.launch_like(operands)(operands.inputs, operands.outputs, ())

    (((product, *rest), *_),) = launched
    assert (product == k).all()
    assert len(rest) == len(operands.inputs) - 2
    assert bool(gemm.made) == is_own


def repeating(a, w):
    """What makes the product of calls like one with these operands."""
    example = Step(a, w, torch.empty(64, 16))
    found = choose(MEASURED, SUMMED, MatmulOperands(a, w, None, example.out))
    return found.repeating(SUMMED, example)


def test_a_product_is_bound_once_for_the_same_addresses(gemm, monkeypatch):
    a, w = on_gpu(64, 2), on_gpu(16, 2)
    repeated = repeating(a, w)
    place = torch.empty(64, 16)
    monkeypatch.setattr(OnGpu, "new_empty", lambda self, shape, dtype=None: place, raising=False)

    assert all((repeated(a, w) == 2).all() for _ in range(3))
    assert len(gemm.made) == 1

    other = on_gpu(64, 2) * 2
    assert (repeated(other, w) == 4).all()
    assert len(gemm.made) == 2


def test_a_repeated_product_of_misaligned_operands_is_multiplied_as_its_first_call_would_be(gemm):
    a, w = on_gpu(64, 2), on_gpu(16, 2)
    repeated = repeating(a, w)
    gemm.why_not = lambda *step: "the rows of a must begin at multiples of 16 bytes"

    assert (repeated(a, w) == 2).all()
    assert gemm.made == []


def test_calls_on_the_cpu_ask_for_no_software_and_all_others_ask_once(monkeypatch):
    assert multiplying.lacks_software.__wrapped__ is multiplying.missing_software  # it is cached
    asked, matrices = [], [torch.ones(4, 4)] * 2
    monkeypatch.setattr(multiplying, "lacks_software", lambda: asked.append(True))

    for partition in ("auto", "split_m", "split_n", "none"):
        graphar.fused_matmul_allreduce(matrices, matrices, partition=partition)

    assert asked == []


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
