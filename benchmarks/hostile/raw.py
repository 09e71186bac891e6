"""The client of `benchmarks.hostile_callers` for attacks that are not one JSON body: heads, connections and keys.

    python -m benchmarks.hostile.raw HOST:PORT NAME SECONDS LEAST

Repeats the attack for SECONDS, and at least LEAST times. Prints one line of JSON as `benchmarks.hammer` does: the
number of answers with each status, and the slowest answer. An error of the connection counts with the name of its
class. The process has the lowest priority, since real callers use processors of their own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import resource
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import chain, repeat

ADMIN_KEY = "admin-key-of-the-benchmark"
"""The key of the server under attack. Callers without a key may generate, too."""
HALF_OPEN = 1100
_ANSWER_SECONDS = 30.0
_REOPEN_SECONDS = 0.01
_LONGEST_SECONDS = 90.0
"""The bound of LEAST repetitions."""
_GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_SMALL_HEADERS = b"a: b\r\n" * 8192
_HEADER_BYTES = 40 * 2**20
_ENDLESS_BYTES = 2**30
_GENERATE = b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}'
_CONNECTIONS, _FILLING_CONNECTIONS = 16, 64
_ODD = ("²", "٣", "1_0", "+1", "9" * 5000)
"""Texts that `str.isdigit` or `int` may take for a number, and that are none here."""
_CONTROL_PATHS = ("/generate%0A", "/v1/models/%00", "/sessions/%1F", "/health%7F", "/tokenize%C2%85", "/%0D%0A")


class Attack:
    """The target of one run, its deadline, and what was seen."""

    def __init__(self, address: str, seconds: float, least: int) -> None:
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self._begin = time.monotonic()
        self.seconds, self.least = seconds, least
        self.statuses: collections.Counter[str] = collections.Counter()
        self.slowest = 0.0

    @property
    def is_over(self) -> bool:
        passed = time.monotonic() - self._begin
        repeated = self.statuses.total() >= self.least
        return passed >= _LONGEST_SECONDS or (repeated and passed >= self.seconds)

    async def count(self, answer: Awaitable[str]) -> None:
        """Wait for the status of an answer, and count it."""
        began = time.monotonic()
        try:
            status = await asyncio.wait_for(answer, _ANSWER_SECONDS)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            status = type(error).__name__
        self.statuses[status] += 1
        self.slowest = max(self.slowest, time.monotonic() - began)

    async def send(self, parts: Iterable[bytes]) -> str:
        """Send `parts` on a new connection until the server answers. Return the status of the answer."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        answer = asyncio.ensure_future(reader.readline())
        try:
            with contextlib.suppress(OSError):  # the answer may have arrived all the same
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                    if answer.done():
                        break
            line = await answer
        finally:
            answer.cancel()
            writer.close()
        return line.split()[1].decode() if line else "closed"


async def endless_header(attack: Attack) -> None:
    """Send one header whose value has no end (1 GiB, where the server takes all of it)."""
    while not attack.is_over:
        value = repeat(b"a" * 65536, _ENDLESS_BYTES // 65536)
        await attack.count(attack.send(chain([_GET, b"X-Endless: "], value)))


async def small_headers(attack: Attack) -> None:
    """Send 40 MiB of headers of four bytes."""
    while not attack.is_over:
        headers = repeat(_SMALL_HEADERS, _HEADER_BYTES // len(_SMALL_HEADERS))
        await attack.count(attack.send(chain([_GET], headers, [b"\r\n"])))


async def half_open(attack: Attack) -> None:
    """Keep 1,100 connections open that have sent half a head. Each one that the server ends is opened again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def hold() -> str:
        reader, writer = await asyncio.open_connection(attack.host, attack.port)
        try:
            writer.write(_GET)
            line = await reader.readline()
        finally:
            writer.close()
        return line.split()[1].decode() if line else "closed"

    async def keep() -> None:
        while True:
            await attack.count(hold())
            await asyncio.sleep(_REOPEN_SECONDS)

    holding = [asyncio.ensure_future(keep()) for _ in range(HALF_OPEN)]
    await asyncio.sleep(max(attack.seconds, 1.0))
    for each in holding:
        each.cancel()
    await asyncio.wait(holding, timeout=_ANSWER_SECONDS)


async def kept_answers(attack: Attack) -> None:
    """Send requests with new Idempotency-Keys, so that the server keeps each answer.

    Sixteen connections do not load the model much. There are more while the LEAST answers are made.
    """

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        head = f"Idempotency-Key: {secrets.token_hex(16)}\r\nContent-Type: application/json\r\n"
        writer.write(_post("/generate", head, _GENERATE))
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        return answer.split()[1].decode()

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(attack.host, attack.port)
        while not attack.is_over:
            await attack.count(ask(reader, writer))
        writer.close()

    count = _FILLING_CONNECTIONS if attack.least > 1 else _CONNECTIONS
    await asyncio.gather(*(connection() for _ in range(count)))


async def odd_digits(attack: Attack) -> None:
    """Send texts that are no numbers where a number is expected: in a query, in a header and as a length."""
    await _in_turn(attack, _odd_digit_requests())


async def control_characters(attack: Attack) -> None:
    """Send paths with control characters, each encoded, and one as it is."""
    paths = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode() for path in _CONTROL_PATHS]
    await _in_turn(attack, [*paths, b"GET /he\x01alth HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"])


def _odd_digit_requests() -> Iterator[bytes]:
    for text in _ODD:
        query = "".join(f"%{byte:02X}" for byte in text.encode())
        owner = f"Host: 127.0.0.1\r\nAuthorization: Bearer {ADMIN_KEY}"
        yield f"GET /sessions?limit={query} HTTP/1.1\r\n{owner}\r\n\r\n".encode()
        event = f"Content-Type: application/json\r\nIdempotency-Key: {text[:9]}\r\nLast-Event-ID: {text}\r\n"
        yield _post("/generate", event, _GENERATE)
        yield f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {text}\r\n\r\n".encode()


async def _in_turn(attack: Attack, requests: Iterable[bytes]) -> None:
    """Send all requests once, and go on from the first one until the attack is over."""
    every = list(requests)
    while True:
        for request in every:
            await attack.count(attack.send([request]))
        if attack.is_over:
            return


def _post(path: str, headers: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    "endless_header": endless_header,
    "small_headers_40mib": small_headers,
    "half_open_1100": half_open,
    "kept_answers_20000": kept_answers,
    "odd_digits": odd_digits,
    "control_characters": control_characters,
}


def main(address: str, name: str, seconds: str, least: str) -> None:
    os.nice(19)
    attack = Attack(address, float(seconds), int(least))
    asyncio.run(_bounded(ATTACKS[name](attack), 2 * _LONGEST_SECONDS))
    print(json.dumps({"statuses": attack.statuses, "slowest_answer_s": round(attack.slowest, 3)}), flush=True)


async def _bounded(attack: Awaitable[None], seconds: float) -> None:
    await asyncio.wait_for(attack, seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
