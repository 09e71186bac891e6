"""Update weights many times while requests run, and check every update by checksum.

    python -m benchmarks.soak --updates 1000 [--mode server|update-serve|serve-update|update-generate] [--bound 5]
    python -m benchmarks.soak --engine sglang --device cuda --updates 20

There are four modes: a server process behind `HttpServerEngineAdapter`, and an in-process `Engine` with
`launch_server_from_verl_engine` in three orders of calls. These would hang if engine and HTTP server used one
TokenizerManager in different event loops. During the updates, two threads generate through the engine and one thread
over HTTP. The updates use the four ways to treat running requests in turn. Prints one JSON line for each mode; progress
goes to stderr. The exit code is 1 if an update was slower than `--bound` or anything failed. Every call has a bound, so
a hang is a failure. On the CPU, the greedy tokens at the end must be those of the trainer's model.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from torch import nn

from benchmarks.engines import ENGINES, HEAD_DIM, settings_of_engine
from verl_server import Engine, EngineBase, HttpServerEngineAdapter
from verl_server.ipc.sockets import free_port
from verl_server.models.tiny import make_model_folder
from verl_server.server.launch import launch_server_from_verl_engine
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.checksum import tensor_checksum
from verl_server.weight_version import WeightVersion

UPDATE_MODES: tuple[Literal["wait", "in_place", "retract", "abort"], ...] = ("wait", "in_place", "retract", "abort")
MODES = ("server", "update-serve", "serve-update", "update-generate")
_JOIN_SECONDS = 60.0


def dtype_on(device: str) -> Literal["float32", "bfloat16"]:
    """The dtype of trainer and server. Not every engine computes in float32 on a GPU."""
    return "float32" if device == "cpu" else "bfloat16"


class Trainer:
    """A transformers model that changes its weights randomly before each push."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        self.model: nn.Module = auto.from_pretrained(folder, dtype=getattr(torch, dtype_on(device))).to(device)
        self._generator = torch.Generator(device).manual_seed(0)
        self.pushes = 0

    def push(self, engine: EngineBase, *, mode: Literal["wait", "in_place", "retract", "abort"]) -> float:
        """Change the weights, push them, and compare all checksums. Returns the seconds of the push."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.empty_like(parameter).normal_(generator=self._generator)
                parameter.add_(0.01 * noise)
        start = time.perf_counter()
        engine.update_weights_from_tensor(list(self.model.named_parameters()), mode=mode, partial=False)
        seconds = time.perf_counter() - start
        self.pushes += 1
        expected = {name: tensor_checksum(p) for name, p in self.model.named_parameters()}
        served = engine.weights_checker()["ranks"][0]["checksums"]
        wrong = [name for name, checksum in expected.items() if served.get(name) != checksum]
        if wrong:
            raise AssertionError(f"Update {self.pushes} ({mode}): served weights differ from the trainer's: {wrong}")
        return seconds

    def check_parity(self, engine: EngineBase) -> None:
        """Raise AssertionError unless the server's greedy tokens are those of the model."""
        prompt = [9, 8, 7, 6, 5]
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        output = engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"]
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        if logits.argmax(-1).tolist() != output:
            raise AssertionError(
                f"After {self.pushes} updates the server generated {output}, but the model predicts other tokens."
            )


@dataclass
class Traffic:
    """Threads that generate until the context ends, and check each reply. Each thread uses one of `calls`."""

    calls: list[Callable[[dict[str, Any]], Any]]
    replies: int = 0
    errors: list[BaseException] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(i, c), daemon=True) for i, c in enumerate(self.calls)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_JOIN_SECONDS)
        if any(thread.is_alive() for thread in threads):
            raise AssertionError(f"A generation was not answered within {_JOIN_SECONDS:.0f} s.")
        self.raise_error()

    def raise_error(self) -> None:
        if self.errors:
            raise AssertionError(f"A generation failed: {self.errors[0]!r}") from self.errors[0]

    def _run(self, number: int, call: Callable[[dict[str, Any]], Any]) -> None:
        step = 0
        try:
            while not self._stop.is_set():
                step += 1
                tokens = 1 + (7 * step + 5 * number) % 24
                sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
                check_reply(call({"input_ids": [5 + number, 6, 7 + step % 200], "sampling_params": sampling}), tokens)
                with self._lock:
                    self.replies += 1
        except BaseException as error:
            self.errors.append(error)


def check_reply(reply: dict[str, Any], tokens: int) -> None:
    """Raise AssertionError unless the reply has all tokens (or was aborted), with contiguous, ascending versions."""
    meta, ids = reply["meta_info"], reply["output_ids"]
    aborted = meta["finish_reason"]["type"] == "abort"
    spans = meta.get("weight_versions") or []
    ends = [0, *(span["end"] for span in spans)]
    versions = [WeightVersion.parse(span["version"]) for span in spans]
    if versions and versions[0] is None:  # the label of the weights that the server loaded
        del versions[0]
    pushed = [version for version in versions if version is not None]
    is_ascending = len(pushed) == len(versions) and all(a < b for a, b in itertools.pairwise(pushed))
    complete = len(ids) == tokens or (aborted and len(ids) < tokens)
    if not complete or [s["start"] for s in spans] != ends[:-1] or ends[-1] != len(ids) or not is_ascending:
        raise AssertionError(f"The reply to a request for {tokens} tokens is wrong: {reply}")


