"""Calls in two steps, and how later calls repeat them: a product, then a plan; or a plan, then work of each rank.

A product in panels is overlapped with their sums over ranks: while one panel is summed, the next is multiplied.

    the caller's stream    multiply 0 | sum 0       | sum 1       | sum 2
    side stream                       | multiply 1  | multiply 2  |

The sums are calls of one communicator on one stream, so each begins after the one before has ended. Each panel has its
own memory, and passes from one stream to the other once, by an event. A multiplication never waits for a sum, and so
never for another rank. It therefore ends, and frees its SMs for a sum that waits for them. At the end, also after an
error, the caller's stream waits for the side stream.

A sum that runs beside a multiplication has few blocks. graphar's matmul leaves these SMs free; torch's matmul does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphar import reference
from graphar.numerics import partitions
from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.numerics.partitions import Panel, length
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from graphar.product.multiply import ByTorch, choose
from graphar.product.operands import MatmulOperands, operands_of
from graphar.runtime import launcher
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Launch, Plan, Tensors
from graphar.runtime.side_stream import stream_beside


class Then:
    """Multiplies on every rank, and then sums the products over the ranks, or also norms the sums.

    A product is cut into the panels of its partition. They are multiplied in order, and a call of its own sums each. A
    bias that is not in the epilogue is added to the sum by torch. The call's algorithm and blocks are for sums
    beside a multiplication; None: the tuning table's number of blocks. A reduce-scatter ignores the algorithm.
    """

    def __init__(self, engine: Engine, call: Call[Product], operands: Operands) -> None:
        work = call.work
        self._engine, self._work = engine, work
        parts = work.parts if work.scattered else [sum(work.parts)]
        self._panels = partitions.panels(work.op, work.partition, work.num_partitions, parts, work.columns)
        self._blocks = call.blocks or engine.table.beside.blocks
        # Partials stay in fp32. Sums are made where the products lie, unless a result has another shape or dtype.
        self._dtype = torch.float32 if work.as_tree else call.dtype
        self._in_place = not (work.scattered or work.norm or work.as_tree)
        k = operands.inputs[1].shape[1]
        algorithm = call.algorithm if self._in_place else "auto"
        whole = Panel(tuple([slice(0, rows) for rows in parts]), slice(0, work.columns))
        works = [work.of_panel(panel).then(k, call.dtype) for panel in (whole, *self._panels)]
        dtype = ACCUMULATION_DTYPES[self._dtype] if work.bias else self._dtype
        self._whole, *self._alone = [Call(of_panel, dtype, call.device, timeout_s=call.timeout_s) for of_panel in works]
        self._beside = [alone._replace(algorithm=algorithm, blocks=self._blocks) for alone in self._alone]

    def plan(self, ranks: Sequence[Operands]) -> Plan:
        """Returns the plan of the call. Collective."""
        engine, work, panel = self._engine, self._work, self._panels[0]
        of_ranks = [operands_of(work, operands) for operands in ranks]
        taken = self._taken(panel, ranks, of_ranks, [self._room(matmul, panel) for matmul in of_ranks])
        if work.norm or work.as_tree:
            plan = engine.plan(self._whole, taken)
            config, reason = plan.config, plan.reason
        else:  # panels and symmetric tensors may take other plans
            config, reason = engine.select(self._whole, taken[0].inputs[0])
        leaves = f" in {work.leaves(engine.world_size)} leaves a rank" if work.as_tree else ""
        return Plan(self.run, config, f"multiplied{leaves}, then summed: {reason}", self.launch_like, self._explained)

    def _explained(self, operands: Operands) -> str:
        matmul = operands_of(self._work, operands)
        return choose(self._engine, self._work, matmul, len(self._panels)).explained(matmul, self._panels)

    def run(self, ranks: Sequence[Operands]) -> None:
        """Makes the call with the operands of each rank of this process. Collective."""
        of_ranks, panels = [operands_of(self._work, operands) for operands in ranks], self._panels
        products = [[self._room(matmul, panel) for matmul in of_ranks] for panel in panels]
        multiplies = [self._bind(*pair) for pair in zip(of_ranks, zip(*products, strict=True), strict=True)]

        if len(panels) == 1 or not of_ranks[0].a.is_cuda:
            for at in range(len(panels)):
                for multiply in multiplies:
                    multiply(at)
                self._take(at, False, ranks, of_ranks, products[at])
            return
        streams = [streams_of(matmul.a.device) for matmul in of_ranks]
        try:
            for at in range(len(panels)):
                for multiply, (main, side) in zip(multiplies, streams, strict=True):
                    with torch.cuda.stream(side if at else main):
                        multiply(at)
                    # The caller's stream waits for the panel. The side stream starts after the first multiplication.
                    if at:
                        main.wait_stream(side)
                    else:
                        side.wait_stream(main)
                self._take(at, at < len(panels) - 1, ranks, of_ranks, products[at])
        finally:
            for main, side in streams:
                main.wait_stream(side)

    def _room(self, matmul: MatmulOperands, panel: Panel) -> torch.Tensor:
        if self._in_place:
            return self._place(matmul, panel, 0)
        return matmul.out.new_empty(panel.shape, dtype=self._dtype)

    def _bind(self, matmul: MatmulOperands, products: Sequence[torch.Tensor]) -> Callable[[int], object]:
        """Returns a function of a panel's number that multiplies a rank's panel, on the current stream."""
        multiply = choose(self._engine, self._work, matmul, len(products))
        whole, pairs = matmul.step, list(zip(self._panels, products, strict=True))
        if not matmul.a.is_cuda:  # smaller matmuls would give other bits
            if len(pairs) == 1:
                multiply.make(whole._replace(out=products[0], bias=None))
                return lambda at: None
            product = matmul.out.new_empty(len(matmul.a), len(matmul.w), dtype=self._dtype)
            multiply.make(whole._replace(out=product, bias=None))
            of_panels = [[product[rows, panel.columns] for rows in panel.rows] for panel in self._panels]
            return lambda at: torch.cat(of_panels[at], out=products[at])
        steps = [whole.in_panel(*pair) for pair in pairs]
        if isinstance(multiply, ByTorch):
            return lambda at: [multiply.make(step) for step in steps[at]]
        sms = launcher.sm_count(matmul.a.device.index)
        few = max(sms - self._blocks, 1)
        # Load all kernels before the first launch: loading beside a kernel that waits for other ranks could hang.
        bound = multiply.bind_all([[(step, few if at else sms) for step in mine] for at, mine in enumerate(steps)])

        def multiply_panel(at: int) -> None:
            with torch.cuda.device(matmul.a.device):
                stream = torch.cuda.current_stream().cuda_stream
                for enqueue in bound[at]:
                    enqueue(stream)

        return multiply_panel

    def _take(self, at: int, is_beside: bool, ranks: Sequence[Operands], of_ranks, products) -> None:
        """Sums the products of a panel in one call, which may also norm the sums."""
        panel, engine, work = self._panels[at], self._engine, self._work
        taken = self._taken(panel, ranks, of_ranks, products)
        call = (self._beside if is_beside else self._alone)[at]
        if self._in_place and not work.codec:
            call = call._replace(symmetric=engine.is_symmetric([of_rank.inputs[0] for of_rank in taken]))
        engine.plan(call, taken).run(taken)
        if not work.norm:
            for index, (matmul, of_rank) in enumerate(zip(of_ranks, taken, strict=True)):
                total, place = of_rank.outputs[0], matmul.out[self._rows_of_out(panel, index), panel.columns]
                if matmul.bias is not None:
                    total = reference.with_bias(total, matmul.bias[panel.columns], matmul.out.dtype)
                if total.data_ptr() != place.data_ptr():
                    place.copy_(total)

    def _taken(self, panel: Panel, ranks: Sequence[Operands], of_ranks, products) -> list[Operands]:
        """Returns the operands of the call that sums a panel, for each rank of this process."""
        taken, epilogue = [], self._work.epilogue
        for index, (operands, matmul, product) in enumerate(zip(ranks, of_ranks, products, strict=True)):
            rows, outputs = self._rows_of_out(panel, index), operands.outputs
            product = reference.widened(product, matmul.bias)
            if not self._work.norm:
                dtype = None if self._work.as_tree else product.dtype
                outputs = (product if self._in_place else self._place(matmul, panel, index, dtype),)
            corner = epilogue and (rows.start, panel.columns.start, epilogue.columns)
            inputs = product, *[x.contiguous() for x in matmul.tensors]
            taken.append(Operands(inputs, outputs, matmul.numbers, corner))
        return taken

    def launch_like(self, operands: Operands) -> Launch | None:
        """Returns the launch of calls with tensors like these: see :class:`graphar.runtime.plan.Plan`."""
        work, matmul, (panel, *others) = self._work, operands_of(self._work, operands), self._panels
        count = work.factors.inputs
        if others or not matmul.a.is_cuda or work.bias or matmul.is_copy_of(operands):
            return None
        if not all(x.is_contiguous() for x in operands.inputs[count:]):
            return None
        product = matmul.out.new_empty(panel.shape, dtype=self._dtype)
        (example,) = self._taken(panel, [operands], [matmul], [product])
        launch, corner = self._engine.plan(self._alone[0], [example]).launch_like(example), example.corner
        if launch is None:
            return None
        multiply = choose(self._engine, work, matmul)
        repeated = multiply.repeating(work, matmul.step._replace(out=product))

        def multiply_and_take(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], _=None) -> None:
            launch((repeated(*inputs[:count]), *inputs[count:]), outputs, numbers, corner)

        return multiply_and_take

    def _rows_of_out(self, panel: Panel, index: int) -> slice:
        """Returns where the rows of a panel lie in the result of rank ``index`` of this process."""
        owner = 0 if not self._work.scattered else index if self._engine.devices else self._engine.rank or 0
        first, rows = self._panels[0].rows[owner].start, panel.rows[owner]
        return slice(rows.start - first, rows.stop - first)

    def _place(
        self, matmul: MatmulOperands, panel: Panel, index: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Returns a contiguous tensor for a panel: a view of ``out`` if the panel is contiguous there and has no bias.

        A view of a misaligned ``out`` would give the panel to torch's matmul, and so other bits.
        """
        rows, columns, out = self._rows_of_out(panel, index), length(panel.columns), matmul.out
        if matmul.bias is None and columns == out.shape[1] and out.data_ptr() % 16 == 0:
            return out[rows]
        return out.new_empty(length(rows), columns, dtype=dtype)


