"""Training tasks: small models on real data. The data come with installed packages, so nothing is downloaded.

digits    a residual network on scikit-learn's 1797 handwritten digits, of 8 x 8 pixels
animals   a convolutional network on animal-mnist's 9,716 silhouettes of ten animals, of 28 x 28 pixels
bytes     a transformer that predicts the next byte of the Python standard library's source text
text      a smaller one
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import os
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

HELD_OUT = 5  # every fifth sample or file is held out for testing


@dataclass(frozen=True)
class Data:
    """Samples and their labels. There is one label for each sample, or one for each position of a sample."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def digest(self) -> str:
        """Returns a hash of the data, because the standard library's source differs between versions of Python."""
        every = hashlib.sha256()
        for tensor in (*self.train, *self.test):
            every.update(tensor.numpy().tobytes())
        return every.hexdigest()[:12]


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: makes a new model with random parameters. The model returns logits [..., classes].
        batch_size: the samples of a step, over all ranks.
        learning_rate: AdamW's initial learning rate. A cosine schedule lowers it to zero.
    """

    name: str
    load: Callable[[], Data]
    model: Callable[[], nn.Module]
    batch_size: int
    learning_rate: float


def load_digits() -> Data:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().sub(8).div(8).unsqueeze(1)
    classes = torch.from_numpy(digits.target).long()
    return _split(images, classes)


def _split(images: Tensor, classes: Tensor) -> Data:
    held_out = torch.arange(len(images)) % HELD_OUT == 0
    return Data((images[~held_out], classes[~held_out]), (images[held_out], classes[held_out]))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)) for _ in "ab"]
        (first, norm), (second, last_norm) = layers
        self.body = nn.Sequential(first, norm, nn.ReLU(), second, last_norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual_network(widths: tuple[int, int] = (32, 64)) -> nn.Module:
    """Returns a residual network; by default it has 0.2 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, padding=1), Residual(widths[0]), Residual(widths[0])]
    layers += [nn.Conv2d(*widths, 3, stride=2, padding=1), Residual(widths[1]), Residual(widths[1])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[1], 10))


def load_animals() -> Data:
    """Reads the package's two files, which are arrays in pickles, without unpickling them."""
    (package,) = importlib.util.find_spec("animal_mnist").submodule_search_locations
    pixels, classes = (
        max(_byte_strings(Path(package, "data", "Animal_MNIST", f"animal_{what}_version_3.gz")), key=len)
        for what in ("data", "label")
    )
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28).float().div(255)
    first = {image.numpy().tobytes(): at for at, image in reversed([*enumerate(images)])}  # a few are there twice
    kept = sorted(first.values())
    return _split(images[kept], torch.frombuffer(bytearray(classes), dtype=torch.int64)[kept])


def _byte_strings(file: Path) -> list[bytes]:
    with gzip.open(file) as opened:
        return [argument for _, argument, _ in pickletools.genops(opened.read()) if isinstance(argument, bytes)]


def convolutional_network() -> nn.Module:
    """Returns a network of three convolutions with 34,000 parameters. It sees images at half their resolution."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for channels, wider, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


CONTEXT, SHORT = 64, 32  # the context lengths in bytes
TRAIN_NBYTES, TEST_NBYTES = 1 << 20, 1 << 17


def load_bytes(context: int = CONTEXT, test_nbytes: int = TEST_NBYTES) -> Data:
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    held_out = files[::HELD_OUT]
    trained = sorted(set(files) - set(held_out))
    return Data(_windows(trained, context, TRAIN_NBYTES), _windows(held_out, context, test_nbytes))


def _windows(files: list[Path], context: int, nbytes: int) -> tuple[Tensor, Tensor]:
    text = b"".join(file.read_bytes() for file in files)[:nbytes]
    length = len(text) // (context + 1) * (context + 1)
    windows = torch.frombuffer(bytearray(text[:length]), dtype=torch.uint8).view(-1, context + 1).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


class ByteTransformer(nn.Module):
    """A byte-level transformer; by default with 0.9 million parameters."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = CONTEXT) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.layers(self.bytes(x) + self.positions(positions), self.mask, is_causal=True)))


TASKS = {
    task.name: task
    for task in (
        Task("digits", load_digits, residual_network, batch_size=64, learning_rate=4e-3),
        Task("animals", load_animals, convolutional_network, batch_size=128, learning_rate=8e-3),
        Task("bytes", load_bytes, ByteTransformer, batch_size=32, learning_rate=2e-3),
        Task(
            "text",
            partial(load_bytes, SHORT, 1 << 15),
            partial(ByteTransformer, 64, 1, 2, SHORT),
            batch_size=32,
            learning_rate=1e-2,
        ),
    )
}
