"""`PrefixIndex`: which servers have seen the beginning of a prompt, so that a request goes where its prefix is cached.

A prompt is the bytes of the request's body from the prompt's field on: ids and messages that grow by appending have
bytes that grow by appending. They are cut into blocks; the hash of a block covers all blocks before it. The index
remembers for each hash which servers got a request with it. It is a guess about caches; a wrong one costs time only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_BLOCK = 1024
"""Bytes of a block: about 250 tokens of text, or 170 ids."""
_MOST_BLOCKS = 1024
"""Blocks of a prompt that are looked at. 1 MiB takes about 2 ms, with the look at the index."""
_MOST_HASHES = 500_000
"""Hashes in the index, about 100 MB. Those that were not used for the longest time are dropped."""
_MOST_BEFORE = 64 * 1024
"""Bytes of a body in which the prompt's field is looked for."""
_FIELDS = (
    b'"input_ids"',
    b'"messages"',
    b'"prompt"',
    b'"text"',
    b'"input"',
    b'"token_ids"',
    b'"prompt_token_ids"',
)


def prompt_blocks(body: bytes, packed: int = 0) -> list[int]:
    """Return the hashes of the prompt's blocks. `packed` is the number of bytes of ids before the JSON, if any.

    They are Python's hashes of bytes, which nobody can foresee who does not know the seed of this process.
    """
    if packed:
        start, end = 0, packed
    else:
        start, end = _prompt_start(body), len(body)
    blocks: list[int] = []
    before = 0
    for at in range(start, min(end, start + _MOST_BLOCKS * _BLOCK) - _BLOCK + 1, _BLOCK):
        before = hash((before, body[at : at + _BLOCK]))
        blocks.append(before)
    return blocks


def _prompt_start(body: bytes) -> int:
    """Return the place of the first field of a prompt in a JSON body, 0 if there is none."""
    start = _MOST_BEFORE
    for field in _FIELDS:
        if (at := body.find(field, 0, start + len(field) - 1)) >= 0:
            start = at
    return 0 if start == _MOST_BEFORE else start


class PrefixIndex:
    def __init__(self, most_hashes: int = _MOST_HASHES) -> None:
        self._most = most_hashes
        self._servers: OrderedDict[int, dict[str, int]] = OrderedDict()
        """Hash -> name of each server that saw it -> the server's epoch at that time."""
        self._ends: set[int] = set()
        """Hashes of the last blocks of prompts."""
        self._epochs: dict[str, int] = {}

    def known(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return the number of leading blocks that each server has seen, for servers that have seen some."""
        counts: dict[str, int] = {}
        present: set[str] | None = None
        for count, block in enumerate(blocks, start=1):
            seen = self._servers.get(block)
            if seen is None:
                break
            now = {name for name, epoch in seen.items() if epoch == self._epochs.get(name, 0)}
            present = now if present is None else present & now
            if not present:
                break
            counts.update(dict.fromkeys(present, count))
        return counts

    def continues(self, blocks: Sequence[int], count: int) -> bool:
        """Return True if the first `count` blocks are a whole prompt: this one repeats it or goes on with it.

        False: it shares a beginning with others, such as a prompt of the system.
        """
        return count > 0 and blocks[count - 1] in self._ends

    def add(self, blocks: Sequence[int], server: str) -> None:
        """Note that a server computes these blocks."""
        epoch = self._epochs.get(server, 0)
        for block in blocks:
            self._servers.setdefault(block, {})[server] = epoch
            self._servers.move_to_end(block)
        if blocks:
            self._ends.add(blocks[-1])
        while len(self._servers) > self._most:
            self._ends.discard(self._servers.popitem(last=False)[0])

    def forget(self, server: str) -> None:
        """Note that a server's cache is of no use any more: it was started again, or has other weights."""
        self._epochs[server] = self._epochs.get(server, 0) + 1
