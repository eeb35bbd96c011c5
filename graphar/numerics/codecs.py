"""Codecs: the quantised formats that tensors can have on the wire.

A codec cuts a tensor into buckets of ``bucket_size`` consecutive elements. Each bucket has a scale. Each element
becomes a code of a few bits, and decodes to code times scale. The named codecs round to nearest:

==========  ====================================  ======  ======  ================
name        an element decodes to                 bucket  scale   bits per element
==========  ====================================  ======  ======  ================
fp8_e4m3    e4m3 number up to +-448, x scale         128  fp32                8.25
int8        integer -127 .. 127, x scale              32  bf16                 8.5
int6        integer -31 .. 31, x scale                32  bf16                 6.5
int5        integer -15 .. 15, x scale                32  bf16                 5.5
int4        integer -7 .. 7, x scale                  32  bf16                 4.5
int3        integer -3 .. 3, x scale                  32  bf16                 3.5
int2        integer -1 .. 1, x scale                  32  bf16                 2.5
==========  ====================================  ======  ======  ================

graphar/numerics/codec_reference.py defines the arithmetic. With stochastic rounding the mean of many roundings is the
value itself, to 2^-16 of a step. A bucket decodes to NaN if an element is NaN or infinite, or if its scale overflows or
its largest code decodes to more than fp32 holds: within 1 % of the largest fp32 number.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from graphar.numerics.dtypes import TYPE_NAMES

FP8 = "fp8_e4m3"
BITS = (2, 3, 4, 5, 6, 8, FP8)
BUCKET_SIZES = (32, 64, 128, 256, 512, 1024)
ROUNDINGS = ("nearest", "stochastic")
SCHEMES = ("absmax", "minmax")
SCALE_DTYPES = (torch.bfloat16, torch.float32)

TILE_NUMEL = 1024  # `tile_numel` in cuda_src/device/wire/wire.cuh
WORD_NBYTES = 4

CodecName = Literal["fp8_e4m3", "int8", "int6", "int5", "int4", "int3", "int2"]
NAMES = get_args(CodecName)
_NAMED = {
    FP8: {"bits": FP8, "bucket_size": 128, "scale_dtype": torch.float32},
    **{name: {"bits": int(name.removeprefix("int"))} for name in NAMES if name != FP8},
}


@dataclass(frozen=True)
class Codec:
    """A quantised format in which tensors are sent: codes of a few bits, with a scale for each bucket of elements.

    The named codecs, such as "int8", are strings that every ``codec`` argument takes. With "absmax" a code times the
    bucket's scale is the element; codes are symmetric about zero. With "minmax" a code counts steps above the bucket's
    smallest value, which is sent as well. A bucket with a NaN or an infinity decodes to NaN.

    Args:
        bits: bits of a code: 2, 3, 4, 5, 6, 8, or "fp8_e4m3" for 8-bit floating point.
        bucket_size: elements that share a scale: 32, 64, 128, 256, 512 or 1024.
        rounding: "nearest" or "stochastic".
        scheme: "absmax" or "minmax"; fp8_e4m3 has "absmax" only.
        scale_dtype: the dtype of scales and zero points: bfloat16 (the default) or float32.
        seed: the 64-bit seed of stochastic rounding; None: a random one. With a seed, results depend only on the seed,
            on the tensors, and on how many calls of the same kernel came before on the same communicator.
        feedback: whether the rounding errors of an input replace the input. The ops set it for calls with a residual;
            leave it False.

    Attributes:
        text: the codec as a string that every ``codec`` argument takes: its name, or all of its arguments.

    Raises:
        ValueError: an argument has another value.
    """

    bits: int | str = 4
    bucket_size: int = 32
    rounding: str = "nearest"
    scheme: str = "absmax"
    scale_dtype: torch.dtype = torch.bfloat16
    seed: int | None = None
    feedback: bool = False
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choices = BITS, BUCKET_SIZES, ROUNDINGS, SCHEMES, SCALE_DTYPES
        for name, allowed in zip(_DEFAULTS, choices, strict=False):  # the first fields
            value = getattr(self, name)
            # Compare types too: True and 4.0 equal integers, and would name another kernel.
            if not any(value == choice and type(value) is type(choice) for choice in allowed):
                raise ValueError(f"Codec: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        if self.is_float and self.scheme == "minmax":
            raise ValueError(f"Codec: {FP8} has no minmax scheme, its codes are symmetric about zero")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 1 << 64):
            raise ValueError(f"Codec: seed must be None or an int of 64 bits, not negative, got {self.seed!r}")
        object.__setattr__(self, "text", self._text())

    def _text(self) -> str:
        values = {name: getattr(self, name) for name in _DEFAULTS}
        for name, arguments in _NAMED.items():
            if values == _DEFAULTS | arguments:
                return name
        values["scale_dtype"] = str(self.scale_dtype).removeprefix("torch.")
        return ", ".join(f"{name}={value}" for name, value in values.items() if value not in (None, False))

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point numbers (e4m3)."""
        return self.bits == FP8

    @property
    def code_bits(self) -> int:
        """Bits of one code: 8 for e4m3."""
        return self.bits if isinstance(self.bits, int) else 8

    @property
    def largest_code(self) -> int:
        """The code of a bucket's largest value, in scales; with "minmax" in scales above the zero point."""
        if self.is_float:
            return 448
        return (1 << self.code_bits) - 1 if self.scheme == "minmax" else (1 << self.code_bits - 1) - 1

    @property
    def tile_codes_nbytes(self) -> int:
        """Bytes of a tile's codes on the wire: whole lines of 128 bytes."""
        return TILE_NUMEL * self.code_bits // 8

    @property
    def tile_scales_nbytes(self) -> int:
        """Bytes of a tile's scales and zero points on the wire: whole 32-bit words."""
        numbers = TILE_NUMEL // self.bucket_size * (2 if self.scheme == "minmax" else 1)
        return max(numbers * self.scale_dtype.itemsize, WORD_NBYTES)

    @property
    def tile_nbytes(self) -> int:
        """Bytes of a tile on the wire."""
        return self.tile_codes_nbytes + self.tile_scales_nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits that an element takes on the wire, its share of the scales included."""
        return self.tile_nbytes * 8 / TILE_NUMEL

    @property
    def spares_a_word(self) -> bool:
        """Whether no 32-bit word on the wire is all ones.

        That word can then be the sentinel for data that has not arrived (cuda_src/device/sync/sentinel.cuh).
        """
        return self.scheme == "absmax"

    @property
    def type_name(self) -> str:
        """The C++ type of the codec: Codec in cuda_src/device/wire/codec.cuh."""
        code = "E4m3" if self.is_float else f"Int<{self.bits}>"
        scale = TYPE_NAMES[self.scale_dtype]
        feedback = ", true" if self.feedback else ""
        return f"Codec<{code}, {self.bucket_size}, {scale}, {self.scheme}, {self.rounding}{feedback}>"

    def tiles(self, numel: int) -> int:
        """Returns how many tiles of 1024 elements a tensor of ``numel`` elements takes; the last one may be padded."""
        return -(-numel // TILE_NUMEL)

    def wire_nbytes(self, numel: int) -> int:
        """Returns the bytes that a tensor of ``numel`` elements takes on the wire."""
        return self.tiles(numel) * self.tile_nbytes


_DEFAULTS = {argument.name: argument.default for argument in fields(Codec) if argument.init}


@functools.cache
def codec(text: str) -> Codec:
    """Returns the codec of one of :data:`NAMES`, or the codec with that ``text``; ValueError if it is neither."""
    if text in _NAMED:
        return Codec(**_NAMED[text])
    words = dict(part.split("=", 1) for part in text.split(", ") if "=" in part)
    if words.keys() < {"bits", "bucket_size", "rounding", "scheme", "scale_dtype"} or words.keys() - _DEFAULTS.keys():
        raise ValueError(f"codec must be a graphar.Codec or one of {', '.join(NAMES)}, got {text!r}")
    values: dict[str, Any] = {name: int(word) if word.isdecimal() else word for name, word in words.items()}
    values |= {"scale_dtype": getattr(torch, words["scale_dtype"], None), "feedback": words.get("feedback") == "True"}
    return Codec(**values)


def as_codec(op: str, wanted: object) -> Codec:
    """Returns the codec that ``wanted`` is or names; TypeError or ValueError, which name ``op``, if it is none."""
    if isinstance(wanted, Codec):
        return wanted
    if not isinstance(wanted, str):
        raise TypeError(f"{op}: codec must be a graphar.Codec or the name of one, got {type(wanted).__name__}")
    try:
        return codec(wanted)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None
