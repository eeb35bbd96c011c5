"""Every block of Python in the README and docs runs as it stands; tests/pages.py says how."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.cli.main import main
from perf import __main__ as perf_command
from tests.pages import FOLDER, PAGES, ROOT, SAVED, Block, blocks_of, programs_of
from tests.processes import _TRIES, import_first, run_ranks

import_first("transformers.models.llama.modeling_llama")  # of the page zero_difference
BLOCKS = {path: found for path in PAGES if (found := blocks_of(path, "python"))}
WORLD_SIZE = 2
LINKED = re.compile(r"\]\(([\w/]+\.(?:cu|py))\)")  # files that a page has beside it
# Pages whose first block is of a checkout, for GPUs, for g++, a row, or compared below.
NO_PROGRAM = {"contributing", "internals", "lossless", "simulator", "own_algorithms", "tp_invariance"}

every_page = pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)


@every_page
def test_every_block_of_python_runs_as_it_stands(path, tmp_path):
    found = torch.cuda.device_count()
    if 0 < found < WORLD_SIZE:
        pytest.skip(f"needs {WORLD_SIZE} GPUs or none, torch sees {found}")
    if missing := [one for block in BLOCKS[path] for one in block.packages() if not importlib.util.find_spec(one)]:
        pytest.skip(f"needs {' and '.join(missing)}")
    for name, text in SAVED.findall(path.read_text()):
        (tmp_path / name).write_text(text)
    for name in LINKED.findall(path.read_text()):
        shutil.copy(path.parent / name, tmp_path)
    programs = programs_of(path)
    for program in programs:
        (tmp_path / program.name).write_text(program.block.text)
    backend = "cpu:gloo,cuda:nccl" if found else "gloo"
    ranks = WORLD_SIZE if found else max([WORLD_SIZE, *(one.ranks or 1 for one in programs)])
    files = {one.block: str(tmp_path / one.name) for one in programs}

    made = stores()
    printed = run_ranks(run_page, ranks, BLOCKS[path], files, str(tmp_path), [*made], backend=backend)

    for program in programs if not found else ():
        text = "".join(of_rank[program.block] for of_rank in printed[: program.ranks or 1])
        assert program.prints.fullmatch(text), text


@every_page
def test_every_block_compiles_and_the_first_of_a_page_is_a_program_with_its_command_and_what_it_prints(path):
    programs = programs_of(path)

    assert all(block.compiled() for block in BLOCKS[path])
    assert path.stem in NO_PROGRAM or (programs and programs[0].block == BLOCKS[path][0])
    for program in programs:
        assert ("dist.init_process_group(" in program.block.text) == (program.ranks is not None)
        assert f"ave it as `{program.name}`" in path.read_text()


def run_page(
    rank: int, world_size: int, blocks: list[Block], files: dict[Block, str], folder: str, ports: list[int]
) -> dict[Block, str]:
    """Runs a page's programs as files, and other blocks with the names of the last one: what the programs print."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    if any("init_process_group(" in block.text for block in blocks):
        port = port_of_try(rank, ports)
        dist.destroy_process_group()
        os.environ.update(torchruns(rank, world_size, port))
    names: dict[str, object] = {"__name__": "__main__"}
    printed = {}
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as found:
            if file := files.get(block):
                names = {"__name__": "__main__", "__file__": file}
                exec(compile(Path(file).read_text(), file, "exec"), names)
                printed[block] = found.getvalue()
            elif block.runs(torch.cuda.is_available()):
                exec(block.compiled(), names)
    graphar.disable()
    return printed


def test_the_program_of_tp_invariance_prints_one_line_on_any_number_of_ranks_and_others_without_it(tmp_path):
    program = BLOCKS[FOLDER / "tp_invariance.md"][0]
    plain = re.sub(r"^(layers = |assert layers).*\n", "", program.text, flags=re.MULTILINE)
    lines = {program: [], replace(program, text=plain): []}

    file = tmp_path / "same_bits.py"
    for block, found in lines.items():
        file.write_text(block.text)
        for ranks in (1, 2, 4):
            made = stores()
            first, *others = run_ranks(run_page, ranks, [block], {block: str(file)}, str(tmp_path), [*made])
            assert not any(one[block] for one in others)
            found.append(first[block])

    invariant, others = lines.values()
    assert len(invariant[0].split()[0]) == 64
    assert len(set(invariant)) == 1
    assert len(set(others)) == 3


def stores() -> dict[int, dist.TCPStore]:
    """Stores for `run_page` by port: the first counts the tries of `run_ranks`, and each try has another."""
    made = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(1 + _TRIES)]
    return {one.port: one for one in made}


def port_of_try(rank: int, ports: list[int]) -> int:
    """The port of a store without the addresses of an earlier try, in which gloo could not connect the ranks."""
    common = dist.distributed_c10d._get_default_store()
    if rank == 0:
        common.set("try", str(dist.TCPStore("127.0.0.1", ports[0], is_master=False).add("tries", 1)))
    return ports[int(common.get("try"))]


def torchruns(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a process."""
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    of_store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in (of_rank | of_store).items()}


def commands(program: str) -> list[str]:
    """The lines of the pages' shell blocks with this beginning, without comments."""
    lines = [line for path in PAGES for block in blocks_of(path, "sh") for line in block.text.splitlines()]
    return sorted({line.split(" #")[0].strip() for line in lines if line.startswith(program)})


GRAPHARS = commands("python -m graphar")


@pytest.mark.parametrize("line", GRAPHARS)
def test_a_command_of_graphar_and_its_options_exist(line, capsys):
    _, _, _, command, *words = shlex.split(line)

    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert [word for word in words if word.startswith("--") and word.split("=")[0] not in told] == []


SHELLS_AND_TEXTS = [pair for path in PAGES for pair in pairwise(blocks_of(path))]
EXPLAINED = {sh.text: text for sh, text in SHELLS_AND_TEXTS if sh.text.startswith("python -m graphar explain")}


@pytest.mark.parametrize("line", EXPLAINED)
def test_the_command_explain_prints_what_its_page_shows(line, capsys):
    assert main(shlex.split(line)[3:]) == 0

    shown = re.escape(" ".join(EXPLAINED[line].text.split())).replace(r"\.\.\.", ".*")
    assert re.fullmatch(shown, " ".join(capsys.readouterr().out.split()))


def test_every_session_of_nox_that_pages_name_exists():
    named = {name for path in PAGES for name in re.findall(r"\bnox -s (\w+)", path.read_text())}

    assert {"perf", "docs", "host"} <= named
    assert named <= set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))


def test_every_part_of_perf_that_pages_name_exists(capsys):
    named = {line.removeprefix("nox -s perf -- ").split()[0] for line in commands("nox -s perf -- ")}
    named |= {line.split()[3] for line in commands("python -m perf ")}

    with pytest.raises(SystemExit):
        perf_command.parse(["--help"])

    told = capsys.readouterr().out
    assert "allreduce" in named
    assert [name for name in named if name not in told] == []
