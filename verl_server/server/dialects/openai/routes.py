"""OpenAI-compatible routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/tokenize`, `/detokenize`.

Each request to generate becomes a `GenerateReqInput`. `Choices` converts the samples into a response or into chunks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.server.dialects.openai.choices import ChatChoices, Choices, TextChoices
from verl_server.server.dialects.openai.protocol import (
    HINTS,
    UNSUPPORTED,
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIRequest,
)
from verl_server.server.dialects.openai.reading import (
    CHAT,
    COMPLETION,
    DETOKENIZE,
    TOKENIZE,
    DetokenizeRequest,
    ReadChat,
    ReadCompletion,
    TextReply,
    TokenizeRequest,
)
from verl_server.server.dialects.operation import EVENTS, JSON, POST, Operation
from verl_server.server.generate_request import GenerateReqInput, ReadRequest
from verl_server.server.generation import Generation
from verl_server.server.responses import (
    SSE_DONE,
    EventStream,
    encoded_response,
    error_object,
    json_response,
    openai_error,
    openai_error_type,
    read_body,
    run_job,
    sse,
    unless_disconnected,
)
from verl_server.server.text_tools import Job
from verl_server.server.tokenizer import ModelText
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs

R = TypeVar("R")

_DEFAULT_COMPLETION_TOKENS = 16


class OpenAIApi:
    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        self._manager = manager
        self._args = server_args
        self._created = int(time.time())

    def operations(self) -> list[Operation]:
        generation: dict[str, Any] = {"refused": UNSUPPORTED, "without_effect": HINTS, "media_types": (JSON, EVENTS)}
        return [
            Operation("/v1/models", self.models),
            Operation("/v1/models/{name:path}", self.model),
            Operation("/v1/completions", self.completions, POST, body=CompletionRequest, **generation),
            Operation("/v1/chat/completions", self.chat_completions, POST, body=ChatCompletionRequest, **generation),
            Operation("/tokenize", self.tokenize, POST, aliases=("/v1/tokenize",), body=TokenizeRequest),
            Operation("/detokenize", self.detokenize, POST, aliases=("/v1/detokenize",), body=DetokenizeRequest),
        ]

    # -- models ---------------------------------------------------------------------------------------------

    @property
    def _model_name(self) -> str:
        return self._args.served_model_name or self._manager.controls.model_path

    def _model_card(self) -> dict[str, Any]:
        self._manager.check_serving()
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "verl-server",
            "root": self._manager.controls.model_path,
            "parent": None,
            "max_model_len": self._manager.context_length,
        }

    async def models(self, request: Request) -> Response:
        """Return a list with the served model."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """Return the served model; 404 for another name."""
        name = request.path_params["name"]
        if name.strip("/") == self._model_name.strip("/"):
            return json_response(self._model_card())
        message = f"The model '{name}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return json_response({"error": error}, 404)

    # -- completions ----------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Return OpenAI's completion object. With `stream`, send server-sent events with OpenAI's chunks."""
        try:
            read = await self._read(request, COMPLETION)
            body = read.request
            most = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
            _at_least(1, "max_tokens", most)
            _at_least(0, "logprobs", body.logprobs)
            wanted = GenerateReqInput(
                sampling_params=body.sampling_params(most),
                rid=body.rid,
                stream=body.stream,
                return_logprob=body.logprobs is not None,
                logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
                top_logprobs_num=body.logprobs or 0,
            )
            generation = await self._submit(request, wanted, read)
        except VerlServerError as error:
            return openai_error(error)
        return await self._answer(request, body, generation, TextChoices(self._text(), self._model_name, body))

    async def chat_completions(self, request: Request) -> Response:
        """Return OpenAI's chat completion object. With `stream`, send server-sent events with OpenAI's chunks."""
        try:
            read = await self._read(request, CHAT)
            self._manager.text.warn_of_unused(read.unused_options)
            body = read.request
            most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            _at_least(1, "max_completion_tokens", most)
            _at_least(0, "top_logprobs", body.top_logprobs)
            if body.top_logprobs and not body.logprobs:
                raise BadRequestError("top_logprobs needs logprobs=true.")
            wanted = GenerateReqInput(
                sampling_params=body.sampling_params(most),
                rid=body.rid,
                stream=body.stream,
                return_logprob=body.logprobs,
                top_logprobs_num=body.top_logprobs or 0,
            )
            generation = await self._submit(request, wanted, read)
        except VerlServerError as error:
            return openai_error(error)
        return await self._answer(request, body, generation, ChatChoices(self._text(), self._model_name, body))

    async def _read(self, request: Request, job: Job[R]) -> R:
        """Return the body of a request, parsed and tokenized."""
        body = await read_body(request, self._args.max_request_bytes)
        self._manager.check_serving()
        return await run_job(request, self._manager.text, job, body)

    async def _submit(self, request: Request, wanted: GenerateReqInput, read: ReadCompletion | ReadChat) -> Generation:
        self._manager.metrics.fields_ignored(request.url.path, read.unknown_fields)
        return await self._manager.submit_read(
            ReadRequest(request=wanted, prompts=read.prompts, is_single=read.is_single)
        )

    def _text(self) -> ModelText:
        assert self._manager.model_text is not None
        return self._manager.model_text

    async def _answer(
        self, request: Request, body: OpenAIRequest, generation: Generation, choices: Choices
    ) -> Response:
        if body.stream:
            return EventStream(_chunks(generation, choices, body), generation.close)
        try:
            await unless_disconnected(request, generation.wait())
            return json_response(await unless_disconnected(request, choices.response(generation.states)))
        except VerlServerError as error:
            return openai_error(error)
        finally:
            generation.close()

    # -- tokenizer ------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Return {"tokens", "count", "max_model_len"}. For a list of texts, "tokens" and "count" are lists."""
        return await self._text_reply(request, TOKENIZE)

    async def detokenize(self, request: Request) -> Response:
        """Return {"text"}. For a list of lists of token ids, "text" is a list."""
        return await self._text_reply(request, DETOKENIZE)

    async def _text_reply(self, request: Request, job: Job[TextReply]) -> Response:
        try:
            reply = await self._read(request, job)
        except VerlServerError as error:
            return openai_error(error)
        self._manager.text.warn_of_unused(reply.unused_options)
        return encoded_response(reply.json, "application/json")


async def _chunks(generation: Generation, choices: Choices, body: OpenAIRequest) -> AsyncIterator[bytes]:
    try:
        async for i, state in generation.updates():
            async for chunk in choices.chunks(i, state):
                yield sse(chunk)
        if body.wants_usage:
            yield sse(choices.usage_chunk(generation.states))
    except VerlServerError as error:
        yield sse({"error": error_object(str(error), error.status_code, openai_error_type(error))})
    yield SSE_DONE


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise BadRequestError(f"{name} must be at least {least}, not {value}.")
