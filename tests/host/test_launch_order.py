"""Every kernel waits for its predecessor, which still writes when it begins. Without the wait, a test fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.host.cases import differences
from tests.host.every_kernel import EVERY_KERNEL, draw, run
from tests.host.mutant import notices

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]


def is_noticed(algorithm, seed: int) -> bool:
    drawn = draw(algorithm, 2, seed, 2)
    calls = [replace(call, waits=False) for call in drawn.calls]
    return notices(lambda: differences(drawn, run(algorithm, 2, seed, calls)))


@pytest.mark.parametrize("algorithm", EVERY_KERNEL)
def test_a_kernel_without_its_wait_is_noticed(algorithm):
    assert any(is_noticed(algorithm, seed) for seed in range(4))
