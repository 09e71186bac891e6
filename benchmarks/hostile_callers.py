"""The effect of one hostile caller on the others: token gaps and `/health` of a server under repeated requests.

    python -m benchmarks.hostile_callers [--attacks chat_3mb tokenize_3mb] [--rounds 5] [--seconds 4]

First, `loop_held_ms` is measured once for each attack, in this process: the longest processor time of the event loop
between two turns of a watching task. Other work on the machine does not change this figure.

Then a server process runs with two streams that always generate, and a probe calls `/health` every 20 ms. Each round
has a quiet window and one window for each attack, in which `benchmarks.hammer` sends the same request repeatedly.
`added_gap_ms` is the longest token gap in the attacked window less the longest one in the quiet window of the same
round; the value is the median over the rounds. `spread` lists all rounds, and `quiet_ms` shows the variation of the
machine itself. `health_ms` is the median over the rounds of the slowest probe. With `--gate`, the exit status is 1 if
an attack adds more than 50 ms, or if its `health_ms` is above 100 ms.

The tokenizer has 8,192 tokens, and the benchmark trains it on the pages of this repository.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import SHAPES
from benchmarks.token_gaps import Interval, Streams, Times
from verl_server import Engine, HttpServerEngineAdapter, launch_server_from_verl_engine
from verl_server.ipc.sockets import free_port
from verl_server.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_model_folder
from verl_server.server.tokenizer_manager import TokenizerManager

_VOCABULARY = 8192
_MOST_ADDED_MS, _MOST_HEALTH_MS = 50.0, 100.0
_PROBE_SECONDS = 0.02
_REQUEST_SECONDS = 120.0
_SLOW_TEMPLATE = "{% for i in range(30000) %}{% for j in range(30000) %}{% endfor %}{% endfor %}"
"""A template that the operator of this server has listed, and that takes minutes to render."""
_TEXT_TIMEOUT = 5.0
_ONE = {"max_new_tokens": 1}
_CANDIDATES: dict[str, Any] = {
    "input_ids": [5],
    "return_logprob": True,
    "top_logprobs_num": 256,
    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
}
_MESSAGE = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Attack:
    path: str
    body: Any


def attacks() -> dict[str, Attack]:
    million = [i % _VOCABULARY for i in range(1_000_000)]
    text = "The quick brown fox, it jumps. " * 100_000  # 3.1 MB
    nested = _SLOW_TEMPLATE.replace("30000", "20000")
    return {
        "template_of_caller": Attack(
            "/v1/chat/completions", {"messages": _MESSAGE, "chat_template_kwargs": {"chat_template": nested}}
        ),
        "slow_listed_template": Attack(
            "/v1/chat/completions", {"messages": _MESSAGE, "chat_template_kwargs": {"chat_template": _SLOW_TEMPLATE}}
        ),
        "chat_3mb": Attack("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "chat_of_one_letter_3mb": Attack(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3_000_000}]}
        ),
        "chat_90000_messages": Attack("/v1/chat/completions", {"messages": _MESSAGE * 90_000}),
        "tokenize_3mb": Attack("/tokenize", {"prompt": text}),
        "detokenize_1000000": Attack("/detokenize", {"tokens": million}),
        "generate_3mb": Attack("/generate", {"text": text}),
        "input_ids_1000000": Attack("/generate", {"input_ids": million}),
        "token_ids_logprob_1000000": Attack(
            "/generate", {"input_ids": [5], "return_logprob": True, "token_ids_logprob": million}
        ),
        "n_1000000": Attack("/generate", {"input_ids": [5], "sampling_params": _ONE | {"n": 1_000_000}}),
        "batch_200000": Attack("/generate", {"input_ids": [[5]] * 200_000, "sampling_params": _ONE}),
        "batch_16000_params": Attack(
            "/generate", {"input_ids": [[5]] * 16_000, "sampling_params": [_ONE | {"n": 2}] * 16_000}
        ),
        "n_4096": Attack("/generate", {"input_ids": [5], "sampling_params": _ONE | {"n": 4096}}),
        "rids_200000": Attack("/generate", {"input_ids": [[5]] * 200_000, "rid": ["same"] * 200_000}),
        "stop_strings_200000": Attack(
            "/generate", {"input_ids": [5], "sampling_params": {"stop": [f"s{i}" for i in range(200_000)]}}
        ),
        "stop_string_3mb": Attack("/generate", {"input_ids": [5], "sampling_params": {"stop": "a" * 3_000_000}}),
        "stop_token_ids_1000000": Attack(
            "/generate", {"input_ids": [5], "sampling_params": {"stop_token_ids": million}}
        ),
        "logit_bias_200000": Attack(
            "/generate", {"input_ids": [5], "sampling_params": {"logit_bias": {str(i): 1.0 for i in range(200_000)}}}
        ),
        "top_logprobs_256": Attack("/generate", _CANDIDATES),
        "top_logprobs_256_stream": Attack("/generate", _CANDIDATES | {"stream": True}),
        "top_logprobs_256_chat": Attack(
            "/v1/chat/completions",
            {"messages": _MESSAGE, "logprobs": True, "top_logprobs": 256, "max_tokens": 400, "ignore_eos": True},
        ),
        "prompt_logprobs_256": Attack(
            "/generate",
            _CANDIDATES | {"input_ids": list(range(5, 105)) * 4, "logprob_start_len": 0, "sampling_params": _ONE},
        ),
    }


def make_folder(path: Path) -> Path:
    """Write a tiny model folder with a BPE tokenizer that has merges, as real tokenizers have. Returns `path`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = [str(page) for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))]
    trainer = BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(pages, trainer)
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    shape = SHAPES["tiny"] | {"vocab_size": _VOCABULARY}
    return make_model_folder(path, "qwen3", weights=False, tokenizer=fast, **shape)


