"""A run of many calls that hangs says where: the call and the traceback of each rank."""

import re
import time

import pytest
import torch.distributed as dist

from tests.integrations.every_call import run_watched
from tests.processes import RankFailed


def oversleep():
    time.sleep(60)


def stop_in_a_call(rank, world_size, watch):
    dist.barrier()  # connects the ranks, which takes long on a busy machine: the limit counts from the first call
    with watch.over("a call that all make"):
        dist.barrier()
    with watch.over("a call that hangs"):
        if rank == 1:
            oversleep()
        dist.barrier()


def test_ranks_that_hang_are_named_with_their_call_and_traceback():
    with pytest.raises(RankFailed) as caught:
        run_watched(stop_in_a_call, 2, limit_s=1.5)

    words = re.split(r"^rank \d: ", str(caught.value), flags=re.MULTILINE)[1:]
    assert [word.startswith("a call that hangs\nTimeout (0:00:01.500000)!") for word in words] == [True, True]
    assert ["in barrier" in word for word in words] == [True, False]
    assert ["in oversleep" in word for word in words] == [False, True]
