"""vLLM's routes that do not change the server: `/inference/v1/generate`, aborts, version and load."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server import lora
from verl_server._version import __version__
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.server.auth import AccessRules
from verl_server.server.dialects.vllm.choices import InferenceChoices
from verl_server.server.dialects.vllm.errors import ModelNotFoundError, vllm_error
from verl_server.server.dialects.vllm.reading import INFERENCE, REFUSED, WITHOUT_EFFECT, InferenceRequest
from verl_server.server.dialects.vllm.sampling import VllmSamplingParams
from verl_server.server.generation import Generation
from verl_server.server.http.operation import EVENTS, JSON, POST, Operation
from verl_server.server.http.responses import (
    SSE_DONE,
    EventStream,
    json_response,
    read_body,
    read_json,
    run_job,
    sse,
    unless_disconnected,
)
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.http.version_headers import demand_of
from verl_server.server.session_hints import header_hint
from verl_server.server.sessions.session_turns import refuse_session
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.error_bodies import vllm_error_body
from verl_server.web.json_body import names_of_unknown
from verl_server.web.json_convert import read_struct

REQUEST_ID_HEADER = "X-Request-Id"
_PREFIX = "generate-tokens-"
_ABORT_ALL = "/abort_requests"
"""The path at which an empty body aborts all requests. At its alias, as in vLLM, a body must name requests."""
_MOST_ABORTED = 16384
"""Most ids of one call of `/abort_requests`, which runs on the event loop."""


class AbortRequestsReq(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_requests`."""

    request_ids: list[str] | None = None
    """Names of the requests. Null or an empty list aborts all requests."""


class VllmApi:
    """Handlers of vLLM's routes that do not change the server."""

    def __init__(self, manager: TokenizerManager, rules: AccessRules) -> None:
        self._manager, self._rules = manager, rules
        self._generations: dict[str, Generation] = {}
        """Unanswered requests to `/inference/v1/generate`, by the caller's name."""

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "/inference/v1/generate",
                self.generate,
                POST,
                answer_error=vllm_error,
                in_session=True,
                generates=True,
                body=InferenceRequest,
                inside={"sampling_params": VllmSamplingParams.known_fields()},
                refused=REFUSED,
                without_effect=WITHOUT_EFFECT,
                media_types=(JSON, EVENTS),
            ),
            Operation(
                _ABORT_ALL,
                self.abort_requests,
                POST,
                answer_error=vllm_error,
                aliases=("/inference/v1/abort_requests",),
                body=AbortRequestsReq,
            ),
            Operation("/version", self.version, answer_error=vllm_error),
            Operation("/load", self.load, answer_error=vllm_error),
        ]

    # -- generate -------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """Return {"request_id", "choices", "usage", ...}. Each choice has `token_ids`, `logprobs`, `finish_reason`,
        `stop_reason` and `weight_versions`. With `stream`, each server-sent event has the tokens since the last event,
        and the last event is `[DONE]`."""
        refuse_session(request, "/inference/v1/generate", "/generate or /v1/completions with token ids")
        body = await read_body(request, self._manager.server_args.max_request_bytes)
        manager = self._manager
        manager.check_serving()
        read = await run_job(request, manager.text, INFERENCE, body)
        judge_unknown(request, read.unknown_fields)
        self._check_model(read.request.model)
        request_id = request.headers.get(REQUEST_ID_HEADER) or read.request.request_id or uuid.uuid4().hex
        read.read.request.rid = request_id
        hint, demand = header_hint(request.headers), demand_of(request.scope)
        generation = await manager.submit_read(read.read, session_id=hint, demand=demand)
        self._generations[request_id] = generation
        choices = InferenceChoices(read, request_id, read.request.model or self._model_name)
        if read.request.stream:
            return EventStream(_frames(generation, choices), lambda: self._close(request_id, generation))
        try:
            await unless_disconnected(request, generation.wait())
            return json_response(await unless_disconnected(request, choices.response(generation.states)))
        finally:
            self._close(request_id, generation)

    def _close(self, request_id: str, generation: Generation) -> None:
        generation.close()
        if self._generations.get(request_id) is generation:
            del self._generations[request_id]

    @property
    def _model_name(self) -> str:
        return self._manager.server_args.served_model_name or self._manager.controls.model_path

    def _check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError for the name of an adapter, `model:adapter`. Other names are not compared."""
        if name and ":" in name and name != self._model_name:
            raise ModelNotFoundError(lora.refusal(f"The model `{name:.200}`", "does not exist"))

    # -- abort ----------------------------------------------------------------------------------------------

    async def abort_requests(self, request: Request) -> Response:
        """Return {"status", "aborted"}: the number of requests that were running. Each of them ends with its partial
        output. To abort all requests is a control call. A name that no request has is ignored."""
        body = await read_json(request, self._manager.server_args.max_request_bytes)
        named = read_struct(body, AbortRequestsReq)
        judge_unknown(request, names_of_unknown(body, named))
        wanted = named.request_ids
        may_abort_all = request.url.path == _ABORT_ALL
        if wanted is None and not (may_abort_all and body.keys() <= {"request_ids"}):
            raise BadRequestError(f"The body has no `request_ids`. `{_ABORT_ALL}` with an empty body aborts all.")
        if wanted is not None and len(wanted) > _MOST_ABORTED:
            raise BadRequestError(f"request_ids: {len(wanted):,} ids; one call may name {_MOST_ABORTED:,}.")
        self._manager.check_serving()
        if wanted or not may_abort_all:
            aborted = sum(self._abort(name) for name in set(wanted or ()))
        else:
            if (refusal := self._rules.control_refusal(request.scope)) is not None:
                raise refusal
            aborted = self._manager.num_requests
            self._manager.abort_request(abort_all=True)
        return json_response({"status": "aborted", "aborted": aborted})

    def _abort(self, name: str) -> int:
        """Abort a request by its name in the request or in the answer. Return 1 if it was running, else 0."""
        generation = self._generations.get(name) or self._generations.get(name.removeprefix(_PREFIX))
        if generation is None:
            return int(self._manager.abort_request(rid=name))
        for state in generation.states:
            self._manager.abort_request(rid=state.rid)
        return 1

    # -- information ----------------------------------------------------------------------------------------

    async def version(self, request: Request) -> Response:
        """Return {"version"}: the version of this server."""
        return json_response({"version": __version__})

    async def load(self, request: Request) -> Response:
        """Return {"server_load"}: the number of unanswered samples."""
        self._manager.check_serving()
        return json_response({"server_load": self._manager.num_requests})


async def _frames(generation: Generation, choices: InferenceChoices) -> AsyncIterator[bytes]:
    try:
        async for i, state in generation.updates():
            if (chunk := await choices.chunk(i, state, generation.states)) is not None:
                yield sse(chunk)
        if (usage := choices.usage_chunk(generation.states)) is not None:
            yield sse(usage)
    except VerlServerError as error:
        yield sse(vllm_error_body(error))
    yield SSE_DONE
