"""partition="batch_invariant" on GPUs: a row has the same bits, whatever the number of rows of the call."""

import pytest
import torch

import graphar
from graphar.errors import UnsupportedError
from graphar.plan.algorithms import MATMUL_TYPES
from tests.cases import same_bits
from tests.gpu import Ranks
from tests.ops.test_fused_gpu import normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

MOST = 4096
ROWS = (1, 2, 8, 16, 17, 33, 64, 65, 128, 300, 1023, 1024, 2047, 2048, 4000)


class Operands:
    """Operands on every device for up to MOST rows."""

    def __init__(self, ranks: Ranks, n: int, k: int, dtype: torch.dtype = torch.bfloat16, rows: int = MOST) -> None:
        self.ranks, devices = ranks, range(ranks.world_size)
        self.a = [normal((rows, k), dtype, rank, 0) for rank in devices]
        self.w = [normal((n, k), dtype, rank, 1) for rank in devices]
        self.bias, self.weight = (self._everywhere(normal((n,), dtype, 0, seed)) for seed in (2, 3))
        self.residual = self._everywhere(normal((rows, n), dtype, 0, 4))

    def _everywhere(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(a.device) for a in self.a]

    def run(self, op, rows: slice = slice(0, MOST), partition: str = "batch_invariant") -> list[torch.Tensor]:
        """The results of a call with some of the rows, in the order of these rows, on the first device."""
        a, how = [x[rows] for x in self.a], {"partition": partition, "group": self.ranks.communicator}
        if op is NORMED:
            found = op(a, self.w, [x[rows] for x in self.residual], self.weight, **how)
            results = [ones[-1] for ones in found]
        elif op is SCATTERED:
            parts = op(a, self.w, bias=self.bias, **how)
            self.ranks.communicator.synchronize()
            results = [torch.cat([part.to("cuda:0") for part in parts])]
        else:
            results = op(a, self.w, bias=self.bias, **how)[-1:]
        self.ranks.communicator.synchronize()
        return [one.to("cuda:0") for one in results]


REDUCED, SCATTERED, NORMED = OPS = (
    graphar.fused_matmul_allreduce,
    graphar.fused_matmul_reducescatter,
    graphar.fused_matmul_allreduce_residual_rmsnorm,
)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


@pytest.mark.promise(
    'With `partition="batch_invariant"` a row of a fused matmul has the same bits for every number of rows.'
)
@every_op
@pytest.mark.parametrize("dtype", MATMUL_TYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(8192, 2048), (1024, 1000), (1032, 67)])
def test_a_row_has_the_same_bits_for_every_number_of_rows(ranks: Ranks, op, dtype, n, k):
    operands = Operands(ranks, n, k, dtype)
    whole = operands.run(op)

    for rows in ROWS:
        first = (MOST - rows) // 2
        own = slice(first, first + rows)
        for partition in ("batch_invariant", "tiles"):  # two choices among the same kernels
            found = operands.run(op, own, partition)
            assert [same_bits(one, of_all[own]) for one, of_all in zip(found, whole, strict=True)] == [0] * len(whole)


@every_op
@pytest.mark.parametrize(("n", "dtype"), [(12, torch.bfloat16), (16, torch.float32)])
def test_a_call_without_such_a_kernel_is_refused_and_the_next_one_works(ranks: Ranks, op, n, dtype):
    with pytest.raises(UnsupportedError, match="no batch-invariant kernel: "):
        Operands(ranks, n, 64, dtype, rows=8).run(op)

    assert all(one.isfinite().all() for one in Operands(ranks, 16, 64, rows=8).run(op))
