"""Losses and log-probabilities over a divided vocabulary: bits on every number of ranks, values, gradients, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

import graphar
from graphar import reference
from graphar.numerics import softmax
from graphar.numerics.exact_fma import fma, fma_in_doubles
from graphar.numerics.softmax import Terms
from graphar.reference.losses import specification
from tests.cases import KERNEL_DTYPES, normal, same_bits
from tests.processes import run_ranks

RANKS = (1, 2, 4, 8)
SIZES = (8, 64, 136, 4160, 8 * 8200)  # a column a leaf, a lane, uneven leaves, more than all lanes, more than a step
EVERYTHING = {"label_smoothing": 0.1, "lse_square_scale": 1e-3}


def drawn(rows, size, dtype=torch.float32, scale=4):
    """Logits and targets, of which the first is ignored."""
    logits = (normal(rows, rows * size, torch.float32).view(rows, size) * scale).to(dtype)
    target = torch.randint(size, (rows,), generator=torch.Generator().manual_seed(size))
    target[0] = -100
    return logits, target


def with_gradients(call, logits, target, ranks):
    """What every rank gets of a list, and the gradient of all logits."""
    parts = [one.clone().requires_grad_() for one in logits.chunk(ranks, -1)]
    results = call(parts, [target] * ranks)
    torch.autograd.backward(results)
    assert all(same_bits(one, results[0]) == 0 for one in results)
    return results[0].detach(), torch.cat([one.grad for one in parts], -1)


@pytest.mark.promise("Losses and log-probabilities have the same bits on 1, 2, 4 and 8 ranks, and so have gradients.")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_losses_and_gradients_have_the_same_bits_on_every_number_of_ranks(size, dtype):
    logits, target = drawn(3, size, dtype)
    for options in ({}, EVERYTHING | {"vocab_size": size - 3}):
        call = partial(graphar.cross_entropy, **options)
        whole = reference.cross_entropy(logits, target, **options)
        found = [with_gradients(call, logits, target, ranks) for ranks in RANKS]
        assert [same_bits(loss, whole) for loss, _ in found] == [0] * 4
        assert [same_bits(gradient, found[0][1]) for _, gradient in found] == [0] * 4
        assert whole.isfinite()
        assert found[0][1].count_nonzero() > 0


@pytest.mark.parametrize("size", SIZES)
def test_log_probs_and_what_comes_with_them_have_the_same_bits_on_every_number_of_ranks(size):
    logits, target = drawn(3, size, torch.bfloat16)
    tokens = target.clamp(0, size - 4)
    options = {"temperature": 0.7, "vocab_size": size - 3, "entropy": True, "top1": True}
    expected = reference.log_probs(logits, tokens, **options)
    for ranks in RANKS:
        found = graphar.log_probs([*logits.chunk(ranks, -1)], [tokens] * ranks, **options)
        for ones, wanted in zip(found, expected, strict=True):
            assert [same_bits(one, wanted) for one in ones] == [0] * ranks


def test_a_row_has_the_same_bits_whatever_the_number_of_rows():
    logits, target = drawn(70, 2112, torch.bfloat16)
    many = specification(logits, target, Terms(2112, "none", -100, 0.1), torch.ones(70))

    for row in (0, 1, 69):
        alone = specification(
            logits[row : row + 1], target[row : row + 1], Terms(2112, "none", -100, 0.1), torch.ones(1)
        )
        assert same_bits(alone.results[0], many.results[0][row : row + 1]) == 0
        assert same_bits(alone.gradients[0], many.gradients[0][row : row + 1]) == 0


def of_rank(rank, ranks):
    """A process's losses, log-probabilities and gradients: of its columns, and of a DTensor."""
    logits, target = drawn(5, 64 * 8, torch.bfloat16)
    own, mesh = logits.chunk(ranks, -1)[rank], init_device_mesh("cpu", (ranks,))
    found = []
    for x in (own, DTensor.from_local(own, mesh, [Shard(-1)]), DTensor.from_local(logits, mesh, [Replicate()])):
        leaf, wanted = x.detach().requires_grad_(), target
        if isinstance(x, DTensor):
            wanted = DTensor.from_local(target, mesh, [Replicate()])
        loss = graphar.cross_entropy(leaf, wanted, **EVERYTHING)
        loss.backward()
        gradient = leaf.grad.to_local() if isinstance(leaf, DTensor) else leaf.grad
        more = graphar.log_probs(x, target.clamp(min=0), entropy=True, top1=True)
        found.append((loss.detach(), gradient, *[one.detach() for one in more]))
    return found


