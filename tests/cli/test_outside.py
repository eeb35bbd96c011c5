"""The commands with algorithms from outside the package, which a file of --load loads."""

import json

import pytest
import torch

from graphar import reference
from graphar.cli.main import main
from graphar.plan.tables import shipped_table
from tests.outside import PUSHED_SUM, load, unload

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

NO_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it measures those")


@pytest.fixture
def file(tmp_path):
    """A Python file that loads pushed_sum as an all-reduce that adds in reverse."""
    path = tmp_path / "mine.py"
    path.write_text(
        "import graphar\n"
        f"graphar.load_algorithm({str(PUSHED_SUM)!r}, op='allreduce',\n"
        "    scratch=lambda n: graphar.Scratch.of_slots(2 * n, 1 << 20, fill=0xFF), max_nbytes=1 << 20)\n"
    )
    return path


@NO_GPUS
def test_bench_times_an_algorithm_by_its_kernels_name(file, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(
        "graphar.allreduce", lambda x, group, out, **given: calls.append(given) or [reference.allreduce(x)] * 2
    )

    assert main(["bench", "2K", "--world-size", "2", "--load", str(file), "--algorithm", "pushed_sum", "--json"]) == 0

    assert calls[0] == {"algorithm": load().value}
    assert [row["nbytes"] for row in json.loads(capsys.readouterr().out)["rows"]] == [2048]


@pytest.mark.parametrize("command", [["explain", "2K"], ["tune"]])  # tune loads files before it looks for GPUs
def test_a_row_that_breaks_a_rule_ends_a_command_with_the_files_name_and_line(file, command, capsys):
    file.write_text(file.read_text().replace("op='allreduce'", "op='ring'"))

    assert main([*command, "--load", str(file)]) == 2

    assert capsys.readouterr().err.startswith(f"graphar: {file}:2: load_algorithm: op must be one of")


@pytest.mark.parametrize("loads", [True, False])
def test_explain_goes_by_a_table_that_names_it_where_it_is_loaded(file, loads, user_folder, capsys):
    table = json.loads(shipped_table("nvidia_h200").to_json())
    entry = {"max_nbytes": 4096, "algorithm": load().value, "blocks": 20, "threads": 256}
    table["rows"]["2"] = [entry, *(one for one in table["rows"]["2"] if (one["max_nbytes"] or 1e9) > 4096)]
    user_folder.mkdir(parents=True)
    (user_folder / "nvidia_h200.json").write_text(json.dumps(table))
    name = load().value
    unload(load())

    arguments = ["--load", str(file)] if loads else []
    assert main(["explain", "2K", "--device", "NVIDIA H200", "--world-size", "2", *arguments]) == 0

    said = f"{name} (1 blocks of 256" if loads else f"; the table's {name} is not loaded in this process"
    assert said in capsys.readouterr().out
