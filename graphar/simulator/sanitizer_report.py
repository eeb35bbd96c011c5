"""The report of a sanitizer without what is the simulator's own, and the last steps of threads, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping

# ThreadSanitizer's paragraph of a thread, with its name.
_CREATED = re.compile(r"^ +Thread (T\d+)(?: '([^'\n]*)')?.* created by .*\n(?: +#.*\n)*\n?", re.MULTILINE)
_OF_SIMULATOR = (
    r"run\.cpp:|simulator::|std::function<|std_function\.h|bits/invoke\.h|__libc_start| in main | in _start "
)
_FRAME_OF_SIMULATOR = re.compile(rf"^ +#\d+ .*(?:{_OF_SIMULATOR}).*\n", re.MULTILINE)
_PLACE = re.compile(r" \([^()\s]*\+0x[0-9a-f]+\)(?: \(BuildId: \w+\))?$", re.MULTILINE)  # in the program
_OF_PROCESS = re.compile(r"^=+(?:\d+=+)?\n?| \(pid=\d+\)| \(pc 0x[^()]*\)|(?<=#\d )0x[0-9a-f]+ in ", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-f]{9,16}")
_IN_BRACKETS = re.compile(r"<(0x[0-9a-f]+)>")
_BEYOND_NBYTES = 64 << 20  # around the ranks' memory there is nothing else (sources/kept.hpp)

Regions = Mapping[str, tuple[int, int]]  # by name, the first address and the bytes


def shortened(report: str, regions: Regions) -> str:
    """Returns a report without frames of the simulator, in which addresses in ``regions`` or near are in words."""
    names = {number: name for number, name in _CREATED.findall(report) if name}
    for own in (_CREATED, _FRAME_OF_SIMULATOR, _PLACE, _OF_PROCESS):
        report = own.sub("", report)
    report = re.sub(r"\bthread (T\d+)\b", lambda found: names.get(found[1], found[0]), report)
    return _ADDRESS.sub(lambda found: _name(int(found[0], 16), regions) or found[0], report).strip()


def named(steps: str, regions: Regions) -> str:
    """Returns the last steps of threads (sources/steps.hpp) with addresses in words."""
    return _IN_BRACKETS.sub(lambda found: _name(int(found[1], 16), regions) or "other memory", steps)


def _name(address: int, regions: Regions) -> str:
    """Returns where an address lies, or an empty string."""
    for name, (begin, nbytes) in regions.items():
        if begin <= address < begin + nbytes:
            return f"{name}, byte {address - begin}"
    beside = {name: max(begin - address, address - begin - nbytes) for name, (begin, nbytes) in regions.items()}
    nearest = min(beside, key=beside.__getitem__, default="")
    if not nearest or beside[nearest] >= _BEYOND_NBYTES:
        return ""
    begin, nbytes = regions[nearest]
    return f"{nearest}, byte {address - begin} of {nbytes}, out of bounds"
