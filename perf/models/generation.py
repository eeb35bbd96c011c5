"""Times eager generation by transformers' unmodified Llama over two backends of torch.distributed.

transformers shards the model with ``tp_plan="auto"`` and calls ``dist.all_reduce``, which runs on the backend of its
process group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import graphar
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks, agreed
from perf.harness.timing import spread, time_in_turn
from perf.harness.verify import LOGITS_TOLERANCE, logit_errors
from perf.md import columns, method_cell, plural, ratio_cell, text_beside
from perf.models.bench import UNSHARDED, BenchPlan, BenchRow, error_cell, verdict
from perf.models.decoder import EPS, SIZES, THETA
from perf.ratios import best_peer, ratio
from perf.report import Spread

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NEEDS = ("transformers", "accelerate")  # accelerate: to shard the model
GRAPHAR = "graphar"
PROMPT = 16  # tokens
REPEATS = {"cuda": 9, "cpu": 5}


@dataclass(frozen=True)
class GenerationPlan(BenchPlan):
    """The generation of ``tokens`` tokens."""

    tokens: int


@dataclass(frozen=True)
class GenerationRow(BenchRow):
    """One backend: the time for the prompt and all generated tokens.

    Attributes:
        method: UNSHARDED, or the backend. With graphar all ranks must have logits with the same bits.
        prompt: the number of tokens of the prompt.
        tokens: the number of generated tokens.
        same_tokens: the number of generated tokens before the first one that differs from torch's backend.
        same_bits: the number of generated tokens whose logits have the same bits as with torch's backend.
    """

    prompt: int
    tokens: int
    time_us: Spread
    error: float | None
    same_tokens: int
    same_bits: int
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.of_layers, f"generation of {plural(self.tokens, 'token')}"

    @property
    def title(self) -> str:
        return f"{self.world_size} ranks, {self.of_layers}: eager {self.what[-1]} with transformers"

    @property
    def per_second(self) -> float:
        return self.tokens / self.median * 1e6


def run_rank(plan: GenerationPlan, rank: int, port: int) -> Iterator[GenerationRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    groups, skipped = make_groups(ranks)
    yield from skipped
    what = f"generation of {plural(plan.tokens, 'token')} with transformers"
    if lacking := [name for name in NEEDS if not importlib.util.find_spec(name)]:
        yield f"{what}: needs {' and '.join(lacking)}"
    else:
        # A transformers built for another version of torch may raise any exception.
        bench, reason = agreed(ranks, partial(Bench, plan, ranks, groups))
        yield from bench.measure() if bench else [f"{what}: {reason}"]
    ranks.barrier()


def make_groups(ranks: ProcessRanks) -> tuple[dict[str, dist.ProcessGroup], list[str]]:
    """Returns a process group of all ranks for each backend, and why graphar's is missing. Collective."""
    groups = {dist.get_backend(): dist.group.WORLD}
    on_gpu = ranks.device.type == "cuda"
    explained = graphar.explain(torch.zeros(PROMPT, dtype=torch.bfloat16, device=ranks.device))
    if on_gpu and explained.algorithm == graphar.Algorithm.FALLBACK:  # graphar's backend would use NCCL
        return groups, [f"backend {GRAPHAR}: {explained.reason}"]
    groups[GRAPHAR] = dist.new_group(backend="cpu:gloo,cuda:graphar" if on_gpu else "cpu:graphar")
    return groups, []


