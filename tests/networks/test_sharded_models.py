"""Models of transformers, sharded by their own plans: one set of bits on 1, 2, 4 and 8 ranks, in training too."""

import copy
import os
import pickle

import pytest
import torch

from tests.cases import same_bits
from tests.processes import import_first, run_ranks

import_first("transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2")

pytest.importorskip("transformers", reason="transformers cannot be imported")

BATCHES, LENGTH, STEPS = (1, 3, 64), 6, 3
MODELS = ("Llama", "Qwen2")


def save(kind, folder):
    """Writes a small model of bf16, with random weights, norms and biases included."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape) * 0.2 + (one.ndim == 1))
    model.bfloat16().save_pretrained(folder)


def loaded(kind, folder, rank=0, ranks=1):
    """The model, sharded by its own plan if there are several ranks."""
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    plan = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=ranks)} if ranks > 1 else {}
    return getattr(transformers, f"{kind}ForCausalLM").from_pretrained(folder, **plan)


def words(batch, length=LENGTH):
    return torch.arange(batch * length).mul(7).remainder(96).view(batch, length)


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def logits_and_decoding(model):
    """Logits by batch size, and those of one token after another with a cache."""
    import transformers

    with torch.no_grad():
        found = [model(words(batch)).logits for batch in BATCHES]
        cache = transformers.DynamicCache(config=model.config)
        steps = [model(words(3)[:, at : at + 1], cache=cache, use_cache=True).logits for at in range(LENGTH)]
    return [*found, torch.cat(steps, 1)]


def training(model):
    """Loss and gradients of the first step, and the parameters after the last one."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), []
    for step in range(STEPS):
        loss = model(words(4 + step), labels=words(4 + step)).loss
        loss.backward()
        if not step:
            found = [loss.detach(), *[whole(one.grad) for one in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return found + [whole(one) for one in model.parameters()]


def everything(rank, ranks, kind, folder):
    """What a rank gets from a model that was made invariant."""
    import graphar.nn

    model = loaded(kind, folder, rank, ranks)
    layers = graphar.nn.make_tp_invariant(model)
    return layers, logits_and_decoding(model) + training(model)


def with_divided_logits(rank, ranks, kind, folder):
    """The same of a model whose plan leaves the logits divided: in training, and log-probabilities of a batch."""
    import graphar.nn

    model = loaded(kind, folder, rank, ranks)
    assert graphar.nn.make_tp_invariant(model, {**model.tp_plan, "lm_head": "colwise"}).loss
    scored = graphar.log_probs(model(words(3)).logits[:, :-1], words(3)[:, 1:], entropy=True, top1=True)
    return [one.detach() for one in scored] + training(model)


def logits_of_plain(rank, ranks, kind, folder):
    return logits_and_decoding(loaded(kind, folder, rank, ranks))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {kind: tmp_path_factory.mktemp(kind) for kind in MODELS}
    for kind, folder in found.items():
        save(kind, folder)
    return found


@pytest.fixture(scope="module")
def on_one_rank(folders):
    """The layers and the tensors of each model that one process has whole, without a process group."""
    return {kind: everything(0, 1, kind, folder) for kind, folder in folders.items()}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_a_sharded_model_has_the_bits_of_the_whole_one(kind, ranks, folders, on_one_rank):
    layers, expected = on_one_rank[kind]

    assert layers.loss
    for found_layers, found in run_ranks(everything, ranks, kind, folders[kind], timeout_s=300):
        assert found_layers == layers
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_divided_logits_have_the_bits_of_the_whole_model(kind, ranks, folders, on_one_rank):
    expected = with_divided_logits(0, 1, kind, folders[kind])
    trained = on_one_rank[kind][1][len(BATCHES) + 1 :]

    assert [same_bits(*pair) for pair in zip(expected[3:], trained, strict=True)] == [0] * len(trained)
    for found in run_ranks(with_divided_logits, ranks, kind, folders[kind], timeout_s=300):
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0] * len(expected)


def test_a_model_that_was_made_invariant_is_copied_with_its_loss_and_compiled(folders, on_one_rank):
    import graphar.nn

    model = loaded("Llama", folders["Llama"])
    for _ in range(2):
        assert graphar.nn.make_tp_invariant(model).loss
    expected = model(words(4), labels=words(4)).loss

    other = pickle.loads(pickle.dumps(model))

    assert other.loss_function.head is other.lm_head
    assert same_bits(copy.deepcopy(model)(words(4), labels=words(4)).loss, expected) == 0
    assert same_bits(torch.compile(other, backend="aot_eager")(words(4), labels=words(4)).loss, expected) == 0
    assert same_bits(expected, on_one_rank["Llama"][1][len(BATCHES) + 1]) == 0


def test_otherwise_a_sharded_model_has_other_bits(folders):
    expected = logits_of_plain(0, 1, "Llama", folders["Llama"])

    for found in run_ranks(logits_of_plain, 2, "Llama", folders["Llama"], timeout_s=300):
        assert all(same_bits(*pair) > pair[0].numel() / 4 for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_of_a_batch_and_a_decoded_token_have_the_bits_of_the_whole_batch(kind, on_one_rank):
    _, (alone, three, many, decoded, *_) = on_one_rank[kind]

    assert same_bits(alone, three[:1]) == same_bits(three, many[:3]) == 0
    assert same_bits(decoded, three) == 0
