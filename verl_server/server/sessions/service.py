"""`SessionService`: the ledgers of one HTTP server with its store, from the start to the end.

`HttpServer` creates it, opens it when the engine is ready, and closes it. Until the store has been read, requests in
sessions are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_server.server.sessions.journal import Journal
from verl_server.server.sessions.journal_files import JournalFiles
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.limits import Bounds
from verl_server.server.sessions.records import FORMAT, HeaderRecord
from verl_server.server.sessions.restart import RestartGate, restore
from verl_server.server.sessions.turn_ledger import TurnLedger
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)


class SessionService:
    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        self._manager, self._args = manager, server_args
        controls = manager.controls
        self._gate = RestartGate(
            lambda: controls.weight_version, lambda: controls.weights_confirmed, server_args.weight_version
        )
        bounds = Bounds(
            memory_bytes=server_args.session_memory_bytes,
            ttl=server_args.session_ttl,
            retention=server_args.session_retention,
            max_sessions=server_args.max_sessions,
            max_turn_tokens=server_args.max_session_turn_tokens,
        )
        self.ledger = SessionLedger(bounds, gate=self._gate, counters=manager.metrics, on_end=manager.finish_session)
        self.ledger.table.is_complete = server_args.session_store is None
        self.turns = TurnLedger(self.ledger, end_tokens=self._end_tokens, longest=self._longest)
        manager.metrics.watch_sessions(self.ledger.table)
        self._journal: Journal | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def _end_tokens(self) -> list[int]:
        text = self._manager.model_text
        return [] if text is None else list(text.eos_token_ids)

    def _longest(self) -> int:
        return self._manager.text.bounds.longest

    async def open(self) -> None:
        """Read the store, and begin to write it. Raise BadRequestError or DamagedStoreError."""
        if self._sweeping is not None:
            return
        if self._args.session_store is not None:
            await self._open_store(Path(self._args.session_store))
        self._sweeping = asyncio.ensure_future(self.ledger.run())

    async def _open_store(self, folder: Path) -> None:
        files = JournalFiles(folder, self._header())
        journal = Journal(files, self._args.session_fsync, asyncio.get_running_loop())
        files.open()
        try:

            def counted() -> Iterator[Any]:
                for record, size in files.records():
                    journal.count(record, size)
                    yield record

            count = await asyncio.to_thread(lambda: restore(self.ledger, counted()))
            journal.start()
        except BaseException:
            files.close()
            raise
        open_sessions = sum(session.state == "open" for session in self.ledger.table.roots())
        self._gate.close(self.ledger.table.last_version if open_sessions else None)
        self.ledger.store = self._journal = journal
        self._manager.metrics.watch_store(journal)
        self.ledger.table.is_complete = True
        logger.info("The session store %s has %d records and %d open sessions.", folder, count, open_sessions)
        if (reason := self._gate()) is not None:
            logger.warning("%s Turns of sessions are answered 503 until then.", reason)

    def _header(self) -> HeaderRecord:
        text = self._manager.model_text
        tokenizer = None if text is None else text.tokenizer_json
        digest = hashlib.blake2b(tokenizer or b"", digest_size=16).digest()
        return HeaderRecord(FORMAT, self._manager.text.bounds.vocab_size, digest, self._args.model_path)

    async def close(self) -> None:
        """Stop the sweep, and write the waiting records."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        if self._journal is not None:
            journal, self._journal = self._journal, None
            await asyncio.to_thread(journal.close)
