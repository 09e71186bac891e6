"""Throughput of outputs that a JSON schema constrains, as a ratio to free outputs, with `Engine` in this process.

    python -m benchmarks.constrained --device cpu --shape tiny --requests 64 --output 128
    python -m benchmarks.constrained --device cuda --shape 0.6b --requests 256 --output 512
    python -m benchmarks.constrained --device cuda --shape 0.6b --any-object
    python -m benchmarks.constrained --device cuda --shape 0.6b --schemas 16 --bounded-strings
    python -m benchmarks.constrained --device cuda --shape 0.6b --set disable_overlap_schedule=true
    python -m benchmarks.constrained --device cuda --shape 0.6b --trace
    python -m benchmarks.constrained --device cuda --shape 0.6b --against ../before
    python -m benchmarks.constrained --device cuda --shape 0.6b --trace --against ../before

The model has random weights, and a generated tokenizer of words, numbers and the punctuation of JSON fills its
vocabulary. All requests are submitted at once. The schema is an array of objects that does not end within the output,
so both kinds of requests have the same number of tokens. Free and constrained runs alternate.

`first_grammar_seconds` is one request with a new schema: its check in a text worker that starts, the compilation, and
one token. `constrained_ratio` is the median of constrained to free tokens/s. Masks are computed on the CPU, and hosts
of the same GPU differ: the `limit` of `constrained` (the median of its tokens/s) is the smaller of free tokens/s and
`masks_tokens_per_s`, the rate at which the grammar library alone, in threads of its own, advances the matchers through
the last run's outputs and computes all masks.

`--trace` drives the scheduler in this process instead, and prints the microseconds of a step by its parts
(`benchmarks.step_trace`) for free and for constrained outputs; on a GPU the time in which the device is idle, too; on
the CPU without a model. `--against CHECKOUT` runs the same command with the package of another checkout by turns, and
prints the ratios of all figures (`benchmarks.checkouts`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor

from benchmarks import checkouts
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import SHAPES
from benchmarks.step_trace import Trace, Workload, device_idle
from verl_server import Engine
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import Grammar, translate
from verl_server.models.tiny import CHAT_TEMPLATE, NUM_BYTE_TOKENS, byte_level_tokenizer, make_model_folder

_SPACE = "Ġ"
"""The character that stands for a space in the byte-level alphabet."""
_SYLLABLES = [c + v for c in "bcdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u", "an", "er", "in", "or", "st")]
_MARKS = ['":', '",', '":"', '","', '{"', '"}', '"},{"', '":[', '"],"', "\\n", "\\u00", "Ġ{", "Ġ}"]


def json_tokens(count: int) -> list[str]:
    """Return the same `count` tokens at each call: punctuation of JSON, numbers, and words of one to four syllables.

    The vocabularies of released models have such tokens. `large_tokenizer` has only what its merges make of text, and
    the prompts here are token ids.
    """
    rng = random.Random(0)
    extra = [*_MARKS, *(str(number) for number in range(10, 1000))]
    tokens: dict[str, None] = {}
    while len(tokens) < count:
        word = extra.pop(0) if extra else "".join(rng.choices(_SYLLABLES, k=rng.choice([1, 2, 2, 3, 3, 4])))
        if not extra and rng.random() < 0.6:
            word = rng.choice([_SPACE, _SPACE, word.capitalize()]) + word
        tokens[word] = None
    return list(tokens)


ANY_OBJECT = '{"type": "object"}'
"""The schema of `response_format: json_object`."""


def schema(number: int, bounded_strings: bool) -> str:
    """Return a JSON schema whose outputs do not end within any benchmark. Each number is another schema.

    A model with random weights hardly ever closes a string, so patterns end the strings, or `maxLength` does.
    """
    word = {"type": "string", "maxLength": 20} if bounded_strings else {"type": "string", "pattern": "^[A-Za-z]{2,12}$"}
    address = {
        "type": "object",
        "properties": {"street": word, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "zip"],
        "additionalProperties": False,
    }
    properties = {
        f"name_{number}": word,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "score": {"type": "number"},
        "kind": {"enum": ["agent", "user", "tool", None]},
        "created": {"type": "string", "format": "date-time"},
        "tags": {"type": "array", "items": word, "maxItems": 5},
        "address": address,
    }
    person = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    options = {"x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"type": "array", "items": person, "minItems": 100_000} | options)


def schemas(args: argparse.Namespace) -> list[str]:
    """Return the schemas of the run. Request i has number i modulo their number."""
    return [ANY_OBJECT if args.any_object else schema(i, args.bounded_strings) for i in range(args.schemas)]


def masks_per_s(args: argparse.Namespace, folder: Path, outputs: list[list[int]]) -> float:
    """Return the masks per second that the grammar library alone computes along `outputs`, without an engine."""
    vocab = SHAPES[args.shape]["vocab_size"]
    compiler = GrammarCompiler((folder / "tokenizer.json").read_bytes(), [], vocab)
    first = [compiler.compile(translate(Grammar("json_schema", text), {})) for text in schemas(args)]
    matchers = [first[i % len(first)].copy().inner for i in range(len(outputs))]
    masks = np.empty((len(outputs), compiler.num_words), np.int32)
    executor, rows = LLExecutor(), list(zip(matchers, range(len(outputs)), strict=True))
    start = time.perf_counter()
    for step in range(args.output):
        executor.unsafe_compute_mask_ptr(rows, masks.ctypes.data, masks.strides[0], len(masks))
        executor.consume_token_par([(matcher, ids[step]) for matcher, ids in zip(matchers, outputs, strict=True)])
    seconds = time.perf_counter() - start
    assert not any(matcher.is_error() for matcher in matchers)
    rate: float = len(outputs) * args.output / seconds
    return rate


def prompts_of(args: argparse.Namespace) -> list[list[int]]:
    """Return the same prompts at each call."""
    rng = random.Random(1)
    vocab = SHAPES[args.shape]["vocab_size"]
    return [[rng.randrange(300, vocab) for _ in range(args.prompt)] for _ in range(args.requests)]


def run_once(engine: Engine, args: argparse.Namespace, constrained: bool) -> tuple[float, list[list[int]]]:
    """Return the output tokens per second of all requests at once, and the outputs."""
    prompts = prompts_of(args)
    params: list[Any] = [{"max_new_tokens": args.output, "ignore_eos": True} for _ in prompts]
    if constrained:
        params = [own | {"json_schema": schemas(args)[i % args.schemas]} for i, own in enumerate(params)]
    start = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - start
    outputs = [result["output_ids"] for result in results]
    tokens = [len(ids) for ids in outputs]
    complete = constrained and args.any_object  # an output may end with its object
    assert complete or set(tokens) == {args.output}, f"the outputs have {sorted(set(tokens))} tokens"
    begin = "{" if args.any_object else '[{"name_'
    assert not constrained or all(result["text"].startswith(begin) for result in results)
    return sum(tokens) / seconds, outputs


def settings_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own = {"disable_radix_cache": True, "max_running_requests": args.requests, "skip_tokenizer_init": False}
    return engine_settings(args, folder, **own)


def trace(args: argparse.Namespace, folder: Path) -> None:
    """Print the microseconds of a step by its parts, and the idle time of a GPU."""
    grammars = [translate(Grammar("json_schema", text), {}) for text in schemas(args)]
    constrained = [grammars[i % len(grammars)] for i in range(args.requests)]
    tokenizer = (folder / "tokenizer.json").read_bytes()
    vocab = SHAPES[args.shape]["vocab_size"]
    load = Workload(prompts_of(args), [], args.output)
    traced = Trace(settings_of(args, folder), tokenizer, vocab, load)
    for kind, load.grammars in (("free", [""] * args.requests), ("constrained", constrained)):
        traced.run()  # warms up
        steps, parts = 0, dict[str, float]()
        for _ in range(args.runs):
            steps += traced.run()
            parts = {name: parts.get(name, 0.0) + value for name, value in traced.times.seconds.items()}
        parts.pop("model", None)
        report(f"{kind}_step_us", 1e6 * sum(parts.values()) / steps, "us", steps=steps)
        for name, value in sorted(parts.items(), key=lambda item: -item[1]):
            report(f"{kind}_{name.replace(' ', '_')}_us", 1e6 * value / steps, "us of a step")
        if args.device == "cuda":
            steps, idle = device_idle(traced)
            report(f"{kind}_idle_before_sampling_us", idle.before_sampling / steps, "us of a step")
            report(f"{kind}_idle_elsewhere_us", idle.elsewhere / steps, "us of a step")


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    with Engine(**settings_of(args, folder)) as engine:
        start = time.perf_counter()
        first = {"max_new_tokens": 1, "json_schema": schema(10**6, args.bounded_strings)}
        engine.generate(input_ids=[300, 301], sampling_params=first)
        report("first_grammar_seconds", time.perf_counter() - start, "s")
        pairs = []
        for run in range(args.runs + 1):
            (free, _), (constrained, outputs) = run_once(engine, args, False), run_once(engine, args, True)
            if run:  # the first pair warms up
                pairs.append((free, constrained))
                report("free_tokens_per_s", free, "tokens/s", run=run)
                report("constrained_tokens_per_s", constrained, "tokens/s", run=run)
    ratios = [constrained / free for free, constrained in pairs]
    spread = [round(min(ratios), 4), round(max(ratios), 4)]
    report("constrained_ratio", statistics.median(ratios), "of free", spread=spread, goal=0.9)
    if args.any_object:  # an output may end before the others
        return
    masks = masks_per_s(args, folder, outputs)
    report("masks_tokens_per_s", masks, "tokens/s")
    free, constrained = map(statistics.median, zip(*pairs, strict=True))
    report("constrained", constrained, "tokens/s", limit=round(min(free, masks), 4))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.constrained", __doc__)
    parser.add_argument("--requests", type=int, default=256, help="concurrent requests (256)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (64)")
    parser.add_argument("--output", type=int, default=256, help="tokens of each output (256)")
    parser.add_argument("--schemas", type=int, default=1, help="number of different schemas (1)")
    parser.add_argument(
        "--bounded-strings", action="store_true", help="strings with maxLength, whose masks take longest"
    )
    parser.add_argument("--any-object", action="store_true", help="any JSON object, in place of the schema")
    parser.add_argument("--runs", type=int, default=3, help="measured pairs of runs (3)")
    parser.add_argument("--trace", action="store_true", help="print the microseconds of a step by its parts instead")
    checkouts.add_options(parser)
    args = parser.parse_args(argv)
    if args.trace and args.tp != 1:
        parser.error("--trace needs --tp 1: it drives the scheduler in this process, without other ranks.")
    if args.trace and args.any_object:
        parser.error("--trace needs outputs of equal length: drop --any-object.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.constrained", args, argv)
    if args.against is not None:
        own = checkouts.without_options(sys.argv[1:] if argv is None else argv)
        checkouts.compare("benchmarks.constrained", own, args.against, args.turns)
        return
    with tempfile.TemporaryDirectory() as temporary:
        shape = SHAPES[args.shape]
        tokens = json_tokens(shape["vocab_size"] - NUM_BYTE_TOKENS)
        tokenizer = byte_level_tokenizer(tokens, chat_template=CHAT_TEMPLATE)
        folder = make_model_folder(temporary, "qwen3", weights=False, tokenizer=tokenizer, **shape)
        (trace if args.trace else benchmark)(args, folder)


if __name__ == "__main__":
    main()
