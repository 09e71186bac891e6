"""A router beside its servers, by turns on one machine: added latency, throughput, processor time, cache hits, pushes.

    python -m benchmarks.router --device cpu --servers 1 --streams 16
    python -m benchmarks.router --device cuda --shape 0.6b --servers 1 --peer PATH/sglang-router
    python -m benchmarks.router --device cuda --shape 0.6b --servers 2 --parts scaling,agents,push

Starts `--servers` servers, each on GPUs of its own, and for each part the routers that it compares: `verl-server
router` and, with `--peer`, sglang-router. Each figure is printed as soon as it is known. The parts:

latency     One caller sends one request after the other, by turns to the first server itself ("direct") and to each
            router in front of it. A request has one output token, and a short or a long prompt that the prefix cache
            knows. `added_latency_ms` is the median of the differences to the direct request of the same turn, `p99` the
            difference of the 99th percentiles. Goal: 0.5 ms. "tcp-relay" hands on bytes only: the price of a hop.
streams     `--streams` streams at once, by turns to the first server itself and to each router in front of it, after a
            round that warms up. `streams_ratio` is the median over the rounds of the quotient by the direct rate of the
            same round. Goal: 0.97. `router_cpu_us` is the processor time of the router and its children for each output
            token, `server_cpu_us` that of the server's process that answers HTTP. `client_cpu_share` is that of the
            busiest client process: near 1, the clients were the limit.
scaling     `--streams` streams to the first server itself, as many for each server through a router in front of all,
            and as many to each server itself ("each"). Goal: 0.95 of the number of servers.
agents      Agents with growing histories (`benchmarks.agents`) play against one server itself, and through a router in
            front of all, with the name of the conversation in each request (`hint`) and without. `agents_hits` is the
            number of prompt tokens that came from a prefix cache, as a share of those that an earlier turn of the same
            agent sent or sampled. Goal: 0.95 of the share at one server.
push        A trainer on the first GPU pushes tensors of the shape to the first server alone, and to all through the
            address of the router, beside plain copies of the same bytes (`benchmarks.fleet_push`). It comes last,
            because it changes the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import torch
import uvloop

from benchmarks.agents import Episode, Played, Waits, make_episodes, play_at_own_pace
from benchmarks.fleet_push import measure_push
from benchmarks.fronts import Caller, Front, own_router, placements, servers, sglang_router, tcp_relay
from benchmarks.multi_turn import LENGTHS
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.serving import cpu_seconds
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.stream_load import Received, run_streams
from verl_server import HttpServerEngineAdapter

RunStreams = Callable[[Sequence[str], list[bytes]], Received]
"""Sends the bodies, one stream each, to an address."""
PARTS = ("latency", "streams", "scaling", "agents", "push")
_MOST_ADDED_MS, _LEAST_STREAMS, _LEAST_SCALING, _LEAST_HITS = 0.5, 0.97, 0.95, 0.95
_PROMPTS = 16
"""Different prompts of the latency part."""
_START_SECONDS = 120.0
_PLAYS = 3
"""Most plays of the agents part, which have different episodes."""


class Benchmark:
    """The servers, and the routers in front of them."""

    def __init__(self, args: argparse.Namespace, folder: Path, found: list[HttpServerEngineAdapter]) -> None:
        self._args, self._folder, self._servers = args, folder, found
        self._urls = [str(server.url) for server in found]
        self._rng = random.Random(args.seed)

    def run(self) -> None:
        for part in PARTS:
            if part in self._args.parts:
                getattr(self, part)()

    # -- latency -----------------------------------------------------------------------------------------------

    def latency(self) -> None:
        with self._fronts(self._urls[:1]) as routers, tcp_relay(self._urls[0]) as hop:
            fronts = [*routers, hop]
            for length in (self._args.short_prompt, self._args.long_prompt):
                bodies = [self._body(length, 1, stream=False) for _ in range(_PROMPTS)]
                report_latencies(measure_latencies(fronts, bodies, self._args.requests), length)

    # -- streams -----------------------------------------------------------------------------------------------

    def streams(self) -> None:
        bodies = self._stream_bodies(self._args.streams)
        with self._fronts(self._urls[:1]) as fronts:
            self._compare("streams", _LEAST_STREAMS, fronts, {front.name: bodies for front in fronts})

    def scaling(self) -> None:
        count, streams = len(self._servers), self._args.streams
        one, every = self._stream_bodies(streams), self._stream_bodies(streams * count)
        with self._fronts(self._urls) as routers:
            fronts = [*routers, Front("each", self._urls[0], self._servers[0].pid or 0)]
            bodies = {front.name: one if front.name == "direct" else every for front in fronts}
            self._compare("scaling", _LEAST_SCALING * count, fronts, bodies)

    def _compare(self, part: str, goal: float, fronts: list[Front], bodies: dict[str, list[bytes]]) -> None:
        """Send the streams of each front by turns, and report rates, ratios and processor time. The first round warms
        up. `bodies`: name of the front -> bodies of its streams."""
        rates: dict[str, list[float]] = {front.name: [] for front in fronts}
        cpu: dict[str, list[float]] = {front.name: [] for front in fronts}
        with self._clients() as run:
            for number in range(self._args.rounds + 1):
                for front in fronts[:: -1 if number % 2 else 1]:
                    rate, spent, more = self._round(run, front, bodies[front.name])
                    if number:
                        rates[front.name].append(rate)
                        cpu[front.name].append(spent)
                        report(f"{part}_run", rate, "tokens/s", front=front.name, round=number, **more)
        shared = {"servers": 1 if part == "streams" else len(self._servers), "output_len": self._args.output_len}
        report_rates(part, rates, goal=goal, **shared)
        for front in fronts[1:]:
            values = cpu[front.name]
            runs = [round(value, 3) for value in values]
            report("router_cpu_us", statistics.median(values), "us/token", front=front.name, part=part, runs=runs)

    def _round(self, run: RunStreams, front: Front, bodies: list[bytes]) -> tuple[float, float, dict[str, Any]]:
        """Return (tokens/s, microseconds of the front's processor time for each token, other figures) of a round."""
        server = self._servers[0].pid or 0
        before, served = front.cpu_seconds(), cpu_seconds(server)
        received = run(self._urls if front.name == "each" else [front.url], bodies)
        spent, served = front.cpu_seconds() - before, cpu_seconds(server) - served
        if received.tokens != len(bodies) * self._args.output_len:
            raise RuntimeError(f"{front.name} sent {received.tokens} tokens in {len(bodies)} streams.")
        more = {
            "streams": len(bodies),
            "seconds": round(received.seconds, 3),
            "chunks": received.chunks,
            "bytes": received.nbytes,
            "server_cpu_us": round(1e6 * served / received.tokens, 2),
            "client_cpu_share": round(received.cpu_share, 3),
        }
        return received.tokens / received.seconds, 1e6 * spent / received.tokens, more

    # -- agents ------------------------------------------------------------------------------------------------

    def agents(self) -> None:
        plays = [(True, False), (False, False)]  # (the turns name their conversation, sglang-router is the router)
        if self._args.peer:
            plays.append((False, True))  # sglang-router drops the name of the conversation
        for number, (hint, peer) in enumerate(plays):
            episodes = episodes_of(self._args, number)
            with self._fronts(self._urls, own=not peer, peer=peer) as (direct, router):
                played = {front.name: self._play(front, episodes, hint) for front in (direct, router)}
                reasons = {} if peer else {"placements": placements(router)}
            possible = sum(episode.reusable_tokens() for episode in episodes)
            shares = {name: each.cached_tokens / possible for name, each in played.items()}
            more = {"hint": hint, "agents": len(episodes), "turns": self._args.turns, "possible_tokens": possible}
            for name, each in played.items():
                seconds = round(each.seconds, 3)
                report("agents_hits", shares[name], "of possible", front=name, seconds=seconds, **more)
            ratio = shares[router.name] / max(shares["direct"], 1e-9)
            report("agents_hits_ratio", ratio, "of one server", front=router.name, goal=_LEAST_HITS, **more, **reasons)

    def _play(self, front: Front, episodes: list[Episode], hint: bool) -> Played:
        for server in self._servers:
            server.flush_cache(timeout=10)
        waiting = self._args.wait_scale > 0
        return uvloop.run(play(front.url, episodes, waiting=waiting, hint=hint))

    # -- push --------------------------------------------------------------------------------------------------

    def push(self) -> None:
        with own_router(self._urls) as router:
            measure_push(self._args, self._folder, self._urls, router.url)

    # -- parts of the above ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _fronts(self, urls: Sequence[str], own: bool = True, peer: bool = True) -> Iterator[list[Front]]:
        """Yield the first server itself, and routers in front of the servers `urls`."""
        fronts = [Front("direct", self._urls[0], self._servers[0].pid or 0)]
        with contextlib.ExitStack() as stack:
            if own:
                fronts.append(stack.enter_context(own_router(urls)))
            if peer and self._args.peer:
                found = sglang_router(self._args.peer, self._args.peer_policy, urls)
                fronts.append(stack.enter_context(found))
            yield fronts

    @contextlib.contextmanager
    def _clients(self) -> Iterator[RunStreams]:
        """Yield `run_streams` with processes of clients, which have started."""
        count, context = self._args.clients, get_context("spawn")
        started = context.Barrier(count + 1)  # so that every process has started before the first round
        with ProcessPoolExecutor(count, mp_context=context, initializer=started.wait) as pool:
            waiting = [pool.submit(os.getpid) for _ in range(count)]
            started.wait(_START_SECONDS)
            wait(waiting)
            yield lambda urls, bodies: run_streams(pool, count, urls, bodies)

    def _stream_bodies(self, count: int) -> list[bytes]:
        return [self._body(self._args.short_prompt, self._args.output_len, stream=True) for _ in range(count)]

    def _body(self, prompt_len: int, output_len: int, *, stream: bool) -> bytes:
        vocabulary = SHAPES[self._args.shape]["vocab_size"]
        ids = [self._rng.randrange(5, vocabulary) for _ in range(prompt_len)]
        params = {"temperature": 1.0, "max_new_tokens": output_len, "ignore_eos": True}
        return orjson.dumps({"input_ids": ids, "sampling_params": params, "stream": stream})


def raise_file_limit() -> None:
    """Permit as many open files as the system does: each stream needs one, and two in a router. Children inherit it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


def measure_latencies(fronts: list[Front], bodies: list[bytes], requests: int) -> dict[str, list[float]]:
    """Name of the front -> milliseconds of each of its requests. A turn sends one body to every front."""
    callers = {front.name: Caller(front.url) for front in fronts}
    milliseconds: dict[str, list[float]] = {name: [] for name in callers}
    for body in bodies:
        for caller in callers.values():
            caller.seconds(body)  # so that the prefix cache knows the prompt, and each connection is open
    names = list(callers)
    for number in range(requests):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            milliseconds[name].append(1e3 * callers[name].seconds(bodies[number % len(bodies)]))
    for caller in callers.values():
        caller.close()
    return milliseconds


def report_latencies(milliseconds: dict[str, list[float]], prompt_len: int) -> None:
    """Report the latency of each front and what each router adds. `milliseconds`: see `measure_latencies`."""
    direct = milliseconds["direct"]
    for name, values in milliseconds.items():
        more = {"front": name, "prompt_tokens": prompt_len, "requests": len(values)}
        report("latency_ms", statistics.median(values), "ms", p99=round(_p99(values), 4), **more)
    for name, values in milliseconds.items():
        if name != "direct":
            added = statistics.median(value - base for value, base in zip(values, direct, strict=True))
            p99 = round(_p99(values) - _p99(direct), 4)
            more = {"front": name, "prompt_tokens": prompt_len, "p99": p99, "goal": _MOST_ADDED_MS}
            report("added_latency_ms", added, "ms", **more)


def _p99(values: list[float]) -> float:
    return sorted(values)[(len(values) * 99) // 100]


def report_rates(name: str, rates: dict[str, list[float]], *, goal: float, **more: Any) -> None:
    """Report the median rate of each front, and the ratio of each router to the direct rate, round by round."""
    for front, values in rates.items():
        runs = [round(value, 1) for value in values]
        report(f"{name}_tokens_per_s", statistics.median(values), "tokens/s", front=front, runs=runs, **more)
    for front, values in rates.items():
        if front != "direct":
            ratios = [value / base for value, base in zip(values, rates["direct"], strict=True)]
            spread = [round(min(ratios), 4), round(max(ratios), 4)]
            report(f"{name}_ratio", statistics.median(ratios), "of direct", front=front, spread=spread, goal=goal)


def episodes_of(args: argparse.Namespace, number: int) -> list[Episode]:
    """Return the episodes of play `number`. Other plays have other prompts, which no router has seen."""
    lengths, waits = LENGTHS.get(args.shape, LENGTHS["tiny"]), Waits(scale=args.wait_scale)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    return make_episodes(args.agents, args.turns, 1, lengths, waits, vocabulary, args.seed + number)


class _RemoteGenerator:
    """The calls of `benchmarks.agents.Generator` over HTTP, for any address."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any:
        body = {"input_ids": input_ids, "sampling_params": sampling_params}
        if session_id is not None:
            body["session_id"] = session_id
        async with self._session.post("/generate", data=orjson.dumps(body)) as response:
            answer = await response.read()
            if response.status != 200:
                raise RuntimeError(f"A turn was answered {response.status}: {answer[:400]!r}")
        return orjson.loads(answer)

    async def async_close_session(self, session_id: str) -> None:
        async with self._session.post("/close_session", json={"session_id": session_id}) as response:
            response.raise_for_status()


async def play(url: str, episodes: list[Episode], *, waiting: bool, hint: bool) -> Played:
    """Play the episodes against an address. With `hint`, each turn names its conversation."""
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as session:
        return await play_at_own_pace(_RemoteGenerator(session), episodes, waiting=waiting, session_ids=hint)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.router", __doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), help="parts, separated by commas (all possible)")
    parser.add_argument("--servers", type=int, default=2, help="number of servers (2)")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="executable of sglang-router, measured too (none)")
    parser.add_argument("--peer-policy", default="cache_aware", help="policy of sglang-router (cache_aware)")
    parser.add_argument("--requests", type=int, help="turns of the latency part at each length (1000; cpu: 100)")
    parser.add_argument("--short-prompt", type=int, default=64, help="tokens of a short prompt (64)")
    parser.add_argument("--long-prompt", type=int, default=4096, help="tokens of a long prompt (4096)")
    parser.add_argument("--streams", type=int, help="concurrent streams (1000; cpu: 32)")
    parser.add_argument("--output-len", type=int, help="output tokens of a stream (128; cpu: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of streams after the one that warms up (5)")
    parser.add_argument("--clients", type=int, help="client processes (4; cpu: 1)")
    parser.add_argument("--agents", type=int, help="agents at one time (128; tiny: 16)")
    parser.add_argument("--turns", type=int, help="turns of each agent (8; tiny: 4)")
    parser.add_argument("--wait-scale", type=float, default=0.0, help="factor for the waits for environments (0)")
    parser.add_argument("--pushes", type=int, default=20, help="measured pushes to one server and to all (20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and lengths (0)")
    args = parser.parse_args(argv)
    on_gpu, is_tiny = args.device == "cuda", args.shape == "tiny"
    args.requests = args.requests or (1000 if on_gpu else 100)
    args.streams = args.streams or (1000 if on_gpu else 32)
    args.output_len = args.output_len or (128 if on_gpu else 64)
    args.clients = args.clients or (4 if on_gpu else 1)
    args.agents = args.agents or (16 if is_tiny else 128)
    args.turns = args.turns or (4 if is_tiny else 8)
    possible = PARTS if args.servers > 1 else ("latency", "streams")
    args.parts = args.parts or list(possible)
    if unknown := [part for part in args.parts if part not in possible]:
        parser.error(f"--parts {','.join(unknown)}: with --servers {args.servers} the parts are {', '.join(possible)}.")
    if args.peer and not args.peer.exists():
        parser.error(f"--peer {args.peer}: no such file. Install sglang-router in an environment of its own.")
    if on_gpu and torch.cuda.device_count() < args.servers * args.tp:
        parser.error(f"--servers {args.servers} --tp {args.tp}: torch sees {torch.cuda.device_count()} GPUs.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.router", args, argv)
    raise_file_limit()
    with tempfile.TemporaryDirectory() as temporary:
        context = args.long_prompt + 16
        if "agents" in args.parts:
            episodes = [episode for number in range(_PLAYS) for episode in episodes_of(args, number)]
            context = max(context, *(episode.total_tokens for episode in episodes))
        folder = shape_folder(temporary, args.shape, context=context)
        settings = engine_settings(
            args, folder, max_running_requests=max(256, args.streams, args.agents), incremental_streaming_output=True
        )
        with servers(args.servers, args.tp, settings) as found:
            Benchmark(args, folder, found).run()


if __name__ == "__main__":
    main()
