"""SGLang's `/generate`, and `/`. `health_routes`, `info_routes` and `admin_routes` have SGLang's other routes.

`app.create_app` mounts the routes. The handlers run on the TokenizerManager's event loop and call it directly.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from verl_server.errors import VerlServerError
from verl_server.messages.columns import MSGPACK
from verl_server.messages.io_struct import PROMPT_HEADER
from verl_server.messages.results import GenerateResult
from verl_server.server.generate_fields import ACCEPTED_HINTS, UNSUPPORTED_FIELDS
from verl_server.server.generate_request import GENERATE, GenerateReqInput
from verl_server.server.generation import Generation
from verl_server.server.http.operation import EVENTS, JSON, TEXT, Operation
from verl_server.server.http.responses import (
    SSE_DONE,
    EventStream,
    read_body,
    result_response,
    result_writer,
    run_job,
    sse,
    unless_disconnected,
)
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.packed_prompts import split_prompt
from verl_server.server.sessions.request_turns import ReplyShape
from verl_server.server.sessions.session_turns import SessionTurns, session_of
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.error_bodies import sglang_error_event


class NativeApi:
    """Handlers of SGLang's routes that do not change the server."""

    def __init__(self, manager: TokenizerManager, turns: SessionTurns) -> None:
        self._manager, self._turns = manager, turns

    def operations(self) -> list[Operation]:
        return [
            Operation("/", self.root, in_session=True, media_types=(TEXT,)),
            Operation(
                "/generate",
                self.generate,
                ("POST", "PUT"),
                in_session=True,
                generates=True,
                replayed=True,
                body=GenerateReqInput,
                refused=UNSUPPORTED_FIELDS,
                without_effect=ACCEPTED_HINTS,
                answer=GenerateResult | list[GenerateResult],
                media_types=(JSON, EVENTS, MSGPACK),
            ),
        ]

    async def root(self, request: Request) -> Response:
        """Return a line of text."""
        return PlainTextResponse("verl-server is running.\n")

    # -- generate -------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """Return a `GenerateResult`, or a list of them for several prompts or for `n` above 1. With `stream`, each
        server-sent event is the `GenerateResult` so far, or only what is new with the setting
        `incremental_streaming_output`, and the last event is `[DONE]`. Tokens that arrive while the client reads an
        event are in its next event."""
        body = await read_body(request, self._manager.server_args.max_request_bytes)
        self._manager.check_serving()
        with self._turns.notes_overflow(session_of(request)):
            if (packed := request.headers.get(PROMPT_HEADER)) is not None:
                read = await self._manager.text.read_packed(*split_prompt(packed, body))
            else:
                read = await run_job(request, self._manager.text, GENERATE, body)
        judge_unknown(request, read.unknown_fields)
        write = result_writer(request, read.request.stream)
        generation = await self._turns.submit(request, read, None, ReplyShape("generate"), write)
        if read.request.stream:
            return self._turns.mark(EventStream(self._frames(generation), generation.close), generation)
        try:
            response = result_response(request, await unless_disconnected(request, generation.result()))
            return self._turns.mark(response, generation)
        finally:
            generation.close()

    async def _frames(self, generation: Generation) -> AsyncIterator[bytes]:
        try:
            async for frame in generation.frames(self._manager.server_args.incremental_streaming_output):
                yield sse(frame)
        except VerlServerError as error:
            yield sse(sglang_error_event(error))
        yield SSE_DONE
