"""Sums as a tree on real GPUs, one process with a tensor a device: the specification's bits, by every algorithm."""

from dataclasses import replace

import pytest

from tests.gpu import Ranks
from tests.ops.gpu_cases import SCATTERED_TREES, TREES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_many_as_trees")]

LARGE = 40 << 20  # elements: 160 MB, more than the scratch of two_shot_push takes
BY_TABLE = [case for case in TREES if not case.kernels]
ALONG_FIRST = [case for case in SCATTERED_TREES if case.form.options["axis"] == 0]


@pytest.mark.parametrize("case", [*BY_TABLE, *ALONG_FIRST], ids=str)
def test_large_tensors_give_the_specification(ranks: Ranks, case):
    case.check(ranks, (LARGE + 5,))


@pytest.mark.parametrize("case", TREES, ids=str)
def test_an_epilogue_works_on_the_sum_before_it_is_rounded(ranks: Ranks, case):
    replace(case, form=replace(case.form, epilogue="max(v * 3, -1)")).check(ranks, (8199,))
