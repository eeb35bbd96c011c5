"""NVLink counters and the links' ceiling: with a fake NVML and pushes on the CPU, and both on 2 GPUs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pynvml
import pytest
import torch
import torch.distributed as dist

from graphar.plan.sizes import MB
from perf import files
from perf.harness import links
from perf.harness.cases import Link, Utilisation
from perf.harness.links import Counters, Reading, find, must_send, utilisation
from perf.harness.ranks import NO_MULTICAST, ProcessRanks
from tests.processes import run_ranks

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
DATA_TX, DATA_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
RAW_TX, RAW_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX
SPEED = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED


class FakeNvml:
    """One GPU of four links, of which the second is down; fields hold each link's value."""

    def __init__(self) -> None:
        self.states = [1, 0, 1, 1]
        self.fields = {
            DATA_TX: [10, 0, 20, 30],
            DATA_RX: [11, 0, 21, 31],
            RAW_TX: [12, 0, 22, 32],
            RAW_RX: [13, 0, 23, 33],
            SPEED: [26562, 0, 26562, 26562],
        }
        self.late = []  # stale values of DATA_TX's first link, which the next reads return
        self.reads = 0

    def by_uuid(self, uuid: str) -> str:
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def state(self, handle: str, link: int) -> int:
        if link >= len(self.states):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self.states[link]

    def values(self, handle: str, scopes: list[tuple[int, int]]) -> list[SimpleNamespace]:
        return [self.value(field, link) for field, link in scopes]

    def value(self, field: int, link: int) -> SimpleNamespace:
        if field not in self.fields:
            return SimpleNamespace(nvmlReturn=pynvml.NVML_ERROR_NOT_SUPPORTED)
        number = self.fields[field][link]
        if (field, link) == (DATA_TX, 0):
            self.reads += 1
            number = self.late.pop(0) if self.late else number
        value = SimpleNamespace(uiVal=number) if field == SPEED else SimpleNamespace(ullVal=number)
        return SimpleNamespace(nvmlReturn=pynvml.NVML_SUCCESS, value=value)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", fake.by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkState", fake.state)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", fake.values)
    return fake