def streams_of(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns the caller's stream on a device, and its side stream."""
    main = torch.cuda.current_stream(device)
    return main, stream_beside(device, main.cuda_stream)


def after(
    plan: Plan,
    inner: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]],
    work: Callable[[Tensors, Tensors, tuple[float, ...], Tensors], None],
) -> Plan:
    """Returns a plan that runs ``plan``, and then ``work`` on each rank's results, which it takes last.

    ``inner`` takes a rank's inputs and outputs, and returns ``plan``'s.
    """

    def run(ranks: Sequence[Operands]) -> None:
        inners = [Operands(*inner(operands.inputs, operands.outputs), operands.numbers) for operands in ranks]
        plan.run(inners)
        for operands, of_plan in zip(ranks, inners, strict=True):
            work(operands.inputs, operands.outputs, operands.numbers, of_plan.outputs)

    def launch_like(operands: Operands) -> Launch | None:
        launch = plan.launch_like(Operands(*inner(operands.inputs, operands.outputs), operands.numbers))
        if launch is None:
            return None

        def launch_and_work(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner=None) -> None:
            taken, made = inner(inputs, outputs)
            launch(taken, made, numbers, corner)
            work(inputs, outputs, numbers, made)

        return launch_and_work

    return plan._replace(run=run, launch_like=launch_like)