def refused_dtensors(rank, ranks):
    """What is said of DTensors whose rows, or uneven columns, ranks have, and of a group beside a DTensor."""
    mesh, said = init_device_mesh("cpu", (ranks,)), []
    for shape, place, group in (((4, 16), Shard(0), None), ((4, 17), Shard(1), None), ((4, 16), Shard(1), mesh)):
        x = distribute_tensor(torch.zeros(shape), mesh, [place])
        with pytest.raises(ValueError, match="a DTensor of logits must be replicated, or evenly") as error:
            graphar.log_probs(x, torch.zeros(4, dtype=torch.int64), group)
        said.append(str(error.value))
    return said


def test_other_dtensors_are_refused():
    for said in run_ranks(refused_dtensors, 2):
        assert [one.startswith("log_probs: ") for one in said] == [True] * 3


@pytest.mark.parametrize("ranks", RANKS)
def test_processes_and_dtensors_get_the_specifications_bits(ranks):
    logits, target = drawn(5, 64 * 8, torch.bfloat16)
    terms = Terms(512, "mean", -100, *EVERYTHING.values())
    losses = specification(logits, target, terms, torch.ones(()))
    more = reference.log_probs(logits, target.clamp(min=0), entropy=True, top1=True)

    for rank, of_kinds in enumerate(run_ranks(of_rank, ranks)):
        for (loss, gradient, *others), count in zip(of_kinds, (ranks, ranks, 1), strict=True):
            expected = losses.gradients[0].chunk(count, -1)[rank % count]
            assert same_bits(loss, losses.results[0]) == same_bits(gradient, expected) == 0
            assert [same_bits(*pair) for pair in zip(others, more, strict=True)] == [0] * 3


def by_torch(logits, target, dtype, **options):
    """The loss of each row and its gradient, by torch in a dtype."""
    x = logits.to(dtype).requires_grad_()
    z_loss = options.pop("lse_square_scale", 0) * x.logsumexp(1) ** 2
    loss = functional.cross_entropy(x, target, reduction="none", **options) + torch.where(target == -100, 0, z_loss)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


@pytest.mark.parametrize("scale", [0.1, 1, 10])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_error_is_no_larger_than_that_of_torch_in_fp32(options, scale):
    logits, target = drawn(40, 8 * 4000, scale=scale)
    names = Terms(32000, "none", -100, *options.values())
    ours = specification(logits, target, names, torch.ones(40))
    exact, fp32 = (by_torch(logits, target, dtype, **options) for dtype in (torch.float64, torch.float32))

    for mine, torchs, wanted in zip((ours.results[0], ours.gradients[0]), fp32, exact, strict=True):
        error, of_torch = ((one - wanted).square().mean().sqrt() for one in (mine, torchs))
        assert 0 < error <= of_torch * 1.05


def test_entropy_is_that_of_the_probabilities():
    logits, target = drawn(6, 640)
    found = reference.log_probs(logits, target.clamp(min=0), temperature=2.0, entropy=True, top1=True)

    of_all = (logits.double() / 2).log_softmax(1)
    torch.testing.assert_close(found[1].double(), -(of_all.exp() * of_all).sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0].double(), of_all.gather(1, target.clamp(min=0)[:, None])[:, 0])
    assert torch.equal(found[2], logits.argmax(1))


