"""Every kernel at the numbers of ranks that the other tests leave out, one case each."""

from __future__ import annotations

import pytest

from tests.host.cases import differences
from tests.host.every_kernel import EVERY_KERNEL, draw, other_world_sizes, run

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

CALLS = 2  # one for each parity of the epoch


@pytest.mark.parametrize(
    ("algorithm", "world_size"), [(one, world_size) for one in EVERY_KERNEL for world_size in other_world_sizes(one)]
)
def test_every_rank_gets_the_specifications_bits(algorithm, world_size):
    drawn = draw(algorithm, world_size, 0, CALLS)

    assert differences(drawn, run(algorithm, world_size, 0, drawn.calls)) == []
