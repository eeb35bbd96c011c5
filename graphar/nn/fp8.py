"""Layers of graphar.nn whose weights are in torch.float8_e4m3fn, as FP8 checkpoints store them; for inference.

    x of 16 bits -- quantize_rows --+
    (rows, scales) of a norm -------+-- product with scales -- y of 16 bits
              weight, weight_scale -+

A weight has one scale, a scale for each row, or a scale for each block of 128 x 128. With blocks, each 128 columns of a
row of ``x`` have their own scale; otherwise each row of ``x`` has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from graphar.numerics import fp8_products
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.numerics.norms import output_of
from graphar.ops.linear import linear
from graphar.ops.matmul_operands import RESULT_DTYPES, check_no_gradient

# Names in checkpoints: of compressed-tensors and FBGEMM first, then of DeepSeek, Qwen and transformers.
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")
FORMATS = ("tensor", "rows", "blocks")

Input = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def quantize_rows(
    x: torch.Tensor, *, scale: torch.Tensor | None = None, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows in torch.float8_e4m3fn and their fp32 scales, whose product is close to ``x``.

    A scale is the largest magnitude in its group, divided by 448, and at least the smallest normal number of fp32. An
    element is x * (1 / scale), computed in fp32, rounded to nearest and saturated. Equal rows get the same bits from
    :func:`graphar.allreduce_residual_rmsnorm` with ``out_dtype=torch.float8_e4m3fn``. Compiled for a GPU, the last bit
    of a scale may differ, because the division by 448 may be rounded differently.

    The results are operands ``a`` and ``a_scale`` of graphar's matmuls, and inputs of FP8 layers, without gradients.

    Args:
        x: [..., columns], bf16, fp16 or fp32.
        scale: one positive fp32 number for the whole tensor. None: scales are computed for each row or group.
        group_size: 128: each 128 columns of a row have their own scale. None: each row has one.

    Returns:
        (rows, scales): rows like ``x``, and scales [..., 1], or [..., columns / 128] with ``group_size``, or ``scale``
        itself. A NaN or an infinity makes its scale NaN, and all elements of its row or group.

    Raises:
        ValueError: the columns are no multiple of ``group_size``, which must be 128, or it goes with a ``scale``.
    """
    output_of("quantize_rows", x.dtype, x.shape[-1], FP8, scale, group_size)  # raises
    wide = x.detach().float()
    if scale is not None:
        return fp8_products.to_fp8(wide, scale.reshape(())), scale
    return fp8_products.quantized(wide, group_size)


