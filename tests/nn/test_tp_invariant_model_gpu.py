"""A model on one GPU that was made tensor-parallel invariant: a row of a batch has the bits that it has alone."""

import pytest
import torch
from torch.distributed.tensor.parallel import SequenceParallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphar import nn
from tests.cases import normal, same_bits
from tests.nn.transformer import Transformer, plan, words

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("hopper")]

LENGTH, BATCHES = 24, (1, 3, 64)


@pytest.fixture
def model():
    made = Transformer(torch.bfloat16, hidden=256, inner=512).cuda()
    assert nn.make_tp_invariant(made, plan()).left == {}
    return made


def test_a_row_has_the_bits_that_it_has_in_batches_of_every_size(model):
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        one, three, many = (model(words(batch, LENGTH, "cuda")) for batch in BATCHES)

    assert one.isfinite().all()
    assert one.float().std() > 0.1
    assert same_bits(one, three[:1]) == same_bits(three, many[:3]) == 0


def test_gradients_are_those_of_the_plain_model_to_within_rounding(model):
    plain, given = Transformer(torch.float32, hidden=256, inner=512).cuda(), words(3, LENGTH, "cuda")

    for one in (model, plain):
        logits = one(given).float()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), given.roll(-1, 1).flatten()).backward()

    for (name, found), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if not name.endswith("k.bias"):  # zero, as a softmax ignores what is added to all keys
            off = (found.grad.float() - wanted.grad).norm() / wanted.grad.norm()
            assert off < 0.1, name


@pytest.mark.parametrize(
    ("kind", "autocast"), [(torch.nn.LayerNorm, False), (torch.nn.RMSNorm, False), (torch.nn.LayerNorm, True)]
)
def test_norms_have_torchs_gradients_under_autocast_too(kind, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    x, of_y = (normal(seed, 24 * 256, torch.bfloat16).view(2, 12, 256).cuda() for seed in (0, 1))
    found = []
    for is_invariant in (False, True):
        norm = torch.nn.Sequential(kind(256, eps=1e-5)).cuda().to(dtype)
        if is_invariant:
            nn.make_tp_invariant(norm, {"0": SequenceParallel()})
            assert type(norm[0]) is not kind
        own = x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = norm(own)
        y.backward(of_y.to(y.dtype))
        found.append([y.detach(), own.grad, *[one.grad for one in norm.parameters()]])

    assert [same_bits(*pair) for pair in zip(*found, strict=True)] == [0] * len(found[0])
