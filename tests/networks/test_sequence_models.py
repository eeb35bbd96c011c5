"""Transformers whose tokens are divided by a plan: what they learn has the bits of the whole model."""

import pytest
import torch
import torch.distributed as dist

from graphar import nn
from tests.nn.test_sequence import BATCH, SEQUENCE, SEVERAL, differing, step, whole
from tests.nn.transformer import Transformer, plan, words
from tests.processes import run_ranks

CASES = {"bf16": (torch.bfloat16, False), "fp32": (torch.float32, False), "autocast": (torch.float32, True)}


def learned(model, autocast):
    """Logits without and with gradients, loss, all gradients and the parameters after a step of AdamW, all whole."""
    given = words(BATCH, SEQUENCE)
    with torch.no_grad():
        served = model(given)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(given)
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), given.roll(-1, 1).flatten())
    loss.backward()
    gradients = [whole(one.grad) for one in model.parameters()]
    step(list(model.parameters()))
    return [whole(served), whole(logits), whole(loss), *gradients, *[whole(one) for one in model.parameters()]]


def sharded(ranks, dtype):
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    return parallelize_module(Transformer(dtype), mesh, plan())


def models_on_ranks(rank, ranks):
    """What a rank gets from models that were made invariant with the plan and without it, and from one that was not."""
    found = {}
    for name, (dtype, autocast) in CASES.items():
        for has_plan in (True, False):
            model = sharded(ranks, dtype)
            layers = nn.make_tp_invariant(model, plan() if has_plan else None)
            found[name, has_plan] = layers, learned(model, autocast)
    return found, learned(sharded(ranks, torch.bfloat16), False)


@pytest.fixture(scope="module")
def of_whole_models():
    """By case the layers of the model of one process, and what it learns."""
    found = {}
    for name, (dtype, autocast) in CASES.items():
        model = Transformer(dtype)
        found[name] = nn.make_tp_invariant(model, plan()), learned(model, autocast)
    return found


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_plan_that_divides_tokens_has_the_bits_of_the_whole_model(ranks, of_whole_models):
    for by_case, plain in run_ranks(models_on_ranks, ranks, timeout_s=300):
        for (case, has_plan), (layers, found) in by_case.items():
            expected_layers, expected = of_whole_models[case]
            assert not any(differing(found, expected)), (case, has_plan)
            assert layers == expected_layers
            assert layers.left == {}
        wrong = differing(plain, of_whole_models["bf16"][1])
        assert sum(map(bool, wrong)) > len(wrong) / 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile reads it where a graph breaks
def test_a_compiled_model_has_the_same_bits(of_whole_models):
    model = Transformer(torch.bfloat16)
    nn.make_tp_invariant(model, plan())
    torch._dynamo.reset()

    model.forward = torch.compile(model.forward, backend="aot_eager")

    assert not any(differing(learned(model, False), of_whole_models["bf16"][1]))
