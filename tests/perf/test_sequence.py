"""perf model --sequence-parallel: its layers and methods, what it takes for wrong, and the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from perf import __main__ as program
from perf.harness.ranks import ProcessRanks
from perf.models import sequence
from perf.models.decoder import PLAIN, PREFILL, SIZES, TINY, Case, Shard, add_and_norm, make_decoder, make_inputs
from perf.models.sequence import (
    ASYNC,
    CPU_METHODS,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
    TRAINING,
    WHOLE,
    Bench,
    SequencePlan,
    Trial,
)
from perf.topics.model import Model
from tests.perf.samples import MACHINE
from tests.perf.samples import sequence_row as row
from tests.processes import run_ranks

CPU = torch.device("cpu")
SIZE, TOKENS = SIZES[TINY], 8
ALONE = Shard(0, 1, CPU)


def test_it_has_the_output_of_the_decoder_with_a_cache():
    decoder, inputs = make_decoder(SIZE, 2, ALONE), make_inputs(SIZE, 2, Case(PREFILL, TOKENS, TOKENS), ALONE)

    output = sequence.forward(decoder, replace(inputs, caches=()), WHOLE, PLAIN)

    def row_parallel_and_norm(a, weight, residual, scale):
        return add_and_norm(torch.nn.functional.linear(a, weight), residual, scale)

    expected = decoder.step(inputs, PLAIN, row_parallel_and_norm)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("world_size", [2, 4])
def test_parts_of_gradients_are_those_of_the_weights(world_size):
    whole = sequence.named_weights(make_decoder(SIZE, 1, ALONE))

    for share in [Shard(rank, world_size, CPU) for rank in range(world_size)]:
        shards = sequence.named_weights(make_decoder(SIZE, 1, share))
        assert shards.keys() == whole.keys()
        for name, weight in whole.items():
            assert torch.equal(sequence.part_of(name, weight, SIZE, share), shards[name]), name


def bench(world_size):
    return Bench(SequencePlan("cpu", world_size, TINY, 1, ()), ProcessRanks(CPU, None), PLAIN)


def rows_of_methods(rank, world_size, names):
    made = bench(world_size)
    methods = [sequence.make_method(name) for name in names]
    return [message for phase in (PREFILL, TRAINING) for message in made.measure(phase, TOKENS, methods)]


def test_every_method_has_the_logits_and_gradients_of_the_unsharded_model():
    for rows in run_ranks(rows_of_methods, 4, CPU_METHODS):
        assert [(row.method, row.phase) for row in rows] == [
            (name, phase) for phase in (PREFILL, TRAINING) for name in CPU_METHODS
        ]
        assert [row.wrong for row in rows] == [0] * len(rows)
        assert all(0 < row.error < 0.015 for row in rows)
        assert all(row.gradient_error is None for row in rows if row.phase == PREFILL)
        assert all(0 < row.gradient_error < 0.03 for row in rows if row.phase == TRAINING)


class Counted(Exception):
    """Ends a compilation once its fused ops are counted."""


def torchs_pass_at_work(rank, world_size):
    """The fused ops of a prefill's graph and of both graphs of a training step, and the step's row.

    torch's own stand-ins compute the fused ops.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    counts = []

    class Counting(sequence.CountFused):
        def __call__(self, graph):
            before = self.count
            super().__call__(graph)
            counts.append(self.count - before)
            if len(counts) == 1:
                raise Counted

    sequence.CountFused = Counting
    made, method = bench(world_size), sequence.make_method(ASYNC)
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric_memory, f"_{name}_fallback"), "CPU")
    dist.is_nccl_available = lambda: True
    with symmetric_memory._test_mode():
        (refused,) = made.measure(PREFILL, TOKENS, [method])
        (row,) = made.measure(TRAINING, TOKENS, [method])
    return counts, refused, row


