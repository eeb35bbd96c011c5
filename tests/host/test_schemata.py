"""Mistakes that are chosen when a program begins: what stands in the file, and which mistakes can be chosen."""

from __future__ import annotations

import importlib
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphar.simulator.build import Mutation
from tests.host import build, conftest
from tests.host.mutants import MUTANTS
from tests.host.schemata import NotSelectable, _masked, can_be_chosen, with_all

KERNEL = """
constexpr int depth = 4;
struct Body {
  int first = 1;
  constexpr int twice(int x) const { return 2 * x; }
  void run(int n) const {
    const int end = n + 1;  // not; two
    if (n > 2)
      step(end, [&](int i) { return i; });
    else
      wait();
    for (int i = 0; i < n; ++i) Copy{i}.to(n);
    send();
  }
};
"""


def chosen(*changes):
    """What stands in the place of Body::run's statements, without blanks and comments."""
    text = with_all(KERNEL, [(n, Mutation("kernel.cu", old, new)) for n, (old, new) in enumerate(changes, 1)])
    body = re.sub(r"//.*", "", text)[text.index("const {\n") + 7 :]
    return re.sub(r"\s+", "", body.replace("};", "", 0))


def test_a_statement_stands_there_twice():
    assert "if(mistakes::chosen==1){}else{send();}" in chosen(("    send();\n", ""))


def test_an_else_belongs_to_its_if():
    both = "{if(n>{})step(end,[&](inti){returni;});elsewait();}"
    assert f"if(mistakes::chosen==1){both.replace('{}', '3')}else{both.replace('{}', '2')}for" in chosen(
        ("n > 2", "n > 3")
    )


def test_a_declaration_stands_there_with_all_that_follows():
    found = chosen(("n + 1;", "n;"))
    assert found.startswith("if(mistakes::chosen==1){constintend=n;if(n>2)")
    assert found.count("send();") == 2


def test_mistakes_of_one_statement_are_alternatives():
    found = chosen(("i < n", "i <= n"), ("Copy{i}.to(n)", "Copy{i}.to(0)"))
    one, two = "for(inti=0;i<=n;++i)Copy{i}.to(n);", "for(inti=0;i<n;++i)Copy{i}.to(0);"
    assert f"if(mistakes::chosen==1){{{one}}}elseif(mistakes::chosen==2){{{two}}}else{{for" in found


def test_a_statement_that_takes_the_next_one_in_has_it():
    found = chosen((" Copy{i}.to(n);", ""))
    assert "{for(inti=0;i<n;++i)send();}else{for(inti=0;i<n;++i)Copy{i}.to(n);send();}" in found


@pytest.mark.parametrize("old", ["depth = 4", "first = 1", "return 2 * x"])
def test_what_is_in_no_function_or_in_a_constexpr_one_cannot_be_chosen(old):
    assert not can_be_chosen(KERNEL, Mutation("kernel.cu", old, old.replace("= ", "= 0 * ").replace("2 *", "3 *")))


def test_braces_that_do_not_match_cannot_be_chosen():
    with pytest.raises(NotSelectable, match="braces"):
        with_all(
            KERNEL, [(1, Mutation("kernel.cu", "    send();\n  }\n", "  }\n  void more() const {\n    send();\n  }\n"))]
        )


def test_most_mistakes_are_chosen_in_a_program_that_they_share():
    alone = [one.name for one in MUTANTS if not can_be_chosen(build._text(one.mutation.file), one.mutation)]
    assert len(alone) <= 12


def resolved(text: str, number: int) -> str:
    """A text with all mistakes, in which this one is chosen: without choices, blanks and comments."""
    text = re.sub(r"\s+", "", _masked(text.removeprefix('#include "mistakes.hpp"')))
    while (begin := text.find("if(mistakes::chosen==")) >= 0:
        end, taken = begin, None
        while found := re.compile(r"(?:if\(mistakes::chosen==(\d+)\))?\{").match(text, end):
            first = found.end()
            end = next(at for at, depth in enumerate(accumulate_braces(text, first), first) if depth < 0)
            if taken is None and found[1] in (None, str(number)):
                taken = text[first:end]
            end += len("}else") if text.startswith("}else", end) and found[1] else 1
            if not found[1]:
                break
        text = text[:begin] + taken + text[end:]
    return text


def accumulate_braces(text: str, begin: int):
    return itertools.accumulate((text[at] == "{") - (text[at] == "}") for at in range(begin, len(text)))


def test_what_a_mistake_chooses_is_the_text_with_this_mistake_alone():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"tests.host.{path.stem}")
    for group in set(build._KNOWN.values()):
        made = {change.file: change for change in build._with_group(group)}
        for number, mistake in enumerate(group, 1):
            for change in mistake if build._can_be_chosen(mistake) else ():
                alone = re.sub(r"\s+", "", _masked(change.apply(build._text(change.file))))
                assert resolved(made[change.file].new, number) == alone, mistake
        for change in made.values():
            assert resolved(change.new, 0) == re.sub(r"\s+", "", _masked(change.old))


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("kind", conftest.MOST_PROGRAMS)
def test_a_run_with_more_programs_than_the_budget_fails(kind, more, monkeypatch):
    monkeypatch.setattr(build, "BUILT", {kind: {str(n) for n in range(conftest.MOST_PROGRAMS[kind] + more)}})
    monkeypatch.setattr(conftest, "_built", {kind: set() for kind in conftest.MOST_PROGRAMS})
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)

    conftest.pytest_sessionfinish(session)

    assert bool(session.exitstatus) == bool(more)
