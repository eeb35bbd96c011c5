"""Hooks for DistributedDataParallel: gradients averaged exactly, or with a codec, by processes over gloo."""

from __future__ import annotations

import contextlib
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar import Codec, ddp, reference
from graphar.plan.call import Call, Operands
from graphar.plan.tables import shipped_table
from graphar.plan.work import Sum
from tests.processes import run_ranks

INT4 = Codec(4, 128)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 5))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(16, 48, generator=torch.Generator().manual_seed(100 * step + rank))


def local_gradients(rank: int) -> list[torch.Tensor]:
    model = make_model()
    model(batch(rank)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients_with(rank, hook, steps=1, accumulated=False, **options):
    """Each step's gradients, of all parameters; ``accumulated`` makes a backward pass without communication first."""
    model = make_model()
    ranks = DistributedDataParallel(model, **options)
    ranks.register_comm_hook(None, hook)
    found = []
    for _ in range(steps):
        ranks.zero_grad()
        if accumulated:
            with ranks.no_sync():
                ranks(batch(rank)).square().mean().backward()
        ranks(batch(rank)).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    return found


def exact_mean(world_size: int) -> list[torch.Tensor]:
    by_rank = [local_gradients(rank) for rank in range(world_size)]
    return [reference.allreduce([one / world_size for one in of_one]) for of_one in zip(*by_rank, strict=True)]


def with_exact_hook(rank, world_size, overlap, options):
    """Whether the gradients of two steps are the specification's; the second has torch's final buckets."""
    steps = gradients_with(rank, graphar.ddp.exact_hook(overlap=overlap), steps=2, **options)
    expected = exact_mean(world_size)
    return all(torch.equal(*pair) for gradients in steps for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("ranks", "options"), [(3, {}), (3, {"gradient_as_bucket_view": True}), (2, {"bucket_cap_mb": 0.002})], ids=str
)
def test_exact_gradients_are_the_specifications_bit_for_bit(ranks, options, overlap):
    assert run_ranks(with_exact_hook, ranks, overlap, options) == [True] * ranks


def sums_of_two_passes(rank, world_size):
    """How many buckets are summed after each hook, of a pass that ended early and of the next, and their means."""
    hook, sums = graphar.ddp.exact_hook(overlap=False), []
    bucket = SimpleNamespace(buffer=lambda: torch.full((64,), 1.0 + rank))
    futures = []
    for index, last in ((0, False), (0, False), (1, False), (2, True)):
        bucket.index, bucket.is_last = (lambda at=index: at), (lambda is_last=last: is_last)
        futures.append(hook(None, bucket))
        sums.append(sum(future.done() for future in futures))
    return sums, [future.wait().mean().item() for future in futures[1:]]


def test_without_overlap_all_buckets_of_a_pass_are_summed_in_its_last_hook():
    assert run_ranks(sums_of_two_passes, 2) == [([0, 0, 0, 3], [1.5] * 3)] * 2


def mean_of_a_pair(rank, world_size):
    """The buckets after the hooks of a group of two, in a world of three. A bucket holds one matrix."""
    group, gradients = dist.new_group([0, 2]), torch.full((64,), 2.0 * rank)
    if rank == 1:
        return None
    bucket = SimpleNamespace(buffer=gradients.clone, parameters=lambda: [torch.empty(8, 8)], index=lambda: 0)
    hooks = graphar.ddp.exact_hook(group), graphar.ddp.quantized_hook("int8", group)
    return [hook(None, bucket).wait().mean().item() for hook in hooks]


def test_the_mean_is_of_the_groups_ranks():
    first, _, last = run_ranks(mean_of_a_pair, 3)

    assert first == last == [2, pytest.approx(2, rel=0.01)]


def with_quantized_hook(rank, world_size, hook_options, options):
    """Each step's gradients, and the exact ones of one step."""
    (exact,) = gradients_with(rank, graphar.ddp.exact_hook())
    return gradients_with(rank, graphar.ddp.quantized_hook(INT4, dist.group.WORLD, **hook_options), **options), exact


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.002}], ids=str)
def test_matrices_are_rounded_and_the_rest_stays_exact(options):
    ((gradients,), exact_gradients), ((others,), _) = run_ranks(with_quantized_hook, 2, {}, options)

    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        error = ((gradient - exact).norm() / exact.norm()).item()
        assert error == 0 if gradient.dim() == 1 else 0 < error < 0.25


