"""Anthropic's routes: `/v1/messages` and `/v1/messages/count_tokens`.

Each message becomes a `GenerateReqInput` with one sample. `MessageWriter` converts the sample into a message or into
the events of a stream.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from verl_server import lora
from verl_server.errors import VerlServerError
from verl_server.server.dialects.anthropic.message import MessageWriter, event
from verl_server.server.dialects.anthropic.protocol import (
    REFUSED,
    WITHOUT_EFFECT,
    AdapterNotFoundError,
    CountTokensRequest,
    MessagesRequest,
    ThreadUnsupportedError,
    TokenCount,
)
from verl_server.server.dialects.anthropic.reading import COUNT_TOKENS, MESSAGES
from verl_server.server.generate_request import GenerateReqInput, ReadRequest
from verl_server.server.generation import Generation
from verl_server.server.http.operation import EVENTS, JSON, POST, Operation
from verl_server.server.http.responses import EventStream, error_headers, json_response, unless_disconnected
from verl_server.server.sessions.request_turns import ReplyShape
from verl_server.server.sessions.session_turns import SessionTurns
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.error_bodies import anthropic_error_body


class AnthropicApi:
    def __init__(self, manager: TokenizerManager, turns: SessionTurns) -> None:
        self._manager, self._turns = manager, turns

    def operations(self) -> list[Operation]:
        known: dict[str, Any] = {
            "methods": POST,
            "in_session": True,
            "refused": REFUSED,
            "without_effect": WITHOUT_EFFECT,
            "answer_error": anthropic_error,
        }
        return [
            Operation(
                "/v1/messages",
                self.messages,
                body=MessagesRequest,
                generates=True,
                replayed=True,
                media_types=(JSON, EVENTS),
                **known,
            ),
            Operation(
                "/v1/messages/count_tokens", self.count_tokens, body=CountTokensRequest, answer=TokenCount, **known
            ),
        ]

    async def messages(self, request: Request) -> Response:
        """Return Anthropic's message, with blocks of the types thinking, text and tool_use. With `stream`, send
        server-sent events with Anthropic's events."""
        read = await self._turns.read(request, MESSAGES)
        self._refuse_adapter(read.request.model)
        self._manager.text.warn_of_unused(read.unused_options)
        wanted = GenerateReqInput(
            sampling_params=read.sampling_params,
            rid=f"msg_{uuid.uuid4().hex}",
            stream=read.request.stream,
            return_logprob=read.request.return_logprob,
            min_weight_version=read.request.min_weight_version,
            exact_weight_version=read.request.exact_weight_version,
        )
        generation = await self._turns.submit(
            request,
            ReadRequest(request=wanted, prompts=read.prompts, is_single=True),
            read.next,
            ReplyShape("messages", read.output, clamps=True),
        )
        writer = MessageWriter(read, self._model_name, generation.states[0])
        headers = {"request-id": writer.id}
        if read.request.stream:
            stream = EventStream(_events(generation, writer), generation.close)
            stream.headers.update(headers)
            return self._turns.mark(stream, generation)
        try:
            await unless_disconnected(request, generation.wait())
            message = await unless_disconnected(request, writer.message(generation.states[0]))
            return self._turns.mark(json_response(message, headers=headers), generation)
        finally:
            generation.close()

    async def count_tokens(self, request: Request) -> Response:
        """Return {"input_tokens"}: the number of prompt tokens that `/v1/messages` would have for this body."""
        counted = await self._turns.read(request, COUNT_TOKENS)
        self._refuse_adapter(counted.model)
        self._manager.text.warn_of_unused(counted.unused_options)
        return json_response({"input_tokens": counted.count})

    @property
    def _model_name(self) -> str:
        return self._manager.server_args.served_model_name or self._manager.controls.model_path

    def _refuse_adapter(self, name: str) -> None:
        """Raise AdapterNotFoundError for `model:adapter` with the served model. Claude's own names may have colons."""
        model, colon, _ = name.partition(":")
        served = self._model_name
        if colon and name != served and model in (served, served.rpartition("/")[2]):
            raise AdapterNotFoundError(lora.refusal(f"The model {name!r:.200}"))


async def _events(generation: Generation, writer: MessageWriter) -> AsyncIterator[bytes]:
    try:
        async for _, state in generation.updates():
            frames = await writer.events(state)
            if frames:
                yield frames
    except VerlServerError as error:
        yield event(_error(error))


def anthropic_error(error: VerlServerError) -> Response:
    """Return an error in Anthropic's shape."""
    return json_response(_error(error), error.status_code, error_headers(error))


def _error(error: VerlServerError) -> dict[str, Any]:
    content = anthropic_error_body(error)
    if error.code == ThreadUnsupportedError.code:  # where Anthropic's clients look
        content["error"]["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return content
