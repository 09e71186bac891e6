"""`MessageWriter`: builds Anthropic's message, or the events of its stream, from one sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from verl_server.chat.cut_json import completed
from verl_server.chat.output import ContentDelta, Delta, ReasoningDelta, ToolCallDelta, joined
from verl_server.server.dialects.anthropic.reading import ReadMessages
from verl_server.server.http.responses import sse
from verl_server.server.request_state import ReqState
from verl_server.server.slices import text_pieces


class MessageWriter:
    """Builds the answer to one request, and records how much of it was streamed."""

    def __init__(self, read: ReadMessages, model: str, state: ReqState) -> None:
        """`state` is the sample, before its first token."""
        self._read = read
        self._request = read.request
        self._model = model
        self._parser = read.output.parser(not read.request.stream, state.call_seed)
        self._hides_thinking = read.request.thinking is not None and read.request.thinking.display == "omitted"
        self.id = state.rid.rpartition("/")[2]
        """Id of the message. If this answer repeats an earlier answer, it has the same id.

        `/abort_request` accepts the id.
        """
        self._chars = 0  # characters of the text that were parsed
        self._started = False
        self._open: str | None = None  # type of the block that is open
        self._blocks = 0  # number of blocks that began
        self._has_calls = False

    # -- the whole message ----------------------------------------------------------------------------------

    async def message(self, state: ReqState) -> dict[str, Any]:
        """Return the whole message of a finished sample."""
        deltas = [delta async for piece in text_pieces(state.text()) for delta in self._parser.push(piece)]
        parsed = joined([*deltas, *self._parser.finish()])
        self._has_calls = bool(parsed.tool_calls)
        content: list[dict[str, Any]] = []
        if parsed.reasoning:
            shown = "" if self._hides_thinking else parsed.reasoning
            content.append({"type": "thinking", "thinking": shown, "signature": self.id})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content, "citations": None})
        for i, call in enumerate(parsed.tool_calls, start=1):
            is_cut = self._parser.is_cut and i == len(parsed.tool_calls)
            # The arguments are JSON already, and are not decoded: that could change numbers.
            arguments = completed(call.arguments) if is_cut else call.arguments
            input = orjson.Fragment(arguments.encode())
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
        return self._head() | {"content": content} | self._stop(state) | {"usage": _usage(state)} | self._extra(state)

    # -- the stream -----------------------------------------------------------------------------------------

    async def events(self, state: ReqState) -> bytes:
        """Return the encoded events of the new part of a sample.

        If the sample is finished, `message_stop` is the last event.
        """
        frames: list[bytes] = []
        if not self._started:
            self._started = True
            usage = _usage(state) | {"output_tokens": 0}
            message = self._head() | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            frames += [event({"type": "message_start", "message": message}), event({"type": "ping"})]
        # Tokens that arrive during an await belong to the next call.
        text, done = state.text(), state.done
        async for piece in text_pieces(text, self._chars):
            frames += self._frames(self._parser.push(piece))
        self._chars = len(text)
        if done:
            frames += [*self._frames(self._parser.finish()), *self._close_block()]
            delta = {"type": "message_delta", "delta": self._stop(state), "usage": _usage(state)}
            frames += [event(delta | self._extra(state)), event({"type": "message_stop"})]
        return b"".join(frames)

    def _frames(self, deltas: Iterable[Delta]) -> Iterator[bytes]:
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                yield from self._open_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                if not self._hides_thinking:
                    yield self._delta({"type": "thinking_delta", "thinking": delta.text})
            elif isinstance(delta, ContentDelta):
                yield from self._open_block("text", {"type": "text", "text": "", "citations": None})
                yield self._delta({"type": "text_delta", "text": delta.text})
            else:
                yield from self._call_frames(delta)

    def _call_frames(self, delta: ToolCallDelta) -> Iterator[bytes]:
        if delta.id is not None:
            self._has_calls = True
            yield from self._close_block()
            block: dict[str, Any] = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            yield from self._open_block("tool_use", block)
        if delta.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": delta.arguments})

    def _open_block(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close_block()
        self._open = kind
        self._blocks += 1
        yield event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})

    def _close_block(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self.id})
        self._open = None
        yield event({"type": "content_block_stop", "index": self._blocks - 1})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    # -- shared ---------------------------------------------------------------------------------------------

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}

    def _stop(self, state: ReqState) -> dict[str, Any]:
        """Return the stop reason of the sample in Anthropic's terms."""
        reason, sequence = state.finish_reason, None
        assert reason is not None
        if reason.type == "abort":  # the client may send the message back, and the policy continues it
            stop = "pause_turn"
        elif reason.type == "length":
            full = len(state.output_ids) < self._request.max_tokens
            stop = "model_context_window_exceeded" if full else "max_tokens"
        elif isinstance(reason.matched, str) and reason.matched != self._read.end_of_call:
            stop, sequence = "stop_sequence", reason.matched
        else:
            stop = "tool_use" if self._has_calls and not self._parser.is_cut else "end_turn"
        return {"stop_reason": stop, "stop_sequence": sequence}

    def _extra(self, state: ReqState) -> dict[str, Any]:
        """Return the fields that are not in Anthropic's API."""
        extra: dict[str, Any] = {}
        if state.session is not None:
            extra["meta_info"] = {"session": state.session}
        if self._request.return_token_ids:
            extra |= {"prompt_token_ids": state.prompt_ids, "token_ids": state.output_ids}
        if self._request.return_logprob:
            extra |= {"token_logprobs": state.output_logprobs, "weight_versions": state.weight_versions}
        return extra


def _usage(state: ReqState) -> dict[str, Any]:
    """Return the token counts. As in Anthropic's API, `input_tokens` does not count tokens from the cache."""
    return {
        "input_tokens": state.num_prompt_tokens - state.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": state.cached_tokens,
        "output_tokens": len(state.output_ids),
    }


def event(content: dict[str, Any]) -> bytes:
    """Return one encoded event of Anthropic's streams, in which the event's type has a line of its own."""
    kind: str = content["type"]
    return b"event: " + kind.encode() + b"\n" + sse(content)
