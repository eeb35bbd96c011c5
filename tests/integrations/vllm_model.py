"""A small model of random weights in vLLM, on two ranks: prints, as JSON, its tokens and graphar's calls on each rank.

python -m tests.integrations.vllm_model FOLDER [--compile]
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import torch

import graphar

RANKS = 2
LAYERS = 3
PROMPTS = ([3, 5, 7, 11], [100, 90, 80, 70, 60, 50], [9])
TOKENS = 12
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


class Traced:
    """What vLLM's workers can be asked for in addition: a trace of graphar's calls."""

    def begin_trace(self, path: str) -> None:
        self.trace = contextlib.ExitStack()
        self.trace.enter_context(graphar.profile(path))

    def end_trace(self) -> str:
        self.trace.close()
        communicator = type(self.device_communicator())
        return f"{communicator.__module__}.{communicator.__qualname__}"

    def sleep_and_wake_up(self) -> list[bool]:
        """Whether graphar's communicator was suspended between what vLLM's sleep mode calls, and after it."""
        from vllm.distributed.parallel_state import resume_device_comms, suspend_device_comms

        used = getattr(self.device_communicator(), "graphar", None)
        found = []
        for step in (suspend_device_comms, resume_device_comms):
            step()
            found.append(used is not None and used.engine.suspended)
        return found

    @staticmethod
    def device_communicator():
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().device_communicator


def write_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    # Weights so large that every layer decides on the tokens.
    config = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)


def run(folder: Path, compiles: bool) -> dict:
    from vllm import LLM, SamplingParams

    write_model(folder / "model")
    model = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        tensor_parallel_size=RANKS,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=not compiles,
        worker_extension_cls=f"{Traced.__module__}.{Traced.__qualname__}",
    )
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    slept = model.collective_rpc("sleep_and_wake_up")
    model.collective_rpc("begin_trace", args=(str(folder / "trace.json"),))
    results = model.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], greedy)
    texts = [result.outputs[0] for result in results]
    classes = model.collective_rpc("end_trace")
    traces = [json.loads(path.read_text()) for path in sorted(folder.glob("trace*.json"))]
    calls = [Counter(event["name"] for event in trace["traceEvents"] if event["ph"] == "X") for trace in traces]
    return {
        "tokens": [text.token_ids for text in texts],
        "logprobs": [
            [step[token].logprob for token, step in zip(text.token_ids, text.logprobs, strict=True)] for text in texts
        ],
        "classes": classes,
        "slept": slept,
        "calls": calls,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), "--compile" in sys.argv)))
