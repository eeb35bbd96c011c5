"""NVLink counters and the links' ceiling: with a fake NVML and pushes on the CPU, and both on 2 GPUs."""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace

import pynvml
import pytest
import torch
import torch.distributed as dist

from graphar.plan.sizes import MB
from perf.harness import link_counters, links
from perf.harness.cases import Case, Utilisation
from perf.harness.link_counters import LinkCounters
from perf.harness.links import Counters, must_send, utilisation
from perf.harness.ranks import NO_MULTICAST, InProcessRanks, ProcessRanks
from tests.processes import run_ranks

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
DATA_TX, RAW_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX
SPEED = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED


class FakeNvml:
    """One GPU of four links, of which the second is down; fields hold each link's value."""

    def __init__(self) -> None:
        self.states = [1, 0, 1, 1]
        self.fields = {
            DATA_TX: [10, 0, 20, 30],
            RAW_TX: [12, 0, 22, 32],
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


def counters() -> LinkCounters:
    return LinkCounters(UUID)


def test_a_reading_has_the_bytes_of_every_active_link(nvml):
    counted = counters()

    assert counted.links == (0, 2, 3)
    assert counted.read() == ([10 * 1024, 20 * 1024, 30 * 1024], [12 * 1024, 22 * 1024, 32 * 1024])


def test_a_reading_waits_until_the_counters_rest(nvml):
    counted = counters()
    nvml.late = [5, 7, 9]
    assert counted.read()[0][0] == 10 * 1024


def test_a_reading_of_busy_links_ends_all_the_same(nvml, monkeypatch):
    monkeypatch.setattr(link_counters, "POLL_S", 1e-3)
    monkeypatch.setattr(link_counters, "SETTLE_S", 20e-3)
    counted = counters()
    nvml.late, nvml.reads = list(range(1000)), 0
    counted.read()
    assert 2 <= nvml.reads <= 21


def test_the_raw_rate_is_that_of_all_links_if_the_driver_tells_it(nvml):
    nvml.fields[SPEED][2] = 20000
    assert counters().raw_rate == pytest.approx(26.562 + 20.0 + 26.562)
    del nvml.fields[SPEED]
    assert counters().raw_rate is None


def test_without_nvml_there_are_no_counters(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(pynvml.NVMLError, match="NVML Shared Library Not Found"):
        counters()


@pytest.mark.parametrize("states", [[], [0, 0]])
def test_a_gpu_without_active_links_is_named(nvml, states):
    nvml.states = states
    with pytest.raises(RuntimeError, match=f"{UUID} has no active NVLink"):
        counters()


@pytest.mark.parametrize("field", [DATA_TX, RAW_TX])
def test_a_counter_that_the_driver_does_not_serve_is_told(nvml, field):
    del nvml.fields[field]
    with pytest.raises(pynvml.NVMLError, match="Not Supported"):
        counters()


def test_the_program_writes_a_line_for_each_it_is_sent(nvml, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", ["\n", "\n"])
    link_counters.main(UUID)
    reading = [[10240, 20480, 30720], [12288, 22528, 32768]]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        [[0, 2, 3], 79.686],
        reading,
        reading,
    ]


def test_the_program_s_last_line_is_its_error(nvml, capsys):
    link_counters.main("GPU-of-another-machine")
    assert json.loads(capsys.readouterr().out) == {"error": "Not Found"}


# A reader whose links have sent 7 bytes. It ends when it is asked for the third time.
READER = """
import sys
print([[4], 25.0], flush=True)
for number, _ in enumerate(sys.stdin):
    if number == 2:
        break
    print([[7], [8]], flush=True)
"""


@pytest.fixture
def reader(monkeypatch):
    """Has torch's device 0 be the GPU with UUID, whatever its index in NVML; returns what sets its reader's program."""
    properties = {0: SimpleNamespace(uuid=UUID.removeprefix("GPU-"))}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[torch.device(device).index])
    return lambda program: monkeypatch.setattr(links, "READER", (sys.executable, "-c", program))


@pytest.fixture
def of_device():
    """Makes the counters of torch's device 0, and closes them in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Counters(torch.device("cuda", 0))))


def test_a_reader_that_ends_costs_one_reading(reader, of_device):
    reader(READER)
    device = of_device()
    assert (device.links, device.raw_rate) == ([4], 25.0)
    assert [device.read() for _ in range(4)] == [[[7], [8]], [[7], [8]], None, [[7], [8]]]


def test_traffic_whose_reader_ended_is_unknown(reader, of_device):
    reader(READER)
    device = of_device()
    case = Case(2, "process", "graph", "bfloat16", 16 * MB)
    counted = [links.count(lambda: None, 1.0, case, InProcessRanks(2), device) for _ in range(2)]
    assert [one is None for one in counted] == [False, True]


def test_a_reader_is_asked_for_the_device_of_torch(reader, of_device):
    reader("import json, sys; print(json.dumps({'error': sys.argv[1]}))")
    with pytest.raises(RuntimeError, match=UUID):
        of_device()


def test_a_reader_that_does_not_begin_is_told(reader, of_device):
    reader("raise SystemExit(1)")
    with pytest.raises(RuntimeError, match="the process that reads NVLink's counters ended"):
        of_device()


def test_without_a_gpu_there_are_no_counters(of_device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        of_device()


@pytest.mark.parametrize(("world_size", "expected"), [(2, 3000), (3, 4000), (4, 4500), (8, 5250)])
def test_what_an_allreduce_must_send(world_size, expected):
    assert must_send(world_size, nbytes=1000, operations=3) == expected


def test_utilisation_is_that_of_what_was_sent_against_time_and_rate():
    used = utilisation(([1, 2], [3, 4]), ([401, 602], [503, 654]), 900, time_us=10.0, raw_rate=0.23)

    assert used == Utilisation(
        must_send_nbytes=900,
        data_tx_nbytes=1000,
        raw_tx_nbytes=1150,
        payload_efficiency=pytest.approx(0.9),
        protocol_overhead=pytest.approx(0.15),
        link_balance=pytest.approx(2 / 3),
        raw_share=pytest.approx(0.5),
    )


def test_links_that_carried_nothing_or_have_no_rate_have_no_ratios():
    used = utilisation(([5, 5], [5, 5]), ([5, 5], [5, 5]), 0, 10.0, None)

    ratios = used.payload_efficiency, used.protocol_overhead, used.link_balance, used.raw_share
    assert ratios == (None, None, None, None)


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


def ranks_on(device):
    return ProcessRanks(device, dist.distributed_c10d._get_default_store())


def count_a_push(rank, world_size, pushes):
    """The bytes that every rank's links counted while rank 0 pushed 64 MB to rank 1 so many times."""
    device = torch.device("cuda", rank)
    ranks, counters = ranks_on(device), Counters(device)
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
    return [sum(now) - sum(then) for now, then in zip(counters.read(), before, strict=True)]


@pytest.mark.gpu
def test_the_counters_count_what_a_kernel_pushes(no_multicast):
    sender, receiver = run_ranks(count_a_push, 2, 16, backend="nccl", timeout_s=120)
    pushed = 16 * 64 * MB
    assert sender[0] == pytest.approx(pushed, rel=0.01)
    assert pushed < sender[1] < 1.5 * pushed
    assert receiver[0] < 0.01 * pushed


def ceiling(rank, world_size):
    return links.measure_ceiling(ranks_on(torch.device("cuda", rank)))


@pytest.mark.gpu
def test_the_ceiling_of_two_gpus_is_below_the_links_raw_rate(no_multicast):
    rates = run_ranks(ceiling, 2, backend="nccl", timeout_s=120)
    assert 50 < rates[0] < 478
    assert rates[0] == rates[1]
