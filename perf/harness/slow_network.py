"""Hosts joined by slow links: network namespaces, and a bridge that sends to each of them at a limited rate."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from perf.harness.ranks import HOST, TIMEOUT, ProcessRanks

ADDRESS = "10.98.0.{}/24"
LIMIT = "tc qdisc add dev {} root tbf rate {} burst 256kb latency 400ms"


def why_not() -> str:
    """Returns why this machine cannot make such hosts; an empty string if it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"needs {', '.join(missing)}"
    try:
        with slow_network(2, "1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"needs root and network namespaces: {error.stderr.strip() or error}"


@contextlib.contextmanager
def slow_network(hosts: int, rate: str) -> Iterator[list[int]]:
    """Makes hosts, each with a link ``eth0`` of a rate in both directions. Yields a process in each namespace.

    Everything is gone once the processes have ended. ``rate`` is in the words of tc(8), such as "100mbit".
    """
    outside = os.readlink("/proc/self/ns/net")
    processes = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(hosts + 1)]
    bridge, *ids = [process.pid for process in processes]
    try:
        end = time.monotonic() + 5
        for process in processes:
            while os.readlink(f"/proc/{process.pid}/ns/net") == outside and time.monotonic() < end:
                if process.poll() is not None:
                    break
                time.sleep(0.01)
        _inside(bridge, "ip link add bridge type bridge", "ip link set bridge up")
        for place, host in enumerate(ids, start=1):
            port = f"port{place}"
            _inside(
                bridge,
                f"ip link add {port} type veth peer name eth0 netns {host}",
                f"ip link set {port} master bridge up",
                LIMIT.format(port, rate),
            )
            address = f"ip addr add {ADDRESS.format(place)} dev eth0"
            _inside(host, address, "ip link set eth0 up", "ip link set lo up", LIMIT.format("eth0", rate))
        yield ids
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _inside(process: int, *commands: str) -> None:
    joined = " && ".join(commands)
    subprocess.run(
        ["nsenter", "-t", str(process), "--net", "sh", "-c", joined], check=True, capture_output=True, text=True
    )


def join(rank: int, hosts: list[int], port: int) -> ProcessRanks:
    """Joins the process group as a rank on the host of the process ``hosts[rank]``, with one thread."""
    store = dist.TCPStore(HOST, port, is_master=False)  # whose connection stays in the namespace outside
    with open(f"/proc/{hosts[rank]}/ns/net") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(hosts), timeout=TIMEOUT)
    return ProcessRanks(torch.device("cpu"), store)
