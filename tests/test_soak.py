"""The soak test itself: it runs, and notices growing memory and wrong results."""

import pytest
import torch

from tests import soak
from tests.soak import MIB, Case, Memory

pytestmark = pytest.mark.skipif(torch.cuda.device_count() > 1, reason="nox -s soak runs it on the GPUs")


def test_a_small_one_passes(capsys):
    assert soak.main(["--calls", "30"]) == 0

    said = capsys.readouterr().out
    assert "rank 2: " in said
    assert "30 calls on 3 ranks on the CPU" in said


@pytest.mark.promise("Long sequences of mixed calls stay right, and memory does not grow.")
@pytest.mark.parametrize(
    ("at_the_end", "grown"),
    [
        (Memory(110 * MIB, 900 * MIB), ""),
        (Memory(130 * MIB, 900 * MIB), f"host by {30 * MIB} bytes"),
        (Memory(90 * MIB, 920 * MIB), f"device by {20 * MIB} bytes"),
    ],
)
def test_memory_that_grows_is_noticed(at_the_end, grown):
    assert soak.growth([Memory(0, 0), Memory(100 * MIB, 900 * MIB), at_the_end]) == grown


def test_a_wrong_bit_is_noticed():
    case = Case.__new__(Case)
    case._what, case._expected = "case 0", torch.zeros(3)

    with pytest.raises(AssertionError, match="case 0: 1 elements are wrong"):
        case.check(torch.tensor([0.0, -0.0, 0.0]))
