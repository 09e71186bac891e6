"""The HTTP application of one TokenizerManager: the operations of all dialects, behind access control.

`RouteMiddleware` finds the operation of a request, `AuthMiddleware` decides whether the caller may call it, and
`Dispatch` calls it. Whoever refuses the request, the answer has the shape of the operation (`routing.error_answer`).

`http_process` serves the application on the TokenizerManager's event loop. `Dispatch` converts the errors of this
project into responses, and this module converts all other errors.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from verl_server.errors import VerlServerError
from verl_server.server.arrivals import ArrivalMiddleware
from verl_server.server.auth import AccessRules, AuthMiddleware
from verl_server.server.dialects.anthropic.routes import AnthropicApi
from verl_server.server.dialects.models import ModelsApi
from verl_server.server.dialects.openai.routes import OpenAIApi
from verl_server.server.dialects.sessions.routes import SessionApi
from verl_server.server.dialects.sglang.admin_routes import ControlApi
from verl_server.server.dialects.sglang.health_routes import HealthApi
from verl_server.server.dialects.sglang.info_routes import InfoApi
from verl_server.server.dialects.sglang.ops_routes import OpsApi
from verl_server.server.dialects.sglang.routes import NativeApi
from verl_server.server.dialects.sglang.session_routes import SglangSessionApi
from verl_server.server.dialects.vllm.control_routes import VllmControlApi
from verl_server.server.dialects.vllm.routes import VllmApi
from verl_server.server.http.answer_counts import AnswerCountMiddleware
from verl_server.server.http.instance import InstanceMiddleware
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import ClientDisconnectedError
from verl_server.server.http.routing import Dispatch, RouteMiddleware, error_answer
from verl_server.server.http.routing_headers import RoutingHeadersMiddleware
from verl_server.server.http.unknown_fields import UnknownFieldsMiddleware
from verl_server.server.http.version_headers import VersionHeadersMiddleware
from verl_server.server.openapi import DescriptionApi
from verl_server.server.replay.middleware import ReplayMiddleware
from verl_server.server.sessions.access import SessionPathMiddleware
from verl_server.server.sessions.service import SessionService
from verl_server.server.sessions.session_turns import SessionTurns
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)


def create_app(manager: TokenizerManager, server_args: ServerArgs, sessions: SessionService | None = None) -> ASGIApp:
    """Return the ASGI application with all operations and middlewares.

    Without `sessions`, sessions are kept in memory.
    """
    rules = AccessRules(server_args)
    sessions = SessionService(manager, server_args) if sessions is None else sessions
    mounted = operations(manager, server_args, rules, sessions)
    handlers: dict[Any, Callable[[Request, Exception], Any]] = {ClientDisconnectedError: disconnect_handler(manager)}
    app = ServerErrorMiddleware(ExceptionMiddleware(Dispatch(), handlers), handler=_on_crash)
    arriving = ArrivalMiddleware(RoutingHeadersMiddleware(app), manager.arrivals)
    refuse = server_args.unknown_fields == "refuse"
    replaying = ReplayMiddleware(
        UnknownFieldsMiddleware(arriving, mounted, manager.metrics, refuse),
        grace=server_args.replay_grace,
        ttl=server_args.replay_ttl,
        most_bytes=server_args.replay_bytes,
        most_body=server_args.max_request_bytes,
        cumulative_events=not server_args.incremental_streaming_output,
    )
    versioned = VersionHeadersMiddleware(replaying, lambda: manager.controls.weight_version)
    guarded = InstanceMiddleware(AuthMiddleware(versioned, rules, sessions.ledger.table), manager.instance_id)
    counted = AnswerCountMiddleware(guarded, manager.metrics)
    return SessionPathMiddleware(RouteMiddleware(counted, mounted))


def operations(
    manager: TokenizerManager, server_args: ServerArgs, rules: AccessRules, sessions: SessionService
) -> list[Operation]:
    """Return the operations of all dialects, and the operations that describe them (`/openapi.json`, `/docs`)."""
    turns, limit = SessionTurns(manager, sessions.turns), server_args.max_request_bytes
    dialects = [
        *NativeApi(manager, turns).operations(),
        *HealthApi(manager).operations(),
        *InfoApi(manager).operations(),
        *ControlApi(manager, rules).operations(),
        *OpsApi(manager).operations(),
        *ModelsApi(manager).operations(),
        *OpenAIApi(manager, turns).operations(),
        *VllmApi(manager, rules).operations(),
        *VllmControlApi(manager).operations(),
        *AnthropicApi(manager, turns).operations(),
        *SessionApi(sessions.ledger, lambda: manager.controls.weight_version, limit).operations(),
        *SglangSessionApi(sessions.ledger, manager.finish_hint, limit).operations(),
    ]
    return [*dialects, *DescriptionApi(dialects).operations()]


def disconnect_handler(manager: TokenizerManager) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return the handler for clients that disconnect before the response."""

    async def on_disconnect(request: Request, error: Exception) -> Response:
        manager.metrics.client_disconnected()
        return Response(status_code=499)  # the client does not receive this response

    return on_disconnect


async def _on_crash(request: Request, error: Exception) -> Response:
    logger.exception("%s %s failed.", request.method, request.url.path, exc_info=error)
    message = f"Internal error in {request.url.path}: {error!r} (see the server's log)."
    return error_answer(request.scope, VerlServerError(message))
