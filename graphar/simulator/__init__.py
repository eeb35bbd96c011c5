"""Kernels on the CPU, at 2 to 8 ranks, without a GPU: their results, their memory ordering and their accesses.

g++ compiles the ``.cu`` files against twins of the PTX functions. A seeded scheduler decides which CUDA thread of which
rank goes on, so a seed repeats a run. ThreadSanitizer, AddressSanitizer and UBSan look at runs, too.
"""

from graphar.simulator.build import SANITIZERS, Mutation
from graphar.simulator.calls import ALGORITHMS
from graphar.simulator.check import Case, Failure, Report, run

__all__ = ["ALGORITHMS", "SANITIZERS", "Case", "Failure", "Mutation", "Report", "run"]
