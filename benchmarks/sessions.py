"""Tokens per second of conversations through sessions, beside the same conversations over `/generate`.

    python -m benchmarks.sessions --device cpu --shape tiny --conversations 16 --turns 3
    python -m benchmarks.sessions --device cuda --shape 0.6b

All conversations run at once, in client processes of their own. A turn sends the whole history, and adds the reply and
the next message to it. The ways to talk, by turns on one server with prefix cache:

- generate: the client keeps token ids, and sends them to `/generate` with log-probabilities;
- chat: OpenAI chat without a session;
- session: OpenAI chat with a session key, and the trajectory read at the end, inside the measured time.

`ratio` is the median over the runs of the quotient by `generate` in the same run. With `--store`, the sessions are in a
journal on disk, and its rate is reported. `ledger_bytes_per_token` is the gauge of the server over the tokens of all
branches.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import re
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
import uvloop

from benchmarks.large_tokenizer import large_tokenizer
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.serving import cpu_seconds
from benchmarks.shapes import SHAPES
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder

WAYS = ("generate", "chat", "session")
_KEY = "owner-key-of-the-benchmark"
_SECONDS = 600.0
_OWNER = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}


@dataclass(frozen=True)
class Message:
    """The user's message in a turn."""

    text: str
    ids: list[int]
    """The tokens behind those that were sampled before: the end of the reply, this message, the begin of the next."""
    output_len: int


@dataclass(frozen=True)
class Load:
    """The conversations of one client process."""

    url: str
    way: str
    conversations: list[list[Message]]


@dataclass
class Result:
    """Sums over conversations."""

    output_tokens: int = 0
    tokens: int = 0
    """Tokens of all branches of the trajectories."""
    branches: int = 0


def run_client(load: Load) -> list[Result]:
    return uvloop.run(_client(load))


async def _client(load: Load) -> list[Result]:
    talk = {"generate": _generate, "chat": _chat, "session": _session}[load.way]
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(load.url, connector=connector, timeout=timeout) as http:
        return list(await asyncio.gather(*(talk(http, messages) for messages in load.conversations)))


async def _post(http: aiohttp.ClientSession, path: str, body: Any, headers: dict[str, str] = _OWNER) -> Any:
    async with http.post(path, data=orjson.dumps(body), headers=headers) as response:
        answer = await response.read()
        assert response.status in (200, 201), (path, answer[:500])
    return orjson.loads(answer)


