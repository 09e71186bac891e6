"""`ResponseAnswer` builds the object or the typed events of `/v1/responses` from one sample."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from verl_server.chat.output import ContentDelta, Delta, OutputParser, ToolCallDelta
from verl_server.errors import ContextLengthError, VerlServerError
from verl_server.server.dialects.openai.choices import answer_metadata
from verl_server.server.dialects.openai.logprobs import LogprobWriter
from verl_server.server.dialects.openai.responses_items import Event, OutputItems
from verl_server.server.dialects.openai.responses_request import ReadResponse
from verl_server.server.dialects.openai.tokens import TokenTexts
from verl_server.server.generation import Generation
from verl_server.server.http.responses import sse
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices, text_pieces
from verl_server.server.text.detokenizer import IncrementalDetokenizer


class ResponseAnswer:
    """The answer to one request."""

    def __init__(
        self,
        texts: TokenTexts,
        model: str,
        read: ReadResponse,
        call_seed: str = "",
    ) -> None:
        request, chat, output = read.request, read.chat, read.output
        self._model = model
        self._request = request
        self._echoed = {name: orjson.Fragment(value) for name, value in read.echoed.items()}
        self._parser: OutputParser = output.parser(not request.stream, call_seed)
        self._one_call = not request.parallel_tool_calls
        top = (request.top_logprobs or 0) if request.wants_logprobs else None
        self._logprobs = LogprobWriter(texts, chat, top)
        self._items = OutputItems(call_seed, read.calls)
        self._created = int(time.time())
        self._number = 0
        self._chars = 0
        """Number of characters that were parsed."""
        self._detokenizer: IncrementalDetokenizer | None = None
        self._tokens = self._decoded = self._reported = 0
        """With log-probabilities: decoded tokens, their characters, and tokens that belong to parsed items."""

    # -- the whole response ---------------------------------------------------------------------------------

    async def response(self, state: ReqState) -> dict[str, Any]:
        """Return the whole response."""
        await self._progress(state)
        return self._object(state)

    # -- the stream -----------------------------------------------------------------------------------------

    async def frames(self, generation: Generation) -> AsyncIterator[bytes]:
        """Yield the frames of the stream."""
        state = generation.states[0]
        yield self._frames([("created", {"response": self._object(None, state)})])
        yield self._frames([("in_progress", {"response": self._object(None, state)})])
        try:
            async for _, updated in generation.updates():
                if events := await self._progress(updated):
                    yield self._frames(events)
            yield self._frames([(self._ending(state), {"response": self._object(state)})])
        except VerlServerError as error:
            failed = self._object(None, state) | {"status": "failed", "error": _error(error)}
            yield self._frames([("failed", {"response": failed})])

    async def _progress(self, state: ReqState) -> list[Event]:
        """Parse the text and tokens that the sample got since the last call. Return their events."""
        text, end, done = state.text(), len(state.output_ids), state.done
        events = await self._parse_tokens(state, text, end) if self._logprobs.is_on else []
        async for piece in text_pieces(text, self._chars):
            events += self._add(self._parser.push(piece))
        self._chars = max(self._chars, len(text))
        if not done:
            return events
        return [*events, *self._add(self._parser.finish()), *self._items.close(self._ending(state))]

    async def _parse_tokens(self, state: ReqState, text: str, end: int) -> list[Event]:
        """Parse the tokens' text up to `end` token by token, so that content has the entries of its own tokens.

        A response has no field for the entries of reasoning and of calls.
        """
        assert state.decode is not None
        self._detokenizer = self._detokenizer or IncrementalDetokenizer(state.decode)
        events, slices = [], Slices()
        for k in range(self._tokens, end):
            self._decoded += len(self._detokenizer.push(state.output_ids[k]))
            piece = text[self._chars : self._decoded]  # `text` ends before a stop string and what may be one
            self._chars += len(piece)
            deltas, entries = self._parser.push(piece), b""
            if any(isinstance(delta, ContentDelta) for delta in deltas):
                entries = await self._logprobs.entries(self._logprobs.output(state, self._reported, k + 1))
            if deltas:
                self._reported = k + 1
            events += self._add(deltas, entries)
            await slices.end()
        self._tokens = end
        return events

    def _frames(self, events: Sequence[Event]) -> bytes:
        frames = []
        for kind, fields in events:
            name = f"response.{kind}"
            frames.append(
                b"event: %b\n" % name.encode() + sse({"type": name, "sequence_number": self._number} | fields)
            )
            self._number += 1
        return b"".join(frames)

    # -- both -----------------------------------------------------------------------------------------------

    def _add(self, deltas: Sequence[Delta], entries: bytes = b"") -> list[Event]:
        """Add deltas. The first content delta gets `entries`: the log-probabilities of all content in `deltas`."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta) and self._one_call and delta.index > 0:
                continue
            events += self._items.add(delta, entries if isinstance(delta, ContentDelta) else b"")
            if isinstance(delta, ContentDelta):
                entries = b""
        return events

    def _ending(self, state: ReqState) -> str:
        """Return the status of the last item, which is also the name of the stream's last event."""
        reason = state.finish_reason
        return "completed" if reason is not None and reason.type == "stop" else "incomplete"

    def _status(self, state: ReqState) -> str:
        """Return the status of the response. OpenAI has a status for an aborted one, but no event."""
        reason = state.finish_reason
        return "cancelled" if reason is not None and reason.type == "abort" else self._ending(state)

    def _object(self, state: ReqState | None, begun: ReqState | None = None) -> dict[str, Any]:
        """Return the response object of the ended sample `state`, or else of the running sample `begun`."""
        request = self._request
        ended = state if state is not None else begun
        assert ended is not None
        status = "in_progress" if state is None else self._status(state)
        metadata = dict(request.metadata or {})
        details = None
        if state is not None:
            metadata |= answer_metadata([state])
            if status == "incomplete":
                details = {"reason": "max_output_tokens"}
        sampling = ended.req.sampling
        session = {} if ended.session is None else {"meta_info": {"session": ended.session}}
        return (
            self._echoed
            | session
            | {
                "id": request.request_id or f"resp_{ended.call_seed.replace('/', '_') or ended.rid}",
                "object": "response",
                "created_at": self._created,
                "completed_at": None if state is None else int(time.time()),
                "status": status,
                "background": False,
                "error": None,
                "incomplete_details": details,
                "max_output_tokens": request.max_output_tokens,
                "max_tool_calls": None,
                "metadata": metadata,
                "model": self._model,
                "output": self._items.items if state is not None else [],
                "parallel_tool_calls": request.parallel_tool_calls,
                "previous_response_id": None,
                "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
                "service_tier": "default",
                "store": ended.session is not None,
                "temperature": sampling.temperature,
                "top_logprobs": request.top_logprobs or 0,
                "top_p": sampling.top_p,
                "truncation": "disabled",
                "usage": None if state is None else _usage(state),
            }
        )


def _usage(state: ReqState) -> dict[str, Any]:
    prompt, output = state.num_prompt_tokens, len(state.output_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": state.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def _error(error: VerlServerError) -> dict[str, Any]:
    """Return the `error` of a failed response. OpenAI's `code` is one of a list, so our own name is its `type`.

    The list lacks `context_length_exceeded`, which OpenAI's service sends and agents look for.
    """
    code = "server_error" if error.status_code >= 500 else "invalid_prompt"
    if error.code == ContextLengthError.code:
        code = error.code
    return {"code": code, "message": str(error), "type": error.code}
