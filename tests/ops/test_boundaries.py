"""Rules with a limit: what lies exactly at it is served, and one beyond it is refused."""

import pytest
import torch

import graphar
from graphar import Scratch
from graphar.plan.scratch import MAX_BLOCKS, SHARED_NBYTES
from tests.outside import load

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

SLOT = 4096
SENTINELS = Scratch.of_slots(3, SLOT, fill=0xFF)  # 12,288 bytes
# By name: a keyword of load_algorithm, the last value that is served, further keywords.
LIMITS = {
    "a tensor whose shard fills the scratch": ("max_nbytes", 2 * 3 * SLOT, {"scratch": SENTINELS}),
    "a tensor whose shards of peers fill it": (
        "max_nbytes",
        6 * SLOT,
        {"scratch": SENTINELS.of_slots(4, SLOT, fill=0xFF), "world_sizes": [3]},
    ),
    "a part that fills it": ("max_nbytes", 3 * SLOT, {"scratch": SENTINELS, "op": "allgather"}),
    "a chunk of a slot": ("chunk", SLOT // 16, {"scratch": SENTINELS, "max_nbytes": SLOT}),
    "blocks": ("blocks", MAX_BLOCKS, {}),
    "ranks": ("world_sizes", (8,), {}),
    "an architecture": ("minimum_arch", 999, {}),
    "bytes": ("max_nbytes", 1 << 62, {"scratch": Scratch.of_slots(1, SLOT)}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_an_algorithm_is_loaded_at_a_limit_and_not_beyond_it(name):
    keyword, last, more = LIMITS[name]
    beyond = (last[0] + 1,) if isinstance(last, tuple) else last + 1
    row = {"world_sizes": (2,)} | more

    load(**row | {keyword: last})

    with pytest.raises(
        ValueError, match=r"load_algorithm: .*(max_nbytes|scratch|chunk|blocks|world_sizes|minimum_arch)"
    ):
        load(**row | {keyword: beyond})


def test_scratch_has_room_for_its_slots_and_no_more():
    for slots, slot_nbytes, pad in ((1, 16, 0), (3, SLOT, 0), (1, 16, 16384)):
        one = Scratch.of_slots(slots, slot_nbytes, signal_pad=bool(pad), shared_nbytes=SHARED_NBYTES)
        assert (one.nbytes, one.capacity) == (pad + slots * slot_nbytes, slot_nbytes // 16)
    load(scratch=Scratch(SLOT // 16, SLOT, 0), max_nbytes=1)
    for scratch in (Scratch(SLOT // 16, SLOT - 1, 0), Scratch(0, SLOT, 0)):
        with pytest.raises(ValueError, match=r"scratch of \d ranks has \d+ bytes and a slot of \d+"):
            load(scratch=scratch, max_nbytes=1)
    for wrong in ({"shared_nbytes": SHARED_NBYTES + 1}, {"fill": 256}, {"fill": -1}):
        with pytest.raises(ValueError, match=r"^Scratch: "):
            Scratch.of_slots(1, 16, **wrong)


def test_what_makes_several_calls_is_explained_by_the_first_and_what_makes_none_is_refused():
    def sum_and_gather(xs, communicator):
        return graphar.reducescatter(xs, communicator), graphar.allgather(xs, communicator)

    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        xs = [torch.ones(4, 2)] * 2
        both = graphar.explain(sum_and_gather, xs, communicator)
        assert str(both) == str(graphar.explain(graphar.reducescatter, xs, communicator))
        with pytest.raises(ValueError, match="explain: sum made no call of graphar's with these tensors"):
            graphar.explain(sum, xs)
