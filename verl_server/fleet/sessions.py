"""`SessionPlaces`: which server has a recorded session.

The router learns it when a session is created through it. It asks the servers about a session that it does not know:
one that was created directly, or before the router was started. Places are never dropped while their server is listed,
because a turn on another server would be sampled without being recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

import msgspec

from verl_server.errors import ServerDiedError, SessionUnavailableError
from verl_server.fleet.members import Fleet, Member, State
from verl_server.fleet.upstream import Headers

_ASK_SECONDS = 5.0
_ABSENT_SECONDS = 30.0
"""Seconds for which nobody is asked again about a name that no server knows."""
_MOST_ABSENT = 100_000
_MOST_ASKING = 64
"""Sessions about which the servers are asked at the same time: random keys must not multiply the requests."""


class _Named(msgspec.Struct):
    id: str | None = None
    key: str | None = None


class SessionPlaces:
    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet, self._clock = fleet, clock
        self._names: dict[str, str] = {}
        self._keys: dict[bytes, str] = {}
        self._absent: dict[bytes, float] = {}
        self._asking: dict[bytes, asyncio.Task[str | None]] = {}
        self._slots = asyncio.Semaphore(_MOST_ASKING)

    def __len__(self) -> int:
        return len(self._names)

    def created(self, url: str, body: bytes) -> None:
        """Note the session of the answer to a request that creates one."""
        try:
            named = msgspec.json.decode(body, type=_Named | str)
        except msgspec.DecodeError:
            return
        name, key = (named, None) if isinstance(named, str) else (named.id, named.key)
        if name is not None:
            self._names[name] = url
            self._absent.pop(_name_hash(name), None)
        if key is not None:
            self._keys[_hashed(key.encode())] = url

    def may_have(self, url: str, name: str) -> None:
        """Note the server that was lost while it created a session. It may have the session when it is back."""
        self._names[name] = url

    def ended(self, name: str) -> None:
        self._names.pop(name, None)

    async def of_key(self, key: bytes) -> str | None:
        """Return the server of the session with this key, or None if no server has it.

        Raise SessionUnavailableError if a server that may have it does not answer.
        """
        hashed = _hashed(key)
        if (url := self._keys.get(hashed)) is not None:
            return url
        headers = [(b"authorization", b"Bearer " + key)]
        url = await self._found(hashed, lambda member: self._knows(member, b"/v1/models", headers), may_be_hint=False)
        if url is not None:
            self._keys[hashed] = url
        return url

    async def of_name(self, name: str, keys: Headers, *, may_be_hint: bool) -> str | None:
        """Return the server of the session with this id, or None if no server has it.

        `keys` are the headers with the keys of the caller. With `may_be_hint`, the id may be the name of a conversation
        that nobody records. Raise SessionUnavailableError if a server that may have it does not answer.
        """
        if (url := self._names.get(name)) is not None:
            return url
        target = b"/sessions/" + quote(name, safe="").encode()
        url = await self._found(
            _name_hash(name), lambda member: self._knows(member, target, keys), may_be_hint=may_be_hint
        )
        if url is not None:
            self._names[name] = url
        return url

    async def _found(
        self, hashed: bytes, knows: Callable[[Member], Awaitable[bool | None]], *, may_be_hint: bool
    ) -> str | None:
        if self._absent.get(hashed, 0.0) > self._clock():
            return None
        task = self._asking.get(hashed)
        if task is None:
            task = self._asking[hashed] = asyncio.ensure_future(self._ask(hashed, knows, may_be_hint))
            task.add_done_callback(lambda _: self._asking.pop(hashed, None))
        return await asyncio.shield(task)

    async def _ask(
        self, hashed: bytes, knows: Callable[[Member], Awaitable[bool | None]], may_be_hint: bool
    ) -> str | None:
        async with self._slots:
            members = self._fleet.members
            answers: Sequence[bool | None] = await asyncio.gather(*map(knows, members))
        for member, answer in zip(members, answers, strict=True):
            if answer:
                return member.url
        # A hint is asked about while servers are down, too. Of a server that the router has seen before, it knows the
        # sessions that were used since, so only one that it has never seen may have the session.
        silent = [
            member
            for member, answer in zip(members, answers, strict=True)
            if answer is None and not (may_be_hint and member.has_answered) and not member.is_retired
        ]
        if silent:
            raise SessionUnavailableError(
                f"The session may be on {', '.join(member.url for member in silent)}, without an answer. Retry later."
            )
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[hashed] = self._clock() + _ABSENT_SECONDS
        return None

    async def _knows(self, member: Member, target: bytes, headers: Headers) -> bool | None:
        """Return True if a server has the session, False if it has not, None if it cannot say."""
        if member.state in (State.DEAD, State.STARTING):
            return None
        exchange = None
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                exchange = await member.upstream.send("GET", target, headers, b"")
                await exchange.started()
                return None if exchange.status >= 500 else exchange.status < 300
        except (ServerDiedError, TimeoutError):
            return None
        finally:
            if exchange is not None:
                exchange.close()


def _hashed(key: bytes) -> bytes:
    """Return the hash under which a key is kept, so that no dump of the router's memory shows it."""
    return hashlib.blake2b(b"key\0" + key, digest_size=16).digest()


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(b"name\0" + name.encode("utf-8", "surrogateescape"), digest_size=16).digest()
