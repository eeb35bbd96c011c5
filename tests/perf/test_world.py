"""perf's ranks: what they found is not lost where one of them fails."""

from __future__ import annotations

import pytest
from torch.multiprocessing import ProcessRaisedException

from perf.harness import ranks


def fail(rank, port):
    yield from range(3)
    raise RuntimeError("out of memory")


@pytest.mark.usefixtures("forked_ranks")
def test_what_was_found_before_a_rank_failed_comes_before_the_failure():
    found = []

    with pytest.raises(ProcessRaisedException, match="out of memory"):
        found.extend(ranks.run(1, fail))

    assert found == [0, 1, 2]