HUGE = 3e38
SPECIAL = {
    "some are -inf": [-math.inf, 1.0, 2.0, -math.inf, 0.5, -math.inf, 3.0, 1.0],
    "all but one are -inf": [-math.inf] * 7 + [1.0],
    "all equal": [2.5] * 8,
    "one huge": [1.0, HUGE, 1.0, 0.0, -1.0, -HUGE, 1.0, 1.0],
    "zeros of both signs": [0.0, -0.0] * 4,
    "all -inf": [-math.inf] * 8,
    "a NaN": [1.0, math.nan, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
    "+inf": [1.0, math.inf, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
}


@pytest.mark.parametrize("repeats", [1, 40])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_are_as_in_torch(name, dtype, repeats):
    row = torch.tensor(SPECIAL[name]).repeat_interleave(repeats).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    row = torch.where(torch.tensor(SPECIAL[name]).repeat_interleave(repeats).isinf(), math.inf * row.sign(), row)
    logits, target = row.to(dtype).expand(2, -1).contiguous(), torch.tensor([8 * repeats - 1, 2])
    ours = specification(logits, target, Terms(len(row), "none", -100), torch.ones(2))
    loss, gradient = by_torch(logits, target, torch.float64)

    torch.testing.assert_close(ours.results[0], loss.float(), equal_nan=True)
    torch.testing.assert_close(ours.gradients[0], gradient.to(dtype), equal_nan=True)
    for ranks in RANKS[1:]:
        found = specification(logits.chunk(ranks, 1), target, Terms(len(row), "none", -100), torch.ones(2))
        assert same_bits(found.results[0], ours.results[0]) == 0
        assert same_bits(torch.cat(found.gradients, 1), ours.gradients[0]) == 0
    top1 = reference.log_probs(logits, target, top1=True)[1].tolist()
    assert top1 == [-1 if row.isnan().any() else row.argmax().item()] * 2


def test_rows_that_are_ignored_have_no_loss_and_gradients_of_zero():
    logits, target = drawn(4, 64)
    ignored = torch.full_like(target, -1)
    leaf = logits.clone().requires_grad_()

    losses = graphar.cross_entropy(leaf, ignored, ignore_index=-1, reduction="none")
    losses.sum().backward()

    assert losses.tolist() == [0.0] * 4
    assert same_bits(leaf.grad, torch.zeros_like(leaf)) == 0
    assert graphar.cross_entropy(logits, ignored, ignore_index=-1, reduction="sum") == 0
    assert graphar.cross_entropy(logits, ignored, ignore_index=-1).isnan()  # as torch's mean of nothing
    assert graphar.cross_entropy(logits[:0], target[:0]).isnan()


def test_padding_counts_as_absent_whatever_it_holds():
    logits, target = drawn(4, 61)
    expected, of_columns = by_torch(logits, target, torch.float64)
    for content in (0.0, 1e30, math.nan, math.inf):
        padded = torch.cat([logits, torch.full((4, 3), content)], 1)
        ours = specification(padded.chunk(8, 1), target, Terms(61, "none", -100, 0.0), torch.ones(4))

        torch.testing.assert_close(ours.results[0], expected.float())
        gradient = torch.cat(ours.gradients, 1)
        torch.testing.assert_close(gradient[:, :61], of_columns.float())
        assert same_bits(gradient[:, 61:], torch.zeros(4, 3)) == 0


@pytest.mark.parametrize("target", [-1, 61, 64])
def test_a_target_that_is_no_column_makes_its_row_nan(target):
    logits, targets = drawn(3, 64)
    targets[1] = target
    ours = specification(logits, targets, Terms(61, "none", -100), torch.ones(3))

    assert ours.results[0].isnan().tolist() == [False, True, False]
    assert ours.gradients[0][:, :61].isnan().all(1).tolist() == [False, True, False]


def test_reductions_are_the_tree_of_the_rows():
    logits, target = drawn(13, 64)
    losses = graphar.cross_entropy(logits, target, reduction="none")
    total = [*losses, *[torch.zeros(())] * 3]
    while len(total) > 1:
        total = [left + right for left, right in zip(total[::2], total[1::2], strict=True)]

    assert same_bits(graphar.cross_entropy(logits, target, reduction="sum"), total[0]) == 0
    assert same_bits(graphar.cross_entropy(logits, target), total[0] / 12) == 0


def test_exponentials_and_logarithms_are_as_exact_as_they_say():
    d = -torch.rand(1 << 18, generator=torch.Generator().manual_seed(0)) * 87
    exact = d.double().exp()
    assert ((softmax.exp(d) - exact).abs() / exact <= 1.7e-7 - 1.4e-8 * d).all()
    assert softmax.exp(torch.tensor([0.0, -0.0, -87.7, -math.inf])).tolist() == [1, 1, 0, 0]
    assert softmax.exp(torch.tensor([math.nan])).isnan()
    s = 1 + 300000 * torch.rand(1 << 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(softmax.log(s), s.double().log(), rtol=1e-12, atol=0)
    assert softmax.log(torch.tensor([0.0, 1.0])).tolist() == [-math.inf, 0]


def test_sums_in_the_middle_between_two_numbers_are_rounded_once():
    a, b = 8384513 * 2.0**-35, 8392705 * 2.0**-35  # 1 + their product is 2^-70 above the middle
    of_fp32 = torch.tensor([a, 0.5]), torch.tensor([b, 0.25])

    found = fma_in_doubles(*(one.double() for one in of_fp32), 1.0)

    assert torch.equal(found.float(), fma(*of_fp32, torch.tensor(1.0)))
    assert found[0] == 1 + 2.0**-23


def test_a_gradient_may_be_written_into_the_logits():
    logits, target = drawn(4, 64, torch.bfloat16)
    leaf = logits.clone().requires_grad_()
    graphar.cross_entropy(leaf, target).backward()
    again = logits.clone().requires_grad_()
    hidden = again * 1
    loss = graphar.cross_entropy(hidden, target, overwrite_logits=True)

    (gradient,) = torch.autograd.grad(loss, hidden, retain_graph=True)

    assert gradient.data_ptr() == hidden.data_ptr()
    assert same_bits(gradient, leaf.grad) == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_refused():
    logits, target = drawn(4, 64)
    leaf = logits.requires_grad_()
    (gradient,) = torch.autograd.grad(graphar.cross_entropy(leaf, target), leaf, create_graph=True)

    with pytest.raises(NotImplementedError, match="cross_entropy: it has no second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_calls_have_the_bits_of_eager_ones(in_place):
    def both(x, target):
        more = graphar.log_probs(x * 2, target.clamp(min=0), entropy=True, top1=True)
        return graphar.cross_entropy(x * 1, target, overwrite_logits=in_place, **EVERYTHING), *more

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for rows in (4, 7):
        logits, target = drawn(rows, 64)
        found = []
        for function in (both, compiled):
            leaf = logits.clone().requires_grad_()
            results = function(leaf, target)
            (results[0] + results[1].sum()).backward()
            found.append([*(one.detach() for one in results), leaf.grad])
            assert [one.requires_grad for one in results] == [True, True, False, False]
        assert [same_bits(*pair) for pair in zip(*found, strict=True)] == [0] * 5


LOGITS, TARGET, WIDE = torch.zeros(3, 16), torch.zeros(3, dtype=torch.int64), torch.zeros(0, 2**24 + 8)
LOSS, PROBS = partial(graphar.cross_entropy, LOGITS, TARGET), partial(graphar.log_probs, LOGITS, TARGET)
REFUSED = {
    "reduction must be 'mean', 'sum' or 'none', got 'max'": partial(LOSS, reduction="max"),
    "label_smoothing must be from 0 to 1, got 1.5": partial(LOSS, label_smoothing=1.5),
    "lse_square_scale must be a finite number, got inf": partial(LOSS, lse_square_scale=math.inf),
    "ignore_index must be an int, got 1.0": partial(LOSS, ignore_index=1.0),
    "vocab_size must be positive, got 0": partial(LOSS, vocab_size=0),
    "vocab_size must be at most the 16 columns, got 17": partial(LOSS, vocab_size=17),
    "top1 takes at most 16777216 columns, got 16777224": partial(graphar.log_probs, WIDE, TARGET[:0], top1=True),
    "temperature must be positive, got 0.0": partial(PROBS, temperature=0.0),
    r"target must be \[3\] torch.int64 on cpu, got \[3\] torch.int32": partial(
        graphar.cross_entropy, LOGITS, TARGET.int()
    ),
    r"target must be \[3\] torch.int64 on cpu, got \[3, 1\]": partial(graphar.cross_entropy, LOGITS, TARGET[:, None]),
    "logits must be bfloat16, float16 or float32, got torch.float64": partial(
        graphar.log_probs, LOGITS.double(), TARGET
    ),
    "logits must have columns": partial(graphar.log_probs, LOGITS[:, :0], TARGET),
    "8 leaves of equal length": partial(graphar.cross_entropy, LOGITS[:, :12], TARGET),
    "for 1, 2, 4 or 8 ranks, got 3": partial(graphar.log_probs, [LOGITS] * 3, [TARGET] * 3),
    "target must be a list of 2 tensors": partial(graphar.cross_entropy, [LOGITS] * 2, TARGET),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_breaks_a_rule_is_refused_by_name(message):
    with pytest.raises((TypeError, ValueError), match=f"^(cross_entropy|log_probs): .*{message}"):
        REFUSED[message]()
