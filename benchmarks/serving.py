"""The cost of HTTP: the offline workload through a server process, and in the same run without HTTP in this process.

    python -m benchmarks.serving --device cpu --shape tiny
    python -m benchmarks.serving --device cuda --shape 0.6b --requests 1024

First an engine in this process runs all requests, submitted at once. Then a server with the same settings runs them for
an aiohttp client that keeps `--concurrency` requests in flight, once with SGLang's JSON replies and once with columnar
msgpack replies. Log-probabilities are on. The last of `--runs` runs of each kind is the figure, and `ratio` is its
quotient by the figure of the engine in this process. `server_cpu_us` is the processor time of the server process (HTTP
and TokenizerManager; the model has a process of its own) for each output token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import orjson
import uvloop

from benchmarks.offline import run_once
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder
from benchmarks.workload import Workload, make_workload
from verl_server import Engine, HttpServerEngineAdapter
from verl_server.messages.columns import MSGPACK, unpack

_REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class Encoding:
    """A format of replies. `read` decodes a reply to token ids and log-probabilities as Python lists."""

    name: str
    fields: dict[str, Any]
    headers: dict[str, str]
    read: Callable[[bytes], dict[str, Any]]


ENCODINGS = (
    Encoding("json", {}, {}, orjson.loads),
    Encoding("columnar", {"columnar": True}, {"Accept": MSGPACK}, lambda reply: unpack(msgspec.msgpack.decode(reply))),
)


async def run_http(url: str, work: Workload, encoding: Encoding, concurrency: int) -> float:
    """Seconds for the whole workload with `concurrency` requests in flight at any time."""
    slots = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def post(prompt: list[int], params: dict[str, Any]) -> int:
            body = orjson.dumps(
                {"input_ids": prompt, "sampling_params": params, "return_logprob": True} | encoding.fields
            )
            async with slots, session.post("/generate", data=body, headers=encoding.headers) as response:
                reply = await response.read()
                assert response.status == 200, reply[:500]
            result = encoding.read(reply)
            assert len(result["output_ids"]) == len(result["meta_info"]["output_token_logprobs"])
            return len(result["output_ids"])

        start = time.perf_counter()
        lengths = await asyncio.gather(*map(post, work.prompts, work.sampling_params()))
        seconds = time.perf_counter() - start
    assert lengths == work.output_lens, "the server did not generate the requested number of tokens"
    return seconds


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its threads so far, in seconds (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    work = make_workload(args.shape).first(args.requests)
    settings = engine_settings(
        args, folder, disable_radix_cache=not args.prefix_cache, max_running_requests=args.concurrency
    )
    with Engine(**settings) as engine:
        seconds = [run_once(engine, work, logprobs=True) for _ in range(args.runs)]
    in_process = work.output_tokens / seconds[-1]
    report("in_process_tokens_per_s", in_process, "tokens/s", runs=_rates(work, seconds))
    with HttpServerEngineAdapter(port=0, **settings) as server:
        assert server.url is not None and server.pid is not None
        for encoding in ENCODINGS:
            seconds = []
            for _ in range(args.runs):
                before = cpu_seconds(server.pid)
                if args.prefix_cache:
                    server.flush_cache(timeout=10)
                seconds.append(uvloop.run(run_http(server.url, work, encoding, args.concurrency)))
                spent = cpu_seconds(server.pid) - before
            value = work.output_tokens / seconds[-1]
            report(
                f"http_{encoding.name}_tokens_per_s",
                value,
                "tokens/s",
                runs=_rates(work, seconds),
                concurrency=args.concurrency,
                in_process=round(in_process, 1),
                ratio=round(value / in_process, 4),
                server_cpu_us=round(1e6 * spent / work.output_tokens, 2),
            )


def _rates(work: Workload, seconds: list[float]) -> list[float]:
    return [round(work.output_tokens / s, 1) for s in seconds]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.serving", __doc__)
    parser.add_argument("--concurrency", type=int, default=256, help="requests in flight at any time (256)")
    parser.add_argument("--requests", type=int, help="number of requests, repeating the workload if needed (its own)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each kind; the last run is the figure (2)")
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="share prefixes between requests (no)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.serving", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()
