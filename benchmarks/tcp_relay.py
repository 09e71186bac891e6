"""A relay that hands on bytes between a client and one server, and knows nothing of HTTP: the least that a hop costs.

`benchmarks.router` measures it beside the routers: `python -m benchmarks.tcp_relay PORT HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class End(asyncio.Protocol):
    """One connection of a pair. What it receives is written to the other one."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def join(self, other: End) -> None:
        self.other, other.other = other, self
        for data in self._early:
            self.data_received(data)
        self._early.clear()


async def relay(port: int, host: str, server_port: int) -> None:
    loop = asyncio.get_running_loop()
    opening: set[asyncio.Task[None]] = set()

    async def open_server(client: End) -> None:
        _, server = await loop.create_connection(End, host, server_port)
        client.join(server)

    def accept() -> End:
        client = End()
        task = loop.create_task(open_server(client))
        opening.add(task)
        task.add_done_callback(opening.discard)
        return client

    await (await loop.create_server(accept, "127.0.0.1", port)).serve_forever()


if __name__ == "__main__":
    server_host, _, server_port = sys.argv[2].rpartition(":")
    uvloop.run(relay(int(sys.argv[1]), server_host, int(server_port)))
