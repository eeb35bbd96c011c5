"""A model of transformers with its linear layers in FP8: sharded between ranks, against the whole model in FP8.

Where K is not cut, logits have the bits of the whole model. Ranks that cut K each round their product to bf16 before
the sum, where the whole layer rounds once; with scales of rows, a rank's rows also have a scale of their own columns. A
value that moves by a rounding of bf16 (2^-9) may be quantised to the next value of e4m3 (2^-3 away) in the next layer.
The model's own rounding does the same. Its spread is measured as the distance between the whole model's logits in bf16
and in fp16, which rounds 8 times more finely. The sharded model's logits are to be within 1.5 of that spread.
"""

import functools

import pytest
import torch

import graphar
from tests.cases import same_bits
from tests.parallel_models import compiled
from tests.processes import import_first, run_ranks

import_first("transformers.models.llama.modeling_llama")

HIDDEN, VOCABULARY, BATCH, LENGTH = 512, 96, 3, 6
FORMATS = ("rows", "blocks")
GROUPS = {"rows": None, "blocks": 128}
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module", autouse=True)
def importable():
    """Not at the top: every process that collects tests would import transformers."""
    pytest.importorskip("transformers", reason="transformers cannot be imported")


def llama(dtype=torch.bfloat16):
    """A small Llama with random weights of bf16, the same in every process, which computes in ``dtype``."""
    import transformers

    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False, use_cache=False)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).bfloat16().to(dtype).eval()


def with_layers(model, make):
    """The model, in which ``make`` replaces each linear layer but the head; it takes the layer and its style."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            parent, _, short = name.rpartition(".")
            style = "rowwise" if short in ("o_proj", "down_proj") else "colwise"
            setattr(model.get_submodule(parent), short, make(layer, style))
    return model


def quantised(scales, dtype=torch.bfloat16):
    """The whole model in FP8."""
    from graphar.nn import Fp8Linear

    return with_layers(llama(dtype), lambda layer, style: Fp8Linear(layer, scales))


def sharded(scales):
    from graphar.nn import ColumnParallelLinear, RowParallelLinear

    kinds = {"rowwise": RowParallelLinear, "colwise": ColumnParallelLinear}
    return with_layers(quantised(scales), lambda layer, style: kinds[style](layer))


class Gathered(torch.nn.Module):
    """A column-parallel layer whose features all ranks get."""

    def __init__(self, layer):
        from graphar.nn import ColumnParallelLinear

        super().__init__()
        self.layer = ColumnParallelLinear(layer)

    def forward(self, x):
        return graphar.allgather(self.layer(x), axis=-1)


class InParts(torch.nn.Module):
    """A row-parallel layer of so many ranks in one process, by the specification."""

    def __init__(self, layer, scales, ranks):
        super().__init__()
        self.scales, self.ranks = scales, ranks
        self.weights = [one.contiguous().view(FP8) for one in layer.weight.view(torch.uint8).chunk(ranks, 1)]
        whole = layer.weight_scale_inv if scales == "blocks" else layer.weight_scale
        self.w_scale = whole.chunk(ranks, 1) if scales == "blocks" else [whole] * ranks

    def forward(self, x):
        from graphar.nn import quantize_rows

        parts = [quantize_rows(one, group_size=GROUPS[self.scales]) for one in x.chunk(self.ranks, -1)]
        rows, a_scale = zip(*parts, strict=True)
        return graphar.reference.fused_matmul_allreduce(rows, self.weights, a_scale=a_scale, w_scale=self.w_scale)


def in_parts(scales, ranks):
    """The model in FP8 in one process, whose row-parallel layers add products of so many ranks."""
    make = {"rowwise": lambda layer: InParts(layer, scales, ranks), "colwise": lambda layer: layer}
    return with_layers(quantised(scales), lambda layer, style: make[style](layer))


def logits(model):
    words = torch.arange(BATCH * LENGTH).mul(7).remainder(VOCABULARY).view(BATCH, LENGTH)
    with torch.no_grad():
        return model(words).logits.clone()


def run_models(rank, ranks):
    """By format, the logits of the sharded model, eager and compiled, and of one that gathers each layer's features."""
    found = {}
    for scales in FORMATS:
        torch._dynamo.reset()
        model = sharded(scales)
        gathered = with_layers(quantised(scales), lambda layer, style: Gathered(layer))
        found[scales] = logits(model), logits(compiled(model, graphar.compile_pass())), logits(gathered)
    return found


@functools.cache
def results(ranks):
    return run_ranks(run_models, ranks, timeout_s=300)


@functools.cache
def of_whole(scales, dtype=torch.bfloat16):
    return logits(quantised(scales, dtype))


def distance(mine, other):
    return ((mine.float() - other.float()).norm() / other.float().norm()).item()


every_size = pytest.mark.parametrize("ranks", [2, 4])
every_format = pytest.mark.parametrize("scales", FORMATS)


@every_size
@every_format
def test_a_model_whose_k_is_not_cut_has_the_bits_of_the_whole_one(scales, ranks):
    for *_, gathered in (rank[scales] for rank in results(ranks)):
        assert same_bits(gathered, of_whole(scales)) == 0


@every_size
@every_format
def test_a_sharded_model_has_the_bits_of_the_sums_of_its_parts_and_every_rank_the_same(scales, ranks):
    expected = logits(in_parts(scales, ranks))

    for eager, *_ in (rank[scales] for rank in results(ranks)):
        assert same_bits(eager, expected) == 0


@every_size
@every_format
def test_a_sharded_model_is_as_near_to_the_whole_one_as_its_rounding(scales, ranks):
    whole, exact = of_whole(scales), logits(llama())
    spread = distance(whole, of_whole(scales, torch.float16))

    for eager, compiled_, _ in (rank[scales] for rank in results(ranks)):
        for found in (eager, compiled_):
            assert 0 < distance(found, whole) < 1.5 * spread
            assert distance(found, exact) < 1.2 * distance(whole, exact)  # no more is lost than by quantising
