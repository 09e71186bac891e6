"""OpenAI-compatible routes: models, completions, chat completions, responses, and the tokenizer's routes.

Each request to generate becomes a `GenerateReqInput`. `Choices` and `ResponseAnswer` convert the samples into an answer
or into the frames of a stream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cached_property, partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server import lora
from verl_server.errors import VerlServerError
from verl_server.server.dialects.openai.chat_choices import ChatChoices
from verl_server.server.dialects.openai.choices import Choices, TextChoices
from verl_server.server.dialects.openai.errors import ModelNotFoundError, error_content, openai_error
from verl_server.server.dialects.openai.fields import (
    CHAT_REFUSED,
    CHAT_WITHOUT_EFFECT,
    COMPLETION_REFUSED,
    COMPLETION_WITHOUT_EFFECT,
)
from verl_server.server.dialects.openai.protocol import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from verl_server.server.dialects.openai.reading import CHAT, COMPLETION, ReadChat, ReadCompletion
from verl_server.server.dialects.openai.responses_answer import ResponseAnswer
from verl_server.server.dialects.openai.responses_request import (
    RESPONSES,
    RESPONSES_REFUSED,
    RESPONSES_WITHOUT_EFFECT,
    ReadResponse,
    ResponsesRequest,
    previous_response,
)
from verl_server.server.dialects.openai.tokenizing import (
    DETOKENIZE,
    DETOKENIZE_WITHOUT_EFFECT,
    TOKENIZE,
    TOKENIZE_REFUSED,
    TOKENIZE_WITHOUT_EFFECT,
    DetokenizeRequest,
    TextReply,
    TokenizeRequest,
)
from verl_server.server.dialects.openai.tokens import TokenTexts
from verl_server.server.generate_request import GenerateReqInput, ReadRequest
from verl_server.server.generation import Generation
from verl_server.server.http.operation import EVENTS, JSON, POST, Operation
from verl_server.server.http.responses import (
    SSE_DONE,
    EventStream,
    encoded_response,
    json_response,
    sse,
    unless_disconnected,
    write_json,
)
from verl_server.server.sessions.request_turns import ReplyShape
from verl_server.server.sessions.session_turns import SessionTurns
from verl_server.server.text.text_tools import Job
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.error_bodies import openai_error_event

_Read = ReadCompletion | ReadChat | ReadResponse
_STREAMED = (JSON, EVENTS)


class OpenAIApi:
    def __init__(self, manager: TokenizerManager, turns: SessionTurns) -> None:
        self._manager, self._turns = manager, turns

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "/v1/completions",
                self.completions,
                POST,
                in_session=True,
                generates=True,
                replayed=True,
                body=CompletionRequest,
                answer_error=_errors_of(CompletionRequest),
                refused=COMPLETION_REFUSED,
                without_effect=COMPLETION_WITHOUT_EFFECT,
                media_types=_STREAMED,
            ),
            Operation(
                "/v1/chat/completions",
                self.chat_completions,
                POST,
                in_session=True,
                generates=True,
                replayed=True,
                body=ChatCompletionRequest,
                answer_error=_errors_of(ChatCompletionRequest),
                refused=CHAT_REFUSED,
                without_effect=CHAT_WITHOUT_EFFECT,
                media_types=_STREAMED,
            ),
            Operation(
                "/v1/responses",
                self.responses,
                POST,
                in_session=True,
                generates=True,
                replayed=True,
                body=ResponsesRequest,
                answer_error=_errors_of(ResponsesRequest),
                refused=RESPONSES_REFUSED,
                without_effect=RESPONSES_WITHOUT_EFFECT,
                media_types=_STREAMED,
            ),
            Operation(
                "/tokenize",
                self.tokenize,
                POST,
                aliases=("/v1/tokenize",),
                body=TokenizeRequest,
                answer_error=_errors_of(TokenizeRequest),
                refused=TOKENIZE_REFUSED,
                without_effect=TOKENIZE_WITHOUT_EFFECT,
            ),
            Operation(
                "/detokenize",
                self.detokenize,
                POST,
                aliases=("/v1/detokenize",),
                body=DetokenizeRequest,
                answer_error=_errors_of(DetokenizeRequest),
                without_effect=DETOKENIZE_WITHOUT_EFFECT,
            ),
        ]

    @property
    def _model_name(self) -> str:
        return self._manager.server_args.served_model_name or self._manager.controls.model_path

    def check_model(self, name: str) -> None:
        """Raise ModelNotFoundError for the name of an adapter, `model:adapter`. Other names are not compared."""
        if ":" in name and name != self._model_name:
            refusal = lora.refusal(f"model {name!r:.200}")
            raise ModelNotFoundError(f"{refusal} Send the name {self._model_name!r} or any name without a colon.")

    # -- completions ----------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """Return OpenAI's completion object. With `stream`, send server-sent events with OpenAI's chunks."""
        read = await self._turns.read(request, COMPLETION)
        body = read.request
        self.check_model(body.model)
        wanted = body.generate_request(body.max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            wanted.logprob_start_len = 0
        shape = ReplyShape("completions", prompt_text=read.prompt_text)
        generation = await self._submit(request, wanted, read, body, shape)
        choices = TextChoices(self._text, self._texts, self._model_name, body)
        return await self._answer(request, body, generation, choices)

    async def chat_completions(self, request: Request) -> Response:
        """Return OpenAI's chat completion object. With `stream`, send server-sent events with OpenAI's chunks."""
        read = await self._turns.read(request, CHAT)
        self._manager.text.warn_of_unused(read.unused_options)
        body = read.request
        self.check_model(body.model)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = body.generate_request(body.max_tokens, top_logprobs, read.output.grammar or "")
        wanted.return_sampling_mask = body.return_sampling_mask
        wanted.sampling_logprobs_mode = body.sampling_logprobs_mode
        shape = ReplyShape("chat", read.output, one_call=not body.parallel_tool_calls)
        generation = await self._submit(request, wanted, read, body, shape)
        choices = ChatChoices(self._texts, self._model_name, body, read.output)
        return await self._answer(request, body, generation, choices)

    async def responses(self, request: Request) -> Response:
        """Return OpenAI's response object. With `stream`, send server-sent events with OpenAI's typed events."""
        read = await self._turns.read(request, RESPONSES, previous_response)
        self._manager.text.warn_of_unused(read.unused_options)
        self._manager.text.warn_of_left_out(read.left_out_tools)
        body, chat = read.request, read.chat
        self.check_model(body.model)
        top_logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
        wanted = chat.generate_request(chat.max_tokens, top_logprobs, read.output.grammar or "")
        shape = ReplyShape("responses", read.output, one_call=not body.parallel_tool_calls)
        generation = await self._submit(request, wanted, read, chat, shape)
        answer = ResponseAnswer(self._texts, self._model_name, read, generation.states[0].call_seed)
        if body.stream:
            return self._turns.mark(EventStream(answer.frames(generation), generation.close), generation)
        return await self._whole(request, generation, answer.response(generation.states[0]))

    async def _submit(
        self, request: Request, wanted: GenerateReqInput, read: _Read, body: OpenAIRequest, shape: ReplyShape
    ) -> Generation:
        return await self._turns.submit(
            request,
            ReadRequest(request=wanted, prompts=read.prompts, is_single=read.is_single),
            read.next,
            shape,
            write_json if body.return_meta_info else None,
        )

    @property
    def _text(self) -> ModelText:
        assert self._manager.model_text is not None
        return self._manager.model_text

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._text)

    async def _answer(
        self, request: Request, body: OpenAIRequest, generation: Generation, choices: Choices
    ) -> Response:
        if body.stream:
            return self._turns.mark(EventStream(_frames(generation, choices, body), generation.close), generation)
        return await self._whole(request, generation, choices.response(generation.states))

    async def _whole(
        self, request: Request, generation: Generation, answer: Coroutine[Any, Any, dict[str, Any]]
    ) -> Response:
        """Return the response that `answer` builds when the generation has ended."""

        async def build() -> dict[str, Any]:
            await generation.wait()
            return await answer

        try:
            response = json_response(await unless_disconnected(request, build()))
            return self._turns.mark(response, generation)
        finally:
            answer.close()
            generation.close()

    # -- tokenizer ------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """Return {"tokens", "count", "max_model_len"}. For a list of texts, "tokens" and "count" are lists."""
        return await self._text_reply(request, TOKENIZE)

    async def detokenize(self, request: Request) -> Response:
        """Return the text as "text" (SGLang) and "prompt" (vLLM). For a list of lists of token ids, it is a list."""
        return await self._text_reply(request, DETOKENIZE)

    async def _text_reply(self, request: Request, job: Job[TextReply]) -> Response:
        reply = await self._turns.read(request, job)
        self._manager.text.warn_of_unused(reply.unused_options)
        return encoded_response(reply.json, "application/json")


def _errors_of(body: type[msgspec.Struct]) -> Callable[[VerlServerError], Response]:
    """Return the function that answers the errors of a route. An error may name a field of the route's body."""
    return partial(openai_error, fields=body.__struct_fields__)


async def _frames(generation: Generation, choices: Choices, body: OpenAIRequest) -> AsyncIterator[bytes]:
    try:
        async for i, state in generation.updates():
            if frames := await choices.frames(i, state):
                yield frames
        if body.streaming.include_usage:
            yield choices.usage_frame(generation.states)
    except VerlServerError as error:
        yield sse(openai_error_event(error_content(error)))
    yield SSE_DONE