class Bench:
    """Measures generation by the unsharded model, and by the sharded model over each backend."""

    def __init__(self, plan: GenerationPlan, ranks: ProcessRanks, groups: Mapping[str, dist.ProcessGroup]) -> None:
        self._plan, self._ranks = plan, ranks
        self._models = make_models(plan, ranks, groups)
        generator = torch.Generator(ranks.device).manual_seed(0)
        words = SIZES[plan.size].vocabulary
        self._prompt = torch.randint(words, (1, PROMPT), generator=generator, device=ranks.device)

    def measure(self) -> Iterator[GenerationRow]:
        """Yields a row for the unsharded model and a row for each backend. Collective."""
        plan, ranks = self._plan, self._ranks
        mode = "eager" if plan.device == "cuda" else "cpu"
        launches = [partial(self._generate, model) for model in self._models.values()]
        times_us = ranks.slowest(
            time_in_turn(launches, REPEATS[plan.device], lambda launch: ranks.time_us(launch, mode))
        )
        results = {method: self._result(model) for method, model in self._models.items()}
        of_torch = results[dist.get_backend()]
        for (method, (tokens, logits)), times in zip(results.items(), times_us, strict=True):
            same_tokens = int((tokens == of_torch[0]).cumprod(0).sum())
            same_bits = int((logits == of_torch[1]).all(-1).sum())
            row = GenerationRow(
                *(method, plan.size, plan.world_size, plan.layers, PROMPT, plan.tokens, spread(times)),
                *(None, same_tokens, same_bits, 0),
            )
            yield row if method == UNSHARDED else self._verified(row, tokens, logits)

    def _generate(self, model: LlamaForCausalLM, **more) -> object:
        """Generates greedily with transformers' default cache, which is dynamic."""
        mask = torch.ones_like(self._prompt)
        return model.generate(
            self._prompt, attention_mask=mask, max_new_tokens=self._plan.tokens, do_sample=False, **more
        )

    def _result(self, model: LlamaForCausalLM) -> tuple[Tensor, Tensor]:
        """Returns the generated tokens and their logits, one row per token. Collective."""
        made = self._generate(model, output_logits=True, return_dict_in_generate=True)
        return made.sequences[0, PROMPT:], torch.cat(made.logits)

    @torch.no_grad()
    def _verified(self, row: GenerationRow, tokens: Tensor, logits: Tensor) -> GenerationRow:
        """Returns the row with its error and wrong tokens. Collective.

        The expected logits come from the unsharded model for the same tokens.
        """
        read = torch.cat([self._prompt[0], tokens[:-1]])
        expected = self._models[UNSHARDED](read.unsqueeze(0)).logits[0, PROMPT - 1 :]
        errors, apart = logit_errors(logits, expected)
        bad = ~(errors <= LOGITS_TOLERANCE * row.layers**0.5) | (apart & row.is_own)
        error, wrong = verdict(errors, bad, self._ranks)
        return replace(row, error=error, wrong=wrong)


def make_models(
    plan: GenerationPlan, ranks: ProcessRanks, groups: Mapping[str, dist.ProcessGroup]
) -> dict[str, LlamaForCausalLM]:
    """Returns the unsharded model with random weights, and its shard of this rank for each backend. Collective."""
    import transformers
    from transformers.distributed import DistributedConfig

    transformers.utils.logging.disable_progress_bar()
    os.environ["LOCAL_RANK"] = str(ranks.rank)  # transformers reads it to choose the GPU
    config, dtype = config_of(plan), torch.bfloat16
    torch.manual_seed(0)
    with ranks.device:
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    models = {UNSHARDED: whole}
    for method, group in groups.items():
        with default_group(group):
            models[method] = transformers.LlamaForCausalLM.from_pretrained(
                None,
                config=config,
                state_dict=whole.state_dict(),
                dtype=dtype,
                distributed_config=DistributedConfig(tp_plan="auto", tp_size=plan.world_size),
            )
    return models


def config_of(plan: GenerationPlan) -> object:
    """Returns the configuration of a Llama without an end-of-sequence token, so that no generation ends early."""
    from transformers import LlamaConfig

    size = SIZES[plan.size]
    return LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=plan.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        vocab_size=size.vocabulary,
        max_position_embeddings=PROMPT + plan.tokens,
        rms_norm_eps=EPS,
        rope_theta=THETA,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


@contextlib.contextmanager
def default_group(group: dist.ProcessGroup) -> Iterator[None]:
    """Makes ``group`` torch's default group, so that transformers' groups use its backend.

    A program would choose the backend in ``dist.init_process_group``. Here one process measures two backends.
    """
    earlier = dist.group.WORLD
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(earlier)


NOTES = text_beside(__name__)


def table_of(rows: Mapping[str, GenerationRow]) -> str:
    peer = best_peer(rows.values())
    known = next((row.method for row in rows.values() if row.is_peer), "torch's backend")
    cells = {
        "method": method_cell,
        "time (ms)": lambda row: f"{row.median / 1e3:.1f}",
        "p10 to p99 (ms)": lambda row: " to ".join(f"{row.time_us[name] / 1e3:.1f}" for name in ("p10", "p99")),
        "tokens/s": lambda row: f"{row.per_second:,.0f}",
        "of_best_peer": lambda row: ratio_cell(ratio(row, peer)),
        "error": error_cell,
        f"tokens as with {known}": lambda row: f"{row.same_tokens} of {row.tokens}",
        "logits with the same bits": lambda row: f"{row.same_bits} of {row.tokens}",
    }
    return columns(rows.values(), cells)
