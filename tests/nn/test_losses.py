"""Losses in models: in place of torch's loss_parallel, and of the loss of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from graphar import nn, reference
from graphar.nn.losses import CausalLoss
from tests.cases import normal, same_bits
from tests.processes import run_ranks

HIDDEN, WORDS, STEPS = 16, 64, 3


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(HIDDEN, 32), torch.nn.ReLU(), torch.nn.Linear(32, HIDDEN), torch.nn.Linear(HIDDEN, WORDS)
    return torch.nn.Sequential(*layers).bfloat16()


def trained(rank, ranks):
    """The losses, a gradient of the head and the parameters after steps of AdamW."""
    mesh, found = init_device_mesh("cpu", (ranks,)), []
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate(), use_local_output=False)}
    plan["3"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    net = parallelize_module(model(), mesh, plan)
    nn.make_tp_invariant(net, plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        target = torch.arange(5 + step) * 7 % WORDS
        with nn.loss_parallel():
            loss = functional.cross_entropy(
                net(normal(step, (5 + step) * HIDDEN, torch.bfloat16).view(-1, HIDDEN)), target
            )
            loss.backward()
        found += [loss.to_local().detach(), net[3].weight.grad.full_tensor()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *[one.detach().full_tensor() for one in net.parameters()]]


@pytest.fixture(scope="module")
def of_one_rank():
    return run_ranks(trained, 1)[0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_place_of_torchs_loss_parallel_training_has_the_bits_of_one_rank(ranks, of_one_rank):
    assert of_one_rank[0] > 0
    for found in run_ranks(trained, ranks):
        assert [same_bits(*pair) for pair in zip(found, of_one_rank, strict=True)] == [0] * len(found)


def losses_as_rank(rank, ranks):
    """What loss_parallel gives for options of torch, and what it refuses."""
    logits, target = normal(0, 5 * WORDS, torch.float32).view(5, WORDS), torch.arange(5)
    x = DTensor.from_local(logits.chunk(ranks, 1)[rank], init_device_mesh("cpu", (ranks,)), [Shard(1)])
    found, refused = [], []
    with nn.loss_parallel():
        plain = functional.cross_entropy(logits, target)  # no DTensor: torch's
        for how in ({}, {"reduction": "sum", "ignore_index": 3}, {"label_smoothing": 0.2, "reduction": "none"}):
            found.append(functional.cross_entropy(x, target, **how).to_local())
        for how in ({"weight": torch.ones(WORDS)}, {"reduce": True}):
            with pytest.raises(ValueError, match="loss_parallel: cross_entropy takes no weight") as error:
                functional.cross_entropy(x, target, **how)
            refused.append(str(error.value))
        with pytest.raises(ValueError, match="logits must be") as error:
            functional.cross_entropy(x[None], target[None])
    return plain, found, refused


def test_it_takes_the_options_of_torch_and_refuses_the_rest():
    logits, target = normal(0, 5 * WORDS, torch.float32).view(5, WORDS), torch.arange(5)
    for plain, found, refused in run_ranks(losses_as_rank, 2):
        assert same_bits(plain, functional.cross_entropy(logits, target)) == 0
        assert same_bits(found[0], reference.cross_entropy(logits, target)) == 0
        assert same_bits(found[1], reference.cross_entropy(logits, target, reduction="sum", ignore_index=3)) == 0
        torch.testing.assert_close(
            found[2], functional.cross_entropy(logits, target, label_smoothing=0.2, reduction="none")
        )
        assert len(refused) == 2


def test_the_loss_of_transformers_shifts_labels_and_divides_by_the_items_of_a_batch():
    head = SimpleNamespace(weight=torch.empty(WORDS, HIDDEN))
    logits = normal(0, 2 * 4 * WORDS, torch.float32).view(2, 4, WORDS)
    labels = torch.arange(8).view(2, 4)
    labels[0, 2] = -100
    shifted = torch.tensor([[1, -100, 3, -100], [5, 6, 7, -100]])

    loss = CausalLoss(head)

    total = reference.cross_entropy(logits, shifted, reduction="sum")
    assert same_bits(loss(logits, labels, WORDS), reference.cross_entropy(logits, shifted)) == 0
    assert same_bits(loss(logits, None, shift_labels=shifted, num_items_in_batch=torch.tensor(3)), total / 3) == 0