@pytest.fixture
def visible_gpu(monkeypatch):
    """Has torch's device 0 be the GPU with UUID, whatever its index in NVML."""
    properties = {0: SimpleNamespace(uuid=UUID.removeprefix("GPU-"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[torch.device(device).index])


def test_a_reading_has_the_bytes_of_every_active_link(nvml):
    assert find(UUID).read() == Reading(
        data_tx=(10 * 1024, 20 * 1024, 30 * 1024),
        data_rx=(11 * 1024, 21 * 1024, 31 * 1024),
        raw_tx=(12 * 1024, 22 * 1024, 32 * 1024),
        raw_rx=(13 * 1024, 23 * 1024, 33 * 1024),
    )


def test_the_links_keep_their_numbers(nvml):
    assert find(UUID).links == (0, 2, 3)


def test_a_difference_is_taken_link_by_link():
    before, after = Reading((1, 2), (3, 4), (5, 6), (7, 8)), Reading((11, 32), (53, 74), (95, 16), (37, 58))
    assert after - before == Reading((10, 30), (50, 70), (90, 10), (30, 50))


def test_a_reading_waits_until_the_counters_rest(nvml):
    counters = find(UUID)
    nvml.late = [5, 7, 9]
    assert counters.read().data_tx[0] == 10 * 1024


def test_a_reading_of_busy_links_ends_all_the_same(nvml, monkeypatch):
    monkeypatch.setattr(links, "POLL_S", 1e-3)
    monkeypatch.setattr(links, "SETTLE_S", 20e-3)
    counters = find(UUID)
    nvml.late, nvml.reads = list(range(1000)), 0
    counters.read()
    assert 2 <= nvml.reads <= 21


def test_a_torch_device_is_found_by_its_uuid(nvml, visible_gpu):
    assert find(torch.device("cuda", 0)).uuid == UUID


def test_each_active_link_has_its_raw_rate(nvml):
    nvml.fields[SPEED][2] = 20000
    assert find(UUID).raw_rates == (26.562, 20.0, 26.562)


def test_a_driver_that_tells_no_speed_leaves_the_raw_rate_open(nvml):
    del nvml.fields[SPEED]
    assert find(UUID).raw_rates is None


def test_without_nvml_find_says_so(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert find(UUID) == "NVML: NVML Shared Library Not Found"


def test_without_a_gpu_find_says_so(nvml, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find(0) == "torch sees no GPU"


def test_a_gpu_that_nvml_does_not_know_is_not_found(nvml):
    assert find("GPU-of-another-machine") == "NVML: Not Found"


@pytest.mark.parametrize("states", [[], [0, 0]])
def test_a_gpu_without_active_links_is_named(nvml, states):
    nvml.states = states
    assert find(UUID) == f"{UUID} has no active NVLink"


@pytest.mark.parametrize("field", [DATA_TX, DATA_RX, RAW_TX, RAW_RX])
def test_a_counter_that_the_driver_does_not_serve_is_told(nvml, field):
    del nvml.fields[field]
    assert find(UUID) == "NVML: Not Supported"


@pytest.mark.parametrize(("world_size", "expected"), [(2, 3000), (3, 4000), (4, 4500), (8, 5250)])
def test_what_an_allreduce_must_send(world_size, expected):
    assert must_send(world_size, nbytes=1000, operations=3) == expected


def test_utilisation_is_that_of_what_was_sent():
    counted = Reading(data_tx=(400, 600), data_rx=(1, 1), raw_tx=(500, 650), raw_rx=(2, 2))
    used = utilisation(counted, must_send_nbytes=900, links=(0, 2))
    assert used == Utilisation(
        must_send_nbytes=900,
        data_tx_nbytes=1000,
        raw_tx_nbytes=1150,
        payload_efficiency=pytest.approx(0.9),
        protocol_overhead=pytest.approx(0.15),
        link_balance=pytest.approx(2 / 3),
        raw_share=None,
        links=[Link(0, 500, None), Link(2, 650, None)],
    )


def test_the_raw_share_counts_all_bytes_against_time_and_rate():
    counted = Reading(data_tx=(10**6, 10**6), data_rx=(0, 0), raw_tx=(2 * 10**6, 10**6), raw_rx=(0, 0))
    used = utilisation(counted, 10**6, (4, 5), time_us=10.0, raw_rates=(400.0, 100.0))
    assert used.raw_share == pytest.approx(0.6)
    assert [(link.link, link.raw_share) for link in used.links] == [(4, pytest.approx(0.5)), (5, pytest.approx(1.0))]


@pytest.mark.parametrize(("time_us", "raw_rates"), [(None, [400.0]), (10.0, None)])
def test_without_a_time_or_a_rate_there_is_no_raw_share(time_us, raw_rates):
    used = utilisation(Reading((1,), (1,), (1,), (1,)), 1, [0], time_us, raw_rates)
    assert (used.raw_share, used.links[0].raw_share) == (None, None)


def test_links_that_carried_nothing_have_no_ratios():
    used = utilisation(Reading((0, 0), (0, 0), (0, 0), (0, 0)), 0, (0, 1))
    assert (used.payload_efficiency, used.protocol_overhead, used.link_balance) == (None, None, None)


def test_utilisation_comes_back_from_json():
    used = utilisation(Reading((4, 5), (6, 7), (8, 9), (1, 2)), 3, (0, 1), 1.0, (20.0, 26.0))
    assert files.from_json(Utilisation, json.loads(json.dumps(files.to_json(used)))) == used


class FakeRanks:
    """The first of two ranks, on the CPU.

    Args:
        times_us: what the pushes take, one after another.
        peer_pushes: whether the other rank's data arrives.
    """

    def __init__(self, times_us: list[float], peer_pushes: bool = True) -> None:
        self.rank, self.size, self.device = 0, 2, torch.device("cpu")
        self.times_us, self.peer_pushes = iter(times_us), peer_pushes
        self.peer_x = self.received = torch.empty(0)

    def random(self, case):
        return torch.randn(case.numel)

    def gather(self, x, window):
        self.peer_x = torch.randn(x.numel())
        return [x, self.peer_x]

    def barrier(self):
        pass

    def time_us(self, launch, mode):
        launch()
        return next(self.times_us)

    def slowest(self, times_us):
        if self.peer_pushes:
            self.received[1].copy_(self.peer_x)
        return times_us

    def total(self, counts):
        return counts


@pytest.fixture
def on_cpu(monkeypatch):
    """Replaces symmetric memory by ordinary memory and several streams by one, with little data."""

    def peer_slots(received, ranks):
        ranks.received = received
        return [torch.empty_like(received[0])]

    monkeypatch.setattr(links, "peer_slots", peer_slots)
    monkeypatch.setattr(links, "push_on_streams", links.push_in_turn)
    monkeypatch.setattr(links.symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(links, "SLOT_NBYTES", 4000)
    monkeypatch.setattr(links, "ROUNDS", 10)
    monkeypatch.setattr(links, "REPEATS", 3)


def test_the_ceiling_is_the_median_of_the_best_way(on_cpu):
    ranks = FakeRanks([4.0, 5.0, 9.0, 1.0, 2.0, 9.0, 7.0, 7.0, 7.0])
    assert links.measure_ceiling(ranks) == pytest.approx(4000 * 10 / 2.0 / 1e3)


def test_a_push_that_does_not_arrive_is_an_error(on_cpu):
    with pytest.raises(RuntimeError, match="push_in_turn: 1 slots do not hold what was pushed"):
        links.measure_ceiling(FakeRanks([1.0] * 9, peer_pushes=False))


@pytest.mark.parametrize("way", [links.push_in_turn, links.push_as_list])
def test_every_slot_holds_what_was_pushed(way, monkeypatch):
    monkeypatch.setattr(links, "ROUNDS", 1)
    x, slots = torch.randn(1000), [torch.zeros(1000) for _ in range(3)]
    way(x, slots)
    assert all(torch.equal(slot, x) for slot in slots)


@pytest.fixture
def no_multicast(monkeypatch):
    for name, value in NO_MULTICAST.items():
        monkeypatch.setenv(name, value)


def counters_of(device) -> Counters:
    counters = find(device)
    assert not isinstance(counters, str), counters
    return counters


def ranks_on(device):
    return ProcessRanks(device, dist.distributed_c10d._get_default_store())


def count_a_push(rank, world_size, pushes):
    """The bytes that every rank's links counted while rank 0 pushed 64 MB to rank 1 so many times."""
    device = torch.device("cuda", rank)
    ranks, counters = ranks_on(device), counters_of(device)
    received = links.symmetric_memory.empty(world_size, 16 * MB, dtype=torch.float32, device=device)
    slots = links.peer_slots(received, ranks)
    x = torch.randn(16 * MB, device=device)
    links.push(x, torch.empty_like(x))
    ranks.barrier()
    before = counters.read()
    ranks.barrier()
    if rank == 0:
        for _ in range(pushes):
            links.push(x, slots[0])
    ranks.barrier()
    counted = counters.read() - before
    return {name: sum(by_link) for name, by_link in vars(counted).items()}


@pytest.mark.gpu
def test_the_counters_count_what_a_kernel_pushes(no_multicast):
    sender, receiver = run_ranks(count_a_push, 2, 16, backend="nccl", timeout_s=120)
    pushed = 16 * 64 * MB
    assert sender["data_tx"] == pytest.approx(pushed, rel=0.01)
    assert receiver["data_rx"] == pytest.approx(pushed, rel=0.01)
    assert pushed < sender["raw_tx"] < 1.5 * pushed


def ceiling(rank, world_size):
    return links.measure_ceiling(ranks_on(torch.device("cuda", rank)))


@pytest.mark.gpu
def test_the_ceiling_of_two_gpus_is_below_the_links_raw_rate(no_multicast):
    rates = run_ranks(ceiling, 2, backend="nccl", timeout_s=120)
    assert 50 < rates[0] < 478
    assert rates[0] == rates[1]
