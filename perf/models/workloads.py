"""Well-known models, each with a batch of random data in its training shape.

Most models come from packages that graphar does not require. A model whose package cannot be imported is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from perf.models.tasks import residual_network


@dataclass(frozen=True)
class Workload:
    """A model and the shape of its data.

    Attributes:
        package: the package that has the model; empty for models defined here.
        make: makes the model with random parameters. The model returns logits [..., classes].
        sample: the shape of a sample: channels, height and width of an image, or the number of tokens.
        classes: the number of image classes, or the size of the vocabulary.
        batch_size: samples per rank and step.
        copies_fit: whether a GPU has memory to train one copy of the model for each gradient reduction at the same
            time. If not, it holds one copy at a time.
    """

    name: str
    package: str
    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    classes: int
    batch_size: int
    copies_fit: bool = True

    @property
    def unit(self) -> str:
        return "tokens" if len(self.sample) == 1 else "img"

    @property
    def items(self) -> int:
        """The number of units in a sample."""
        return self.sample[0] if self.unit == "tokens" else 1

    def batch(self, batch_size: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
        """Returns samples and their labels. There is one label for each image or token."""
        generator = torch.Generator(device).manual_seed(seed)
        integers = partial(torch.randint, self.classes, generator=generator, device=device)
        if self.unit == "tokens":
            return integers((batch_size, *self.sample)), integers((batch_size, *self.sample))
        return torch.randn(batch_size, *self.sample, generator=generator, device=device), integers((batch_size,))


def _of_torchvision(name: str) -> nn.Module:
    from torchvision.models import get_model

    return get_model(name)


def _of_timm(name: str) -> nn.Module:
    from timm import create_model

    return create_model(name)


class Bert(nn.Module):
    """BERT-base with its language-model head: 110 million parameters."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.bert = BertForMaskedLM(BertConfig())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bert(input_ids=tokens).logits


class Decoder(nn.Module):
    """A causal transformer with tied embedding and head. The default size is Transformer-XL base.

    It has the layers, widths and vocabulary of the named model. Transformer-XL's recurrence, relative positions and
    adaptive softmax are left out.
    """

    def __init__(
        self,
        vocabulary: int,
        tokens: int,
        width: int = 410,
        inner: int = 2100,
        layers: int = 16,
        heads: int = 10,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)  # for logits of about 1
        layer = nn.TransformerEncoderLayer(width, heads, inner, 0.1, batch_first=True, norm_first=norm_first)
        norm = nn.LayerNorm(width) if norm_first else None
        self.layers = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(tokens), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight
        return nn.functional.linear(self.layers(x, self.mask, is_causal=True), self.embedding.weight)


GPT2_XL = partial(Decoder, width=1600, inner=6400, layers=48, heads=25, norm_first=True)  # 1.56 billion parameters

IMAGENET, VOCABULARY, WIKITEXT, GPT2 = 1000, 30522, 267735, 50257
CONTEXT, SEGMENT, GPT2_TOKENS = 128, 150, 1024  # sequence lengths: BERT's first phase, Transformer-XL, GPT-2


def _image_model(name: str, package: str, size: int = 224, batch_size: int = 32, known_as: str = "") -> Workload:
    make = partial(_of_torchvision if package == "torchvision" else _of_timm, known_as or name)
    return Workload(name, package, make, (3, size, size), IMAGENET, batch_size)


TINY, XL = "tiny", "gpt2_xl"
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(TINY, "", residual_network, (1, 8, 8), 10, 16),
        *(_image_model(f"resnet{layers}", "torchvision") for layers in (18, 34, 50, 101, 152)),
        _image_model("vgg16", "torchvision"),
        _image_model("resnext50_32x4d", "torchvision"),
        _image_model("vit_small", "timm", known_as="vit_small_patch16_224"),
        _image_model("vit_base", "timm", known_as="vit_base_patch16_224"),
        _image_model("nfnet_f1", "timm", 224, 16, known_as="dm_nfnet_f1"),
        _image_model("nfnet_f3", "timm", 320, 16, known_as="dm_nfnet_f3"),
        Workload("bert_base", "transformers", Bert, (CONTEXT,), VOCABULARY, 32),
        Workload("transformer_xl_base", "", partial(Decoder, WIKITEXT, SEGMENT), (SEGMENT,), WIKITEXT, 16),
        Workload(XL, "", partial(GPT2_XL, GPT2, GPT2_TOKENS), (GPT2_TOKENS,), GPT2, 4, copies_fit=False),
    )
}
