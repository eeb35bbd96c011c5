"""perf norm_gradients: measurements on the CPU, the bounds of peers, methods that fail, and the report."""

from __future__ import annotations

import argparse
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional

from graphar.errors import UnsupportedError
from perf import machine
from perf import passes as common
from perf.compare import identity
from perf.harness.verify import count_far
from perf.passes import BOTH, COMPILED, CPU_METHODS, PassesPlan
from perf.topics import norm_gradients as topic
from perf.topics.norm_gradients import (
    BACKWARD,
    CPU_SHAPES,
    EPS,
    METHODS,
    PASSES,
    SHAPES,
    NormGradients,
    Trial,
    exact,
    least_nbytes,
    make_method,
    make_operands,
    specified,
)
from tests.perf.samples import norm_gradient_row as row

SHAPE = (24, 264)
SUMMED = pytest.mark.parametrize("summed", [True, False])


@pytest.mark.parametrize(
    ("gpu_count", "plan"),
    [
        (0, PassesPlan("cpu", CPU_SHAPES, CPU_METHODS)),
        (1, PassesPlan("cuda", SHAPES, METHODS)),
        (4, PassesPlan("cuda", SHAPES, METHODS)),
    ],
)
def test_one_gpu_is_enough_for_the_kernels(gpu_count, plan):
    assert NormGradients.plan(argparse.Namespace(shapes=None), gpu_count) == plan


def test_the_progress_bar_counts_every_row(monkeypatch):
    plan = PassesPlan("cpu", [(3, 16)], CPU_METHODS)

    assert len(list(common.run_shapes(NormGradients, plan, 0, 0))) == NormGradients.count(plan)


@pytest.mark.parametrize("text", ["4096", "0x8", "8x", "8x8x8", "-1x8"])
def test_a_shape_is_rows_and_columns(text):
    assert NormGradients.shape_of("4096x8192") == (4096, 8192)
    with pytest.raises(ValueError, match=text):
        NormGradients.shape_of(text)


@pytest.mark.parametrize(
    ("summed", "passes", "tensors", "weights"),
    [(False, BACKWARD, 3, 2), (True, BACKWARD, 4, 2), (False, BOTH, 7, 3), (True, BOTH, 8, 3)],
)
def test_the_least_bytes_are_those_of_each_operand_and_result(summed, passes, tensors, weights):
    assert least_nbytes(passes, (10, 100), summed) == 2000 * tensors + 200 * weights


@pytest.mark.parametrize(("clock_khz", "rate"), [(2_619_000, 3352.32), (0, None)])
def test_the_rate_of_the_memory_is_that_of_its_clock_and_width(monkeypatch, clock_khz, rate):
    properties = SimpleNamespace(memory_clock_rate=clock_khz, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)

    assert machine.memory_rate() == rate


def test_a_version_of_torch_without_the_memorys_clock_has_no_rate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", SimpleNamespace)

    assert machine.memory_rate() is None


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("passes", "peak_nbytes"), [(BACKWARD, None), (BOTH, 5000)])
def test_graphs_are_captured_on_the_stream_of_the_forward_pass_and_memory_is_that_beside_the_operands(
    monkeypatch, passes, peak_nbytes
):
    captured = []
    monkeypatch.setattr(common, "capture", lambda run, stream: captured.append(stream) or run)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 6000)
    operands = make_operands((3, 16), True, "cpu")
    operands = operands._replace(x=operands.x.as_subclass(OnGpu))
    trial = Trial(topic.TORCH, passes, make_method(topic.TORCH, True), operands)

    trial.make_launch()()

    assert (captured, trial.peak_nbytes) == (["the stream"], peak_nbytes)


@pytest.fixture
def operands(request):
    return make_operands(SHAPE, getattr(request, "param", True), "cpu")


def wrong_gradients(gradients, operands):
    """How many of the gradients of rows and of the weight are wrong."""
    values, limits = exact(operands)
    pairs = zip(gradients, values[-2:], limits[-2:], strict=True)
    return [count_far((gradient,), (value,), (limit,)) for gradient, value, limit in pairs]


def by_formula(operands, rounded=lambda x: x, whole_sum=False):
    """The gradients, with every intermediate result ``rounded``."""
    x, residual, weight, g, more = (None if tensor is None else tensor.detach().double() for tensor in operands)
    r = x + residual if whole_sum else (x + residual).bfloat16().double()
    s = (r.square().mean(-1, keepdim=True) + EPS).rsqrt()
    u, scaled = rounded(r * s), rounded(g * weight)
    rows = rounded(s * (scaled - u * (scaled * u).mean(-1, keepdim=True)))
    return rows if more is None else rounded(rows + more), rounded((g * u).sum(0))


@SUMMED
@pytest.mark.parametrize("whole_sum", [True, False])
@pytest.mark.parametrize("rounded", [lambda x: x.bfloat16().double(), lambda x: x], ids=["rounded", "in_fp64"])
def test_a_peer_may_round_every_intermediate_result_and_leave_the_sum_unrounded(summed, whole_sum, rounded):
    operands = make_operands(SHAPE, summed, "cpu")

    assert wrong_gradients(by_formula(operands, rounded, whole_sum), operands) == [0, 0]


