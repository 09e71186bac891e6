"""Which run of a server answers: the `X-Verl-Instance` header of every response, and requests that expect one.

A server that is started again serves the weights that it loads, not those that were pushed to the run before. So each
run has a random id, and a client sends the id that it knows with each request. `InstanceMiddleware` compares the two
before anything else is done, in the very process that would do it: there is no moment between the check and the work at
which another run could take over, whatever happens to connections, proxies or streams. A request without the header is
served by any run.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import ServerRestartedError
from verl_server.io_struct import EXPECTED_INSTANCE_HEADER, INSTANCE_HEADER
from verl_server.server.responses import status_error


class InstanceMiddleware:
    def __init__(self, app: ASGIApp, instance_id: str) -> None:
        self._app, self._instance_id = app, instance_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[INSTANCE_HEADER] = self._instance_id
            await send(message)

        expected = Headers(scope=scope).get(EXPECTED_INSTANCE_HEADER, self._instance_id)
        app = self._app if expected == self._instance_id else status_error(self._restarted(expected))
        await app(scope, receive, send_with_id)

    def _restarted(self, expected: str) -> ServerRestartedError:
        return ServerRestartedError(
            f"The request expects run {expected} of this server, but this is run {self._instance_id}: the server was "
            "started again, and may serve other weights. Nothing was done."
        )
