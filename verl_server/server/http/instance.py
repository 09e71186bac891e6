"""`InstanceMiddleware` names the run of the server in every response, and refuses requests that expect another run.

A server that is started again serves the weights that it loads, not the weights that were pushed to the run before.
Each run therefore has a random id. The header `X-Verl-Instance` returns the id to clients, and a client sends the id
that it knows with each request. The middleware compares the two ids before any other work, in the process that does the
work. So no other run can take over between the check and the work, whatever happens to connections, proxies or streams.
Any run serves a request without the header.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import ServerRestartedError
from verl_server.messages.io_struct import EXPECTED_INSTANCE_HEADER, INSTANCE_HEADER
from verl_server.server.http.routing import error_answer
from verl_server.web.first_headers import first_headers

_EXPECTED = EXPECTED_INSTANCE_HEADER.lower().encode()


class InstanceMiddleware:
    def __init__(self, app: ASGIApp, instance_id: str) -> None:
        self._app, self._instance_id = app, instance_id
        self._header = INSTANCE_HEADER.lower().encode(), instance_id.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._header]
            await send(message)

        expected = first_headers(scope).get(_EXPECTED)
        app = self._app
        if expected is not None and expected != self._header[1]:
            app = error_answer(scope, self._restarted(expected.decode("latin-1")))
        await app(scope, receive, send_with_id)

    def _restarted(self, expected: str) -> ServerRestartedError:
        return ServerRestartedError(
            f"The request expects run {expected} of this server, but this is run {self._instance_id}: the server was "
            "started again, and may serve other weights. Nothing was done."
        )
