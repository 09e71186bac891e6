"""OpenAI-compatible routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/tokenize`, `/detokenize`.

Each request becomes a `GenerateReqInput`; its samples' states are written as choices, whole or as deltas.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.server.dialects.openai.choices import ChatChoices, Choices, TextChoices
from verl_server.server.dialects.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIRequest,
    parse_openai,
    text_messages,
)
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.generation import Generation
from verl_server.server.responses import (
    SSE_DONE,
    EventStream,
    error_object,
    json_response,
    openai_error,
    openai_error_type,
    read_json,
    sse,
    unless_disconnected,
)
from verl_server.server.tokenizer import ModelText
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs

_DEFAULT_COMPLETION_TOKENS = 16


class OpenAIApi:
    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        self._manager = manager
        self._args = server_args
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        post = ["POST"]
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat_completions, methods=post),
            Route("/tokenize", self.tokenize, methods=post),
            Route("/v1/tokenize", self.tokenize, methods=post),
            Route("/detokenize", self.detokenize, methods=post),
            Route("/v1/detokenize", self.detokenize, methods=post),
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
        """The served model, as a list of one."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        """The served model; 404 for another name."""
        name = request.path_params["name"]
        if name.strip("/") == self._model_name.strip("/"):
            return json_response(self._model_card())
        message = f"The model '{name}' does not exist"
        error = {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
        return json_response({"error": error}, 404)

    # -- completions ----------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """OpenAI's completion object; with `stream` server-sent events of what is new."""
        try:
            body = await self._read(request, CompletionRequest)
            most = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
            _at_least(1, "max_tokens", most)
            _at_least(0, "logprobs", body.logprobs)
            obj = GenerateReqInput(
                sampling_params=body.sampling_params(most),
                rid=body.rid,
                stream=body.stream,
                return_logprob=body.logprobs is not None,
                logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
                top_logprobs_num=body.logprobs or 0,
            )
            obj.text, obj.input_ids = _split_prompt(body.prompt)
            generation = await self._manager.submit(obj)
        except VerlServerError as error:
            return openai_error(error)
        return await self._answer(request, body, generation, TextChoices(self._text(), self._model_name, body))

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's chat completion object; with `stream` server-sent events of what is new."""
        try:
            body = await self._read(request, ChatCompletionRequest)
            most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            _at_least(1, "max_completion_tokens", most)
            _at_least(0, "top_logprobs", body.top_logprobs)
            if body.top_logprobs and not body.logprobs:
                raise BadRequestError("top_logprobs needs logprobs=true.")
            obj = GenerateReqInput(
                input_ids=self._chat_prompt(body),  # type: ignore[arg-type]
                sampling_params=body.sampling_params(most),
                rid=body.rid,
                stream=body.stream,
                return_logprob=body.logprobs,
                top_logprobs_num=body.top_logprobs or 0,
            )
            generation = await self._manager.submit(obj)
        except VerlServerError as error:
            return openai_error(error)
        return await self._answer(request, body, generation, ChatChoices(self._text(), self._model_name, body))

    def _chat_prompt(self, body: ChatCompletionRequest) -> list[int]:
        if body.input_ids is not None:
            return body.input_ids
        options = dict(body.chat_template_kwargs or {})
        if body.continue_final_message:
            options["continue_final_message"] = True
        options.setdefault("add_generation_prompt", body.add_generation_prompt and not body.continue_final_message)
        return self._text().apply_chat_template(text_messages(body.messages), **options)

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        parsed, unknown = parse_openai(await read_json(request, self._args.max_request_bytes), kind)
        self._manager.metrics.fields_ignored(request.url.path, unknown)
        self._manager.check_serving()
        self._text().decoder()  # these routes answer with text: refuse without a tokenizer
        return parsed

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
            return json_response(choices.response(generation.states))
        except VerlServerError as error:
            return openai_error(error)
        finally:
            generation.close()

    # -- tokenizer ------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        try:
            body = _convert(await read_json(request, self._args.max_request_bytes), TokenizeRequest)
            self._manager.check_serving()
            tokens, count = self._tokens(body)
        except VerlServerError as error:
            return openai_error(error)
        return json_response({"tokens": tokens, "count": count, "max_model_len": self._manager.context_length})

    def _tokens(self, body: TokenizeRequest) -> tuple[list[Any], int | list[int]]:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequestError("Give exactly one of `prompt` and `messages`.")
        text = self._text()
        if body.messages is not None:
            options = dict(body.chat_template_kwargs or {})
            options.setdefault("add_generation_prompt", body.add_generation_prompt)
            ids = text.apply_chat_template(text_messages(body.messages), **options)
            return ids, len(ids)
        if isinstance(body.prompt, str):
            ids = text.encode(body.prompt, body.add_special_tokens)
            return ids, len(ids)
        batch = [text.encode(one, body.add_special_tokens) for one in body.prompt or []]
        return batch, [len(ids) for ids in batch]

    async def detokenize(self, request: Request) -> Response:
        try:
            body = _convert(await read_json(request, self._args.max_request_bytes), DetokenizeRequest)
            self._manager.check_serving()
            decode = self._text().decoder(body.skip_special_tokens)
            _check_detokenizable(body.tokens, int(self._manager.scheduler_info["vocab_size"]))
        except VerlServerError as error:
            return openai_error(error)
        nested = bool(body.tokens) and isinstance(body.tokens[0], list)
        text = [decode(ids) for ids in body.tokens] if nested else decode(body.tokens)  # type: ignore[arg-type]
        return json_response({"text": text})


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


async def _chunks(generation: Generation, choices: Choices, body: OpenAIRequest) -> AsyncIterator[bytes]:
    try:
        async for i, state in generation.updates():
            for chunk in choices.chunks(i, state):
                yield sse(chunk)
        if body.wants_usage:
            yield sse(choices.usage_chunk(generation.states))
    except VerlServerError as error:
        yield sse({"error": error_object(str(error), error.status_code, openai_error_type(error))})
    yield SSE_DONE


def _split_prompt(prompt: str | list[Any]) -> tuple[Any, Any]:
    """(text, input_ids) of a completion prompt in any of its four forms."""
    if isinstance(prompt, str):
        return prompt, None
    if not prompt:
        raise BadRequestError("prompt cannot be empty.")
    if all(isinstance(p, str) for p in prompt):
        return prompt, None
    if any(isinstance(p, str) for p in prompt):
        raise BadRequestError("prompt mixes strings and token ids.")
    return None, prompt


def _check_detokenizable(tokens: list[Any], vocab: int) -> None:
    flat = [t for part in tokens for t in (part if isinstance(part, list) else [part])]
    wrong = next((t for t in flat if not 0 <= t < vocab), None)
    if wrong is not None:
        raise BadRequestError(f"tokens holds id {wrong}, outside the vocabulary of {vocab} tokens.")
    if tokens and len({isinstance(t, list) for t in tokens}) > 1:
        raise BadRequestError("tokens mixes ids and lists.")


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise BadRequestError(f"{name} must be at least {least}, not {value}.")


def _convert(body: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(
            {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body, kind
        )
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error).replace("`$.", "`")) from None
