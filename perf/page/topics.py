"""What a page can have sections of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from perf import compare, compile_report, lossless, norms, nvlink_report, prefetch, report
from perf.fused import report as fused
from perf.model import report as model
from perf.page import allreduce, codecs, glance, models
from perf.page.bands import Bands
from perf.page.bars import Bars
from perf.page.dots import Dots
from perf.page.glance import Glance
from perf.page.heat import HeatMap
from perf.page.plot import Plot
from perf.quantized import report as quantized
from perf.throughput import report as throughput
from perf.training import report as training

Figure = Plot | HeatMap | Bars | Bands | Dots


@dataclass(frozen=True)
class Topic:
    """One kind of report.

    Attributes:
        name: of its files.
        command: of `python -m perf`, which makes it.
        markdown: its text, from its JSON.
        verdict: that text in a few lines, likewise.
        glance: what it comes to, likewise.
        figures: its plots, likewise, by the headings of the text that they go under; "" is its beginning.
        leads: the heading of the table that stands first, likewise; "" is that of the text.
    """

    name: str
    command: str
    title: str
    markdown: Callable[[dict], str]
    verdict: Callable[[dict], str]
    glance: Callable[[dict], Glance]
    figures: Callable[[dict], dict[str, list[Figure]]]
    leads: Callable[[dict], str] = lambda content: ""


def _topic(
    name: str,
    title: str,
    module,
    verdict: Callable,
    glance: Callable,
    figures: Callable,
    *,
    command: str = "",
    leads: Callable = lambda found: "",
) -> Topic:
    return Topic(
        name,
        command or name,
        title,
        lambda content: module.markdown(content["machine"], module.found_in(content), content["command"]),
        lambda content: verdict(module.found_in(content)),
        lambda content: glance(module.found_in(content)),
        lambda content: figures(module.found_in(content)),
        lambda content: leads(module.found_in(content)),
    )


TOPICS = (
    _topic(
        "allreduce",
        "All-reduce",
        report,
        lambda found: report.summary(found.rows),
        glance.allreduce,
        allreduce.figures,
        leads=allreduce.leads,
    ),
    _topic(
        "nvlink",
        "What NVLink carries",
        nvlink_report,
        lambda found: compare.verdict(found.rows),
        glance.nvlink,
        allreduce.counted,
    ),
    _topic("quantized", "Quantised all-reduce", quantized, quantized.verdict, glance.quantized, codecs.quantized),
    _topic(
        "lossless",
        "Fewer bytes, the same sum",
        lossless,
        lambda found: lossless.verdict(found.rows),
        lambda found: glance.lossless(found.rows),
        lambda found: codecs.lossless(found.rows),
    ),
    _topic(
        "norms",
        "All-reduce, residual and RMSNorm as one op",
        norms,
        lambda found: norms.verdict(found[0]),
        glance.norms,
        models.norms,
    ),
    _topic(
        "prefetch",
        "The next weight, prefetched by an all-reduce",
        prefetch,
        prefetch.verdict,
        glance.prefetch,
        models.prefetch,
    ),
    _topic("fused", "Matmul and all-reduce as one op", fused, fused.verdict, glance.fused, models.fused),
    _topic("model", "A tensor-parallel decoder", model, model.verdict, glance.model, models.model),
    _topic(
        "training",
        "Training with quantised gradients",
        training,
        lambda found: training.verdict(found.rows),
        lambda found: glance.training(found.rows),
        lambda found: models.training(found.rows),
        command="train",
    ),
    _topic(
        "throughput",
        "Steps of known models",
        throughput,
        lambda found: throughput.verdict(found.rows),
        glance.throughput,
        models.throughput,
    ),
    Topic(
        "compile",
        "compile",
        "Compiling every kernel",
        compile_report.markdown,
        lambda content: compile_report.verdict(len(content["kernels"]), content["wall_s"]),
        glance.compiled,
        models.compiled,
    ),
)
