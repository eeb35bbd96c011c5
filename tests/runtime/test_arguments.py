"""The structs that kernels receive, as Python fills them."""

import torch

from graphar.runtime.arguments import NormArguments


def tensors(count):
    return [torch.ones(1) for _ in range(count)]


def test_a_norm_gets_the_addresses_of_its_tensors():
    (x, residual, weight), (normed, summed), arguments = tensors(3), tensors(2), NormArguments()

    arguments.put((x, residual, weight), (normed, summed))

    assert (arguments.residual, arguments.weight) == (residual.data_ptr(), weight.data_ptr())
    assert (arguments.summed, arguments.scale, arguments.scales) == (summed.data_ptr(), 0, 0)


def test_a_norm_in_fp8_takes_a_scale_or_writes_scales():
    inputs, outputs, (scale, scales), arguments = tensors(3), tensors(2), tensors(2), NormArguments()

    arguments.put((*inputs, scale), outputs)
    assert (arguments.scale, arguments.scales) == (scale.data_ptr(), 0)

    arguments.put(inputs, (*outputs, scales))
    assert (arguments.scale, arguments.scales) == (0, scales.data_ptr())