def test_torchs_pass_fuses_every_collective_of_both_passes():
    for counts, refused, trained in run_ranks(torchs_pass_at_work, 2, timeout_s=280):
        assert counts == [4, 4, 4]
        assert refused.startswith("async_tp, prefill on a sequence of 8 tokens: ")
        assert (trained.phase, trained.wrong) == (TRAINING, 0)


def test_where_torch_fuses_nothing_there_is_no_row():
    x = torch.randn(TOKENS, SIZE.hidden, dtype=torch.bfloat16)
    inputs = replace(make_inputs(SIZE, 1, Case(PREFILL, TOKENS, TOKENS), ALONE), x=x, caches=())
    trial = Trial(replace(WHOLE, name=ASYNC), make_decoder(SIZE, 1, ALONE), inputs, x, PREFILL, PLAIN)

    with pytest.raises(RuntimeError, match="torch fused no collective with a matmul"):
        trial.make_launch()


def rows_of_mistakes(rank, world_size):
    good = sequence.make_method(SEQUENCE_PARALLEL)

    def row_parallel(a, w):
        """Returns this rank's rows of its own product."""
        return torch.nn.functional.linear(a, w).chunk(world_size)[rank]

    broken = [
        replace(good, name="no sum", row_parallel=row_parallel),
        replace(good, name="norms", sum_norms=lambda x: x),
    ]
    return list(bench(world_size).measure(TRAINING, TOKENS, broken))


def test_tokens_and_gradients_that_are_too_far_off_are_counted():
    for no_sum, norms in run_ranks(rows_of_mistakes, 2):
        assert no_sum.wrong >= TOKENS
        assert norms.wrong == 2 * 3  # two norms of the layer and the last one, on each of two ranks
        assert norms.error < 0.015 < 0.1 < norms.gradient_error


def test_a_gradient_that_is_no_number_is_infinitely_wrong():
    assert sequence.relative_error(torch.tensor([torch.nan]), torch.ones(1)) == float("inf")


ONLY = ["model", "--decode", "--prefill", "--generate", "0", "--sequence-parallel"]


@pytest.mark.parametrize(
    ("argv", "lengths"),
    [
        (["model"], None),
        ([*ONLY], (2048, 8192)),
        ([*ONLY, "64"], [64]),
        (["model", "--sequence-parallel"], (2048, 8192)),
    ],
)
def test_lengths_are_those_that_are_given_or_those_of_a_prefill(argv, lengths):
    plans = Model.plan(program.parse(argv), gpu_count=4)

    planned = [plan for plan in plans if isinstance(plan, SequencePlan)]
    assert [(plan.size, plan.layers, plan.tokens) for plan in planned] == (
        [("llama-3-70b", 4, lengths)] if lengths else []
    )
    assert (len(plans) == 1) == (argv != ["model"] and argv[1] == "--decode")


ROWS = [row("nccl", 1000.0), row("async_tp", 900.0), row(TENSOR_PARALLEL, 850.0), row(SEQUENCE_PARALLEL, 720.0)]


def test_a_step_has_a_table():
    report = Model(sequences=ROWS)

    section, notes = report.sections()
    title = "4 ranks, 4 layers of llama-3-70b, sequence parallelism: training on 8192 tokens"
    assert section.title == title
    *_, last = section.body[0].splitlines()
    assert last == f"| {SEQUENCE_PARALLEL} | 720.0 | 0.80 | 14.4 | 568,889 | 0.0100 | 0.0200 |"
    assert notes.title == "How sequence parallelism was measured"
    assert report.glance().headline == "0.80"


def test_wrong_results_are_named():
    text = Model(sequences=[*ROWS[:3], row(SEQUENCE_PARALLEL, 720.0, wrong=3)]).markdown(MACHINE, "a command")

    what = f"{SEQUENCE_PARALLEL} at 4 layers of llama-3-70b, training on a sequence of 8192 tokens"
    assert f"**WRONG RESULTS: 1 of 4 ({what}).**" in text
    assert f"| {SEQUENCE_PARALLEL} **(3 WRONG)** |" in text
