"""`serve_socket`: one WebSocket connection of an environment server, which owns one environment until it ends.

The connections at `/ws` (`env_server`) and at `/mcp` (`env_mcp`) differ in their messages only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from starlette.websockets import WebSocket, WebSocketDisconnect

from verl_server.rollout.environments.env_pool import EnvPool
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv


async def serve_socket(
    socket: WebSocket,
    pool: EnvPool,
    serve: Callable[[HostedEnv], Awaitable[None]],
    refuse: Callable[[EnvMessageError], Awaitable[None]],
) -> None:
    """Run `serve` on an environment of its own, then close environment and connection.

    `refuse` sends the error if the pool has no room.
    """
    await socket.accept()
    try:
        hosted = pool.open()
    except EnvMessageError as error:
        await refuse(error)
        await socket.close()
        return
    try:
        await serve(hosted)
    except WebSocketDisconnect:
        pass
    finally:
        await pool.close(hosted)
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client closed first
            await socket.close()
