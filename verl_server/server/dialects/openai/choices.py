"""`Choices` builds OpenAI's responses and stream chunks from samples: `TextChoices` and `ChatChoices`."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from verl_server.io_struct import TokenLogprobs
from verl_server.server.dialects.openai.protocol import OpenAIRequest
from verl_server.server.request_state import ReqState, Triple
from verl_server.server.responses import write_json
from verl_server.server.slices import Slices
from verl_server.server.tokenizer import ModelText


class Choices(abc.ABC):
    """Builds the answer to one request, and records how much of each sample was streamed."""

    object_name: str
    chunk_name: str

    def __init__(self, text: ModelText, model: str, body: OpenAIRequest) -> None:
        self._model = model
        self._body = body
        self._decode = text.decoder(skip_special_tokens=False)
        self._decode_shown = text.decoder(body.skip_special_tokens is not False)
        self._created = int(time.time())
        self._id: str | None = None
        self._sent: dict[int, tuple[int, int]] = {}  # index of a choice -> (characters, tokens) that were streamed

    # -- different for text and chat ------------------------------------------------------------------------

    @abc.abstractmethod
    def choice(self, index: int, state: ReqState, logprobs: Any) -> dict[str, Any]:
        """Return a whole choice."""

    @abc.abstractmethod
    def delta(self, index: int, text: str, logprobs: Any, first: bool) -> dict[str, Any]:
        """Return the choice of a chunk. `text` is the new text, and `first` is True for the sample's first chunk."""

    @abc.abstractmethod
    async def logprobs(self, state: ReqState, start: int, end: int) -> Any:
        """Return the log-probabilities of the output tokens [start, end), or None if they were not requested.

        Each position is encoded when it is built, because it may have hundreds of candidates.
        """

    # -- shared ---------------------------------------------------------------------------------------------

    async def response(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the whole response."""
        slices = Slices()
        choices = []
        for i, state in enumerate(states):
            choices.append(write_json(self.choice(i, state, await self.logprobs(state, 0, len(state.output_ids)))))
            await slices.end()
        return self._head(self.object_name, states[0]) | {
            "choices": choices,
            "usage": self.usage(states),
            "metadata": {
                "weight_version": states[0].weight_version,
                "weight_versions": [span for state in states for span in state.weight_versions],
            },
        }

    async def chunks(self, index: int, state: ReqState) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks with the new text and tokens of a sample. The last chunk has only the finish reason."""
        head = self._head(self.chunk_name, state)
        first = index not in self._sent
        chars, tokens = self._sent.get(index, (0, 0))
        prefix = self.echoed(state) if first else ""
        # Tokens that arrive while log-probabilities are encoded belong to the next chunk.
        text, until, done = state.text(), len(state.output_ids), state.done
        new = prefix + text[chars:]
        if first or new or until > tokens:
            choice = self.delta(index, new, await self.logprobs(state, tokens, until), first)
            choice["finish_reason"] = None
            if self._body.return_token_ids:
                choice["token_ids"] = state.output_ids[tokens:until]
            self._sent[index] = (len(text), until)
            yield head | {"choices": [choice]} | self._running_usage(state)
        if done:
            choice = self.delta(index, "", None, False) | _finish(state)
            yield head | {"choices": [choice]} | self._running_usage(state)

    def usage_chunk(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the chunk that has only the token counts."""
        return self._head(self.chunk_name, states[0]) | {"choices": [], "usage": self.usage(states)}

    def usage(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the token counts. A prompt with n samples counts once."""
        prompts = states[:: self._body.n]
        prompt = sum(len(state.req.input_ids) for state in prompts)
        completion = sum(len(state.output_ids) for state in states)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(state.cached_tokens for state in prompts)},
            "reasoning_tokens": 0,
        }

    def echoed(self, state: ReqState) -> str:
        """Return the text of the prompt if the request has `echo`, otherwise ""."""
        return ""

    def _running_usage(self, state: ReqState) -> dict[str, Any]:
        return {"usage": self.usage([state])} if self._body.wants_usage_in_each_chunk else {}

    def _head(self, object_name: str, state: ReqState) -> dict[str, Any]:
        self._id = self._id or state.rid
        return {"id": self._id, "object": object_name, "created": self._created, "model": self._model}

    def _token_ids(self, state: ReqState) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        ids = state.output_ids.copy()
        return {"token_ids": ids, "response_token_ids": ids, "prompt_token_ids": state.req.input_ids}

    def _token(self, token: int) -> str:
        return self._decode([token])


class TextChoices(Choices):
    object_name = chunk_name = "text_completion"

    def choice(self, index: int, state: ReqState, logprobs: Any) -> dict[str, Any]:
        text = self.echoed(state) + state.text()
        return {"index": index, "text": text, "logprobs": logprobs} | _finish(state) | self._token_ids(state)

    def delta(self, index: int, text: str, logprobs: Any, first: bool) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs}

    def echoed(self, state: ReqState) -> str:
        return self._decode_shown(state.req.input_ids) if getattr(self._body, "echo", False) else ""

    async def logprobs(self, state: ReqState, start: int, end: int) -> Any:
        if not state.req.return_logprob:
            return None
        triples = state.output_triples(start)[: end - start]
        candidates: list[TokenLogprobs | None] = [*state.output_top[start:end]]
        prompt = state.prompt_logprobs
        if start == 0 and getattr(self._body, "echo", False) and prompt is not None:
            triples = [[v, t, None] for v, t in zip(prompt.logprobs, prompt.token_ids, strict=True)] + triples
            candidates = [*(prompt.top or []), *candidates]
        slices = Slices()
        tokens, offsets, at = [], [], 0
        for triple in triples:
            tokens.append(self._token(triple[1]))
            offsets.append(at)
            at += len(tokens[-1])
            await slices.end()
        top = []
        for each in candidates:
            found = {self._token(t[1]): t[0] for t in reversed(state.triples(each) or [])}
            top.append(write_json(found or None))
            await slices.end()
        return {
            "text_offset": offsets,
            "token_logprobs": [t[0] for t in triples],
            "tokens": tokens,
            "top_logprobs": top or None,
        }


class ChatChoices(Choices):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int, state: ReqState, logprobs: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": state.text(), "reasoning_content": None, "tool_calls": None}
        return {"index": index, "message": message, "logprobs": logprobs} | _finish(state) | self._token_ids(state)

    def delta(self, index: int, text: str, logprobs: Any, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text}
        if first:
            delta = {"role": "assistant"} | delta
        return {"index": index, "delta": delta, "logprobs": logprobs}

    async def logprobs(self, state: ReqState, start: int, end: int) -> Any:
        if not state.req.return_logprob:
            return None
        triples = state.output_triples(start)[: end - start]
        tops: list[TokenLogprobs | None] = [*state.output_top[start:end]] or [None] * len(triples)
        slices = Slices()
        content = []
        for triple, top in zip(triples, tops, strict=False):
            candidates = [self._entry(t) for t in state.triples(top) or []]
            content.append(write_json(self._entry(triple) | {"top_logprobs": candidates}))
            await slices.end()
        return {"content": content}

    def _entry(self, triple: Triple) -> dict[str, Any]:
        token = self._token(triple[1])
        return {"token": token, "bytes": list(token.encode()), "logprob": triple[0]}


def _finish(state: ReqState) -> dict[str, Any]:
    reason = state.finish_reason
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason.type, "matched_stop": reason.matched}