async def _generate(http: aiohttp.ClientSession, messages: list[Message]) -> Result:
    ids: list[int] = []
    result = Result(branches=1)
    for message in messages:
        ids = ids + message.ids
        params = {"temperature": 1.0, "max_new_tokens": message.output_len, "ignore_eos": True}
        answer = await _post(http, "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True})
        ids = ids + answer["output_ids"]
        result.output_tokens += len(answer["output_ids"])
    result.tokens = len(ids)
    return result


async def _chat(http: aiohttp.ClientSession, messages: list[Message], headers: dict[str, str] = _OWNER) -> Result:
    history: list[dict[str, Any]] = []
    result = Result()
    for message in messages:
        history.append({"role": "user", "content": message.text})
        body = {"model": "model", "messages": history, "max_tokens": message.output_len, "ignore_eos": True}
        answer = await _post(http, "/v1/chat/completions", body, headers)
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        result.output_tokens += answer["usage"]["completion_tokens"]
    return result


async def _session(http: aiohttp.ClientSession, messages: list[Message]) -> Result:
    created = await _post(http, "/sessions", {})
    result = await _chat(http, messages, _OWNER | {"Authorization": f"Bearer {created['key']}"})
    async with http.get(f"/sessions/{created['id']}/trajectory", headers=_OWNER) as response:
        branches = orjson.loads(await response.read())["branches"]
    result.branches = len(branches)
    result.tokens = sum(len(branch["ids"]) for branch in branches)
    assert sum(sum(branch["loss_mask"]) for branch in branches) == result.output_tokens
    return result


def make_conversations(args: argparse.Namespace, tokenizer: Any) -> list[list[Message]]:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def message(turn: int) -> Message:
        words = args.words if turn == 0 else args.next_words
        text = " ".join("".join(rng.choices(letters, k=3)) for _ in range(words))
        around = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        if turn > 0:
            around = "<|im_end|>\n" + around
        ids = tokenizer.encode(around, add_special_tokens=False)
        return Message(text, ids, rng.randint(args.output_len // 2, args.output_len * 3 // 2))

    return [[message(turn) for turn in range(args.turns)] for _ in range(args.conversations)]


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    tokenizer = large_tokenizer(SHAPES[args.shape]["vocab_size"])
    make_model_folder(folder / "model", "qwen3", weights=False, tokenizer=tokenizer, **SHAPES[args.shape])
    conversations = make_conversations(args, tokenizer)
    store = folder / "store"
    settings = engine_settings(
        args,
        folder / "model",
        skip_tokenizer_init=False,
        max_running_requests=args.conversations,
        api_key=_KEY,
        session_store=str(store) if args.store else None,
        session_fsync=args.fsync,
    )
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu: dict[str, float] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        HttpServerEngineAdapter(port=0, **settings) as server,
        ProcessPoolExecutor(args.clients, mp_context=spawn) as pool,
    ):
        assert server.url is not None and server.pid is not None
        for _ in range(args.runs + 1):  # the first round warms up
            for way in WAYS:
                server.flush_cache()
                loads = [Load(server.url, way, conversations[i :: args.clients]) for i in range(args.clients)]
                before, written = cpu_seconds(server.pid), _size(store)
                start = time.perf_counter()
                results = [result for part in pool.map(run_client, loads) for result in part]
                seconds = time.perf_counter() - start
                tokens = sum(result.output_tokens for result in results)
                rates[way].append(tokens / seconds)
                cpu[way] = (cpu_seconds(server.pid) - before) / tokens
                if way == "session":
                    _report_sessions(args, server.url, results, _size(store) - written, seconds)
    for way in WAYS:
        runs = rates[way][1:]
        ratio = statistics.median(value / whole for value, whole in zip(runs, rates["generate"][1:], strict=True))
        report(
            f"{way}_tokens_per_s",
            statistics.median(runs),
            "tokens/s",
            runs=[round(rate, 1) for rate in runs],
            ratio=round(ratio, 4),
            server_cpu_us=round(1e6 * cpu[way], 2),
            conversations=args.conversations,
            turns=args.turns,
        )


def _report_sessions(args: argparse.Namespace, url: str, results: list[Result], written: int, seconds: float) -> None:
    """Report memory, branches and the journal of the sessions of a run, and delete the sessions."""
    tokens = sum(result.tokens for result in results)
    with httpx.Client(base_url=url, headers=_OWNER, trust_env=False, timeout=60) as client:
        found = re.search(r"^verl_server:session_bytes(?:{[^}]*})? (\S+)$", client.get("/metrics").text, re.M)
        assert found is not None
        report("ledger_bytes_per_token", float(found[1]) / tokens, "bytes/token", tokens=tokens, goal=24)
        report("branches_per_conversation", sum(r.branches for r in results) / len(results), "branches")
        if args.store:
            turns = args.turns * len(results)
            report("journal_rate", written / seconds / 1e6, "MB/s", bytes_per_turn=written // turns, fsync=args.fsync)
        while listed := client.get("/sessions").json()["sessions"]:  # a page at a time
            for session in listed:
                client.delete(f"/sessions/{session['id']}").raise_for_status()


def _size(folder: Path) -> int:
    """Return the bytes of the files of a folder, 0 if it is not there."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.sessions", __doc__)
    parser.add_argument("--conversations", type=int, default=256, help="conversations at the same time (256)")
    parser.add_argument("--turns", type=int, default=8, help="turns of a conversation (8)")
    parser.add_argument("--words", type=int, default=64, help="words of the first message, two tokens each (64)")
    parser.add_argument("--next-words", type=int, default=16, help="words of a later message (16)")
    parser.add_argument("--output-len", type=int, default=128, help="output tokens of a turn on average (128)")
    parser.add_argument("--clients", type=int, default=4, help="client processes (4)")
    parser.add_argument("--runs", type=int, default=2, help="runs after the one that warms up (2)")
    parser.add_argument("--store", action="store_true", help="keep the sessions in a journal on disk")
    parser.add_argument("--fsync", default="interval", choices=("interval", "turn", "never"), help="sync (interval)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.sessions", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, Path(temporary))


if __name__ == "__main__":
    main()
