"""`Choices` builds OpenAI's responses and stream chunks from samples. `TextChoices` are those of /v1/completions.

There is a chunk for each step of each stream. So chunks are assembled as bytes, and the constant parts of a stream are
encoded once.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from verl_server.server.dialects.openai.logprobs import LogprobWriter
from verl_server.server.dialects.openai.protocol import CompletionRequest, OpenAIRequest
from verl_server.server.dialects.openai.tokens import TokenTexts
from verl_server.server.http.responses import write_json
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices
from verl_server.server.text.tokenizer import ModelText

_NO_FINISH = b',"finish_reason":null,"matched_stop":null'


@dataclass
class Progress:
    """The part of one sample that was streamed."""

    head: bytes
    """Beginning of each frame, up to the index of the choice."""
    chars: int = 0
    tokens: int = 0
    offset: int = 0
    """Characters of the tokens whose log-probabilities were streamed."""


class Choices(abc.ABC):
    """Builds the answer to one request, and records how much of each sample was streamed."""

    object_name: str
    chunk_name: str
    last: bytes
    """Content of the last choice of a stream, which has the finish reason."""

    def __init__(self, texts: TokenTexts, model: str, body: OpenAIRequest, top_logprobs: int | None) -> None:
        """`top_logprobs` is the number of candidates that are shown; None shows no log-probabilities."""
        self.created = int(time.time())
        self._model = model
        self._body = body
        self._logprobs = LogprobWriter(texts, body, top_logprobs)
        self._id: str | None = None
        self._progress: dict[int, Progress] = {}

    # -- different for text and chat ------------------------------------------------------------------------

    @abc.abstractmethod
    async def choice(self, index: int, state: ReqState) -> dict[str, Any]:
        """Return a choice of a whole response. `response` adds the fields that text and chat share."""

    async def response_fields(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the fields of the response that are specific to text or to chat."""
        return {}

    @abc.abstractmethod
    async def news(self, state: ReqState, progress: Progress, first: bool, end: int) -> bytes | None:
        """Return the content of a choice with the new part up to token `end`, or None if there is nothing to send."""

    # -- the whole response ---------------------------------------------------------------------------------

    async def response(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the whole response."""
        slices = Slices()
        choices = []
        for i, state in enumerate(states):
            choice = await self.choice(i, state) | finish_fields(state, self.finish_type(i, state))
            if self._body.return_meta_info:
                await state.write_candidates()
                choice["meta_info"] = state.meta_info()
            elif state.session is not None:
                choice["meta_info"] = {"session": state.session}
            choices.append(write_json(choice))
            await slices.end()
        response: dict[str, Any] = {
            "id": self._name(states[0]),
            "object": self.object_name,
            "created": self.created,
            "model": self._model,
            "choices": choices,
            "usage": self.usage(states),
            "metadata": answer_metadata(states),
        } | await self.response_fields(states)
        if self._body.return_cached_tokens_details:
            details = {"device": sum(state.cached_tokens for state in states[:: self._body.n]), "host": 0}
            response["sglext"] = response.get("sglext", {}) | {"cached_tokens_details": details}
        return response

    def finish_type(self, index: int, state: ReqState) -> str | None:
        """Return the finish reason of a choice, or None while it runs."""
        return None if state.finish_reason is None else state.finish_reason.type

    def usage(self, states: Sequence[ReqState]) -> dict[str, Any]:
        """Return the token counts. A prompt with n samples counts once."""
        prompts = states[:: self._body.n]
        prompt = sum(state.num_prompt_tokens for state in prompts)
        completion = sum(len(state.output_ids) for state in states)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(state.cached_tokens for state in prompts)},
            "reasoning_tokens": 0,
        }

    # -- streams --------------------------------------------------------------------------------------------

    async def frames(self, index: int, state: ReqState) -> bytes:
        """Return the frames with the new text and tokens of a sample. The last frame has only the finish reason."""
        progress = self._progress.get(index)
        first = progress is None
        if progress is None:
            progress = self._progress[index] = Progress(self._frame_head(index, state))
        # Tokens that arrive while log-probabilities are encoded belong to the next frame.
        end, done = len(state.output_ids), state.done
        new = await self.news(state, progress, first, end)
        tail = self._usage_tail(state)
        frame = b""
        if new is not None:
            answer_fields = self.first_fields(state) if first else b""
            frame = b"%b%b%b}]%b%b}\n\n" % (progress.head, new, _NO_FINISH, answer_fields, tail)
        if not done:
            return frame
        reason = orjson.dumps(finish_fields(state, self.finish_type(index, state)))[1:-1]
        metadata = b',"metadata":' + orjson.dumps(answer_metadata([state]))
        if state.session is not None:
            reason += b',"meta_info":' + orjson.dumps({"session": state.session})
        return b"%b%b%b,%b}]%b%b}\n\n" % (frame, progress.head, self.last, reason, metadata, tail)

    def usage_frame(self, states: Sequence[ReqState]) -> bytes:
        """Return the frame that has only the token counts."""
        head = {"id": self._name(states[0]), "object": self.chunk_name, "created": self.created, "model": self._model}
        return b"data: " + orjson.dumps(head | {"choices": [], "usage": self.usage(states)}) + b"\n\n"

    def _frame_head(self, index: int, state: ReqState) -> bytes:
        head = {"id": self._name(state), "object": self.chunk_name, "created": self.created, "model": self._model}
        return b'data: %b,"choices":[{"index":%d,' % (orjson.dumps(head)[:-1], index)

    def first_fields(self, state: ReqState) -> bytes:
        """Return additional fields of the first frame of a sample."""
        return b""

    def _usage_tail(self, state: ReqState) -> bytes:
        if not self._body.streaming.continuous_usage_stats:
            return b""
        return b',"usage":' + orjson.dumps(self.usage([state]))

    def _name(self, state: ReqState) -> str:
        self._id = self._id or state.rid
        return self._id


class TextChoices(Choices):
    object_name = chunk_name = "text_completion"
    last = b'"text":"","logprobs":null'

    def __init__(self, text: ModelText, texts: TokenTexts, model: str, body: CompletionRequest) -> None:
        super().__init__(texts, model, body, body.logprobs)
        self._echo = body.echo
        self._decode = text.decoder(body.skip_special_tokens is not False)

    async def choice(self, index: int, state: ReqState) -> dict[str, Any]:
        logprobs = None
        if self._logprobs.is_on:
            positions = self._logprobs.prompt(state) if self._echo else []
            positions += self._logprobs.output(state, 0, len(state.output_ids))
            logprobs = orjson.Fragment((await self._logprobs.completion(positions, 0))[0])
        choice = {"index": index, "text": self._echoed(state) + state.text(), "logprobs": logprobs}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = orjson.Fragment(await self._logprobs.prompt_logprobs(state))
        if self._body.return_token_ids:
            choice["token_ids"] = state.output_ids
        if self._body.return_token_ids or self._body.return_prompt_token_ids:
            choice["prompt_token_ids"] = state.prompt_ids
        return choice

    async def news(self, state: ReqState, progress: Progress, first: bool, end: int) -> bytes | None:
        text = state.text()
        piece = text[progress.chars :]
        start = progress.tokens
        body = self._body
        if not (piece or first or (end > start and (self._logprobs.is_on or body.return_token_ids))):
            return None
        progress.chars, progress.tokens = len(text), end
        if first:
            piece = self._echoed(state) + piece
        logprobs = b"null"
        if self._logprobs.is_on:
            positions = self._logprobs.prompt(state) if self._echo and first else []
            positions += self._logprobs.output(state, start, end)
            logprobs, progress.offset = await self._logprobs.completion(positions, progress.offset)
        ids = b""
        if body.return_token_ids:
            ids = b',"token_ids":' + orjson.dumps(state.output_ids[start:end])
        if first and (body.return_token_ids or body.return_prompt_token_ids):
            ids += b',"prompt_token_ids":' + orjson.dumps(state.prompt_ids)
        return b'"text":%b,"logprobs":%b%b' % (orjson.dumps(piece), logprobs, ids)

    def _echoed(self, state: ReqState) -> str:
        """Return the text of the prompt if the request has `echo`, otherwise ""."""
        return self._decode(state.prompt_ids) if self._echo else ""


def finish_fields(state: ReqState, finish_type: str | None) -> dict[str, Any]:
    """Return the finish reason, what ended the sample, and the weight versions of its tokens.

    What ended it stands in SGLang's field (`matched_stop`) and in vLLM's (`stop_reason`), which is null for a token
    that ends every output, such as EOS.
    """
    reason = state.finish_reason
    matched = None if reason is None else reason.matched
    asked = isinstance(matched, str) or matched in (state.req.sampling.stop_token_ids or ())
    return {
        "finish_reason": finish_type,
        "matched_stop": matched,
        "stop_reason": matched if asked else None,
        "weight_versions": state.weight_versions,
    }


def answer_metadata(states: Sequence[ReqState]) -> dict[str, str]:
    """Return the `metadata` of an answer: the weight versions of its end and of its first token.

    OpenAI's type has texts as values only.
    """
    return {"weight_version": states[0].weight_version, "weight_version_start": states[0].weight_version_start}
