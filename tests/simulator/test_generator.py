"""The scheduler's random numbers are the standard library's, so that a seed means what it always has."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from graphar.simulator.build import HERE, UNOBSERVED
from graphar.simulator.compiler import compile_file

PROGRAM = """
#include <random>
#include "generator.hpp"
int main() {
  for (unsigned long seed : {0ul, 1ul, 1234567890123456789ul, ~0ul}) {
    simulator::Generator mine;
    std::mt19937_64 theirs(seed);
    mine.seed(seed);
    for (int number = 0; number < 1000; ++number)
      if (mine() != theirs()) return 1;
  }
}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_they_are_those_of_mt19937_64():
    files = {"main.cpp": PROGRAM, "generator.hpp": (HERE / "sources/generator.hpp").read_text()}

    assert subprocess.run([compile_file(files, "main.cpp", UNOBSERVED)], check=False).returncode == 0
