"""Sessions of an earlier run: reads them from the store, and holds their turns until the weights are confirmed.

A server that was started again serves the weights that it loads, and its sessions were sampled from pushed ones. Turns
therefore wait until an update or the owner has confirmed the weights, or the version is the one of the last turn. A
free label that is equal, such as "default" or "13", proves nothing (`weight_version`). It counts only if the owner has
stated it at the start of the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from verl_server.server.sessions.journal_files import DamagedStoreError
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.records import CutRecord, DeleteRecord, SessionRecord
from verl_server.weight_version import WeightVersion

logger = logging.getLogger(__name__)


class RestartGate:
    """Says why sessions cannot continue now."""

    def __init__(
        self, weight_version: Callable[[], str], is_confirmed: Callable[[], bool], stated: str | None = None
    ) -> None:
        """`weight_version` and `is_confirmed` return the server's state. `stated` is `ServerArgs.weight_version`."""
        self._weight_version, self._is_confirmed, self._stated = weight_version, is_confirmed, stated
        self._expected: str | None = None

    def close(self, version: str | None) -> None:
        """Close the gate until the weights are known to be those of `version`. None leaves the gate open."""
        self._expected = version

    def __call__(self) -> str | None:
        if self._expected is None:
            return None
        if self._is_confirmed() or self._is_expected():
            self._expected = None
            return None
        return (
            f"The server was started again and serves version {self._weight_version()}; the session store ends at "
            f"version {self._expected}: push weights (heal), call accept_restart(), or start with --weight-version "
            f"{self._expected}."
        )

    def _is_expected(self) -> bool:
        """Return True if the label of the weights proves that they are the expected ones."""
        is_proof = self._expected == self._stated or WeightVersion.parse(self._expected or "") is not None
        return is_proof and self._weight_version() == self._expected


def restore(ledger: SessionLedger, records: Iterable[Any]) -> int:
    """Apply the records of earlier runs. Return their number. Raise DamagedStoreError if they do not fit together.

    A record of a deleted session is skipped, because a turn may end after the deletion. After a repair (`CutRecord`), a
    session whose records do not fit together has lost some records, and is skipped.
    """
    count, lost, is_repaired = 0, set[str](), False
    for record in records:
        count += 1
        if isinstance(record, CutRecord):
            is_repaired = True
            continue
        if not isinstance(record, SessionRecord) and record.session not in ledger.table:
            continue
        try:
            ledger.table.apply(record)
        except (KeyError, IndexError) as error:
            if not is_repaired:
                raise DamagedStoreError(
                    f"The session store is damaged: {type(record).__name__} without {error}."
                ) from None
            root = (record.id if isinstance(record, SessionRecord) else record.session).partition(".")[0]
            lost.add(root)
            if root in ledger.table:
                ledger.table.apply(DeleteRecord(root))
    if lost:
        logger.warning(
            "%d sessions lost records before the store was repaired, and are left out: %s",
            len(lost),
            ", ".join(sorted(lost)[:10]) + (", ..." if len(lost) > 10 else ""),
        )
    ledger.restored()
    return count