class MayBeFp8(torch.nn.Module):
    """A linear layer whose weight may be in FP8. Parameters then have the scales, by the names of the checkpoint."""

    bias: torch.Tensor | None
    out_dtype: torch.dtype | None = None
    _weight_scale = ""  # the name of the weight's scales; an empty string if the weight is not in FP8
    _input_scale = ""  # the name of one scale for all inputs; an empty string if every input gets its own
    _in_blocks = False  # whether the weight's scales are of blocks

    def _take_scales(self, linear: torch.nn.Linear | SimpleNamespace) -> None:
        layer, (rows, columns) = f"graphar.nn.{type(self).__name__}", linear.weight.shape
        self._weight_scale, self._input_scale = _named(linear, WEIGHT_SCALES), _named(linear, INPUT_SCALES)
        if not self._weight_scale:
            raise ValueError(f"{layer}: a weight in {FP8} needs {' or '.join(WEIGHT_SCALES)}")
        scale = getattr(linear, self._weight_scale).detach()
        scale = scale.unsqueeze(1) if scale.ndim == 1 else scale
        of_blocks = [-(-rows // BLOCK), -(-columns // BLOCK)]
        self._in_blocks = scale.numel() > 1 and [*scale.shape] == of_blocks
        if scale.numel() > 1 and not self._in_blocks and [*scale.shape] != [rows, 1]:
            raise ValueError(
                f"{layer}: {self._weight_scale} of a weight {[rows, columns]} must be one number, or {[rows, 1]} of "
                f"rows, or {of_blocks} of blocks of {BLOCK} x {BLOCK}, got {list(scale.shape)}"
            )
        if self._in_blocks and columns % BLOCK:
            raise ValueError(f"{layer}: scales of blocks need a multiple of {BLOCK} input features, got {columns}")
        if self._in_blocks and self._input_scale:
            raise ValueError(f"{layer}: scales of blocks need scales of groups of inputs, got {self._input_scale}")
        setattr(self, self._weight_scale, _constant(scale.float()))
        if self._input_scale:
            setattr(self, self._input_scale, _constant(getattr(linear, self._input_scale).detach().float()))

    def _scaled(self, x: Input) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Returns an input in FP8 and its scales, and the arguments of a product that are this rank's."""
        dtype = self.out_dtype
        if isinstance(x, torch.Tensor):
            check_no_gradient(f"graphar.nn.{type(self).__name__}", "x", x)
            dtype = dtype or (x.dtype if x.dtype in RESULT_DTYPES else None)
            scale = getattr(self, self._input_scale) if self._input_scale else None
            x = quantize_rows(x, scale=scale, group_size=BLOCK if self._in_blocks else None)
        (a, a_scale), dtype = x, dtype or torch.bfloat16
        if a.ndim == 1:
            a_scale = a_scale.reshape(1, -1)
        bias = None if self.bias is None else self.bias.to(dtype)
        return a, a_scale, {"w_scale": getattr(self, self._weight_scale), "bias": bias, "out_dtype": dtype}

    def _apply(self, fn, recurse=True):
        """Moves or casts parameters. A cast leaves a weight in FP8 and its scales as they are."""
        names = ("weight", self._weight_scale, self._input_scale) if self._weight_scale else ()
        constant = {id(getattr(self, name)) for name in names if name}

        def applied(x: torch.Tensor) -> torch.Tensor:
            made = fn(x)
            return x.to(made.device) if id(x) in constant and made.dtype != x.dtype else made

        return super()._apply(applied, recurse)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        state = self._from_checkpoint(state_dict, prefix)
        weight = state.get(f"{prefix}weight")
        if self._weight_scale and isinstance(weight, torch.Tensor) and weight.dtype != FP8:
            error_msgs.append(f"{prefix}weight must be {FP8}, as the layer's, got {weight.dtype}")
            return
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _from_checkpoint(self, state_dict: dict, prefix: str) -> dict:
        """Returns a checkpoint with the layer's scales in fp32, and scales of rows as a column."""
        state = dict(state_dict)
        for name in filter(None, (self._weight_scale, self._input_scale)):
            scale, parameter = state.get(prefix + name), getattr(self, name)
            if isinstance(scale, torch.Tensor):
                scale = (scale.unsqueeze(1) if scale.ndim == 1 else scale).detach().float()
                state[prefix + name] = scale.reshape(parameter.shape) if scale.numel() == parameter.numel() else scale
        return state


class Fp8Linear(MayBeFp8, torch.nn.Linear):
    """A linear layer with its weight in torch.float8_e4m3fn, whole on this rank; for inference.

    An input is a tensor, which :func:`quantize_rows` quantises, or a pair ``(rows, scales)`` in FP8, as a norm with
    ``out_dtype=torch.float8_e4m3fn`` returns it. :func:`graphar.linear` multiplies. ``state_dict`` has ``weight`` and
    its scales, with the names and shapes of FP8 checkpoints, and ``load_state_dict`` takes them.

    :class:`ColumnParallelLinear` and :class:`RowParallelLinear` take it, or any torch.nn.Linear with such parameters.

    Args:
        linear: a torch.nn.Linear, whose weight is quantised unless it is in FP8 already. Then ``linear`` has a
            parameter ``weight_scale`` or ``weight_scale_inv``: one number, [out_features, 1], or [out_features / 128,
            in_features / 128]. One number ``input_scale`` or ``activation_scale`` is the scale of all inputs.
        scales: of a weight that is quantised here: "tensor", one scale; "rows", one for each row; "blocks", one for
            each block of 128 x 128.
        out_dtype: torch.bfloat16 or torch.float16. None: the input's dtype, or bf16 if the input is fp32 or a pair.

    Shape:
        Input ``(*, in_features)``, or a pair of this in FP8 and scales ``(*, 1)``, ``(*, in_features / 128)`` or one
        number; output ``(*, out_features)``.

    Raises:
        TypeError, ValueError: ``linear`` is no torch.nn.Linear, its scales do not fit, or ``scales`` is unknown.
    """

    def __init__(self, linear: torch.nn.Linear, scales: str = "rows", *, out_dtype: torch.dtype | None = None) -> None:
        check_linear("Fp8Linear", linear)
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.out_dtype = linear.in_features, linear.out_features, out_dtype
        source = linear if linear.weight.dtype == FP8 else _quantized(linear.weight, scales)
        self.weight = _constant(source.weight.detach())
        self.bias = linear.bias
        self._take_scales(source)

    def forward(self, input: Input) -> torch.Tensor:
        """Returns the output, of 16 bits, for an input of any float type or a pair (rows, scales) in FP8."""
        a, a_scale, how = self._scaled(input)
        return linear(a, self.weight, a_scale=a_scale, **how)


def check_linear(layer: str, linear: object) -> None:
    """Raises TypeError unless ``linear`` is a torch.nn.Linear, whose weight can be divided."""
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"graphar.nn.{layer}: linear must be a torch.nn.Linear, got {type(linear).__name__}")


def _quantized(weight: torch.Tensor, scales: str) -> SimpleNamespace:
    """Returns a weight in FP8 with its scales, under the name that checkpoints have for their format."""
    if scales not in FORMATS:
        raise ValueError(f"graphar.nn.Fp8Linear: scales must be one of {', '.join(FORMATS)}, got {scales!r}")
    wide, (rows, columns) = weight.detach().float(), weight.shape
    if scales != "blocks":
        scale = fp8_products.scales_of(wide, (1,) if scales == "rows" else (0, 1))
        return SimpleNamespace(weight=fp8_products.to_fp8(wide, scale), weight_scale=scale)
    padded = functional.pad(wide, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = fp8_products.scales_of(blocks, (1, 3))
    in_fp8 = fp8_products.to_fp8(blocks, scale).flatten(2).flatten(0, 1)[:rows, :columns]
    return SimpleNamespace(weight=in_fp8.contiguous(), weight_scale_inv=scale[:, 0, :, 0])


def _named(linear: object, names: Sequence[str]) -> str:
    """Returns the first of the names under which a layer has a tensor; an empty string if there is none."""
    return next((name for name in names if isinstance(getattr(linear, name, None), torch.Tensor)), "")


def _constant(x: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(x, requires_grad=False)
