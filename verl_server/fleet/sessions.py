"""`SessionPlaces`: which server has a recorded session.

The router learns it when a session is created through it. It asks the servers about a session that it does not know:
one that was created directly, or before the router was started. A million sessions are remembered, because a turn on
another server would be sampled without being recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, cast
from urllib.parse import quote

import msgspec

from verl_server.errors import ServerDiedError, SessionUnavailableError
from verl_server.fleet.members import Fleet, Member, State
from verl_server.fleet.recent import Recent
from verl_server.fleet.requests import decoded
from verl_server.fleet.upstream import Headers

_KEY_HEADERS = (b"authorization", b"x-api-key")
_ASK_SECONDS = 5.0
_ABSENT_SECONDS = 30.0
"""Seconds for which nobody is asked again about a name that no server knows."""
_MOST_ABSENT = 100_000
_MOST_NAMES = 1_000_000
"""Sessions and keys that are remembered. A key that was dropped is asked about again."""
_MOST_ASKING = 64
"""Sessions about which the servers are asked at the same time: random keys must not multiply the requests."""


class Said(Enum):
    """What a server answers about a session."""

    HERE = "here"
    ABSENT = "absent"
    REFUSED = "refused"
    """The caller's key does not permit the question, so another caller may get another answer."""
    SILENT = "silent"
    """It does not answer, or cannot say now."""


class _Named(msgspec.Struct):
    id: str | None = None
    key: str | None = None


class SessionPlaces:
    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet, self._clock = fleet, clock
        self._names = Recent(_MOST_NAMES)
        self._keys = Recent(_MOST_NAMES)
        self._absent: dict[bytes, float] = {}
        self._asking: dict[bytes, asyncio.Task[list[tuple[Member, Said]]]] = {}
        self._slots = asyncio.Semaphore(_MOST_ASKING)

    def __len__(self) -> int:
        return len(self._names)

    def created(self, url: str, body: bytes) -> None:
        """Note the session of the answer to a request that creates one."""
        named: _Named | str | None = decoded(body, cast(Any, _Named | str))
        name, key = (named.id, named.key) if isinstance(named, _Named) else (named, None)
        if name is not None:
            self._names.put(name, url)
        if key is not None:
            self._keys.put(_hashed(b"key", key.encode()), url)

    def may_have(self, url: str, name: str) -> None:
        """Note the server that was lost while it created a session. It may have the session when it is back."""
        self._names.put(name, url)

    def ended(self, name: str) -> None:
        self._names.drop(name)

    async def of_key(self, key: bytes) -> str | None:
        """Return the server of the session with this key, or None if no server has it.

        Raise SessionUnavailableError if a server that may have it does not answer.
        """
        hashed = _hashed(b"key", key)
        if (url := self._keys.get(hashed)) is not None:
            return url
        # In the path, because a server without keys takes any key in a header.
        target = b"/s/%s/v1/models" % quote(key, safe="").encode()
        url = await self._found(hashed, lambda member: self._ask_one(member, target, [], absent=401), may_be_hint=False)
        if url is not None:
            self._keys.put(hashed, url)
        return url

    async def of_name(self, name: str, headers: Headers, *, may_be_hint: bool) -> str | None:
        """Return the server of the session with this id, or None if no server has it.

        `headers` are those of the request, whose keys are sent. With `may_be_hint`, the id may be the name of a
        conversation that nobody records. Raise SessionUnavailableError if a server that may have it does not answer.
        """
        if (url := self._names.get(name)) is not None:
            return url
        keys = [header for header in headers if header[0] in _KEY_HEADERS]
        text = name.encode("utf-8", "surrogateescape")
        target = b"/sessions/" + quote(text, safe="").encode()
        url = await self._found(
            _hashed(b"name", text, *sorted(value for _, value in keys)),
            lambda member: self._ask_one(member, target, keys, absent=404),
            may_be_hint=may_be_hint,
        )
        if url is not None:
            self._names.put(name, url)
        return url

    async def _found(self, hashed: bytes, ask: Callable[[Member], Awaitable[Said]], *, may_be_hint: bool) -> str | None:
        if self._absent.get(hashed, 0.0) > self._clock():
            return None
        task = self._asking.get(hashed)
        if task is None:
            task = self._asking[hashed] = asyncio.ensure_future(self._ask_all(ask))
            task.add_done_callback(lambda _: self._asking.pop(hashed, None))
        answers = await asyncio.shield(task)
        url = next((member.url for member, said in answers if said is Said.HERE), None)
        if url is not None:
            return url
        # A hint is asked about while servers are down, too. Of a server that the router has seen before, it knows the
        # sessions that were used since, so only one that it has never seen may have the session.
        silent = [
            member
            for member, said in answers
            if said is Said.SILENT and not (may_be_hint and member.has_answered) and not member.is_retired
        ]
        if silent:
            raise SessionUnavailableError(
                f"The session may be on {', '.join(member.url for member in silent)}, without an answer. Retry later."
            )
        if all(said is Said.ABSENT for _, said in answers):
            if len(self._absent) >= _MOST_ABSENT:
                self._absent.clear()
            self._absent[hashed] = self._clock() + _ABSENT_SECONDS
        return None

    async def _ask_all(self, ask: Callable[[Member], Awaitable[Said]]) -> list[tuple[Member, Said]]:
        async with self._slots:
            members = self._fleet.members
            return list(zip(members, await asyncio.gather(*map(ask, members)), strict=True))

    async def _ask_one(self, member: Member, target: bytes, headers: Headers, *, absent: int) -> Said:
        """Ask a server about a session. `absent` is the status with which it says that it has no such session."""
        if member.state in (State.DEAD, State.STARTING):
            return Said.SILENT
        exchange = None
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                exchange = await member.upstream.send("GET", target, headers, b"")
                await exchange.started()
        except (ServerDiedError, TimeoutError):
            return Said.SILENT
        finally:
            if exchange is not None:
                exchange.close()
        if exchange.status >= 500:
            return Said.SILENT
        if exchange.status == absent:
            return Said.ABSENT
        return Said.REFUSED if exchange.status in (400, 401, 403) else Said.HERE


def _hashed(*parts: bytes) -> bytes:
    """Return the hash under which a key is kept, so that no dump of the router's memory shows it."""
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()
