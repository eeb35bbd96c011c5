"""Every block of Python in the README and docs runs as it stands; tests/pages.py says how."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import shlex

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.cli.main import main
from tests.pages import NEEDS_GPU, PAGES, Block, blocks_of
from tests.processes import run_ranks

BLOCKS = {path: found for path in PAGES if (found := blocks_of(path, "python"))}
WORLD_SIZE = 2
CHEAP = ("explain",)  # commands of graphar that take no time


def test_every_block_of_python_runs_as_it_stands(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    run_ranks(run_pages, WORLD_SIZE, list(BLOCKS.values()), store.port, str(tmp_path), timeout_s=120)


def run_pages(rank: int, world_size: int, pages: list[list[Block]], port: int, folder: str) -> None:
    """Runs the pages one after another, each in a namespace of its own."""
    os.chdir(folder)
    for at, blocks in enumerate(pages):
        makes_group = any("init_process_group(" in one.text for one in blocks)
        if makes_group:
            dist.destroy_process_group()
            os.environ.update(torchruns(rank, world_size, port, 2 * at))
        with contextlib.redirect_stdout(io.StringIO()):
            run_page(blocks)
        graphar.disable()
        torch._dynamo.reset()
        if makes_group:
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.update(torchruns(rank, world_size, port, 2 * at + 1))
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def torchruns(rank: int, world_size: int, port: int, attempt: int) -> dict[str, str]:
    """The environment that torchrun gives a process."""
    given = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": attempt,
    }
    return {name: str(value) for name, value in given.items()}


def run_page(blocks: list[Block]) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        torch.manual_seed(0)
        random.seed(0)
        if torch.cuda.is_available() or not block.text.startswith(NEEDS_GPU):
            exec(block.compiled(), names)


@pytest.mark.parametrize("path", BLOCKS, ids=lambda path: path.stem)
def test_every_block_of_python_compiles(path):
    for block in BLOCKS[path]:
        assert block.compiled()


COMMANDS = [
    line
    for path in PAGES
    for block in blocks_of(path, "sh")
    for line in re.findall(r"python -m graphar .*", block.text)
]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.split()[3] in CHEAP])
def test_commands_run(line, capsys):
    assert main(shlex.split(line, comments=True)[3:]) == 0
    assert capsys.readouterr().out
