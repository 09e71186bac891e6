"""`Store`: where the ledger's records go. `MemoryStore` drops them, and `journal.Journal` writes them to disk."""

from __future__ import annotations

from typing import Protocol

from verl_server.server.sessions.records import Record


class Store(Protocol):
    """Takes every record of the ledger, in order."""

    @property
    def failure(self) -> str | None:
        """Why nothing can be written now; None if the store works."""
        ...

    def put(self, record: Record) -> None:
        """Take a record, without waiting."""
        ...

    async def flushed(self) -> None:
        """Return when all records so far are durable by policy. Raise SessionUnavailableError if they are not."""
        ...


class MemoryStore:
    """The store of a server without `session_store`."""

    failure: str | None = None

    def put(self, record: Record) -> None:
        pass

    async def flushed(self) -> None:
        pass
