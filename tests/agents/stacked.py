"""The server's front process with a family's tokenizer and template, over a scheduler that samples what a test wants.

SDKs call the application in the process, on its own event loop.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import httpx2
from anthropic import AsyncAnthropic
from families import Family
from openai import AsyncOpenAI

from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO
from verl_server.messages.io_struct import TokenizedGenerateReq

T = TypeVar("T")

OWNER = {"Authorization": "Bearer owner"}
_CONTEXT = 16384


class FamilyStack:
    """A `Stack` for one family."""

    def __init__(self, family: Family, stack: Stack) -> None:
        self.family, self.stack = family, stack
        self.byte_ids = _byte_ids(family)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 60.0) -> T:
        """Run a coroutine on the event loop of the application."""
        return self.stack.manager.run_sync(work, timeout=timeout)

    def owner(self, method: str, path: str, **options: Any) -> Any:
        answer = self.stack.request(method, path, headers=OWNER, **options)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def samples(self, outputs: Sequence[Sequence[int]]) -> None:
        """Let the scheduler sample these ids, an output for each request."""
        left = iter(outputs)
        self.stack.scheduler.script = lambda req: list(next(left))

    def sent(self) -> list[TokenizedGenerateReq]:
        """Return the requests that the scheduler received since `forget`."""
        return [each for each in self.stack.scheduler.received if isinstance(each, TokenizedGenerateReq)]

    def forget(self) -> None:
        self.stack.scheduler.received.clear()

    def other_ids(self, text: str, draw: random.Random) -> list[int]:
        """Return ids of a text that the tokenizer would not choose. Tags stay whole tokens."""
        ids: list[int] = []
        for part in self._around_tags(text):
            tag = self._tags().get(part)
            ids += [tag] if tag is not None else self._cut(part, draw)
        return ids

    def _cut(self, text: str, draw: random.Random) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            piece = text[at : at + draw.choice((1, 1, 2, 3, 5, 8))]
            at += len(piece)
            if draw.random() < 0.2:
                ids += [self.byte_ids[byte] for byte in piece.encode()]
            else:
                ids += self.family.tokenizer.encode(piece, add_special_tokens=False)
        return ids

    def _around_tags(self, text: str) -> Iterator[str]:
        """Yield the tags in a text, and the texts between them."""
        while text:
            found = [(text.find(tag), tag) for tag in self._tags() if tag in text]
            at, tag = min(found, default=(len(text), ""))
            if at:
                yield text[:at]
            if tag:
                yield tag
            text = text[at + len(tag) :]

    def _tags(self) -> dict[str, int]:
        added = self.family.tokenizer.added_tokens_decoder.items()
        return {token.content: number for number, token in added if not token.content.startswith(("<SPECIAL", "<unk"))}


@contextmanager
def family_stack(family: Family, folder: Path) -> Iterator[FamilyStack]:
    """Run the front process for a family's folder."""
    before = dict(INFO)
    vocab = -(-len(family.tokenizer) // 64) * 64
    INFO.update(context_length=_CONTEXT, max_req_input_len=_CONTEXT - 1, max_total_num_tokens=1 << 20, vocab_size=vocab)
    stack = Stack(folder, api_key="owner", max_sessions=5000)
    try:
        yield FamilyStack(family, stack)
    finally:
        stack.close()
        INFO.update(before)


class StackedSession:
    """A session, with clients of the SDKs."""

    def __init__(self, stack: FamilyStack, **body: Any) -> None:
        self._stack = stack
        created = stack.owner("POST", "/sessions", json=body)
        self.id = created["id"]
        app = stack.stack.app
        plain = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        newer = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))  # the package that anthropic uses
        local = "http://localhost"
        self.openai = AsyncOpenAI(
            base_url=local + created["base_url"], api_key="unused", http_client=plain, max_retries=0
        )
        self.anthropic = AsyncAnthropic(
            base_url=local + created["anthropic_base_url"], api_key="unused", http_client=newer, max_retries=0
        )

    def trajectory(self, query: str = "") -> dict[str, Any]:
        found: dict[str, Any] = self._stack.owner("GET", f"/sessions/{self.id}/trajectory{query}")
        return found

    def end(self) -> None:
        self._stack.owner("DELETE", f"/sessions/{self.id}")


def sampled(branch: dict[str, Any]) -> list[int]:
    """Return the ids of a branch that have a loss mask."""
    return list(itertools.compress(branch["ids"], branch["loss_mask"]))


def _byte_ids(family: Family) -> list[int]:
    """Return the token of each byte."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    return [family.token_id(letters[byte]) for byte in range(256)]
