"""Converts samples into the answers of `/inference/v1/generate`: one object, or the events of a stream.

A token is named `token_id:N`, and its id is a field of its own, so that clients of all versions of vLLM can read the
answer. With `output_mode="text"`, a token is named by its text. Log-probabilities are encoded position by position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from verl_server.messages.packed import TokenLogprobs
from verl_server.server.dialects.vllm.reading import ReadInference
from verl_server.server.http.responses import write_json
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices

_POSITIONS = 16
"""Number of positions that are encoded between two checks of the clock."""
_LOWEST = -9999.0
"""vLLM's value for a log-probability that is not finite, which JSON cannot hold."""


class InferenceChoices:
    """The answer to one request. `request_id` is the caller's name, without vLLM's prefix."""

    def __init__(self, read: ReadInference, request_id: str, model: str) -> None:
        self._request, self._sampling = read.request, read.sampling
        self._id = f"generate-tokens-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._sent: dict[int, tuple[int, int]] = {}
        """Choice -> (tokens, characters) that were sent in events."""

    async def response(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [await self._choice(i, state, 0, len(state.output_ids)) for i, state in enumerate(states)]
        for choice, state in zip(choices, states, strict=True):
            choice |= _ending(state)
            if self._in_text:
                choice["text"] = state.text()
        return {
            "request_id": self._id,
            "created": self._created,
            "model": self._model,
            "output_mode": self._request.output_mode,
            "choices": choices,
            "usage": _usage(states, details=True),
            "prompt_logprobs": await self._prompt_logprobs(states[0]),
            "prompt_token_ids": states[0].prompt_ids if self._request.return_token_ids else None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    async def chunk(self, i: int, state: ReqState, states: Sequence[ReqState]) -> dict[str, Any] | None:
        """Return an event with the tokens of choice `i` since its last event, None if there is nothing to send."""
        tokens, characters = self._sent.get(i, (0, 0))
        count, text = len(state.output_ids), state.text() if self._in_text else ""
        if count == tokens and len(text) == characters and not state.done:
            return None
        choice = await self._choice(i, state, tokens, count)
        if self._in_text:
            choice["text"] = text[characters:]
        choice |= _ending(state) if state.done else {"finish_reason": None, "stop_reason": None}
        chunk: dict[str, Any] = {"request_id": self._id, "output_mode": self._request.output_mode, "choices": [choice]}
        if self._request.return_token_ids and not self._sent:
            chunk["prompt_token_ids"] = state.prompt_ids
        self._sent[i] = count, len(text)
        options = self._request.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = _usage([state])
        return chunk

    def usage_chunk(self, states: Sequence[ReqState]) -> dict[str, Any] | None:
        """Return the last event, with the numbers of tokens, if the caller wants it."""
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return None
        usage = _usage(states, details=True)
        return {"request_id": self._id, "output_mode": self._request.output_mode, "choices": [], "usage": usage}

    @property
    def _in_text(self) -> bool:
        return self._request.output_mode == "text"

    async def _choice(self, i: int, state: ReqState, start: int, end: int) -> dict[str, Any]:
        content = await self._content(state, start, end) if self._wants_logprobs else None
        return {
            "index": i,
            "token_ids": state.output_ids[start:end],
            "logprobs": None if content is None else {"content": content},
            "routed_experts": None,
            "sampling_mask": None,
        }

    # -- log-probabilities ----------------------------------------------------------------------------------

    @property
    def _wants_logprobs(self) -> bool:
        return self._sampling.logprobs is not None or bool(self._sampling.logprob_token_ids)

    async def _content(self, state: ReqState, start: int, end: int) -> orjson.Fragment:
        """Return the encoded list with an entry for each of the output tokens [start, end).

        The JSON text is assembled directly, because it takes ten times as long to encode objects of hundreds of tokens.
        """
        slices = Slices()
        entries: list[str] = []
        named = self._text_entry(state) if self._in_text else _entry
        ranked = not self._sampling.logprob_token_ids
        for k in range(start, min(end, len(state.output_logprobs))):
            token = state.output_ids[k]
            others: list[str] = []
            own_rank = None
            for rank, (other, value) in enumerate(_pairs(self._candidates(state, k)), start=1):
                if other == token:
                    own_rank = rank if ranked else None
                else:
                    others.append(named(other, value, rank if ranked else None))
            own = named(token, state.output_logprobs[k], own_rank)
            entries.append(f'{own[:-1]},"top_logprobs":[{",".join([own, *others])}]}}')
            if not k % _POSITIONS:
                await slices.end()
        return orjson.Fragment("[" + ",".join(entries) + "]")

    def _candidates(self, state: ReqState, k: int) -> TokenLogprobs | None:
        """Return the candidates at output position `k` that the caller wants, at most as many as requested."""
        if self._sampling.logprob_token_ids:
            return state.output_requested[k]
        wanted = self._sampling.logprobs or 0
        if not wanted or not state.output_top:
            return None
        found = state.output_top[k]
        return found if wanted == -1 else found.first(wanted)

    @staticmethod
    def _text_entry(state: ReqState) -> Callable[[int, float, int | None], str]:
        """Return `_entry` with the texts of tokens as their names."""
        assert state.decode is not None
        decode = state.decode

        def entry(token: int, logprob: float, rank: int | None) -> str:
            text = decode([token])
            name, data = orjson.dumps(text).decode(), list(text.encode())
            return (
                f'{{"token":{name},"token_id":{token},"logprob":{_finite(logprob)!r},"bytes":{data},'
                f'"rank":{"null" if rank is None else rank}}}'
            )

        return entry

    async def _prompt_logprobs(self, state: ReqState) -> list[Any] | None:
        """Return {token id: log-probability and rank} for each prompt position, null for the first."""
        found, wanted = state.prompt_logprobs, self._sampling.prompt_logprobs
        if wanted is None or found is None:
            return None
        slices = Slices()
        positions: list[Any] = []
        columns = zip(found.token_ids, found.logprobs, found.ranks, strict=True)
        for k, (token, logprob, own_rank) in enumerate(columns):
            if logprob is None:
                positions.append(None)
                continue
            top = found.top[k] if found.top is not None else None
            pairs = list(_pairs(top))[: wanted if wanted >= 0 else None]
            entries = {token: (logprob, own_rank)}
            for rank, (other, value) in enumerate(pairs, start=1):
                entries.setdefault(other, (value, rank))
            decode = state.decode if self._in_text else None
            shown = {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": decode([other]) if decode is not None else None,
                }
                for other, (value, rank) in entries.items()
            }
            positions.append(write_json(shown))
            await slices.end()
        return positions


def _entry(token: int, logprob: float, rank: int | None) -> str:
    """Return a token with its log-probability as JSON. Its name is its id."""
    return (
        f'{{"token":"token_id:{token}","token_id":{token},"logprob":{_finite(logprob)!r},"bytes":null,'
        f'"rank":{"null" if rank is None else rank}}}'
    )


def _pairs(candidates: TokenLogprobs | None) -> zip[tuple[int, float]]:
    """Return an iterator over (token id, log-probability)."""
    if candidates is None:
        return zip((), (), strict=True)
    return zip(candidates.token_ids, candidates.logprobs, strict=True)


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST  # NaN compares as False


def _ending(state: ReqState) -> dict[str, Any]:
    """Return the reason why a choice ended, and the weight versions of its tokens."""
    reason = state.finish_reason
    matched = reason.matched if reason is not None else None
    if isinstance(matched, int) and matched not in (state.req.sampling.stop_token_ids or ()):
        matched = None  # as in vLLM, EOS is no stop_reason
    return {
        "finish_reason": reason.type if reason is not None else None,
        "stop_reason": matched,
        "weight_versions": state.weight_versions,
    }


def _usage(states: Sequence[ReqState], details: bool = False) -> dict[str, Any]:
    prompt = states[0].num_prompt_tokens
    completion = sum(len(state.output_ids) for state in states)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
    }  # fmt: skip
    if details:
        usage["prompt_tokens_details"] = {"cached_tokens": max(state.cached_tokens for state in states)}
    return usage
