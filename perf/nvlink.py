"""What NVLink carried, by the counters in the hardware: how much of it was payload, and how even the links were.

    counters = find(torch.device("cuda", 0))
    if isinstance(counters, str):  # why there are none
        ...
    before = counters.read()
    ...  # the operations to count; then torch.cuda.synchronize()
    used = utilisation(counters.read() - before, must_send(world_size, nbytes, operations), counters.links)

The counters belong to the GPU: whatever another process sends meanwhile is counted as well. They count KiB a link, so a
difference may be off by 1 KiB a link: count operations that send a megabyte or more together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import pynvml
import torch

KIB = 1 << 10

# NVML says neither when its counters are updated nor that a read returns the newest. So a reading is one that two reads
# POLL_S apart agree on; on links that others keep busy there is none, and at SETTLE_S the newest will do.
POLL_S = 5e-3
SETTLE_S = 100e-3


@dataclass(frozen=True)
class Reading:
    """Bytes by active link, since the driver was loaded or, as a difference, between two readings of one GPU.

    Attributes:
        data_tx, data_rx: payload sent and received.
        raw_tx, raw_rx: the same with all that the protocol adds.
    """

    data_tx: tuple[int, ...]
    data_rx: tuple[int, ...]
    raw_tx: tuple[int, ...]
    raw_rx: tuple[int, ...]

    def __sub__(self, before: Reading) -> Reading:
        return Reading(
            data_tx=_minus(self.data_tx, before.data_tx),
            data_rx=_minus(self.data_rx, before.data_rx),
            raw_tx=_minus(self.raw_tx, before.raw_tx),
            raw_rx=_minus(self.raw_rx, before.raw_rx),
        )


@dataclass(frozen=True)
class Utilisation:
    """What one GPU sent, against what it had to. ``Utilisation(**u.to_dict()) == u``; a ratio to nothing is None.

    Attributes:
        must_send_nbytes: what the algorithm cannot do without.
        data_tx_nbytes: payload the links counted.
        raw_tx_nbytes: the same with all that the protocol adds.
        payload_efficiency: must_send / data_tx; below 1 where more was sent than had to be.
        protocol_overhead: raw_tx / data_tx - 1.
        link_balance: data_tx of the least loaded link / that of the most loaded; 1 is even.
        raw_share: raw_tx / what the links' raw rate allows in the time; None where the time or the rate is unknown.
        links: the same of each: its number ``link``, ``raw_tx_nbytes`` and ``raw_share``.
    """

    must_send_nbytes: int
    data_tx_nbytes: int
    raw_tx_nbytes: int
    payload_efficiency: float | None
    protocol_overhead: float | None
    link_balance: float | None
    raw_share: float | None
    links: list[dict[str, int | float | None]]

    def to_dict(self) -> dict[str, object]:
        """Plain numbers, for JSON."""
        return asdict(self)


def must_send(world_size: int, nbytes: int, operations: int) -> int:
    """Bytes a rank must send for so many all-reduces of nbytes a rank, without multicast: 2(N-1)/N of it each."""
    return 2 * (world_size - 1) * nbytes * operations // world_size


def utilisation(
    counted: Reading,
    must_send_nbytes: int,
    links: Sequence[int],
    time_us: float | None = None,
    raw_rates: Sequence[float] | None = None,
) -> Utilisation:
    """The figures of a difference of two readings.

    Args:
        counted: the difference.
        must_send_nbytes: see must_send.
        links: Counters.links.
        time_us: how long the operations took.
        raw_rates: Counters.raw_rates, GB/s in one direction.
    """
    data, raw = sum(counted.data_tx), sum(counted.raw_tx)
    allowed = [(time_us or 0) * rate * 1e3 for rate in raw_rates or [0] * len(links)]
    by_link = [
        {"link": link, "raw_tx_nbytes": nbytes, "raw_share": _ratio(nbytes, most)}
        for link, nbytes, most in zip(links, counted.raw_tx, allowed, strict=True)
    ]
    overhead = _ratio(raw, data)
    return Utilisation(
        must_send_nbytes=must_send_nbytes,
        data_tx_nbytes=data,
        raw_tx_nbytes=raw,
        payload_efficiency=_ratio(must_send_nbytes, data),
        protocol_overhead=None if overhead is None else overhead - 1,
        link_balance=_ratio(min(counted.data_tx, default=0), max(counted.data_tx, default=0)),
        raw_share=_ratio(raw, sum(allowed)),
        links=by_link,
    )


def find(device: torch.device | int | str) -> Counters | str:
    """A GPU's counters, or why they cannot be read.

    Args:
        device: a torch device or its index, or the GPU's UUID as nvidia-smi prints it.
    """
    try:
        pynvml.nvmlInit()  # NVML counts these; it stays loaded as long as the process, for the counters' sake
        counters = Counters(device)
        counters.read()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    except NoLinksError as error:
        return str(error)
    return counters


class NoLinksError(Exception):
    """There is no GPU, or it has no NVLink in use."""


class Counters:
    """One GPU's NVLink counters. find() makes them where they can be read; NVML must be initialised.

    Attributes:
        uuid: the GPU's, as NVML knows it.
        links: the numbers of the links in use.
        raw_rates: GB/s (1e9 bytes) each of them carries in one direction, protocol included; None where NVML does not
            say.

    Raises:
        NoLinksError: if torch has no GPU, or no link is in use.
        pynvml.NVMLError: if NVML has no such GPU.
    """

    def __init__(self, device: torch.device | int | str) -> None:
        self.uuid = device if isinstance(device, str) else _uuid(device)
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        self.links = tuple(link for link in range(pynvml.NVML_NVLINK_MAX_LINKS) if self._is_active(link))
        if not self.links:
            raise NoLinksError(f"{self.uuid} has no active NVLink")
        self.raw_rates = self._raw_rates()

    def read(self) -> Reading:
        """The counters, once they rest. Synchronize the device first: a kernel that still runs is counted in part.

        Raises:
            pynvml.NVMLError: if the driver does not serve a counter.
        """
        deadline = time.monotonic() + SETTLE_S
        reading = self._sample()
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            last, reading = reading, self._sample()
            if reading == last:
                break
        return reading

    def _sample(self) -> Reading:
        return Reading(
            data_tx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            data_rx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            raw_tx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX),
            raw_rx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX),
        )

    def _nbytes(self, field: int) -> tuple[int, ...]:
        return self._values(field, lambda value: value.ullVal * KIB)

    def _raw_rates(self) -> tuple[float, ...] | None:
        try:
            megabytes = self._values(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, lambda value: value.uiVal)
        except pynvml.NVMLError:
            return None
        return tuple(rate / 1e3 for rate in megabytes) if all(megabytes) else None

    def _values(self, field: int, member: Callable[..., int]) -> tuple[int, ...]:
        """A field of every link. The scope names the link: a bare field would silently mean the first one."""
        results = pynvml.nvmlDeviceGetFieldValues(self._handle, [(field, link) for link in self.links])
        for result in results:
            if result.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(result.nvmlReturn)
        return tuple(member(result.value) for result in results)

    def _is_active(self, link: int) -> bool:
        try:
            return pynvml.nvmlDeviceGetNvLinkState(self._handle, link) != pynvml.NVML_FEATURE_DISABLED
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            return False  # past this GPU's last link


def _uuid(device: torch.device | int) -> str:
    """By UUID, since CUDA_VISIBLE_DEVICES renumbers torch's devices, but not NVML's."""
    if not torch.cuda.is_available():
        raise NoLinksError("torch sees no GPU")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _minus(after: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(after, before, strict=True))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
