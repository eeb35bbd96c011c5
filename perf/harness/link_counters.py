"""Reads the counters of a GPU's NVLinks, as a program: `python -m perf.harness.link_counters UUID`.

It writes a line of JSON that has the active links and their raw rate, and then a reading for each line that it is sent.
An error is a line as well, and the last one.
"""

from __future__ import annotations

import json
import sys
import time

import pynvml

KIB = 1 << 10

# NVML does not document when its counters are updated. So counters are read every POLL_S until two reads agree. If
# other processes use the links, they may never agree. The last read before SETTLE_S is then used.
POLL_S = 5e-3
SETTLE_S = 100e-3

Reading = tuple[list[int], list[int]]  # by link, since the driver was loaded: the payload sent, and all bytes sent


class LinkCounters:
    """The counters of a GPU's active NVLinks.

    Attributes:
        links: the indices of the active links.
        raw_rate: the raw rate of all links in one direction, in GB/s (1e9 bytes); None if NVML does not report it.

    Raises:
        RuntimeError: no link is active.
        pynvml.NVMLError: NVML has no such GPU or counter.
    """

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()  # stays initialised, because the counters need NVML
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.links = tuple(link for link in range(pynvml.NVML_NVLINK_MAX_LINKS) if self._is_active(link))
        if not self.links:
            raise RuntimeError(f"{uuid} has no active NVLink")
        self.raw_rate = self._raw_rate()
        self.read()

    def read(self) -> Reading:
        """Returns the counters once they no longer change."""
        deadline = time.monotonic() + SETTLE_S
        reading = self._sample()
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            last, reading = reading, self._sample()
            if reading == last:
                break
        return reading

    def _sample(self) -> Reading:
        fields = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX
        data, raw = ([value.ullVal * KIB for value in self._values(field)] for field in fields)
        return data, raw

    def _raw_rate(self) -> float | None:
        try:
            megabytes = [value.uiVal for value in self._values(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED)]
        except pynvml.NVMLError:
            return None
        return sum(megabytes) / 1e3 if all(megabytes) else None

    def _values(self, field: int) -> list:
        """Returns a field of every link. The scope of a query is the link; by default NVML reads the first link."""
        results = pynvml.nvmlDeviceGetFieldValues(self._handle, [(field, link) for link in self.links])
        for result in results:
            if result.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(result.nvmlReturn)
        return [result.value for result in results]

    def _is_active(self, link: int) -> bool:
        try:
            return pynvml.nvmlDeviceGetNvLinkState(self._handle, link) != pynvml.NVML_FEATURE_DISABLED
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            return False  # this GPU has fewer links


def main(uuid: str) -> None:
    try:
        counters = LinkCounters(uuid)
        print(json.dumps([counters.links, counters.raw_rate]), flush=True)
        for _ in sys.stdin:
            print(json.dumps(counters.read()), flush=True)
    except (RuntimeError, pynvml.NVMLError) as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main(sys.argv[1])
