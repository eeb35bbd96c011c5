"""The public interface of graphar, and limits that keep its code easy to read."""

import ast
import inspect
import json
import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graphar
from graphar import errors
from graphar.plan.algorithms import kernels_that
from graphar.runtime import availability
from graphar.runtime.catalogue import file_of

ROOT = Path(__file__).parents[1]
OWN_ERRORS = (
    "CompileError",
    "DriverError",
    "CommunicatorError",
    "UnsupportedError",
    "CollectiveTimeout",
    "ConcurrentCallError",
)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


IMPORT = """
import json, sys, time, torch
def cuda_packages():
    return [name for name in sys.modules if name.split('.')[0] in ('cuda', 'pynvml')]
found = {"with torch alone": cuda_packages()}
begin = time.process_time()
import graphar
found |= {"seconds": time.process_time() - begin, "CUDA": torch.cuda.is_initialized(), "imported": cuda_packages()}
graphar.allreduce([torch.ones(3)] * 2)
print(json.dumps(found | {"after a call": cuda_packages()}))
"""


@pytest.fixture(scope="module")
def new_process(new_interpreter):
    """What a new interpreter finds when it imports graphar after torch, and calls it on the CPU."""
    return json.loads(new_interpreter(IMPORT).stdout)


PUBLIC_MODULES = ("ddp", "fsdp", "nn", "reference", "simulator")


def test_the_public_names_are_those_of_all():
    # Submodules become attributes when they are imported, and graphar.nn where it is used.
    assert graphar.nn
    found = {
        name
        for name, value in vars(graphar).items()
        if not name.startswith("_") and (name in PUBLIC_MODULES or not isinstance(value, ModuleType))
    }

    assert sorted(found) == sorted(graphar.__all__)
    assert list(graphar.__all__) == sorted(graphar.__all__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("all_reduce", "allreduce"),
        ("reduce_scatter", "reducescatter"),
        ("reduce_scatter_tensor", "reducescatter"),
        ("all_gather", "allgather"),
        ("all_gather_into_tensor", "allgather"),
        ("all_gather_single", "allgather"),
        ("all_to_all_single", "alltoall"),
    ],
)
def test_a_name_spelt_as_torch_does_is_refused_by_the_one_that_is_meant(name, meant):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'; graphar\.{meant} is meant"):
        getattr(graphar, name)

    assert not hasattr(graphar, name)
    assert name not in dir(graphar)


def test_another_unknown_name_is_refused_in_pythons_words():
    with pytest.raises(AttributeError, match=r"^module 'graphar' has no attribute 'broadcast'$"):
        graphar.broadcast  # noqa: B018


def test_a_star_import_gives_the_public_names():
    found = {}

    exec("from graphar import *", found)

    assert sorted(found.keys() - {"__builtins__"}) == sorted(graphar.__all__)


def test_the_version_is_that_of_the_project():
    assert f'version = "{graphar.__version__}"' in (ROOT / "pyproject.toml").read_text()


def public_objects():
    for name in graphar.__all__:
        one = getattr(graphar, name)
        yield name, one
        if inspect.isclass(one) or inspect.ismodule(one):
            for member, value in vars(one).items():
                if inspect.isfunction(value) and not member.startswith("_") and value.__module__.startswith("graphar"):
                    yield f"{name}.{member}", value


@pytest.mark.parametrize(("name", "one"), list(public_objects()))
def test_every_public_object_is_documented(name, one):
    written = one.__doc__ or ""

    assert written.strip(), name
    assert not written.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"


def test_an_epilogue_shows_its_expression_and_its_arguments():
    epilogue = graphar.Epilogue("v * scale + bias[col]", bias=torch.ones(4), scale=0.5)

    assert repr(epilogue) == "Epilogue('v * scale + bias[col]', bias=<tensor>, scale=0.5)"


def test_an_epilogue_of_a_function_shows_its_name():
    assert repr(graphar.Epilogue(torch.relu)) == "Epilogue(relu)"
    assert repr(graphar.Epilogue(lambda v: v)) == "Epilogue(<lambda>)"


def test_a_communicator_shows_its_ranks_and_whether_it_is_closed():
    communicator = graphar.Communicator(devices=["cpu"] * 2, timeout_s=5)
    shown = "Communicator(devices=['cpu', 'cpu'], world_size=2, timeout_s=5"

    assert repr(communicator) == f"{shown})"
    communicator.close()
    assert repr(communicator) == f"{shown}, closed)"


def test_a_compile_pass_shows_its_rewrites(world_of_one):
    compile_pass = graphar.compile_pass(on=["epilogue"], off=["norm", "matmul"])

    shown = "on=['epilogue'], off=['matmul', 'norm'], batch_invariant=False, tp_invariant=False"
    assert repr(compile_pass) == f"CompilePass({shown}, constant_weights=False, graphs=0)"


