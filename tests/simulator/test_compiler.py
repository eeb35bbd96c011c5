"""The compiler that the simulator needs, and the cache of what it made."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from graphar.errors import CompileError, UnsupportedError
from graphar.simulator import build
from graphar.simulator.build import check_libraries, compile_file

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.fixture(autouse=True)
def looked_up_anew(monkeypatch):
    """The compiler that a test sets is found, and the usual one afterwards."""
    monkeypatch.delenv("CXX", raising=False)
    build.compiler.cache_clear()
    yield
    build.compiler.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the simulator in an empty kernel cache."""
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "simulator"


def install(folder, text):
    """A compiler that ends like the shell commands ``text``."""
    program = folder / "c++"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(("variable", "named"), [("PATH", r"g\+\+"), ("CXX", "CXX=/nowhere")])
def test_a_compiler_that_is_not_there_is_named_with_what_to_install(monkeypatch, variable, named):
    monkeypatch.setenv(variable, "/nowhere")

    with pytest.raises(UnsupportedError, match=rf"needs g\+\+ 12 or newer.*apt install g\+\+.*; {named} is not there"):
        build.compiler()


def test_an_older_compiler_is_refused_with_its_version(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", install(tmp_path, "echo '#define __GNUC__ 11'"))

    with pytest.raises(UnsupportedError, match=r"needs g\+\+ 12 or newer.* is version 11"):
        build.compiler()


@pytest.mark.parametrize("text", ["echo '#define __GNUC__ 13'\necho '#define __clang__ 1'", "exit 1"])
def test_another_compiler_is_refused(monkeypatch, tmp_path, text):
    monkeypatch.setenv("CXX", install(tmp_path, text))

    with pytest.raises(UnsupportedError, match="is another compiler"):
        build.compiler()


def test_cxx_may_have_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", install(tmp_path, "echo '#define __GNUC__ 12'") + " -m64")

    assert build.compiler() == (f"{tmp_path}/c++", "-m64")


def test_a_sanitizer_whose_library_is_missing_is_told(monkeypatch, tmp_path):
    answers = "case $1 in -print*) echo libtsan.so;; *) echo '#define __GNUC__ 12';; esac"
    monkeypatch.setenv("CXX", install(tmp_path, answers))

    with pytest.raises(UnsupportedError, match=r"dnf install gcc-c\+\+ libtsan.*has no libtsan"):
        check_libraries(("libtsan",))


@needs_compiler
def test_an_output_is_made_once_and_again_if_a_header_changes(folder):
    files = {"one.cpp": '#include "two.hpp"\n', "two.hpp": "int two = 2;\n"}

    first, again = compile_file(files, "one.cpp", ("-c",)), compile_file(files, "one.cpp", ("-c",))
    changed = compile_file(files | {"two.hpp": "int two = 3;\n"}, "one.cpp", ("-c",))

    assert first == again
    assert sorted(folder.iterdir()) == sorted([first, changed])


@needs_compiler
def test_an_error_names_file_and_line_and_leaves_nothing(folder):
    files = {"one.cpp": '#include "two.hpp"\n', "two.hpp": "\nint two = three;\n"}

    with pytest.raises(CompileError, match="three") as found:
        compile_file(files, "one.cpp", ("-c",))

    assert (found.value.file, found.value.line) == ("two.hpp", 2)
    assert list(folder.iterdir()) == []


@needs_compiler
def test_outputs_that_were_not_used_for_a_month_are_deleted(folder):
    old, used = (compile_file({"one.cpp": f"int one = {at};\n"}, "one.cpp", ("-c",)) for at in range(2))
    for path in (old, used):
        os.utime(path, (0, time.time() - 2 * build.KEPT_S))
    compile_file({"one.cpp": "int one = 1;\n"}, "one.cpp", ("-c",))

    compile_file({"one.cpp": "int one = 2;\n"}, "one.cpp", ("-c",))

    assert not old.exists()
    assert used.exists()


@needs_compiler
@pytest.mark.parametrize(("mode", "is_writable"), [(0o777, True), (0o700, False)])
def test_without_a_cache_to_trust_and_to_write_outputs_are_the_process_own(folder, monkeypatch, mode, is_writable):
    monkeypatch.setattr(os, "access", lambda path, _: is_writable or path != folder)
    folder.mkdir(parents=True)
    folder.chmod(mode)

    made = compile_file({"one.cpp": "int one = 1;\n"}, "one.cpp", ("-c",))

    assert made.exists()
    assert list(folder.iterdir()) == []
