"""`MessageNodes`: the records of a session's message tree (`chat.history.NODE`), which turns append.

`Session` owns it, and the ledger appends on the event loop. The messages of a request are one block of records. A block
is compared and copied as a whole. So the work in Python does not grow with the number of messages, but with the number
of points at which conversations diverge.
"""

from __future__ import annotations

import numpy as np

from verl_server.chat.history import NODE

_WORDS = NODE.size // 4
_PARENT, _TURN, _CONTENT = 0, 1, slice(2, 9)
"""Positions of the fields of `NODE` in 32-bit words. The content is role, digest and reasoning."""
_START_BYTES = 200
"""Bytes of an entry of `_starts`."""


class MessageNodes:
    __slots__ = ("_starts", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        """The records."""
        # The children of each node that is not the record before them: (parent, content) -> node. Others need no entry.
        self._starts: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.data) // NODE.size

    @property
    def memory(self) -> int:
        """Approximate bytes of memory."""
        return len(self.data) + _START_BYTES * len(self._starts)

    def extend(self, records: bytes) -> None:
        """Append records unchanged."""
        if not records:
            return
        first = len(self)
        self.data += records
        words = _words(records)
        is_start = (words[:, _PARENT] != np.arange(first - 1, first - 1 + len(words))) & (words[:, _TURN] < 0)
        for place in np.flatnonzero(is_start).tolist():
            self._starts.setdefault(_start(int(words[place, _PARENT]), words[place]), first + place)

    def append(self, records: bytes, after: int) -> int:
        """Append consecutive messages after node `after`. Return the last node.

        A message that is in the tree already is not appended again, so turns with equal messages have the same prompt
        node. The parents in `records` are ignored. The node of a sampled reply never counts as one of these messages.
        """
        if not records:
            return after
        node, place = self._known(records, after)
        new = _words(records)[place:].copy()
        if len(new) == 0:
            return node
        first = len(self)
        new[:, _PARENT] = np.arange(first - 1, first - 1 + len(new))
        new[0, _PARENT] = node
        new[:, _TURN] = -1
        self.extend(new.tobytes())
        return first + len(new) - 1

    def missing(self, records: bytes, after: int) -> int:
        """Return the number of messages that `append` would append."""
        return len(records) // NODE.size - self._known(records, after)[1] if records else 0

    def append_reply(self, parent: int, turn: int, role: int, digest: bytes, reasoning: bytes) -> int:
        """Append the reply of a turn, and return its node."""
        self.data += NODE.pack(parent, turn, role, b"", digest, reasoning, 0, 0)
        return len(self) - 1

    def _known(self, records: bytes, after: int) -> tuple[int, int]:
        """Return (last node, number) of the leading messages that are in the tree already."""
        words = _words(records)
        node, place = after, 0
        while place < len(words) and (known := self._child(node, words[place])) >= 0:
            length = self._common(known, words[place:])
            node, place = known + length - 1, place + length
        return node, place

    def _child(self, parent: int, message: np.ndarray) -> int:
        """Return the node of a message under `parent`, or -1."""
        known = self._starts.get(_start(parent, message), -1)
        if known >= 0 or parent + 1 >= len(self):
            return known
        return parent + 1 if self._common(parent + 1, message[None], parent) else -1

    def _common(self, node: int, messages: np.ndarray, parent: int | None = None) -> int:
        """Return how many of the leading `messages` equal the records from `node` on, each a child of the preceding
        record.

        `parent` is the parent that the first record must have. None: the first record is known to have the right
        parent.
        """
        begin = node * NODE.size
        own = _words(bytes(self.data[begin : begin + NODE.size * len(messages)]))
        messages = messages[: len(own)]
        fits = (own[:, _CONTENT] == messages[:, _CONTENT]).all(axis=1) & (own[:, _TURN] < 0)
        fits[1:] &= own[1:, _PARENT] == np.arange(node, node + len(own) - 1)
        if parent is not None:
            fits[0] &= own[0, _PARENT] == parent
        return len(fits) if fits.all() else int(fits.argmin())


def _words(records: bytes) -> np.ndarray:
    """Return records as 32-bit words, one row for each."""
    return np.frombuffer(records, "<i4").reshape(-1, _WORDS)


def _start(parent: int, message: np.ndarray) -> bytes:
    return parent.to_bytes(4, "little", signed=True) + message[_CONTENT].tobytes()
