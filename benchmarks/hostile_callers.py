"""The effect of one hostile caller on the others: token gaps and `/health` of a server under attacks.

    python -m benchmarks.hostile_callers [--only chat_3mb endless_header] [--rounds 3] [--seconds 2]

First, the memory of a connection is measured: `half_open_connection_bytes` and `idle_connection_bytes` are the growth
of the server process for 1,000 connections, divided by their number. A half-open connection has sent half a head, an
idle one has had an answer. `--connections 0` omits this part.

Then, `loop_held_ms` is measured once for each attack, in this process: the longest processor time of the event loop
between two turns of a watching task. Other work on the machine does not change this figure.

Then a server process runs with two streams that always generate. It may open 1,024 files. One probe calls `/health`
every 20 ms on a connection that stays open, another one on a new connection each time. Each round has a quiet window
and one window for each attack, in which a client process repeats the attack.
`added_gap_ms` is the longest token gap in the attacked window less the longest one in the quiet window of the same
round; the value is the median over the rounds. `spread` lists all rounds, and `quiet_ms` shows the variation of the
machine itself. `health_ms` is the median over the rounds of the slowest call on the open connection,
`new_connection_ms` of the slowest call on a new one. `quiet_health_ms` and `quiet_new_connection_ms` are the same
figures of the quiet windows. `statuses` counts the answers of the last window. With `--gate`, the exit status is 1 if
an attack adds more than 50 ms, or if its `health_ms` is above 100 ms.

The attacks are large and expensive requests, heads without an end, 1,100 half-open connections, requests of a session
key with thousands of equal messages or 45 MiB, 20,000 kept answers, and texts that are no digits or no
path. `prepared_s` shows what the first run of each attack was answered, before the streams start.

The tokenizer has 8,192 tokens, and the benchmark trains it on the pages of this repository.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from benchmarks.hostile.attackers import Attackers, Figures
from benchmarks.hostile.connection_memory import report_connection_memory
from benchmarks.hostile.few_files import server_with_few_files
from benchmarks.hostile.others import HealthProbe, LoopWatch, longest_gap_ms, slowest_ms
from benchmarks.hostile.raw import ADMIN_KEY
from benchmarks.hostile.requests import LAST_MESSAGE_TEMPLATE, SLOW_TEMPLATE, VOCABULARY
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import SHAPES
from benchmarks.token_gaps import Interval, Streams
from verl_server import Engine, launch_server_from_verl_engine
from verl_server.ipc.sockets import free_port
from verl_server.models.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, make_model_folder

_MOST_ADDED_MS, _MOST_HEALTH_MS = 50.0, 100.0
_TEXT_TIMEOUT = 5.0
_FILES = 1024
_MOST_LOOP_SECONDS = 1.0


def make_folder(path: Path) -> Path:
    """Write a tiny model folder with a BPE tokenizer that has merges, as real tokenizers have. Returns `path`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pages = [str(page) for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md"))]
    trainer = BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(pages, trainer)
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    shape = SHAPES["tiny"] | {"vocab_size": VOCABULARY}
    return make_model_folder(path, "qwen3", weights=False, tokenizer=fast, **shape)


def server_settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings of the servers: callers without a key may generate, and the templates of the attacks are listed."""
    templates = {"slow.jinja": SLOW_TEMPLATE, "last_message.jinja": LAST_MESSAGE_TEMPLATE}
    for name, text in templates.items():
        (folder / name).write_text(text)
    return engine_settings(
        args,
        make_folder(folder / "model"),
        skip_tokenizer_init=False,
        admin_api_key=ADMIN_KEY,
        allowed_chat_templates=tuple(str(folder / name) for name in templates),
        text_timeout=_TEXT_TIMEOUT,
        log_level="error",  # each refused request would be a warning
    )


def report_loop(settings: dict[str, Any], attackers: Attackers, seconds: float) -> None:
    reader, writer = Pipe(duplex=False)
    with Engine(port=free_port(), **settings) as engine:
        manager = engine.tokenizer_manager
        arguments = (manager, engine.scheduler_info, engine.server_args, writer)
        threading.Thread(target=launch_server_from_verl_engine, args=arguments, daemon=True).start()
        assert reader.recv() == "ready"
        gc.collect()
        gc.freeze()  # as a server process does at its start
        watch = LoopWatch(manager)
        for name in attackers.names:
            attackers.run(engine.server_args.url, name, 0.0)  # starts everything that starts on first use
            watch.take_ms()
            figures = attackers.run(engine.server_args.url, name, min(seconds, _MOST_LOOP_SECONDS))
            report("loop_held_ms", watch.take_ms(), "ms", attack=name, **figures)
        watch.stop()


@dataclass(frozen=True)
class Seen:
    """The figures of all windows of one kind, one for each round."""

    gaps: list[float]
    health: list[float]
    new: list[float]


def compare(args: argparse.Namespace, settings: dict[str, Any], attackers: Attackers) -> bool:
    """Alternate quiet and attacked windows of one server. Returns True if every attack stays within the bounds."""
    windows: dict[str, list[Interval]] = {name: [] for name in ("quiet", *attackers.names)}
    outputs: dict[str, Figures] = {}
    with server_with_few_files(_FILES, settings) as url:
        for name in attackers.names:
            figures = attackers.prepare(url, name)
            report("prepared_s", figures["slowest_answer_s"], "s", attack=name, **figures)
        streams = Streams(url, count=2, prompt_len=16, output_len=440, vocab_size=VOCABULARY, reconnect=True)
        streams.start(timeout=60)
        probes = HealthProbe(url), HealthProbe(url, reconnects=True)
        for _ in range(args.rounds):
            began = time.perf_counter()
            time.sleep(args.seconds)
            windows["quiet"].append((began, time.perf_counter()))
            for name in attackers.names:
                began = time.perf_counter()
                outputs[name] = attackers.attack(url, name, args.seconds)
                windows[name].append((began, time.perf_counter()))
        for probe in probes:
            probe.stop()
        outcome = streams.stop()
    report("failed_health_calls", sum(probe.errors for probe in probes), "calls")
    assert not outcome.lost, outcome.lost[:3]
    open_probes, new_probes = (probe.probes for probe in probes)
    seen = {
        name: Seen(
            [longest_gap_ms(outcome.arrivals, window) for window in each],
            [slowest_ms(open_probes, window) for window in each],
            [slowest_ms(new_probes, window) for window in each],
        )
        for name, each in windows.items()
    }
    quiet = seen.pop("quiet")
    _report_quiet(quiet)
    return all([_report_attack(name, each, quiet, outputs[name]) for name, each in seen.items()])


def _report_quiet(quiet: Seen) -> None:
    for name, values in (("gap", quiet.gaps), ("health", quiet.health), ("new_connection", quiet.new)):
        report(f"quiet_{name}_ms", statistics.median(values), "ms", spread=_rounded(values))


def _report_attack(name: str, seen: Seen, quiet: Seen, figures: Figures) -> bool:
    """Print the figures of one attack. Returns True if it stays within the bounds."""
    added = [gap - before for gap, before in zip(seen.gaps, quiet.gaps, strict=True)]
    passes = statistics.median(added) <= _MOST_ADDED_MS and statistics.median(seen.health) <= _MOST_HEALTH_MS
    report(
        "added_gap_ms",
        statistics.median(added),
        "ms",
        attack=name,
        spread=_rounded(added),
        gap_ms=_rounded(seen.gaps),
        quiet_ms=_rounded(quiet.gaps),
        health_ms=round(statistics.median(seen.health), 1),
        health_spread=_rounded(seen.health),
        quiet_health_ms=_rounded(quiet.health),
        new_connection_ms=round(statistics.median(seen.new), 1),
        quiet_new_connection_ms=_rounded(quiet.new),
        passes=passes,
        **figures,
    )
    return passes


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 1) for value in values]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.hostile_callers", __doc__)
    names = Attackers.all_names()
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--rounds", type=int, default=1, help="rounds of quiet and attacked windows; 0: only loop_held_ms (1)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of a window (1)")
    parser.add_argument("--connections", type=int, default=1000, help="connections of each kind to measure (1000)")
    parser.add_argument("--gate", action="store_true", help="exit with 1 if an attack exceeds the bounds")
    return parser.parse_args(argv)


def benchmark(args: argparse.Namespace, folder: Path) -> bool:
    """Run and report. Returns True if every attack stays within the bounds."""
    settings = server_settings(args, folder)
    attackers = Attackers(args.only, folder)
    if args.connections:
        report_connection_memory(settings, args.connections)
    report_loop(settings, attackers, args.seconds)
    return args.rounds == 0 or compare(args, settings, attackers)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.hostile_callers", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        fine = benchmark(args, Path(temporary))
    if args.gate and not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()
