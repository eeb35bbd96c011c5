"""PyTorch's own tests of torch.distributed between processes, with groups of the backend "graphar": nox -s c10d.

They take a minute or two, so they are not part of the suite. The cases are those of gloo, or of NCCL where there are
enough GPUs: most skip themselves for a backend with a name that torch does not know. Those that need another world size
skip themselves, too. torch's wheel has no other tests that a backend could take: its tests of threads have a process
group of their own, and those of DTensor are not in it.
"""

import multiprocessing
import os
import tempfile
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import graphar  # noqa: F401 (registers the backend)

WORLD_SIZE = 3
ON_GPUS = torch.cuda.device_count() >= WORLD_SIZE
OF_GRAPHAR = {"backend": "cpu:gloo,cuda:graphar" if ON_GPUS else "cpu:graphar"}
MONITORED = "torch allows dist.monitored_barrier for gloo alone"
TEXT = "expects the words of gloo's error, which names no rank"
NAME = "expects the name gloo"
HIDDEN = "torch hides is_completed() and the source of works of a backend in Python"
CANNOT_PASS = {
    "test_monitored_barrier_gloo": MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": MONITORED,
    "test_monitored_barrier_gloo_subgroup": MONITORED,
    "test_barrier_timeout_full_group": TEXT,
    "test_barrier_timeout_global": TEXT,
    "test_ddp_logging_data_cpu": NAME,
    "test_get_backend": NAME,
}
if torch.__version__ >= "2.14":
    sends = ("irecv", "isend", "isend_autograd_profiler", "isend_torch_profiler", "send_recv_any_source")
    sends += ("send_recv_any_source_autograd_profiler", "send_recv_any_source_torch_profiler")
    CANNOT_PASS |= {f"test_{one}": HIDDEN for one in sends}

FOLDER = os.environ.get("TEMP_DIR") or tempfile.mkdtemp()  # ranks that are spawned have that of the first process
os.environ |= {"BACKEND": "nccl" if ON_GPUS else "gloo", "WORLD_SIZE": str(WORLD_SIZE), "TEMP_DIR": FOLDER}
os.environ |= {"INIT_METHOD": f"file://{FOLDER}/store", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60"}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.distributed import distributed_test


@pytest.mark.filterwarnings("ignore")
class TestC10d(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self):
        if self._testMethodName in CANNOT_PASS:
            self.skipTest(CANNOT_PASS[self._testMethodName])
        super().setUp()
        self._start_processes(multiprocessing.get_context("spawn" if ON_GPUS else "fork").Process)

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, **more):
        init = dist.init_process_group
        with mock.patch.object(dist, "init_process_group", lambda *given, **named: init(*given, **named | OF_GRAPHAR)):
            super()._run(rank, test_name, file_name, pipe, **more)