@pytest.mark.parametrize("operands", [True, False], indirect=True)
def test_the_specification_is_within_the_bounds_of_peers(operands):
    assert count_far(specified(operands), *exact(operands)) == 0


def without_the_mean(operands):
    x, residual, weight, g, more = (tensor.detach().double() for tensor in operands)
    r = x + residual
    return r.square().mean(-1, keepdim=True).add(EPS).rsqrt() * g * weight + more


def test_rows_without_the_mean_of_their_gradient_are_wrong(operands):
    of_rows = without_the_mean(operands)

    assert wrong_gradients((of_rows, by_formula(operands)[1]), operands)[0] > of_rows.numel() / 2


def test_rows_without_the_gradient_of_the_sum_are_wrong(operands):
    of_rows, of_weight = by_formula(operands._replace(of_summed=None))

    wrong = wrong_gradients((of_rows, of_weight), operands)

    assert wrong[0] > of_rows.numel() / 2
    assert wrong[1] == 0


def test_a_gradient_of_the_weight_without_a_few_rows_is_wrong(operands):
    fewer = operands.of_normed.clone()
    fewer[-4:] = 0
    of_weight = by_formula(operands._replace(of_normed=fewer))[1]

    assert wrong_gradients((by_formula(operands)[0], of_weight), operands)[1] > of_weight.numel() / 2


@SUMMED
def test_float64_has_the_gradients_of_autograd(summed):
    operands = make_operands(SHAPE, summed, "cpu")
    r, w = (tensor.detach().double().requires_grad_() for tensor in (operands.x + operands.residual, operands.weight))
    normed = functional.rms_norm(r, w.shape, w, EPS)
    results, gradients = [normed, r][: 1 + summed], [operands.of_normed, operands.of_summed][: 1 + summed]
    expected = torch.autograd.grad(results, [r, w], [gradient.double() for gradient in gradients])

    values, _ = exact(operands)

    torch.testing.assert_close(list(values), [normed.detach(), r.detach(), expected[0], *expected])


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", CPU_METHODS)
def test_a_launch_that_computes_nothing_leaves_nothing_right(operands, name, passes):
    trial = Trial(name, passes, make_method(name, True), operands)
    trial.make_launch()

    wrong = trial.count_wrong(lambda: None)

    assert wrong == sum(result.numel() for result in trial.results) > 0


@pytest.mark.parametrize("passes", PASSES)
def test_a_wrong_bit_of_graphars_is_counted(operands, passes):
    trial = Trial(topic.OWN, passes, make_method(topic.OWN, True), operands)
    launch = trial.make_launch()

    def one_bit_off():
        launch()
        trial.results[-1].view(torch.int16)[3] ^= 1

    assert (trial.count_wrong(launch), trial.count_wrong(one_bit_off)) == (0, 1)


