"""`ChatChoices` builds responses and stream chunks of /v1/chat/completions, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from verl_server.chat.output import ContentDelta, Delta, OutputParser, ReasoningDelta, ToolCallDelta, joined
from verl_server.server.dialects.openai.choices import Choices, Progress
from verl_server.server.dialects.openai.protocol import ChatCompletionRequest
from verl_server.server.dialects.openai.tokens import TokenTexts
from verl_server.server.request_state import ReqState
from verl_server.server.slices import text_pieces
from verl_server.server.text.chat_prompt import ChatOutput

_NO_REASONING = b'"reasoning_content":null'
"""In every delta, as in SGLang: its clients read the attribute of the openai package's object."""
_EMPTY = b'"content":"",' + _NO_REASONING


class ChatChoices(Choices):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    last = b'"delta":{%b},"logprobs":null' % _EMPTY

    def __init__(self, texts: TokenTexts, model: str, body: ChatCompletionRequest, output: ChatOutput) -> None:
        super().__init__(texts, model, body, (body.top_logprobs or 0) if body.logprobs else None)
        self._chat = body
        self._output = output
        self._parsers: dict[str, _SampleParser] = {}
        """Parser of each sample, by the sample's name in scheduler messages."""

    def finish_type(self, index: int, state: ReqState) -> str | None:
        """Return the finish reason: "tool_calls" for a message that ends after whole calls."""
        reason = super().finish_type(index, state)
        parser = self._parsers.get(state.req.rid)
        return "tool_calls" if reason == "stop" and parser is not None and parser.has_whole_calls else reason

    # -- the whole response ---------------------------------------------------------------------------------

    async def choice(self, index: int, state: ReqState) -> dict[str, Any]:
        logprobs = None
        if self._logprobs.is_on:
            positions = self._logprobs.output(state, 0, len(state.output_ids))
            logprobs = orjson.Fragment(await self._logprobs.chat(positions))
        choice = {"index": index, "message": await self._message(state), "logprobs": logprobs}
        if self._body.return_token_ids:
            choice["token_ids"] = choice["response_token_ids"] = state.output_ids
        if self._returns_prompt:
            choice["prompt_token_ids"] = state.prompt_ids
        return choice

    async def response_fields(self, states: Sequence[ReqState]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._returns_prompt:
            fields["prompt_token_ids"] = states[0].prompt_ids
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = orjson.Fragment(await self._logprobs.prompt_logprobs(states[0]))
        if self._chat.store is not None:
            fields["store"] = states[0].session is not None
        ids: dict[str, Any] = {}
        if self._chat.return_input_ids_in_sglext:
            ids["input_ids"] = states[0].prompt_ids
        if self._chat.return_output_ids_in_sglext:
            ids["output_ids"] = [state.output_ids for state in states]
        return fields | ({"sglext": ids} if ids else {})

    async def _message(self, state: ReqState) -> dict[str, Any]:
        if not self._output.is_parsed:
            return {"role": "assistant", "content": state.text(), "reasoning_content": None}
        parser = self._parsers[state.req.rid] = _SampleParser(self._chat, self._output, True, state.call_seed)
        deltas = [delta async for piece in text_pieces(state.text()) for delta in parser.push(piece)]
        parsed = joined([*deltas, *parser.finish()])
        message: dict[str, Any] = {
            "role": "assistant",
            "content": parsed.content or (None if parsed.tool_calls else ""),
            "reasoning_content": parsed.reasoning,
            "reasoning": parsed.reasoning,
        }
        if parsed.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "index": i,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for i, call in enumerate(parsed.tool_calls)
            ]
        return message

    @property
    def _returns_prompt(self) -> bool:
        return self._body.return_token_ids or self._body.return_prompt_token_ids

    # -- streams --------------------------------------------------------------------------------------------

    async def news(self, state: ReqState, progress: Progress, first: bool, end: int) -> bytes | None:
        text, start = state.text(), progress.tokens
        piece = text[progress.chars :]
        content = self._delta(state, piece)
        wants_tokens = end > start and (self._logprobs.is_on or self._body.return_token_ids)
        if not (content or first or wants_tokens):
            progress.chars = len(text)
            return None
        progress.chars, progress.tokens = len(text), end
        logprobs = b"null"
        if self._logprobs.is_on:
            logprobs = await self._logprobs.chat(self._logprobs.output(state, start, end))
        ids = b""
        if self._body.return_token_ids:
            ids = b',"token_ids":' + orjson.dumps(state.output_ids[start:end])
        if first:
            content = b'"role":"assistant",' + (content or _EMPTY)
        return b'"delta":{%b},"logprobs":%b%b' % (content or _EMPTY, logprobs, ids)

    def first_fields(self, state: ReqState) -> bytes:
        fields: dict[str, Any] = {}
        if self._returns_prompt:
            fields["prompt_token_ids"] = state.prompt_ids
        if self._chat.store is not None:
            fields["store"] = state.session is not None
        return b"," + orjson.dumps(fields)[1:-1] if fields else b""

    def _delta(self, state: ReqState, piece: str) -> bytes:
        """Return the fields of a delta with the next text of a sample, or b"" if there is none."""
        if not self._output.is_parsed:
            return b'"content":%b,%b' % (orjson.dumps(piece), _NO_REASONING) if piece else b""
        parser = self._parsers.get(state.req.rid)
        if parser is None:
            parser = self._parsers[state.req.rid] = _SampleParser(self._chat, self._output, False, state.call_seed)
        deltas = parser.push(piece)
        if state.done:
            deltas += parser.finish()
        return _delta_fields(deltas)


