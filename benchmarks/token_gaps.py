"""Times between the tokens of running requests, which show the effect of a weight push on generation.

`Streams` keeps a number of streaming requests in flight at a server, in a thread and event loop of its own, and records
the arrival time of each token. `gap_figures` then compares the gaps that overlap a push with the others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass, field

import aiohttp
import numpy as np
import numpy.typing as npt

Interval = tuple[float, float]
"""(start, end) on the clock of `time.perf_counter()`, which is the same in all processes of a host."""
Times = npt.NDArray[np.float64]
_STOP_SECONDS = 30.0


@dataclass
class Outcome:
    """Results of the requests. A request that was still running at the end counts in `arrivals` only."""

    arrivals: list[Times] = field(default_factory=list)
    """Arrival times of the tokens of each request."""
    completed: int = 0
    aborted: int = 0
    """Requests that ended early with an abort, which only mode="abort" may cause."""
    restarted: int = 0
    """Requests that lost their KV cache at least once, which only mode="retract" may cause."""
    lost: list[str] = field(default_factory=list)
    """Descriptions of requests without an answer, with an error, or with missing tokens but without an abort."""


class Streams:
    """Keeps `count` greedy requests with random prompts in flight: a request that ends is followed by a new one.

    With `reconnect`, each request has a new connection, as a server needs it that ends connections after an answer.
    """

    def __init__(
        self, url: str, count: int, prompt_len: int, output_len: int, vocab_size: int, *, reconnect: bool = False
    ) -> None:
        self._url, self._count = url, count
        self._prompt_len, self._output_len, self._vocab_size = prompt_len, output_len, vocab_size
        self._reconnect = reconnect
        self._outcome = Outcome()
        self._started = threading.Semaphore(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._main()), daemon=True)
        self._stop = asyncio.Event()

    def start(self, timeout: float) -> None:
        """Start the requests, and return when every stream has received its first token.

        Raises TimeoutError after `timeout` seconds.
        """
        self._thread.start()
        deadline = time.monotonic() + timeout
        for _ in range(self._count):
            if not self._started.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"Not all of the {self._count} streams received a token within {timeout} s.")

    def stop(self) -> Outcome:
        """Cancel the requests that are still running, and return the results."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"The streams did not end within {_STOP_SECONDS} s.")
        return self._outcome

    async def _main(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, force_close=self._reconnect)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:
            streams = [asyncio.create_task(self._stream(session, number)) for number in range(self._count)]
            await self._stop.wait()
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(number)
        for turn in itertools.count():
            prompt = [rng.randrange(5, self._vocab_size) for _ in range(self._prompt_len)]
            # The first requests have different lengths, so that they do not all end at once.
            tokens = self._output_len if turn else 1 + self._output_len * (number + 1) // self._count
            try:
                await self._request(session, prompt, tokens, first=turn == 0)
            except (aiohttp.ClientError, ValueError, KeyError) as error:
                self._outcome.lost.append(f"{type(error).__name__}: {error}")
                return

    async def _request(self, session: aiohttp.ClientSession, prompt: list[int], tokens: int, *, first: bool) -> None:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        arrivals: list[float] = []
        frame = b"{}"
        try:
            async with session.post("/generate", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    arrivals.append(time.perf_counter())
                    frame = line
                    if first and len(arrivals) == 1:
                        self._started.release()
        finally:
            self._outcome.arrivals.append(np.array(arrivals))
        self._count_result(json.loads(frame.removeprefix(b"data: ")), tokens)

    def _count_result(self, answer: dict[str, object], tokens: int) -> None:
        """Count the result of a request from its last frame. Frames are cumulative, so only the last one is parsed."""
        if "error" in answer or "meta_info" not in answer:
            self._outcome.lost.append(str(answer)[:200])
            return
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert isinstance(meta, dict) and isinstance(ids, list)
        self._outcome.restarted += meta["num_retractions"] > 0
        if meta["finish_reason"]["type"] == "abort":
            self._outcome.aborted += 1
        elif len(ids) != tokens:
            self._outcome.lost.append(f"{len(ids)} of {tokens} tokens, {meta['finish_reason']}")
        else:
            self._outcome.completed += 1


def gap_figures(
    arrivals: list[Times], events: dict[str, list[Interval]], busy: list[Interval]
) -> dict[str, dict[str, float]]:
    """Statistics of the milliseconds between two tokens of one request, for each kind of event.

    `KIND` are the gaps that overlap an event of that kind, and `quiet` those that overlap none. `KIND_added` are, for
    each event of that kind, its longest gap less the median quiet gap, which is the time of one step. Gaps that overlap
    a `busy` interval, in which the trainer wrote or checked weights, are left out.
    """
    times = [each for each in arrivals if len(each) > 1]
    starts = np.concatenate([each[:-1] for each in times] or [np.empty(0)])
    ends = np.concatenate([each[1:] for each in times] or [np.empty(0)])
    usable = ~_overlaps(starts, ends, busy)
    starts, ends = starts[usable], ends[usable]
    gaps = 1e3 * (ends - starts)
    hit = {kind: _overlaps(starts, ends, intervals) for kind, intervals in events.items() if intervals}
    quiet = gaps[~np.logical_or.reduce(list(hit.values()))] if hit else gaps
    figures = {"quiet": _summary(quiet)}
    step = float(np.median(quiet)) if quiet.size else 0.0
    for kind, overlapping in hit.items():
        longest = [gaps[(starts < b) & (ends > a)] for a, b in events[kind]]
        figures[kind] = _summary(gaps[overlapping])
        figures[f"{kind}_added"] = _summary(np.array([each.max() - step for each in longest if each.size]))
    return figures


def _overlaps(starts: Times, ends: Times, intervals: list[Interval]) -> npt.NDArray[np.bool_]:
    """bool: True for each span (starts[i], ends[i]) that overlaps an interval. Intervals are sorted and disjoint."""
    if not intervals:
        return np.zeros(len(starts), dtype=bool)
    opened, closed = (np.array(column) for column in zip(*intervals, strict=True))
    following = np.searchsorted(closed, starts, side="right")  # the first interval that ends after the span starts
    reached = np.append(opened, np.inf)[following] < ends
    return np.asarray(reached, dtype=bool)


def _summary(values: Times) -> dict[str, float]:
    if not values.size:
        return {"count": 0}
    p50, p90, p99, p999 = (round(float(np.percentile(values, q)), 3) for q in (50, 90, 99, 99.9))
    longest = round(float(values.max()), 3)
    return {"count": int(values.size), "p50": p50, "p90": p90, "p99": p99, "p99.9": p999, "longest": longest}
