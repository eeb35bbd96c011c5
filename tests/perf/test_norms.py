"""perf norms: measurements on the CPU, the check of results, and the report."""

from __future__ import annotations

import functools

import pytest
import torch

import graphar
from perf import __main__ as program
from perf.harness import verify
from perf.harness.ranks import InProcessRanks
from perf.harness.verify import count_differing, count_far
from perf.models.decoder import EPS, add_and_norm, compiled
from perf.report import read
from perf.topics import norms
from perf.topics.norms import Norms, bounds
from tests.perf.samples import norm_row as row


def test_a_run_on_the_cpu_is_reported(tmp_path, monkeypatch, forked_ranks):
    monkeypatch.setattr(norms, "CPU_TOKENS", (3,))

    assert program.main(["norms", "--hidden", "64", "--out", str(tmp_path)]) == 0

    folder = tmp_path / "cpu"
    report = read(folder, Norms).report
    measured = [(row.tokens, row.method, row.wrong) for row in report.rows]
    methods = ("graphar", "graphar fp8", "gloo + norm", "graphar + norm")
    assert measured == [(3, method, 0) for method in methods]
    assert report.skipped == []
    assert (
        "| tokens | graphar (us) | graphar fp8 (us) | gloo + norm (us) | graphar + norm (us) | best peer"
        in (folder / "norms.md").read_text()
    )


def data(world_size, seed=0, tokens=64, hidden=256):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, hidden)] * (world_size + 1) + [(hidden,)]
    *xs, residual, weight = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return xs, residual, weight


def test_graphar_is_held_to_the_bit_and_peers_to_their_rounding():
    xs, residual, weight = data(2)
    expected = graphar.reference.allreduce_residual_rmsnorm(xs, residual, weight, EPS, 0.0)
    limits = bounds(xs, residual, weight, expected)
    results = expected[0].clone(), expected[1].clone()
    results[1].view(torch.int16)[2, 3] ^= 1

    assert count_differing(results, expected) == 1
    assert count_far(results, expected, limits) == 0
    assert count_far((expected[0] + 1, expected[1]), expected, limits) > 0.9 * residual.numel()
    assert count_far((expected[0] * torch.nan, expected[1]), expected, limits) == residual.numel()


def ring(parts):
    """A sum that rounds at every hop."""
    return functools.reduce(lambda total, part: (total.float() + part.float()).bfloat16(), parts)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_ring_that_rounds_at_every_hop_is_right_between_any_ranks_and_one_that_drops_a_rank_is_not(
    world_size, in_place
):
    xs, residual, weight = data(world_size)
    expected = graphar.reference.allreduce_residual_rmsnorm(xs, residual, weight, EPS, 0.0)
    limits = bounds(xs, residual, weight, expected)
    parts, dropped = xs, [*xs[:-1], torch.zeros_like(xs[-1])]
    if in_place:
        limits = [verify.drift(world_size) * limit for limit in limits]
        parts = [(x.double() * float(world_size) ** (1 - norms.CALLS)).bfloat16() for x in xs]
        for _ in range(norms.CALLS - 1):
            parts = [ring(parts)] * world_size

    assert count_far(add_and_norm(ring(parts), residual, weight), expected, limits) == 0
    assert count_far(add_and_norm(ring(dropped), residual, weight), expected, limits) > 0.5 * residual.numel()


def tables(rows):
    (section,) = Norms(rows).sections()
    return section


def test_times_end_in_the_ratio_to_the_best_peers_and_what_is_wrong_says_so():
    rows = [row("graphar", 1, 4.0), row("nccl + norm", 1, 16.0), row("flashinfer_one_shot", 1, 8.0)]
    rows += [row("graphar", 2, 5.0, wrong=3), row("nccl + norm", 2, 9.0)]

    section = tables(rows)

    assert section.body[0].splitlines()[2:] == [
        "| 1 | 4 | 16 | 8 | flashinfer_one_shot | 0.50 |",
        "| 2 | 5 **(3 WRONG)** | 9 | - | nccl + norm | - |",
    ]
    assert Norms(rows).verdict() == "**WRONG RESULTS: 1 of 5 (graphar at 2 tokens, hidden size 8192).**"


def test_a_glance_is_the_range_of_graphars_ratio_and_its_worst_case():
    rows = [row("graphar", 1, 4.0), row("nccl + norm", 1, 12.0), row("flashinfer_one_shot", 1, 8.0)]
    rows += [row("graphar", 8, 10.0), row("nccl + norm", 8, 8.0), row("graphar + norm", 8, 5.0)]

    glance = Norms(rows).glance()

    assert glance.headline == "0.50 to 1.25"
    assert glance.words == "graphar's time / the time of the best of 2 peers, by number of tokens"
    assert glance.shortfall == "1 of 2 cases; the worst is 1.25 (8 tokens, 4 ranks)"


@pytest.mark.parametrize(
    ("method", "tokens", "serves"),
    [("flashinfer_one_shot", 1, True), ("flashinfer_two_shot", 4, False), ("flashinfer_two_shot", 5, True)],
)
def test_what_a_method_of_flashinfers_takes(method, tokens, serves):
    assert norms.serves(method, tokens, world_size=4) == serves


