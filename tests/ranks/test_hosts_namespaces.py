"""The hierarchical all-reduce between two namespaces with their own network and host name, joined by one link."""

import ctypes
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import reference
from tests.cases import KERNEL_DTYPES, normal, same_bits
from tests.ranks.test_hosts import CODECS, NUMELS, TWO_BY_TWO

# Two hosts: their processes are the last two arguments of "$@". Whatever is left ends with the outer namespace.
SCRIPT = """
set -e
unshare --net --uts sleep 300 & first=$!
unshare --net --uts sleep 300 & second=$!
here=$(readlink /proc/self/ns/uts)
for host in $first $second; do
    until [ "$(readlink /proc/$host/ns/uts)" != "$here" ]; do sleep 0.01; done
done
ip link add toward2 netns $first type veth peer name toward1 netns $second
join() {
    nsenter -t $1 --net --uts sh -c "echo $2 > /proc/sys/kernel/hostname; ip addr add $3/24 dev $4; ip link set $4 up
        ip link set lo up"
}
join $first host1 10.99.0.1 toward2
join $second host2 10.99.0.2 toward1
"$@" $first $second
"""
RANKS = "import sys; from tests.ranks.test_hosts_namespaces import be_all_ranks; be_all_ranks(sys.argv[1:])"


def on_two_hosts(*command):
    """Runs the command with the process ids of two hosts as its last arguments."""
    outer = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    root = Path(__file__).parents[2]
    return subprocess.run(
        [*outer, "sh", "-c", SCRIPT, "sh", *command], cwd=root, capture_output=True, text=True, timeout=120
    )


def be_all_ranks(hosts):
    """Two ranks on each host, which are forks of this process: importing torch takes longer than what they do."""
    importlib.import_module("torch._dynamo")  # as DistributedDataParallel would on each rank
    ranks = [multiprocessing.get_context("fork").Process(target=be_rank_on, args=(r, hosts[r // 2])) for r in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def be_rank_on(rank, host):
    for namespace in ("net", "uts"):
        with open(f"/proc/{host}/ns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = ("toward2", "toward1")[rank // 2]
    be_rank(rank)


def be_rank(rank):
    """A rank of the group. It ends in an error if a sum is not the specification's."""
    dist.init_process_group("gloo", init_method="tcp://10.99.0.1:29500", rank=rank, world_size=4)
    for dtype in KERNEL_DTYPES:
        for codec in (None, CODECS[0]):
            for numel in NUMELS[:4]:
                parts = [normal(one, numel, dtype) for one in range(4)]
                y = graphar.allreduce(parts[rank], algorithm="hierarchical", codec=codec)
                expected = reference.hierarchical_allreduce(parts, TWO_BY_TWO, codec)
                assert same_bits(y, expected) == 0, (dtype, codec, numel)
    gradients = torch.nn.Linear(8, 8)
    torch.nn.init.ones_(gradients.weight)
    model = torch.nn.parallel.DistributedDataParallel(gradients)
    model.register_comm_hook(None, graphar.ddp.exact_hook(algorithm="hierarchical"))
    model(torch.full((1, 8), float(rank))).sum().backward()
    assert torch.equal(gradients.weight.grad, torch.full((8, 8), 1.5)), "the mean of the ranks' gradients"
    dist.destroy_process_group()


@pytest.fixture
def two_hosts():
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))) or on_two_hosts("true").returncode:
        pytest.skip("needs unshare(1), nsenter(1), ip(8), and the right to make network namespaces")
    return on_two_hosts


def test_ranks_on_two_networks_find_their_hosts_and_get_the_specifications_bits(two_hosts):
    done = two_hosts(sys.executable, "-c", RANKS)

    assert done.returncode == 0, done.stderr