class _SampleParser:
    """Parses one sample, and applies the options of the request that remove or delay parts of it."""

    def __init__(self, body: ChatCompletionRequest, output: ChatOutput, whole_calls: bool, call_seed: str) -> None:
        self._parser: OutputParser = output.parser(whole_calls, call_seed)
        self._shows_reasoning = body.include_reasoning
        self._delays_reasoning = not body.stream_reasoning
        self._one_call = not body.parallel_tool_calls
        self._delayed: list[str] = []
        self._has_calls = False

    @property
    def has_whole_calls(self) -> bool:
        """True if the message has calls, and its last one is not cut."""
        return self._has_calls and not self._parser.is_cut

    def push(self, text: str) -> list[Delta]:
        return self._select(self._parser.push(text))

    def finish(self) -> list[Delta]:
        deltas = self._select(self._parser.finish())
        return deltas + self._take_delayed()

    def _select(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ReasoningDelta):
                if not self._shows_reasoning:
                    continue
                if self._delays_reasoning:
                    self._delayed.append(delta.text)
                    continue
            elif isinstance(delta, ToolCallDelta):
                self._has_calls = True
                if self._one_call and delta.index > 0:
                    continue
            if not isinstance(delta, ReasoningDelta):
                kept += self._take_delayed()
            kept.append(delta)
        return kept

    def _take_delayed(self) -> list[Delta]:
        delayed, self._delayed = "".join(self._delayed), []
        return [ReasoningDelta(delayed)] if delayed else []


def _delta_fields(deltas: Sequence[Delta]) -> bytes:
    """Return deltas as the fields of one delta of OpenAI, or b"" for none."""
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if not isinstance(delta, ToolCallDelta):
            continue
        call = calls.setdefault(delta.index, {"index": delta.index, "function": {"arguments": ""}})
        if delta.id is not None:
            function = {"name": delta.name, "arguments": ""}
            call |= {"id": delta.id, "type": "function", "function": function}
        call["function"]["arguments"] += delta.arguments
    fields = []
    if reasoning:
        encoded = orjson.dumps(reasoning)
        fields.append(b'"reasoning_content":%b,"reasoning":%b' % (encoded, encoded))
    elif content or calls:
        fields.append(_NO_REASONING)
    if content:
        fields.append(b'"content":' + orjson.dumps(content))
    if calls:
        fields.append(b'"tool_calls":' + orjson.dumps(list(calls.values())))
    return b",".join(fields)