def test_what_stays_exact_can_be_chosen():
    ((gradients,), exact), _ = run_ranks(with_quantized_hook, 2, {"stays_exact": is_small}, {})

    unequal = [not torch.equal(*pair) for pair in zip(gradients, exact, strict=True)]
    assert unequal == [parameter.numel() >= 1000 for parameter in make_model().parameters()]


def is_small(parameter):
    return parameter.numel() < 1000


def test_a_bucket_of_exact_gradients_alone_is_exact():
    ((gradients,), exact), _ = run_ranks(with_quantized_hook, 2, {"stays_exact": torch.is_tensor}, {})

    assert all(torch.equal(*pair) for pair in zip(gradients, exact, strict=True))


def test_gradients_accumulate_before_they_are_averaged():
    ((once,), _), _ = run_ranks(with_quantized_hook, 2, {}, {})
    ((twice,), _), _ = run_ranks(with_quantized_hook, 2, {}, {"accumulated": True})

    # The ranks' own doubled gradients are sent, and the codec's scales double with them.
    torch.testing.assert_close(twice, [2 * gradient for gradient in once])


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
def test_errors_that_are_fed_back_cancel_over_the_steps():
    def error_of_mean(feedback):
        (steps, exact), _ = run_ranks(with_quantized_hook, 2, {"error_feedback": feedback}, {"steps": 16})
        mean = [torch.stack(of_one).mean(0) for of_one in zip(*steps, strict=True)]
        return sum((ours - theirs).norm().item() for ours, theirs in zip(mean, exact, strict=True))

    assert error_of_mean(True) < 0.6 * error_of_mean(False)


def with_seed(rank, world_size, seed):
    codec = Codec(2, 128, "stochastic", seed=seed)
    return gradients_with(rank, graphar.ddp.quantized_hook(codec), steps=2)


def test_a_seed_repeats_stochastic_rounding_and_steps_differ():
    (first, _), (again, _), (other, _) = (run_ranks(with_seed, 2, seed) for seed in (1, 1, 2))

    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[1][0], again[1][0])
    assert not torch.equal(first[0][0], other[0][0])
    assert not torch.equal(first[0][0], first[1][0])


@pytest.mark.parametrize("wanted", [False, True])
def test_the_hook_decides_about_feedback_whatever_the_codec_says(wanted):
    """Without a residual the kernels would leave errors in the gradients that they are writing."""
    hooks = [graphar.ddp.quantized_hook(Codec(4, feedback=asked), error_feedback=wanted) for asked in (False, True)]

    assert [hook._average._codec for hook in hooks] == [Codec(4, feedback=wanted).text] * 2


def test_an_unknown_codec_is_refused_when_the_hook_is_made():
    with pytest.raises(ValueError, match="int9"):
        graphar.ddp.quantized_hook("int9")


def test_what_is_no_group_is_refused_when_the_hook_is_made():
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a DeviceMesh or a Communicator, got str"):
        graphar.ddp.exact_hook("int8")


def test_an_unknown_algorithm_is_refused_when_the_hook_is_made():
    with pytest.raises(ValueError, match=r"exact_hook: algorithm must be one of auto, .*, got 'ring'"):
        graphar.ddp.exact_hook(algorithm="ring")


def engine_of(ranks=2, reason=None, **functions):
    """A stand-in for an engine. ``reason`` says why no kernel serves a call."""
    given = {"is_symmetric": lambda out: False, "why_no_kernel": lambda *of: reason} | functions
    table, failures = shipped_table("default"), lambda op: contextlib.nullcontext()
    return SimpleNamespace(name="mine", world_size=ranks, table=table, keeping_failure=failures, **given)