@pytest.mark.parametrize("layer", ["RowParallelLinear", "ColumnParallelLinear"])
def test_a_layer_shows_its_features_and_ranks(world_of_one, layer):
    made = getattr(graphar.nn, layer)(torch.nn.Linear(8, 4, bias=False))

    assert repr(made) == f"{layer}(in_features=8, out_features=4, bias=False, ranks=1)"


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_an_own_error_is_a_graphar_error(name):
    assert getattr(graphar, name).__mro__[1:3] == (graphar.GrapharError, RuntimeError)


def test_the_error_tree_is_drawn_in_full():
    defined = {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, Exception)}

    drawn = set(re.findall(r"^ *(\w+(?:Error|Timeout))\b", errors.__doc__, re.MULTILINE))

    assert drawn == defined == {"GrapharError", *OWN_ERRORS}


@pytest.mark.parametrize(
    "error",
    [
        graphar.CompileError("one_shot.cu", 7, "the log"),
        graphar.CollectiveTimeout("rank 0 waited", graphar.TimeoutRecord("allreduce", "one_shot", 7, 0, 1, ("none",))),
        graphar.CommunicatorError("rank 1 is absent"),
    ],
)
def test_an_error_travels_between_processes_whole(error):
    copy = pickle.loads(pickle.dumps(error))

    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


@pytest.mark.promise("`import graphar` starts no CUDA and adds less than a second to torch's import.")
def test_import_adds_less_than_a_second_to_torch(new_process):
    assert new_process["seconds"] < 1


@pytest.mark.promise("`import graphar` starts no CUDA and adds less than a second to torch's import.")
def test_import_starts_no_cuda_and_loads_none_of_its_packages(new_process):
    assert not new_process["CUDA"]
    assert set(new_process["imported"]) == set(new_process["with torch alone"])
    assert "cuda.core" not in new_process["imported"]


def test_an_op_on_the_cpu_loads_no_cuda_package(new_process):
    assert "cuda.core" not in new_process["after a call"]


@pytest.fixture
def machine(monkeypatch):
    """Makes torch report GPUs and their capabilities, and graphar report missing software."""

    def pretend(count, capability=(9, 0), peer_access=lambda i, j: True, software=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capability)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", peer_access)
        monkeypatch.setattr(availability, "missing_software", lambda: software)

    return pretend


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((0,), "torch sees no CUDA device"),
        ((1,), "kernels need at least 2 GPUs, torch sees 1"),
        ((2, (7, 5)), "kernels need sm_80 or newer, cuda:0 is older"),
        ((2, (9, 0), None, "NVRTC cannot be loaded"), "NVRTC cannot be loaded"),
        (
            (3, (9, 0), lambda i, j: (i, j) != (2, 1)),
            "cuda:2 has no peer access to cuda:1 (`nvidia-smi topo -p2p r` says why)",
        ),
    ],
)
def test_what_is_missing_is_said(machine, arguments, reason):
    machine(*arguments)

    answer = graphar.is_available()

    assert not answer
    assert answer.reason == reason


def test_two_gpus_with_peer_access_suffice(machine):
    machine(2, (8, 0))

    assert graphar.is_available()


def sources(*folders, suffixes=(".py", ".cu", ".cuh")):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


def test_no_file_is_long():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in every_source()}

    assert {path: count for path, count in lines.items() if count > MAX_FILE_LINES} == {}


def test_no_python_function_is_long():
    long = {}
    for path in every_source():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = max(parts_of(node, path))
                if count > MAX_FUNCTION_LINES:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = count

    assert long == {}


def parts_of(function, path):
    """The lines of a function. The docstring of a public one is a page for itself, and counted apart."""
    lines = function.end_lineno - function.lineno + 1
    is_public = path.is_relative_to(ROOT / "graphar") and function.name in {
        *graphar.__all__,
        *graphar.reference.__all__,
    }
    if not is_public or ast.get_docstring(function) is None:
        return [lines]
    docstring = function.body[0].end_lineno - function.body[0].lineno + 1
    return [lines - docstring, docstring]


def every_source():
    found = [ROOT / "noxfile.py", *sources("graphar", "cuda_src", "tests", "perf", "docs")]
    assert len(found) > 30
    return found


def test_no_kernel_holds_assembly():
    kernels = [path for path in sources("cuda_src") if "device" not in path.relative_to(ROOT).parts]

    assert len(kernels) >= 4
    assert [path.name for path in kernels if re.search(r"\basm\b", path.read_text())] == []


def test_every_algorithm_has_a_kernel_file_of_its_name_and_a_picture():
    for algorithm in kernels_that(lambda row: True):
        text = (ROOT / "cuda_src" / file_of(algorithm)).read_text()

        assert text.startswith(f"// {algorithm.value}: ")
        assert "->" in text.split("#include")[0]