@contextlib.contextmanager
def served(mode: str, trainer: Trainer, server_args: ServerArgs) -> Iterator[tuple[EngineBase, str]]:
    """Yields (engine, URL of its server) after the first calls in the order of the mode."""
    if mode == "server":
        with HttpServerEngineAdapter(server_args=server_args) as adapter:
            assert adapter.url is not None
            yield adapter, adapter.url
        return
    args = server_args.replace(port=free_port())
    with Engine(server_args=args) as engine:
        if mode == "update-serve":
            trainer.push(engine, mode="wait")
            serve_in_thread(engine, args)
        elif mode == "serve-update":
            serve_in_thread(engine, args)
            httpx.post(f"{args.url}/generate", json={"input_ids": [5]}, timeout=_JOIN_SECONDS).raise_for_status()
        else:
            trainer.push(engine, mode="wait")
            engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 4})
            trainer.push(engine, mode="wait")
            serve_in_thread(engine, args)
        yield engine, args.url


def serve_in_thread(engine: Engine, args: ServerArgs) -> None:
    ready = threading.Event()
    threading.Thread(
        target=launch_server_from_verl_engine,
        args=(engine.tokenizer_manager, engine.scheduler_info, args, None, ready.set),
        daemon=True,
    ).start()
    if not ready.wait(_JOIN_SECONDS):
        raise AssertionError(f"The HTTP server over the live engine was not ready within {_JOIN_SECONDS:.0f} s.")


def soak(
    mode: str,
    folder: Path,
    updates: int,
    bound: float,
    progress: Callable[[str], None],
    *,
    engine_name: str = "embedded",
    device: Literal["cpu", "cuda"] = "cpu",
) -> dict[str, Any]:
    """Run one mode and return its figures. Raises AssertionError at the first failure."""
    trainer = Trainer(folder, device)
    args = ServerArgs(
        model_path=str(folder),
        device=device,
        dtype=dtype_on(device),
        port=0,
        mem_fraction_static=0.3,
        control_timeout=_JOIN_SECONDS,
        log_level="warning",
        **settings_of_engine(engine_name, kv_cache_gib=0.05),
    )
    with served(mode, trainer, args) as (engine, url), httpx.Client(base_url=url, timeout=_JOIN_SECONDS) as client:

        def in_process(body: dict[str, Any]) -> Any:
            return engine.generate(**body)

        traffic = Traffic([in_process, in_process, lambda body: client.post("/generate", json=body).json()])
        seconds: list[float] = []
        with traffic.running():
            trainer.push(engine, mode="wait")  # the first push opens shared memory, which stays open
            open_files = len(os.listdir("/proc/self/fd"))
            while len(seconds) < updates:
                seconds.append(trainer.push(engine, mode=UPDATE_MODES[len(seconds) % 4]))
                traffic.raise_error()
                if seconds[-1] > bound:
                    raise AssertionError(f"Update {len(seconds)} took {seconds[-1]:.2f} s, more than {bound} s.")
                if len(seconds) % 100 == 0:
                    progress(f"{mode}: {len(seconds)} of {updates} updates, {traffic.replies} generations")
            leaked = len(os.listdir("/proc/self/fd")) - open_files
        if device == "cpu":  # rounding to bfloat16 decides greedy tokens
            trainer.check_parity(engine)
    if leaked > 8:
        raise AssertionError(f"There are {leaked} more open file descriptors than after the first update.")
    return {
        "name": f"soak_{mode}_worst_update",
        "engine": engine_name,
        "value": round(max(seconds) * 1000, 2),
        "unit": "ms",
        "peer": None,
        "peer_value": None,
        "limit": bound * 1000,
        "median": round(statistics.median(seconds) * 1000, 2),
        "updates": trainer.pushes,
        "checksummed": trainer.pushes,
        "generations": traffic.replies,
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1000, help="updates in each mode (1000)")
    parser.add_argument("--mode", choices=MODES, action="append", help="run only this mode; may be repeated (all)")
    parser.add_argument("--bound", type=float, default=5.0, help="largest seconds of an update (5)")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="engine (embedded)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of trainer and server (cpu)")
    return parser.parse_args(argv)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parse_args()
    failed = False
    with tempfile.TemporaryDirectory(prefix="verl-soak-") as name:
        folder = make_model_folder(name, "llama", head_dim=HEAD_DIM)
        for mode in options.mode or MODES:
            try:
                chosen: dict[str, Any] = {"engine_name": options.engine, "device": options.device}
                line = soak(mode, folder, options.updates, options.bound, progress, **chosen)
            except Exception as error:
                failed, line = True, {"name": f"soak_{mode}_worst_update", "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(line), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