COPIES = "two_shot_copies"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("auto", 64, "sum")),
        ({"ranks": 4}, ("auto", 32, "sum")),
        ({"ranks": 3}, ("auto", 32, "parts")),
        ({"dtype": torch.bfloat16}, ("auto", 64, "sum")),
        ({"dtype": torch.float16}, ("auto", 64, "parts")),
        ({"algorithm": COPIES, "dtype": torch.float16}, (COPIES, 132, "parts")),
        ({"algorithm": COPIES, "ranks": 4}, (COPIES, 132, "sum")),
        ({"algorithm": "hierarchical"}, ("hierarchical", 64, "parts")),
        ({"reason": "the tensor is on the CPU"}, ("auto", 64, "result")),
        ({"reason": "the tensor is on the CPU", "ranks": 3}, ("auto", 32, "parts")),
    ],
    ids=str,
)
def test_exact_buckets_are_divided_as_they_are_summed_where_bits_stay(given, expected):
    given = {"dtype": torch.float32, "algorithm": "auto"} | given
    x, exact = torch.empty(1 << 20, dtype=given.pop("dtype"), device="meta"), ddp._Exact(given.pop("algorithm"))
    call, divided = exact._call(engine_of(**given), x)

    assert (call.algorithm, call.blocks, divided) == expected
    by_copies, in_sum = call.algorithm == COPIES, divided == "sum"
    assert (call.work.beside != "", call.work.epilogue is not None) == (in_sum and by_copies, in_sum and not by_copies)


def test_the_call_of_a_bucket_is_made_once_in_a_process():
    asked, ran, exact, x = [], [], ddp._Exact("auto"), torch.full((8,), 2.0)
    engine = engine_of(why_no_kernel=lambda *of: asked.append(of), run=lambda *of: ran.append(of))
    for _ in range(2):
        assert exact(engine, None, x) is x

    assert (len(asked), x.tolist()) == (1, [2.0] * 8)  # the sum is divided
    assert ran == [(ran[0][0], [Operands((x,), (x,), (0.5,))])] * 2
    assert pickle.loads(pickle.dumps(exact))._calls == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divided_sum_has_the_bits_of_a_sum_of_divided_parts(dtype):
    parts = [(1e30 ** (rank - 1)) * torch.randn(4096).to(dtype) for rank in range(4)]

    expected = reference.allreduce([part / 4 for part in parts])

    scaled = reference.allreduce(parts, epilogue=graphar.Epilogue("v * scale", scale=0.25))
    assert torch.equal(scaled, expected)  # by kernels
    assert torch.equal(reference.allreduce(parts) * 0.25, expected)  # by copies


def test_a_result_of_fp32_that_is_divided_has_the_bits_of_a_divided_sum_in_subnormals_too():
    parts = [1e-38 * torch.randn(4096) for _ in range(4)]

    scaled = reference.allreduce(parts, epilogue=graphar.Epilogue("v * scale", scale=0.25))

    assert torch.equal(reference.allreduce(parts) / 4, scaled)
    assert not torch.equal(reference.allreduce([part / 4 for part in parts]), scaled)


def bucket_of(*parameters):
    buffer = torch.cat([parameter.reshape(-1) for parameter in parameters])
    return SimpleNamespace(parameters=lambda: [*parameters], index=lambda: 0, buffer=lambda: buffer)


def test_sums_with_a_codec_take_the_full_grid_and_what_no_codec_rounds_is_refused():
    calls, x, quantized = [], torch.ones(4), ddp._Quantized(Codec(4), True, ddp.has_one_dimension)
    engine = SimpleNamespace(world_size=2, run=lambda *call: calls.append(call))

    quantized(engine, bucket_of(x[None]), x)

    ((call, [operands]),) = calls
    assert call == Call.of(Sum(4, Codec(4, feedback=True).text), x)
    assert ([gradients.tolist() for gradients in operands.inputs], operands.outputs) == ([[0.5] * 4, [0.0] * 4], (x,))
    with pytest.raises(ValueError, match=r"quantized_hook: a codec rounds .*, got a tensor of torch\.float64"):
        quantized(engine, bucket_of(x[None]), x.double())


def test_a_bucket_that_comes_with_other_parameters_is_divided_anew():
    matrix, bias, other = torch.ones(2, 3), torch.ones(3), torch.ones(2, 3)
    quantized = ddp._Quantized(Codec(4), True, ddp.has_one_dimension)

    def known(*parameters):
        return quantized._known(bucket_of(*parameters))

    first = known(matrix, bias)
    assert known(matrix, bias) is first
    assert first.runs == [0, 6, 3]
    assert [known(*changed).runs for changed in ([matrix], [matrix, bias, other], [matrix, other])] == [
        [0, 6],
        [0, 6, 3, 6],
        [0, 12],
    ]
    assert known(other, matrix).parameters[0] is other