@pytest.fixture
def without_inductor(monkeypatch):
    """Compiles without Inductor, which takes long, and restores the settings of torch's compiler."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with of_autograd.patch(donated_buffer=True), config.patch(compile_threads=1):
        yield


@SUMMED
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_function_has_the_right_gradients_as_often_as_its_backward_pass_runs(passes, summed):
    trial = Trial(COMPILED, passes, make_method(COMPILED, summed), make_operands(SHAPE, summed, "cpu"))

    assert trial.count_wrong(trial.make_launch()) == 0


@pytest.mark.usefixtures("without_inductor")
def test_a_compiled_backward_pass_may_not_reuse_the_memory_of_what_it_runs_on_again():
    from torch._functorch import config as of_autograd

    common.compiled(torch.relu)

    assert not of_autograd.donated_buffer


def refuse(*operands):
    raise RuntimeError("backend='inductor' raised:\nno compiler\nset TORCH_LOGS")


@pytest.mark.parametrize(("passes", "method"), [(PASSES, (refuse, None)), ((BACKWARD,), None)])
def test_a_method_that_fails_is_named_with_the_reason_and_the_others_are_measured(monkeypatch, passes, method):
    def made(name, summed):
        forward, backward = make_method(name, summed)
        if name != topic.TORCH:
            return forward, backward
        return method or (forward, lambda *operands: refuse() if operands[-1] else backward(*operands))

    monkeypatch.setattr(topic, "make_method", made)
    plan = PassesPlan("cpu", [(3, 16)], CPU_METHODS)

    measured = list(topic.rows_of(plan, (3, 16)))[-4:]

    told = "3 x 16, without a gradient of the sum: RuntimeError: backend='inductor' raised: no compiler"
    assert [row for row in measured if isinstance(row, str)] == [f"torch, {of_passes}, {told}" for of_passes in passes]
    rows = [row for row in measured if not isinstance(row, str)]
    assert [row.passes for row in rows if row.method == topic.OWN] == list(PASSES)
    assert len(rows) == 4 - len(passes)


def test_an_error_at_the_end_of_a_capture_is_told_with_what_came_before():
    def fail():
        try:
            raise RuntimeError("not permitted")
        finally:
            raise KeyError

    with pytest.raises(KeyError) as caught:
        fail()

    assert common.reason(caught.value) == "KeyError (after RuntimeError: not permitted)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "\n\n-- Process 0 failed:\nTraceback\n  raise\ntorch.AcceleratorError: CUDA error: no\nmore\n",
            "torch.AcceleratorError: CUDA error: no",
        ),
        ("process 0 terminated with signal SIGSEGV", "process 0 terminated with signal SIGSEGV"),
    ],
)
def test_a_process_that_ended_tells_its_error_or_its_signal(text, reason):
    assert common.reason_of_process(ProcessException(text, 0, 0)) == reason


def test_a_gpu_that_the_kernels_do_not_serve_is_told_rather_than_the_specification_timed(monkeypatch):
    x = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(topic.residual_norm, "serves", lambda rows: False)
    monkeypatch.setattr(topic.residual_norm, "serves_backward", lambda rows: False)
    monkeypatch.setattr(topic, "missing_software", lambda: "")

    with pytest.raises(UnsupportedError, match=topic.NO_KERNEL):
        topic.own_forward(x, x, x)
    with pytest.raises(UnsupportedError, match=topic.NO_KERNEL):
        topic.own_backward(x, x, x, True)


def ending(topic, plan, rank, port):
    """Stands in for a measurement, which ends its process for the first shape."""
    if plan.shapes == [(3, 16)]:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")
    yield row("graphar", 1.0)


@pytest.mark.usefixtures("forked_ranks")
def test_a_shape_whose_process_ends_does_not_take_the_others_with_it(monkeypatch):
    monkeypatch.setattr(common, "run_shapes", ending)

    rows = list(NormGradients().measure(PassesPlan("cuda", [(3, 16), (5, 16)], METHODS)))

    assert rows == ["3 x 16: RuntimeError: CUDA error: an illegal memory access", row("graphar", 1.0)]


def report(own=100.0, **more):
    times = {"graphar": own, "torch": 400.0}
    rows = [row(name, us, of_passes, **more) for of_passes in PASSES for name, us in times.items()]
    return NormGradients([*rows, row("torch.compile", 200.0), row("torch.compile", 125.0, summed=False)])


def test_a_table_has_the_times_the_ratio_and_the_least_bytes_with_their_time():
    backward, _, _ = report().sections()

    assert backward.body[0].splitlines()[2:] == [
        "| 4096 x 8192 | yes | 100 | 400 | 200 | torch.compile | 0.50 | 256 | 67.1 | 1.49 |",
        "| 4096 x 8192 | no | - | - | 125 | torch.compile | - | 192 | 50.3 | - |",
    ]


def test_memory_has_a_table_of_its_own_where_it_was_measured():
    *_, peaks = report().sections()

    assert peaks.body[0].splitlines()[0].endswith("| graphar (MB) | torch (MB) |")
    assert peaks.body[0].splitlines()[2:] == ["| 4096 x 8192 | yes | 192 | 192 |"]
    assert [section.title for section in report(peak_nbytes=None).sections()] == ["Backward", "Forward and backward"]


def test_a_glance_is_the_ratio_of_the_backward_pass_to_the_best_peers():
    glance = report(own=250.0).glance()

    assert (glance.headline, glance.words) == (
        "1.25",
        "graphar's time of the backward pass / that of the best of 2 peers, by shape",
    )
    assert glance.shortfall == "1 of 1 cases; the worst is 1.25 (4096 x 8192, with a gradient of the sum)"
    assert NormGradients([row("graphar", 1.0)]).glance().headline == "-"


def test_a_wrong_result_of_graphars_fails_the_run_and_is_compared_with_nothing():
    made = report(wrong=2)

    assert made.wrong() == [f"graphar at {of_passes}, 4096 x 8192, with a gradient of the sum" for of_passes in PASSES]
    assert "| 100 **(2 WRONG)** | 400 **(2 WRONG)** | 200 | torch.compile | - |" in made.sections()[0].body[0]
    assert made.ratio_chart().marks == []


def test_a_chart_has_a_row_for_each_shape():
    (mark,) = report().ratio_chart().marks

    assert (mark.row, mark.value) == ("4096 x 8192", 0.5)


def test_times_of_two_runs_are_told_apart_by_pass_shape_and_gradient():
    rows = [row("graphar", 1.0, of_passes, summed=summed) for of_passes in PASSES for summed in (True, False)]

    identities = [identity(row) for row in NormGradients(rows).timed()]

    assert identities[0] == ("graphar", "1 rank", "backward", "4096 x 8192", "with a gradient of the sum")
    assert len(set(identities)) == 4


@pytest.mark.gpu(1)
def test_every_method_is_measured_and_verified_in_graphs_on_a_gpu():
    plan = PassesPlan("cuda", [(200, 1024)], METHODS)

    rows = list(NormGradients().measure(plan))

    assert [row for row in rows if isinstance(row, str)] == []
    assert {(row.method, row.passes) for row in rows} == {(name, of_passes) for name in METHODS for of_passes in PASSES}
    assert [row for row in rows if row.wrong] == []
    assert all((row.peak_nbytes is not None) == (row.passes == BOTH) for row in rows)
