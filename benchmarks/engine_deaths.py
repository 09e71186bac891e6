"""Kills each process of a server (SIGKILL), and reports what clients see and when all of its processes have ended.

    python -m benchmarks.engine_deaths
    python -m benchmarks.engine_deaths --device cuda --shape 0.6b --engine sglang --requests 32
    python -m benchmarks.engine_deaths --device cuda --shape 0.6b --engine sglang --victims scheduler

For each victim a server starts, and `--requests` requests run: one third are streams, one third wait for the whole
answer, and one third are calls of `HttpServerEngineAdapter`. When all streams have a token, the victim dies. The victim
`front` is the HTTP server itself. The others are processes of the engine.

The line `death` of a victim has as its value the seconds from the kill until the last client has an end. `clients`
counts what the clients of each kind saw, and `messages` has one text of each. `processes_seconds` is the time until
every process of the server has ended. `next_call` is what a call after that raises, and after how many seconds.
`unfreed_bytes` is the device memory that is in use then, less that before the start. The exit status is 1 if a client
or a process takes more than `--bound` seconds, if a client gets no error, or if memory stays taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.engines import ENGINES, settings_of_engine
from benchmarks.options import report
from benchmarks.processes import has_ended, process_tree
from benchmarks.shapes import SHAPES, shape_folder
from verl_server import HttpServerEngineAdapter
from verl_server.errors import VerlServerError

_PROMPT = [9, 8, 7, 6, 5]
_LEAK_BYTES = 256 * 2**20
"""Device memory that this process itself or the driver may take meanwhile."""
_POLL = 0.02


@dataclass(frozen=True)
class Fate:
    """The end of one request."""

    kind: str
    seen: str
    message: str
    at: float
    """Time on the monotonic clock."""


class Clients:
    """Requests that run in threads until the server ends them."""

    def __init__(self, adapter: HttpServerEngineAdapter, count: int, tokens: int, bound: float) -> None:
        self.fates: list[Fate] = []
        self._adapter, self._url, self._bound = adapter, str(adapter.url), bound
        self._params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self._started = threading.Semaphore(0)
        kinds: list[tuple[str, Callable[[], tuple[str, str]]]] = [
            ("stream", self._stream),
            ("whole answer", self._whole),
            ("adapter", self._call),
        ]
        chosen = [kinds[number % len(kinds)] for number in range(count)]
        self._streams = sum(kind == "stream" for kind, _ in chosen)
        self._threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in chosen]

    def start(self) -> None:
        """Return when each stream has a token. Raises TimeoutError after the bound."""
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + self._bound
        for _ in range(self._streams):
            if not self._started.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"Not all of the {self._streams} streams have a token after {self._bound} s.")

    def wait(self) -> int:
        """Wait for all requests, at most the bound. Return the number of those without an end."""
        deadline = time.monotonic() + self._bound
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self, kind: str, request: Callable[[], tuple[str, str]]) -> None:
        try:
            seen, message = request()
        except (httpx.HTTPError, VerlServerError, OSError) as error:
            seen, message = type(error).__name__, str(error)
        self.fates.append(Fate(kind, seen, message, time.monotonic()))

    def _body(self, stream: bool) -> dict[str, Any]:
        return {"input_ids": _PROMPT, "sampling_params": self._params, "stream": stream}

    def _stream(self) -> tuple[str, str]:
        last, is_first = "", True
        timeout = 4 * self._bound
        with httpx.stream("POST", f"{self._url}/generate", json=self._body(True), timeout=timeout) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    last = line.removeprefix("data: ")
                    if is_first:
                        self._started.release()
                    is_first = False
        answer = json.loads(last)
        return ("error event", str(answer["error"])) if "error" in answer else _ended(answer)

    def _whole(self) -> tuple[str, str]:
        answer = httpx.post(f"{self._url}/generate", json=self._body(False), timeout=4 * self._bound)
        return _ended(answer.json()) if answer.is_success else (f"status {answer.status_code}", answer.text)

    def _call(self) -> tuple[str, str]:
        return _ended(self._adapter.generate(input_ids=_PROMPT, sampling_params=self._params))


def _ended(answer: Any) -> tuple[str, str]:
    reason = answer["meta_info"]["finish_reason"]
    return ("aborted" if reason["type"] == "abort" else "completed"), str(reason)


def find_victim(server: int, victim: str, engine: str) -> int:
    """The process id of a victim in the tree of the server."""
    if victim == "front":
        return server
    part = ENGINES[engine].processes[victim]
    for pid in process_tree(server):
        with contextlib.suppress(OSError):
            if part in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return pid
    raise RuntimeError(f"The server has no process {part!r} ({victim}).")


def seconds_until_ended(processes: list[int], since: float, bound: float) -> float | None:
    """The seconds until all processes have ended, None if one runs after the bound."""
    while time.monotonic() < since + bound:
        if all(map(has_ended, processes)):
            return time.monotonic() - since
        time.sleep(_POLL)
    return None


def next_call(adapter: HttpServerEngineAdapter) -> dict[str, Any]:
    start = time.monotonic()
    try:
        adapter.generate(input_ids=_PROMPT, sampling_params={"max_new_tokens": 1})
        seen, message = "completed", ""
    except (VerlServerError, OSError) as error:
        seen, message = type(error).__name__, str(error)
    return {"seen": seen, "seconds": round(time.monotonic() - start, 3), "message": shortened(message)}


def shortened(message: str) -> str:
    """The begin and the end of a message: what ended is at its begin, and the reason is at the end of the log in it."""
    return message if len(message) <= 600 else f"{message[:200]} ... {message[-300:]}"


def used_bytes(device: str) -> int:
    """Bytes of the GPU that any process uses; 0 on the CPU."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def kill(args: argparse.Namespace, folder: Path, victim: str) -> bool:
    """Start a server, kill the victim, report, and return True if all ended in time with an error."""
    before = used_bytes(args.device)
    begin = time.monotonic()
    adapter = HttpServerEngineAdapter(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device=args.device,
        dtype="bfloat16" if args.device == "cuda" else "float32",
        mem_fraction_static=args.memory,
        port=0,
        log_level="error",
        **settings_of_engine(args.engine, kv_cache_gib=0.5, graphs=False),
    )
    ready = time.monotonic() - begin
    try:
        assert adapter.pid is not None
        processes, pid = process_tree(adapter.pid), find_victim(adapter.pid, victim, args.engine)
        tokens = SHAPES[args.shape]["max_position_embeddings"] - 64
        clients = Clients(adapter, args.requests, tokens, args.bound)
        clients.start()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        endless = clients.wait()
        ended = seconds_until_ended(processes, killed, args.bound)
        later = next_call(adapter)
    finally:
        adapter.shutdown()
    unfreed = used_bytes(args.device) - before
    last = max((fate.at - killed for fate in clients.fates), default=0.0)
    counts: dict[str, Counter[str]] = {}
    for fate in clients.fates:
        counts.setdefault(fate.kind, Counter())[fate.seen] += 1
    report(
        "death",
        last,
        "s",
        victim=victim,
        engine=args.engine,
        seconds_to_ready=round(ready, 1),
        clients=counts,
        endless=endless,
        messages={f"{fate.kind}, {fate.seen}": shortened(fate.message) for fate in clients.fates},
        processes=len(processes),
        processes_seconds=None if ended is None else round(ended, 3),
        next_call=later,
        unfreed_bytes=unfreed,
    )
    got_error = all(fate.seen != "completed" for fate in clients.fates) and later["seen"] != "completed"
    return not endless and ended is not None and got_error and unfreed < _LEAK_BYTES


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_deaths",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the engine runs (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="shape of the model (tiny)")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="engine (embedded)")
    parser.add_argument("--victims", nargs="+", help="processes that die, each of a new server (all)")
    parser.add_argument("--requests", type=int, default=9, help="requests that run, at least 3 (9)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory (0.5)")
    parser.add_argument("--bound", type=float, default=30.0, help="most seconds of a client or a process (30)")
    args = parser.parse_args(argv)
    victims = ["front", *ENGINES[args.engine].processes]
    if unknown := set(args.victims or ()) - set(victims):
        parser.error(f"--engine {args.engine} has no process {', '.join(unknown)}: choose from {', '.join(victims)}.")
    if args.requests < 3:
        parser.error("--requests must be at least 3: one of each kind.")
    args.victims = args.victims or victims
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    print(json.dumps({"name": "run", "command": " ".join(["python -m benchmarks.engine_deaths", *given])}), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = shape_folder(temporary, args.shape)
        is_ok = [kill(args, folder, victim) for victim in args.victims]
    if not all(is_ok):
        sys.exit("A client got no error in time, or something outlived the server: see the lines `death`.")


if __name__ == "__main__":
    main()