@pytest.mark.parametrize(("wrong", "status"), [("nccl + norm", 0), ("graphar", 1), ("graphar + norm", 1)])
def test_a_wrong_peer_does_not_fail_a_run_and_a_wrong_result_of_graphars_does(tmp_path, monkeypatch, wrong, status):
    methods = ("graphar", "graphar + norm", "nccl + norm")
    rows = [row(method, 1, 4.0, wrong=int(method == wrong)) for method in methods]
    monkeypatch.setattr(norms.ranks_of, "run", lambda *_: iter(rows))

    assert program.main(["norms", "--out", str(tmp_path)]) == status
    assert program.main(["report", str(next(tmp_path.glob("*/"))), "--json"]) == status


def test_nothing_is_compared_with_a_wrong_peer():
    section = tables([row("graphar", 1, 4.0), row("nccl + norm", 1, 12.0, wrong=3)])

    assert section.body[0].endswith("| 1 | 4 | 12 **(3 WRONG)** | - | - |")


def summed(x, residual, weight):
    return add_and_norm(2 * x, residual, weight)  # as if another rank held the same


def summed_in_place(x, residual, weight):
    return add_and_norm(x.mul_(2), residual, weight)


@pytest.fixture
def trial_of():
    """A method's trial on two ranks with equal data, these data, and the right result."""

    def make(call):
        x, residual, weight = torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
        trial = norms.Trial(call, x, residual, weight)
        trial.run(1)
        return trial, x, add_and_norm(2 * x, residual, weight)

    return make


@pytest.mark.parametrize("call", [summed, summed_in_place])
def test_what_a_timed_launch_computes_is_known_even_where_sums_take_the_place_of_its_input(trial_of, call):
    trial, x, expected = trial_of(call)

    results, drift = trial.results_of(trial.make_launch(), x, InProcessRanks(2))

    assert count_differing(results, expected) == 0
    assert drift == 1


@pytest.mark.parametrize("call", [summed, summed_in_place])
def test_a_timed_launch_that_computes_nothing_leaves_nothing_right(trial_of, call):
    trial, x, expected = trial_of(call)

    results, drift = trial.results_of(lambda: None, x, InProcessRanks(2))

    assert count_far(results, expected, [drift * torch.ones_like(x)] * 2) == 2 * x.numel()


def measure(methods, monkeypatch):
    class Two(InProcessRanks):
        device = torch.device("cpu")

    monkeypatch.setattr(norms, "serves", lambda *_: True)
    return list(norms.rows_of(norms.NormPlan("cpu", 2, 8, (4,)), 4, methods, Two(2)))


def test_sums_in_place_are_timed_on_finite_data(monkeypatch):
    seen = []

    def watched(x, residual, weight):
        seen.append(bool(x.isfinite().all() and x.count_nonzero() == x.numel()))
        return add_and_norm(x.mul_(2), residual, weight)

    measure({"nccl + norm": watched}, monkeypatch)

    assert len(seen) > norms.CALLS * norms.REPEATS["cpu"]
    assert all(seen)


def test_a_peer_that_refuses_a_size_is_named_and_the_others_are_measured(monkeypatch):
    def refuse(x, residual, weight):
        raise RuntimeError("too many rows\nsomewhere")

    name, *rows = measure({"flashinfer_one_shot": refuse, "gloo + norm": summed}, monkeypatch)

    assert name == "flashinfer_one_shot, 2 ranks, 4 tokens: too many rows"
    assert [row.method for row in rows] == ["gloo + norm"]


def test_graphar_may_not_refuse(monkeypatch):
    def refuse(x, residual, weight):
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        measure({"graphar": refuse}, monkeypatch)


def test_what_is_compiled_leaves_no_reduction_to_be_timed_on_each_rank(monkeypatch):
    from torch._inductor import compile_fx, config

    patches = []

    def compile_nothing(module, inputs, config_patches, **_):
        patches.append(config_patches)
        return module

    monkeypatch.setattr(compile_fx, "compile_fx", compile_nothing)

    with config.patch(compile_threads=1):
        compiled(lambda x: x.relu())(torch.ones(3))

    assert [options["deterministic"] for options in patches] == [True]


@pytest.mark.gpu(1)
def test_a_compiled_norm_has_one_kernel_that_nothing_is_timed_for(tmp_path, monkeypatch):
    """Otherwise Inductor has two for such rows, and takes the faster."""
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    timed, of_norms = [], torch.randn(2, 64, 8192, dtype=torch.bfloat16, device="cuda")
    original = CachingAutotuner.autotune_to_one_config
    monkeypatch.setattr(
        CachingAutotuner,
        "autotune_to_one_config",
        lambda tuner, *args, **kwargs: timed.append(tuner) or original(tuner, *args, **kwargs),
    )

    with config.patch(compile_threads=1):
        compiled(add_and_norm)(*of_norms, of_norms[0, 0])

    assert timed == []
