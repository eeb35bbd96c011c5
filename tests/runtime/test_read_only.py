"""Directories that really cannot be written: /tmp, the home, the cache. Each test has a mount of its own."""

import ctypes
import functools
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from graphar.plan.algorithms import Algorithm
from graphar.runtime.catalogue import kernel_source
from graphar.runtime.compiler import compile_kernel
from tests.processes import run_code

ROOT = Path(__file__).parents[2]
MOUNT = "mount --bind {0} {0} && mount -o remount,ro,bind {0}"
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000  # of unshare(2)

COMPILE = """
import sys, torch
from graphar.runtime.compiler import compile_kernel
from graphar.plan.algorithms import Algorithm
from graphar.runtime.catalogue import kernel_source
print(len(compile_kernel(kernel_source(Algorithm.ONE_SHOT, torch.bfloat16, int(sys.argv[1])), "sm_90a").image) > 1000)
"""
ALLREDUCE = """
import torch, graphar
print(graphar.allreduce([torch.ones(3)] * 2)[1].tolist())
"""


def read_only_mount(directory):
    """Mounts the directory read-only for this process alone, in its own user and mount namespace."""
    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # as unshare(1) does
    subprocess.run(["sh", "-c", MOUNT.format(shlex.quote(directory))], check=True)
    tempfile.tempdir = None  # forget what the parent process found


@functools.cache
def mounts_are_possible():
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT.format("/tmp")]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def mounts():
    if not mounts_are_possible():
        pytest.skip("needs unshare(1) and the right to mount in a namespace of its own")


@pytest.fixture
def run(mounts):
    """Runs code with a directory mounted read-only. Returns what it prints, and its RuntimeWarnings."""

    def run_python(code, *arguments, read_only, **environment):
        prepare = functools.partial(read_only_mount, str(read_only))
        environment = without_places() | environment
        return run_code(code, *map(str, arguments), environment=environment, prepare=prepare)

    return run_python


def without_places():
    """The environment without variables that name places for files."""
    places = ("GRAPHAR_CACHE_DIR", "XDG_CACHE_HOME", "TMPDIR", "TEMP", "TMP")
    return {name: value for name, value in os.environ.items() if name not in places}


@pytest.fixture
def full_cache(tmp_path, monkeypatch):
    """A cache that has the kernel of two ranks."""
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path))
    compile_kernel.cache_clear()
    compile_kernel(kernel_source(Algorithm.ONE_SHOT, torch.bfloat16, 2), "sm_90a")
    assert len(os.listdir(tmp_path)) == 1
    return tmp_path


@pytest.mark.promise("NVML, `/tmp`, a home directory and a writable cache are all optional.")
def test_importing_and_summing_need_no_tmp(mounts):
    python = shlex.join([sys.executable, "-W", "error::RuntimeWarning", "-c", ALLREDUCE])
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", f"{MOUNT.format('/tmp')} && exec {python}"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        environment = without_places() | {"HOME": elsewhere}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

        assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0]\n"), done.stderr
        assert list(Path(elsewhere).rglob("*.cache/graphar/*")) == []


@pytest.mark.promise("NVML, `/tmp`, a home directory and a writable cache are all optional.")
def test_compiling_needs_no_tmp(run):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        assert run(COMPILE, 2, read_only="/tmp", HOME=elsewhere) == ("True", [])
        assert len(list(Path(elsewhere).rglob("*.cache/graphar/*"))) == 1


@pytest.mark.promise("NVML, `/tmp`, a home directory and a writable cache are all optional.")
def test_in_a_read_only_home_kernels_stay_in_memory_and_one_warning_says_so(run, tmp_path):
    said, warned = run(COMPILE, 2, read_only=tmp_path, HOME=str(tmp_path))

    assert said == "True"
    assert warned == [
        f"the kernel cache {tmp_path}/.cache/graphar cannot be made: Read-only file system. Kernels stay in memory; "
        "GRAPHAR_CACHE_DIR names another."
    ]


def test_from_a_read_only_cache_kernels_are_loaded_without_a_word(run, full_cache):
    assert run(COMPILE, 2, read_only=full_cache, GRAPHAR_CACHE_DIR=str(full_cache)) == ("True", [])


def test_what_a_read_only_cache_lacks_is_compiled_and_one_warning_says_so(run, full_cache):
    before = os.listdir(full_cache)

    said, warned = run(COMPILE, 3, read_only=full_cache, GRAPHAR_CACHE_DIR=str(full_cache))

    assert said == "True"
    assert [line.split(". Kernels")[0] for line in warned] == [
        f"the kernel cache {full_cache} cannot be written: Read-only file system"
    ]
    assert os.listdir(full_cache) == before


def test_the_doctor_says_what_to_do_about_a_read_only_cache(run, tmp_path):
    code = "from graphar.cli.doctor.sections import kernel_cache; print([x.advice for x in kernel_cache() if x.advice])"

    said, _ = run(code, read_only=tmp_path, GRAPHAR_CACHE_DIR=str(tmp_path))

    assert "make it writable, or name another in GRAPHAR_CACHE_DIR" in said
