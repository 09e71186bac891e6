"""The figures of each set: which line of which part, and the limit beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Lines = dict[tuple[str, str], dict[str, Any]]
"""(part, name of the line) -> last line of that name in the file."""
Read = Callable[[Lines], float]
"""Reads a number. Raises KeyError if the line or the field is missing."""


@dataclass(frozen=True)
class Figure:
    """A number of one part. Its share is `value` / `limit`, or the inverse for a number that should be small."""

    name: str
    part: str
    unit: str
    value: Read
    limit: Read | None = None
    is_time: bool = False
    """Smaller is better: the limit is the least, not the most."""
    least: float | None = None
    most: float | None = None
    """Fixed bounds of `value`, which hold on every card."""
    kept: float = 0.9
    """A run must keep this part of the committed share."""

    def share(self, lines: Lines) -> float | None:
        """The share of the limit, None if the figure has no limit."""
        if self.limit is None:
            return None
        value, limit = self.value(lines), self.limit(lines)
        return limit / value if self.is_time else value / limit


def _read(part: str, name: str, field: str = "value") -> Read:
    return lambda lines: float(lines[part, name][field])


def _of_limit(name: str, part: str, line: str = "output_tokens_per_s", **more: Any) -> Figure:
    """A rate beside the limit in its line."""
    return Figure(name, part, "tokens/s", _read(part, line), _read(part, line, "limit"), **more)


def _push(name: str, part: str) -> Figure:
    return Figure(name, part, "ms", _read(part, "push", "median_ms"), _read(part, "push", "limit_ms"), is_time=True)


def _time(name: str, part: str, line: str, unit: str, **more: Any) -> Figure:
    return Figure(name, part, unit, _read(part, line), _read(part, line, "limit"), is_time=True, **more)


def _fixed(name: str, part: str, line: str, field: str = "value", **bounds: Any) -> Figure:
    """A ratio with fixed bounds."""
    return Figure(name, part, "x", _read(part, line, field), **bounds)


def _graphs(name: str, part: str) -> Figure:
    """The number of captured graphs of the rank that has the fewest."""
    return Figure(name, part, "graphs", _read(part, "cuda_graphs"), least=1)


def _beyond_copies(name: str, part: str) -> Figure:
    """Milliseconds of a push beyond 1.5 times plain copies: what a push may take that does not depend on bytes."""

    def beyond(lines: Lines) -> float:
        return _read(part, "push", "median_ms")(lines) - 1.5 * _read(part, "push", "limit_ms")(lines)

    return Figure(name, part, "ms", beyond, most=5)


def _two_to_one(lines: Lines) -> float:
    """Tokens/s of two tensor-parallel GPUs to those of one GPU, whose neighbour runs the same."""
    two, one = _read("offline_8b_tp2", "output_tokens_per_s"), _read("replicas_8b", "one_engine_tokens_per_s")
    return two(lines) / one(lines)


FIGURES: dict[int, list[Figure]] = {
    0: [
        _of_limit("4M parameters", "offline_tiny", least=7_620),
        # vLLM CPU 0.32.0 on both cores of the machine in docs/performance.md. Measure it again beside this figure,
        # because timings on that machine vary.
        _of_limit("0.6B, 16 x (64 + 64)", "offline_0.6b", least=56.4),
    ],
    1: [
        _of_limit("0.6B offline", "offline_0.6b"),
        _of_limit("0.6B one sequence", "offline_0.6b", "single_sequence_tokens_per_s"),
        Figure(
            "0.6B, log-probabilities",
            "offline_0.6b",
            "tokens/s",
            _read("offline_0.6b", "plain"),
            _read("offline_0.6b", "without_logprobs"),
        ),
        _of_limit("0.6B, top-p", "offline_0.6b", "top_p"),
        _of_limit("0.6B, top-k and top-p", "offline_0.6b", "top_p_top_k"),
        _of_limit("0.6B, min-p", "offline_0.6b", "min_p"),
        _of_limit("0.6B, repetition penalty", "offline_0.6b", "repetition_penalty"),
        _of_limit("0.6B, presence penalty", "offline_0.6b", "presence_penalty"),
        _of_limit("0.6B, 5 top log-probabilities", "offline_0.6b", "top_logprobs"),
        _of_limit("0.6B, JSON schema", "constrained_0.6b", "constrained"),
        _of_limit("8B offline", "offline_8b"),
        _of_limit("8B one sequence", "offline_8b", "single_sequence_tokens_per_s"),
        _push("8B push", "push_8b"),
        # Most of a start is the import of torch. In four runs on H100s the shares were 0.68 to 0.85.
        _time("8B start to first token", "start_8b", "seconds_to_first_token", "s", kept=0.75),
        _graphs("0.6B captured graphs", "offline_0.6b"),
        _graphs("8B captured graphs", "offline_8b"),
        _of_limit("0.6B offline, both on", "offline_0.6b_both"),
        _of_limit("8B offline, both on", "offline_8b_both"),
        _fixed("HTTP (columns) to in process", "serving_0.6b", "http_columnar_tokens_per_s", "ratio", least=0.97),
        _fixed("HTTP (JSON) to in process", "serving_0.6b", "http_json_tokens_per_s", "ratio", least=0.97),
        _fixed("prefix hits of what could hit", "multi_turn_0.6b", "prefix_hit_rate", "ratio", least=0.95),
        _fixed("lock step to own pace", "multi_turn_0.6b", "lock_step_ratio", least=3),
        _fixed("own pace to the ideal", "multi_turn_0.6b", "ideal_ratio", most=1.1),
        _push("8B push to SGLang", "sglang_push_8b"),
        _beyond_copies("8B push to SGLang, beyond 1.5 copies", "sglang_push_8b"),
        Figure(
            "8B push to SGLang, lost requests",
            "sglang_gaps_8b",
            "requests",
            _read("sglang_gaps_8b", "lost_requests"),
            most=0,
        ),
        _fixed("8B, SGLang behind the front to alone", "sglang_front_8b", "front_ratio", least=0.97),
        _fixed("0.6B, SGLang behind the front to alone", "sglang_front_0.6b", "front_ratio", least=0.97),
        _time("8B push to SGLang, after a sleep", "sglang_sleep_8b", "colocated_push", "ms"),
        Figure("0.6B SGLang, a process dies", "sglang_deaths", "s", _read("sglang_deaths", "death"), most=10),
    ],
    2: [
        _of_limit("8B, two replicas", "replicas_8b"),
        _of_limit("8B, each replica", "replicas_8b", "one_engine_tokens_per_s"),
        _of_limit("8B TP 2", "offline_8b_tp2"),
        # H100s reach 1.51 to 1.53. H200s reach 1.46 to 1.50: one reads its weights faster, and the links are the same.
        Figure("8B TP 2 to one GPU", "offline_8b_tp2", "x", _two_to_one, least=1.4),
        _of_limit("8B TP 2, one sequence", "offline_8b_tp2", "single_sequence_tokens_per_s"),
        _graphs("8B TP 2 captured graphs", "offline_8b_tp2"),
        _push("8B push, FSDP2 to TP 2", "push_tp2"),
        _push("8B push, FSDP2 to two replicas", "push_replicas"),
        _push("8B push, process group", "push_group"),
        _time("8B push, trainer beside TP 2", "colocated", "colocated_push", "ms"),
        _time("8B FSDP2 step beside TP 2", "colocated", "colocated_train", "ms"),
        _of_limit("8B vLLM TP 2", "vllm_tp2"),
        _push("8B push, FSDP2 to vLLM TP 2", "vllm_push_tp2"),
    ],
}
"""Number of GPUs (0: the CPU) -> rows of the table. Names are keys in `shares.json`: keep them."""
