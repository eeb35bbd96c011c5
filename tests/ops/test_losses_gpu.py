"""Losses over a divided vocabulary on GPUs: the specification's bits, by processes that may share one, and in lists."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import graphar
from graphar import reference
from graphar.numerics.softmax import Terms
from graphar.reference.losses import specification
from tests.cases import KERNEL_DTYPES, bit_patterns, normal, same_bits
from tests.processes import run_on_gpus

SHAPES = ((1, 64), (3, 136), (130, 2112), (7, 32064), (2, 151936))  # rows and columns of all ranks
LOSSES = (
    {"reduction": "mean"},
    {"reduction": "none", "label_smoothing": 0.1, "lse_square_scale": 1e-3},
    {"reduction": "sum", "vocab_size": 61},
)
PROBS = {"temperature": 0.7, "entropy": True, "top1": True}
RANKS = [pytest.param(count, marks=pytest.mark.gpu(count, shared=count > 1)) for count in (1, 2, 4)]


def drawn(rows, columns, dtype, fill=normal):
    """Logits with a row of -inf but for a column, and targets, of which some are ignored."""
    logits = fill(rows, rows * columns, dtype).view(rows, columns)
    if fill is normal:
        logits = logits * 4
        logits[rows // 2, 1:] = -math.inf
    target = torch.arange(rows) * 7919 % 61
    target[3::5] = -100
    return logits, target


def specified(logits, target, options):
    """The loss, and the gradient of all logits, of an upstream gradient of twos."""
    terms = Terms(options.get("vocab_size") or logits.shape[1], options["reduction"], -100)
    terms = terms._replace(**{name: one for name, one in options.items() if name in Terms._fields})
    like = torch.full((len(target) if terms.result == "none" else 1,), 2.0)
    (loss, *_), (gradient,) = specification(logits, target, terms, like)
    return loss, gradient


def with_gradient(own, target, options, **more):
    """A rank's loss and gradient, by kernels."""
    hidden = own.clone().requires_grad_() * 1
    loss = graphar.cross_entropy(hidden, target, **options, **more)
    return loss.detach(), *torch.autograd.grad(loss, hidden, torch.full_like(loss, 2.0))


def wrong_as_rank(rank, ranks):
    """By case, how many elements of this rank's results and gradients differ from the specification."""
    found = {}
    for dtype, shape, fill in itertools.product(KERNEL_DTYPES, SHAPES, (normal, bit_patterns)):
        if fill is bit_patterns and shape != SHAPES[1]:
            continue
        logits, target = drawn(*shape, dtype, fill)
        own, on_gpu = logits.chunk(ranks, 1)[rank].contiguous().cuda(), target.cuda()
        for options in LOSSES:
            expected, of_all = specified(logits, target, options)
            for in_place in (False, True):
                loss, gradient = with_gradient(own, on_gpu, options, overwrite_logits=in_place)
                pairs = (loss, expected), (gradient, of_all.chunk(ranks, 1)[rank])
                found[str((dtype, shape, fill.__name__, options, in_place))] = [
                    same_bits(mine.cpu(), one) for mine, one in pairs
                ]
        tokens = target.clamp(min=0)
        scored = graphar.log_probs(own, tokens.cuda(), **PROBS)
        pairs = zip(scored, reference.log_probs(logits, tokens, **PROBS), strict=True)
        found[str((dtype, shape, fill.__name__))] = [same_bits(mine.cpu(), one) for mine, one in pairs]
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_losses_log_probs_and_gradients_have_the_specifications_bits(ranks):
    for found in run_on_gpus(wrong_as_rank, ranks, timeout_s=600):
        assert {name: wrong for name, wrong in found.items() if any(wrong)} == {}
        assert len(found) == len(KERNEL_DTYPES) * (len(SHAPES) + 1) * (2 * len(LOSSES) + 1)


def replayed_as_rank(rank, ranks):
    """How many elements differ in replays of a captured forward and backward pass with other logits."""
    logits, target = drawn(130, 2112, torch.bfloat16)
    own, on_gpu = logits.chunk(ranks, 1)[rank].contiguous().cuda().requires_grad_(), target.cuda()

    def step():
        loss = graphar.cross_entropy(own, on_gpu, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, own), graphar.log_probs(own.detach(), on_gpu.clamp(min=0))

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph, wrong = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        other = normal(90 + seed, logits.numel(), torch.bfloat16).view(logits.shape)
        with torch.no_grad():
            own.copy_(other.chunk(ranks, 1)[rank])
        graph.replay()
        torch.cuda.synchronize()
        terms = Terms(2112, "mean", -100, 0.1)
        (loss, *_), (gradient,) = specification(other, target, terms, torch.ones(1))
        expected = loss, gradient.chunk(ranks, 1)[rank], reference.log_probs(other, target.clamp(min=0))
        wrong += [same_bits(mine.detach().cpu(), one) for mine, one in zip(results, expected, strict=True)]
    return wrong


@pytest.mark.parametrize("ranks", RANKS)
def test_captured_calls_replay_with_the_bits_of_other_logits(ranks):
    for wrong in run_on_gpus(replayed_as_rank, ranks, timeout_s=300):
        assert wrong == [0] * 9


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_list_gets_the_specifications_bits(reduction):
    count = 1 << min(3, torch.cuda.device_count().bit_length() - 1)
    logits, target = drawn(130, 2112, torch.bfloat16)
    parts = [one.contiguous().to(f"cuda:{at}").requires_grad_() for at, one in enumerate(logits.chunk(count, 1))]

    losses = graphar.cross_entropy(parts, [target.to(one.device) for one in parts], reduction=reduction)
    torch.autograd.backward(losses, [torch.full_like(one, 2.0) for one in losses])

    expected, gradient = specified(logits, target, {"reduction": reduction})
    for at, one in enumerate(gradient.chunk(count, 1)):
        assert same_bits(losses[at].detach().cpu(), expected) == 0
        assert same_bits(parts[at].grad.cpu(), one) == 0


@pytest.mark.gpu(1)
def test_a_process_without_a_group_takes_no_copy_of_the_logits():
    rows, columns = 4096, 32064
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.arange(rows, device="cuda")
    hidden = logits * 1
    graphar.cross_entropy(hidden.detach()[:8], target[:8])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    (gradient,) = torch.autograd.grad(graphar.cross_entropy(hidden, target, overwrite_logits=True), hidden)

    assert gradient.data_ptr() == hidden.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < hidden.numel() * hidden.itemsize / 50
