"""Tokens per second of each HTTP dialect, beside SGLang's `/generate` in the same run, without streaming and with it.

    python -m benchmarks.dialects --device cpu --shape tiny --requests 64 --concurrency 16
    python -m benchmarks.dialects --device cuda --shape 0.6b --runs 3

One server answers all dialects by turns, `--runs` times. Clients in processes of their own keep `--concurrency`
requests in flight, whose outputs have 0.5 to 1.5 times `--output-len` tokens, so that they do not start together. They
send the same prompts as token ids where the dialect has them, otherwise as the text of one chat message, and read the
whole answer, whose `usage` has the number of output tokens. `ratio` is the median over the runs of the quotient by
`/generate` without streaming in the same run. `server_cpu_us` is the processor time of the server process (HTTP and
TokenizerManager) for each output token.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.large_tokenizer import large_tokenizer
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.serving import cpu_seconds
from benchmarks.shapes import SHAPES
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder

_REQUEST_SECONDS = 600.0
_STREAM_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Wire:
    """One route, with the bodies of its requests and the place of the number of output tokens in its answers."""

    name: str
    path: str
    streams: bool = True

    def body(self, ids: list[int], text: str, output_len: int, stream: bool) -> dict[str, Any]:
        common: dict[str, Any] = {"model": "model", "temperature": 1.0}
        message = {"role": "user", "content": text}
        if self.name == "generate":
            params = {"temperature": 1.0, "max_new_tokens": output_len, "ignore_eos": True}
            return {"input_ids": ids, "sampling_params": params, "return_logprob": False, "stream": stream}
        if self.name == "completions":
            body = common | {"prompt": ids, "max_tokens": output_len, "ignore_eos": True}
        elif self.name == "chat":
            body = common | {"messages": [message], "max_tokens": output_len, "ignore_eos": True}
        elif self.name == "messages":
            return common | {"messages": [message], "max_tokens": output_len, "stream": stream}
        elif self.name == "responses":
            return common | {"input": text, "max_output_tokens": output_len, "store": False, "stream": stream}
        else:
            params = {"temperature": 1.0, "max_tokens": output_len, "ignore_eos": True}
            body = {"model": "model", "token_ids": ids, "sampling_params": params}
        return body | (_STREAM_USAGE if stream else {})

    def count(self, answer: bytes, stream: bool) -> int:
        """Return the number of output tokens of an answer, or of the events of a stream."""
        if not stream:
            return self._of(orjson.loads(answer))
        counts = [
            self._of(orjson.loads(line[6:]))
            for line in answer.rsplit(b"\n\n", 8)
            for line in line.split(b"\n")
            if line.startswith(b"data: {")
        ]
        return max(counts)

    def _of(self, content: dict[str, Any]) -> int:
        if self.name == "generate":
            return int(content["meta_info"]["completion_tokens"])
        usage = (content.get("response") or content).get("usage") or {}
        for name in ("completion_tokens", "output_tokens"):
            if name in usage:
                return int(usage[name])
        choices = content.get("choices") or []
        return sum(len(choice.get("token_ids") or ()) for choice in choices)


WIRES = (
    Wire("generate", "/generate"),
    Wire("completions", "/v1/completions"),
    Wire("chat", "/v1/chat/completions"),
    Wire("responses", "/v1/responses"),
    Wire("messages", "/v1/messages"),
    Wire("inference", "/inference/v1/generate"),
)


@dataclass(frozen=True)
class Load:
    """The requests of one client process."""

    url: str
    wire: Wire
    stream: bool
    bodies: list[bytes]
    concurrency: int


def run_client(load: Load) -> int:
    """Send all requests of a client process. Return the number of output tokens."""
    return uvloop.run(_client(load))


async def _client(load: Load) -> int:
    slots = asyncio.Semaphore(load.concurrency)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    async with aiohttp.ClientSession(
        load.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers
    ) as session:

        async def post(body: bytes) -> int:
            async with slots, session.post(load.wire.path, data=body) as response:
                answer = await response.read()
                assert response.status == 200, (load.wire.path, answer[:500])
            return load.wire.count(answer, load.stream)

        return sum(await asyncio.gather(*map(post, load.bodies)))


def measure(
    pool: ProcessPoolExecutor, clients: int, url: str, wire: Wire, stream: bool, bodies: list[bytes], concurrency: int
) -> tuple[float, int]:
    """Return (seconds, output tokens) of all requests."""
    loads = [Load(url, wire, stream, bodies[i::clients], concurrency // clients) for i in range(clients)]
    start = time.perf_counter()
    tokens = sum(pool.map(run_client, loads))
    return time.perf_counter() - start, tokens


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    tokenizer = large_tokenizer(SHAPES[args.shape]["vocab_size"])
    make_model_folder(folder, "qwen3", weights=False, tokenizer=tokenizer, **SHAPES[args.shape])
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join("".join(rng.choices(letters, k=3)) for _ in range(args.words)) for _ in range(args.requests)]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    lengths = [rng.randint(args.output_len // 2, args.output_len * 3 // 2) for _ in prompts]
    wires = [wire for wire in WIRES if wire.name in args.wires]
    variants = [(wire, stream) for stream in (False, True) for wire in wires]
    settings = engine_settings(
        args, folder, skip_tokenizer_init=False, disable_radix_cache=True, max_running_requests=args.concurrency
    )
    rates: dict[tuple[str, bool], list[float]] = {(w.name, s): [] for w, s in variants}
    cpu: dict[tuple[str, bool], float] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        HttpServerEngineAdapter(port=0, **settings) as server,
        ProcessPoolExecutor(args.clients, mp_context=spawn) as pool,
    ):
        assert server.url is not None and server.pid is not None
        for _ in range(args.runs + 1):  # the first round warms up
            for wire, stream in variants:
                requests = zip(prompts, texts, lengths, strict=True)
                bodies = [orjson.dumps(wire.body(ids, text, length, stream)) for ids, text, length in requests]
                before = cpu_seconds(server.pid)
                seconds, tokens = measure(pool, args.clients, server.url, wire, stream, bodies, args.concurrency)
                rates[wire.name, stream].append(tokens / seconds)
                cpu[wire.name, stream] = (cpu_seconds(server.pid) - before) / tokens
    base = rates["generate", False][1:]
    for wire, stream in variants:
        runs = rates[wire.name, stream][1:]
        ratio = statistics.median(value / whole for value, whole in zip(runs, base, strict=True))
        report(
            f"{wire.name}{'_stream' if stream else ''}_tokens_per_s",
            statistics.median(runs),
            "tokens/s",
            runs=[round(rate, 1) for rate in runs],
            ratio=round(ratio, 4),
            goal=0.8 if stream else 0.95,
            server_cpu_us=round(1e6 * cpu[wire.name, stream], 2),
            concurrency=args.concurrency,
        )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.dialects", __doc__)
    parser.add_argument("--concurrency", type=int, default=256, help="requests in flight at any time (256)")
    parser.add_argument("--requests", type=int, default=1024, help="requests of each dialect in a run (1024)")
    parser.add_argument("--words", type=int, default=64, help="words of a prompt, two tokens each (64)")
    parser.add_argument("--output-len", type=int, default=256, help="output tokens of a request on average (256)")
    parser.add_argument("--clients", type=int, default=4, help="client processes (4)")
    parser.add_argument("--runs", type=int, default=2, help="runs after the one that warms up (2)")
    parser.add_argument(
        "--wires", nargs="+", default=[w.name for w in WIRES], choices=[w.name for w in WIRES], help="dialects (all)"
    )
    args = parser.parse_args(argv)
    if "generate" not in args.wires:
        parser.error("--wires needs generate, to which the others are compared")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.dialects", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, Path(temporary))


if __name__ == "__main__":
    main()
