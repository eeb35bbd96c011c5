"""The structs that kernels receive, as Python fills them."""

import pytest
import torch

from graphar.plan.call import Call
from graphar.plan.slices import Slice
from graphar.plan.work import Exchange
from graphar.runtime.arguments import ExchangeArguments, NormArguments


@pytest.mark.parametrize(("scales_in", "scales_out"), [(0, 0), (1, 0), (0, 1)])
def test_a_norm_gets_the_addresses_of_its_tensors_and_in_fp8_of_a_scale_or_of_scales(scales_in, scales_out):
    x, residual, weight, *scale = (torch.ones(1) for _ in range(3 + scales_in))
    normed, summed, *scales = (torch.ones(1) for _ in range(2 + scales_out))
    arguments = NormArguments()

    arguments.put((x, residual, weight, *scale), (normed, summed, *scales), (), None)

    assert (arguments.residual, arguments.weight) == (residual.data_ptr(), weight.data_ptr())
    addresses = [sum(one.data_ptr() for one in ones) for ones in (scale, scales)]
    assert [arguments.summed, arguments.scale, arguments.scales] == [summed.data_ptr(), *addresses]


@pytest.mark.parametrize("known", [True, False])
def test_both_ranks_of_a_pair_get_one_fingerprint_of_the_part_between_them_unless_all_are_known(known):
    sends, numbers, found = ((1, 2), (3, 4)), {}, []
    for rank in range(2):
        work = Exchange(rank, (1, 8), (sends[rank],), (tuple(of[rank] for of in sends),), known=known)
        found.append(arguments := ExchangeArguments(rank=rank))
        arguments.bind(
            Call(work, torch.float32, 0), Slice(0), lambda words: numbers.setdefault(words, 1 + len(numbers))
        )

    pairs = [(found[a].sent_words[b], found[b].received_words[a]) for a in range(2) for b in range(2)]
    assert all(sent == received for sent, received in pairs)
    assert len({sent for sent, _ in pairs} - {0}) == (0 if known else 4)
