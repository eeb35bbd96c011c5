"""What a report's JSON file holds: one object, of this version of the schema.

Every report has ``schema``, the version; ``topic``, which names the report and its files; ``machine``, see
perf/machine.py; and what ``TOPICS`` lists for its topic, no more and no less. The fields of a row are explained where
they are made: ``Row`` in perf/rows.py, ``ErrorRow`` in perf/quantized/errors.py, ``Timeline`` in
perf/fused/timeline.py, ``LosslessRow``, ``NormRow``, ``FusedRow``, ``ModelRow``, ``TrainingRow``, ``ThroughputRow`` and
``Compiled`` beside their reports. ``skipped`` lists what was not measured, and why; ``command`` measures the same
again. The version changes with any change of a field's name, type or meaning.

version 2   training's outcomes have ``losses``, what NVLink carried has ``links``, and compile has a ``command``
version 3   fused has ``timelines``
version 4   lossless and training have ``skipped``

Files of earlier versions are read all the same, as if they had said of those fields that nothing is known.

In a schema a list stands for a list of any length, and a tuple for one of several kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 4


@dataclass(frozen=True)
class Since:
    """A field that a version brought.

    Attributes:
        unknown: what it is taken to be in files of earlier versions.
    """

    version: int
    kind: object
    unknown: object


NOTHING = type(None)
NUMBER = (int, float)

MACHINE = {
    "gpu": (str, NOTHING),
    "gpu_count": int,
    "driver": (str, NOTHING),
    "cuda": (str, NOTHING),
    "torch": str,
    "nccl": (str, NOTHING),
    "cpu": str,
    "cpu_count": int,
    "commit": (str, NOTHING),
    "date": str,
}
TIME_US = {"median": NUMBER, "p10": NUMBER, "p99": NUMBER}
RATIO = (*NUMBER, NOTHING)
LINK = {"link": int, "raw_tx_nbytes": int, "raw_share": RATIO}
NVLINK = {  # perf.nvlink.Utilisation
    "must_send_nbytes": int,
    "data_tx_nbytes": int,
    "raw_tx_nbytes": int,
    "payload_efficiency": RATIO,
    "protocol_overhead": RATIO,
    "link_balance": RATIO,
    "raw_share": RATIO,
    "links": Since(2, [LINK], []),
}
ROW = {
    "op": str,
    "method": str,
    "algorithm": (str, NOTHING),
    "quantised": bool,
    "nbytes": int,
    "dtype": str,
    "world_size": int,
    "mode": str,
    "form": str,
    "time_us": TIME_US,
    "algbw": NUMBER,
    "busbw": NUMBER,
    "wrong": int,
    "nvlink": (NVLINK, NOTHING),
}
ERROR_ROW = {
    "codec": str,
    "data": str,
    "world_size": int,
    "bits": NUMBER,
    "relative_l2": NUMBER,
    "relative_max": NUMBER,
    "cosine": NUMBER,
}
LOSSLESS_ROW = {
    "data": str,
    "world_size": int,
    "nbytes": int,
    "bits": NUMBER,
    "plain_us": (*NUMBER, NOTHING),
    "lossless_us": (*NUMBER, NOTHING),
}
NORM_ROW = {
    "method": str,
    "world_size": int,
    "tokens": int,
    "hidden": int,
    "time_us": {"median": NUMBER, "p10": NUMBER, "p90": NUMBER},
    "wrong": int,
}
FUSED_ROW = {
    "method": str,
    "world_size": int,
    "m": int,
    "n": int,
    "k": int,
    "time_us": TIME_US,
    "wrong": int,
}
TIMELINE = {
    "world_size": int,
    "m": int,
    "n": int,
    "k": int,
    "tile": str,
    "total_us": NUMBER,
    "means": [{"warp": str, "phase": str, "time_us": NUMBER}],
    "lanes": [{"block": int, "warp": str, "events": [[(*NUMBER, str)]]}],  # each as Event lists it
    "wrong": int,
}
MODEL_ROW = {
    "method": str,
    "size": str,
    "world_size": int,
    "layers": int,
    "phase": str,
    "tokens": int,
    "context": int,
    "time_us": TIME_US,
    "error": RATIO,
    "wrong": int,
}
PREFETCH_ROW = FUSED_ROW | {"time_us": NORM_ROW["time_us"]}
RUN = {"backend": str, "codec": (dict, NOTHING), "error_feedback": bool, "seed": int, "steps": int}
OUTCOME = {
    "train_loss": NUMBER,
    "train_accuracy": NUMBER,
    "test_loss": NUMBER,
    "test_accuracy": NUMBER,
    "time_s": NUMBER,
    "step_ms": NUMBER,
    "parameters": int,
    "same_bits": bool,
    "losses": Since(2, [NUMBER], []),
}
TRAINING_ROW = {
    "task": str,
    "data": str,
    "backend": str,
    "world_size": int,
    "batch_size": int,
    "epochs": NUMBER,
    "run": RUN,
    "outcome": OUTCOME,
    "mode": str,
    "bits": NUMBER,
    "sent_nbytes": NUMBER,
}
THROUGHPUT_ROW = {
    "model": str,
    "unit": str,
    "parameters": int,
    "exact_parameters": int,
    "world_size": int,
    "batch_size": int,
    "items": int,
    "way": {"backend": str, "codec": (str, NOTHING), "bits": NUMBER},
    "steps": int,
    "step_ms": NUMBER,
    "loss": NUMBER,
    "same_bits": bool,
    "throughput": NUMBER,
    "sent_nbytes": NUMBER,
}
COMPILED = {
    "file": str,
    "kernel": str,
    "arch": str,
    "compile_s": NUMBER,
    "nbytes": int,
    "registers": int,
    "stack_nbytes": int,
    "shared_nbytes": int,
}
SWEEP = {"command": str, "link_ceiling": (dict, NOTHING), "rows": [ROW], "skipped": [str]}
TOPICS = {
    "allreduce": SWEEP,
    "nvlink": SWEEP,
    "quantized": {"command": str, "errors": [ERROR_ROW], "times": [ROW], "skipped": [str]},
    "lossless": {"command": str, "rows": [LOSSLESS_ROW], "skipped": Since(4, [str], [])},
    "norms": {"command": str, "rows": [NORM_ROW], "skipped": [str]},
    "prefetch": {"command": str, "rows": [PREFETCH_ROW], "skipped": [str]},
    "fused": {"command": str, "rows": [FUSED_ROW], "timelines": Since(3, [TIMELINE], []), "skipped": [str]},
    "model": {"command": str, "rows": [MODEL_ROW], "skipped": [str]},
    "training": {"command": str, "rows": [TRAINING_ROW], "skipped": Since(4, [str], [])},
    "throughput": {"command": str, "rows": [THROUGHPUT_ROW], "skipped": [str]},
    "compile": {
        "command": Since(2, str, "python -m perf compile"),
        "nvrtc": str,
        "wall_s": NUMBER,
        "kernels": [COMPILED],
    },
}


def problem_with(content: object) -> str:
    """What is wrong with a report as JSON gives it, or nothing."""
    if not isinstance(content, dict):
        return "it is not a JSON object"
    if content.get("schema") not in range(1, VERSION + 1):
        return f"it has schema {content.get('schema')!r}, and this is {VERSION}"
    if content.get("topic") not in TOPICS:
        return f"its topic is {content.get('topic')!r}, and none of {', '.join(TOPICS)}"
    return _problem(content, _of_version(_kind(content), content["schema"]), "")


def upgraded(content: dict) -> dict:
    """A report without problem, of this version: what earlier ones did not have is said to be unknown."""
    return _filled(content, _kind(content)) | {"schema": VERSION}


def _kind(content: dict) -> dict:
    return {"schema": int, "topic": str, "machine": MACHINE, **TOPICS[content["topic"]]}


def _of_version(kind: object, version: int) -> object:
    """The schema as it was."""
    match kind:
        case Since():
            return _of_version(kind.kind, version)
        case dict():
            there = {key: one for key, one in kind.items() if not isinstance(one, Since) or one.version <= version}
            return {key: _of_version(one, version) for key, one in there.items()}
        case list() | tuple():
            return type(kind)(_of_version(one, version) for one in kind)
    return kind


def _filled(value: object, kind: object) -> object:
    match kind:
        case Since():
            return _filled(value, kind.kind)
        case dict() if isinstance(value, dict):
            there = {key: _filled(value[key], one) for key, one in kind.items() if key in value}
            return there | {key: one.unknown for key, one in kind.items() if key not in value}
        case list():
            return [_filled(one, kind[0]) for one in value]
        case tuple():
            return next((_filled(value, one) for one in kind if isinstance(one, dict)), value)
    return value


def _problem(value: object, kind: object, where: str) -> str:
    if isinstance(kind, list):
        if not isinstance(value, list):
            return f"{where} is not a list"
        return next(filter(None, (_problem(one, kind[0], f"{where}[{at}]") for at, one in enumerate(value))), "")
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return f"{where} is not an object"
        if differing := value.keys() ^ kind.keys():
            return f"{where}.{min(differing)} is {'missing' if min(differing) in kind else 'unknown'}".removeprefix(".")
        return next(filter(None, (_problem(value[key], kind[key], f"{where}.{key}") for key in kind)), "")
    if isinstance(kind, tuple):
        problems = [_problem(value, one, where) for one in kind]
        return "" if "" in problems else problems[0]
    return "" if type(value) is kind else f"{where} is {value!r}".removeprefix(".")
