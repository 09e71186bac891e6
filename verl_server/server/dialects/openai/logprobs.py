"""Log-probabilities in the shapes of OpenAI's completions, OpenAI's chat and vLLM's `prompt_logprobs`.

The functions return encoded JSON. One position may have hundreds of candidates. So the functions encode token by token,
in slices, and build no objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson

from verl_server.messages.packed import TokenLogprobs
from verl_server.server.dialects.openai.protocol import OpenAIRequest
from verl_server.server.dialects.openai.tokens import TokenTexts
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices

_LEAST = -9999.0
"""Value that replaces minus infinity, which JSON lacks. OpenAI and vLLM use the same value."""


class Position(NamedTuple):
    """One token and the candidates at its position."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    candidates: TokenLogprobs | None
    rank: int | None = None
    """Rank of the token in the vocabulary: 1 is the most likely token. Known for prompts only."""


class LogprobWriter:
    """Encodes the log-probabilities of one request."""

    def __init__(self, texts: TokenTexts, body: OpenAIRequest, top: int | None) -> None:
        """`top` is the number of candidates that are shown; None shows no log-probabilities."""
        self._texts = texts
        self._as_ids = body.return_tokens_as_token_ids
        self._requested = body.logprob_token_ids is not None
        self._prompt_top = body.prompt_logprobs
        self._top = top

    @property
    def is_on(self) -> bool:
        return self._top is not None

    def output(self, state: ReqState, start: int, end: int) -> list[Position]:
        """Return the positions [start, end) of the output."""
        found: Sequence[TokenLogprobs | None] = state.output_requested if self._requested else state.output_top
        return [
            Position(state.output_ids[k], state.output_logprobs[k], found[k] if k < len(found) else None)
            for k in range(start, end)
        ]

    def prompt(self, state: ReqState) -> list[Position]:
        """Return the positions of the prompt whose log-probabilities were requested."""
        prompt = state.prompt_logprobs
        if prompt is None:
            return []
        found = (prompt.requested if self._requested else prompt.top) or [None] * len(prompt.token_ids)
        columns = zip(prompt.token_ids, prompt.logprobs, found, prompt.ranks, strict=True)
        return [Position(*each) for each in columns]

    async def completion(self, positions: Iterable[Position], offset: int) -> tuple[bytes, int]:
        """Return (`logprobs` of a choice of /v1/completions, offset of the next token).

        `offset` is the number of characters before the first token.
        """
        assert self._top is not None
        slices = Slices()
        tokens, offsets, values, tops = [], [], [], []
        for position in positions:
            tokens.append(self._texts.name_json(position.token, self._as_ids))
            offsets.append(offset)
            offset += len(self._texts.name(position.token, self._as_ids))
            values.append(_number(position.logprob))
            tops.append(self._by_text(position, self._top))
            await slices.end()
        encoded = b'{"text_offset":%b,"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}' % (
            orjson.dumps(offsets),
            b",".join(values),
            b",".join(tokens),
            b",".join(tops),
        )
        return encoded, offset

    async def chat(self, positions: Iterable[Position]) -> bytes:
        """Return `logprobs` of a choice of a chat."""
        return b'{"content":[%b]}' % await self.entries(positions)

    async def entries(self, positions: Iterable[Position]) -> bytes:
        """Return entries {"token", "bytes", "logprob", "top_logprobs"}, with commas between them."""
        assert self._top is not None
        slices = Slices()
        content = []
        head, as_ids = self._texts.entry_head, self._as_ids
        for position in positions:
            candidates = [
                b"%b%b}" % (head(token, as_ids), _number(value))
                for token, value in _pairs(position.candidates, None if self._requested else self._top)
            ]
            content.append(
                b'%b%b,"top_logprobs":[%b]}'
                % (head(position.token, as_ids), _number(position.logprob), b",".join(candidates))
            )
            await slices.end()
        return b",".join(content)

    async def prompt_logprobs(self, state: ReqState) -> bytes:
        """Return vLLM's `prompt_logprobs`. The request must have requested them."""
        assert self._prompt_top is not None
        slices = Slices()
        written = []
        for position in self.prompt(state):
            written.append(self._with_rank(position, self._prompt_top))
            await slices.end()
        return b"[%b]" % b",".join(written)

    def _by_text(self, position: Position, top: int) -> bytes:
        """Return {text: log-probability} with the token itself first.

        Different tokens may have one text. The first one has the text as its key, and the others `token_id:<id>`.
        """
        if position.logprob is None:
            return b"null"
        name = self._texts.name_json
        own = name(position.token, self._as_ids)
        entries = {own: _number(position.logprob)}
        for token, value in _pairs(position.candidates, None if self._requested else top):
            if token == position.token:
                continue
            key = name(token, self._as_ids)
            entries[key if key not in entries else name(token, True)] = _number(value)
        return b"{%b}" % b",".join([b"%b:%b" % entry for entry in entries.items()])

    def _with_rank(self, position: Position, top: int) -> bytes:
        """Return {token id: {"logprob", "rank", "decoded_token"}} with the prompt's token first."""
        if position.logprob is None:
            return b"null"
        ranks: dict[int, tuple[float | None, int | None]] = {position.token: (position.logprob, position.rank)}
        for rank, (token, value) in enumerate(_pairs(position.candidates, top), start=1):
            ranks.setdefault(token, (value, rank))
        return b"{%b}" % b",".join(
            [
                b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}'
                % (token, _number(value), orjson.dumps(rank), self._texts.name_json(token, False))
                for token, (value, rank) in ranks.items()
            ]
        )


def _pairs(candidates: TokenLogprobs | None, top: int | None) -> Iterable[tuple[int, float | None]]:
    if candidates is None:
        return ()
    return zip(candidates.token_ids[:top], candidates.logprobs[:top], strict=True)


def _number(value: float | None) -> bytes:
    return b"null" if value is None else orjson.dumps(value if value > _LEAST else _LEAST)