def hammer(url: str, path: str, seconds: float, body: Path) -> dict[str, Any]:
    """Send the request repeatedly for `seconds`, at least once. Returns the output of `benchmarks.hammer`."""
    address = urllib.parse.urlsplit(url).netloc
    command = [sys.executable, "-m", "benchmarks.hammer", address, path, str(seconds), str(body)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds + 2 * _REQUEST_SECONDS)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


# -- the event loop -----------------------------------------------------------------------------------------


class LoopWatch:
    """Measures the longest processor time of an event loop's thread between two turns of this object's task."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._longest = 0.0
        self._task = asyncio.run_coroutine_threadsafe(self._watch(), manager.loop)

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self._longest = max(self._longest, time.thread_time() - before)

    def take_ms(self) -> float:
        """The longest time since the last call, in milliseconds."""
        longest, self._longest = self._longest, 0.0
        return 1e3 * longest

    def stop(self) -> None:
        self._task.cancel()


def report_loop(settings: dict[str, Any], chosen: dict[str, Attack], bodies: dict[str, Path]) -> None:
    reader, writer = Pipe(duplex=False)
    with Engine(port=free_port(), **settings) as engine:
        manager = engine.tokenizer_manager
        arguments = (manager, engine.scheduler_info, engine.server_args, writer)
        threading.Thread(target=launch_server_from_verl_engine, args=arguments, daemon=True).start()
        assert reader.recv() == "ready"
        gc.collect()
        gc.freeze()  # as a server process does at its start
        watch = LoopWatch(manager)
        for name, attack in chosen.items():
            hammer(engine.server_args.url, attack.path, 0.0, bodies[name])  # starts everything that starts on first use
            watch.take_ms()
            figures = hammer(engine.server_args.url, attack.path, 1.0, bodies[name])
            report("loop_held_ms", watch.take_ms(), "ms", attack=name, **figures)
        watch.stop()


# -- other callers ------------------------------------------------------------------------------------------


class HealthProbe:
    """Calls `/health` repeatedly on a connection of its own, and records (start, end) of each call."""

    def __init__(self, url: str) -> None:
        self._host = urllib.parse.urlsplit(url).netloc
        self._stop = threading.Event()
        self.probes: list[Interval] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=_REQUEST_SECONDS)
        while not self._stop.wait(_PROBE_SECONDS):
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.probes.append((began, time.perf_counter()))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(_REQUEST_SECONDS)


def longest_gap_ms(arrivals: list[Times], window: Interval) -> float:
    """The longest token gap that overlaps a window, in milliseconds."""
    longest = 0.0
    for times in arrivals:
        starts, ends = times[:-1], times[1:]
        inside = (starts < window[1]) & (ends > window[0])
        longest = max(longest, float(np.max(ends[inside] - starts[inside], initial=0.0)))
    return 1e3 * longest


def slowest_ms(probes: list[Interval], window: Interval) -> float:
    """The longest probe that overlaps a window, in milliseconds."""
    return 1e3 * max((end - start for start, end in probes if start < window[1] and end > window[0]), default=0.0)


def benchmark(args: argparse.Namespace, folder: Path) -> bool:
    """Run and report. Returns True if every attack stays within the bounds."""
    chosen = {name: attack for name, attack in attacks().items() if name in (args.attacks or attacks())}
    bodies = {name: folder / f"{name}.json" for name in chosen}
    for name, attack in chosen.items():
        bodies[name].write_text(json.dumps(attack.body))
    template = folder / "slow.jinja"
    template.write_text(_SLOW_TEMPLATE)
    settings = engine_settings(
        args,
        make_folder(folder / "model"),
        skip_tokenizer_init=False,
        allowed_chat_templates=(str(template),),
        text_timeout=_TEXT_TIMEOUT,
    )
    report_loop(settings, chosen, bodies)
    return args.rounds == 0 or compare(args, settings, chosen, bodies)


def compare(
    args: argparse.Namespace, settings: dict[str, Any], chosen: dict[str, Attack], bodies: dict[str, Path]
) -> bool:
    """Alternate quiet and attacked windows of one server. Returns True if every attack stays within the bounds."""
    windows: dict[str, list[Interval]] = {name: [] for name in ("quiet", *chosen)}
    outputs: dict[str, dict[str, Any]] = {}
    with HttpServerEngineAdapter(port=0, **settings) as server:
        assert server.url is not None
        streams = Streams(server.url, count=2, prompt_len=16, output_len=440, vocab_size=_VOCABULARY)
        streams.start(timeout=60)
        probe = HealthProbe(server.url)
        for name, attack in chosen.items():  # before the measurement, so that everything has started
            outputs[name] = hammer(server.url, attack.path, 0.0, bodies[name])
        for _ in range(args.rounds):
            windows["quiet"].append(_window(args.seconds))
            for name, attack in chosen.items():
                began = time.perf_counter()
                outputs[name] = hammer(server.url, attack.path, args.seconds, bodies[name])
                windows[name].append((began, time.perf_counter()))
        probe.stop()
        outcome = streams.stop()
    assert not outcome.lost, outcome.lost[:3]
    return _report(chosen, windows, outputs, outcome.arrivals, probe.probes)


def _window(seconds: float) -> Interval:
    began = time.perf_counter()
    time.sleep(seconds)
    return began, time.perf_counter()


def _report(
    chosen: dict[str, Attack],
    windows: dict[str, list[Interval]],
    outputs: dict[str, dict[str, Any]],
    arrivals: list[Times],
    probes: list[Interval],
) -> bool:
    gaps = {name: [longest_gap_ms(arrivals, window) for window in each] for name, each in windows.items()}
    health = {name: [slowest_ms(probes, window) for window in each] for name, each in windows.items()}
    report("quiet_gap_ms", statistics.median(gaps["quiet"]), "ms", spread=_rounded(gaps["quiet"]))
    report("quiet_health_ms", statistics.median(health["quiet"]), "ms", spread=_rounded(health["quiet"]))
    fine = True
    for name in chosen:
        added = [gap - quiet for gap, quiet in zip(gaps[name], gaps["quiet"], strict=True)]
        slow = statistics.median(health[name])
        passes = statistics.median(added) <= _MOST_ADDED_MS and slow <= _MOST_HEALTH_MS
        fine = fine and passes
        report(
            "added_gap_ms",
            statistics.median(added),
            "ms",
            attack=name,
            spread=_rounded(added),
            quiet_ms=_rounded(gaps["quiet"]),
            health_ms=round(slow, 1),
            health_spread=_rounded(health[name]),
            passes=passes,
            **outputs[name],
        )
    return fine


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 1) for value in values]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.hostile_callers", __doc__)
    parser.add_argument("--attacks", nargs="+", choices=list(attacks()), help="attacks to run (all)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of quiet and attacked windows; 0: only loop_held_ms (3)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of a window (3)")
    parser.add_argument("--gate", action="store_true", help="exit with 1 if an attack exceeds the bounds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.hostile_callers", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        fine = benchmark(args, Path(temporary))
    if args.gate and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()
