"""A router without placement: it reports the states of its servers, and hands each request to the first healthy one."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import httpx

from verl_server.engine.router_client import FLEET_HEADER
from verl_server.messages.io_struct import EXPECTED_INSTANCE_HEADER, INSTANCE_HEADER

FLEET = "f1ee7000"


class FakeRouter:
    """A router on a port of its own. `states` overrides what it finds out itself, by URL."""

    def __init__(self, urls: Callable[[], list[str]]) -> None:
        self._urls = urls
        self.states: dict[str, str] = {}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        """(method, path, headers, body) of each request that was handed on."""
        self.committed: list[str] = []
        """Versions whose push was declared to be over."""
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        router = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                router._answer(self)

            do_POST = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._connections: set[Any] = set()
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._connections):  # as the end of a process does
            connection.close()

    def report(self) -> dict[str, Any]:
        return {
            "fleet": FLEET,
            "committed": self.committed[-1] if self.committed else None,
            "servers": [self._look(url) for url in self._urls()],
        }

    def _look(self, url: str) -> dict[str, Any]:
        seen: dict[str, Any] = {"url": url, "state": "dead", "instance_id": None, "weight_version": None}
        try:
            info = httpx.get(f"{url}/server_info", timeout=10).json()
            seen |= {name: info[name] for name in ("instance_id", "weight_version", "weights_confirmed")}
            seen["state"] = "healthy"
        except httpx.HTTPError:
            pass
        return seen | ({"state": self.states[url]} if url in self.states else {})

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self._connections.add(request.connection)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        healthy = [server["url"] for server in self.report()["servers"] if server["state"] == "healthy"]
        expected = request.headers.get(EXPECTED_INSTANCE_HEADER)
        headers = {FLEET_HEADER: FLEET, INSTANCE_HEADER: FLEET}
        if request.path == "/fleet/commit":
            self.committed.append(json.loads(body)["weight_version"])
        if request.path.startswith("/fleet"):
            status, content = 200, json.dumps(self.report()).encode()
        elif expected not in (None, FLEET):
            status, content = 412, b'{"error": {"message": "another fleet"}}'
        elif not healthy:
            status, content = 503, b'{"error": {"message": "no healthy server"}}'
            headers |= {"X-Verl-Error": "ServerUnavailableError", "Retry-After": "1"}
        else:
            names = {name.lower(): value for name, value in request.headers.items()}
            self.requests.append((request.command, request.path, names, body))
            status, sent, content = _handed_on(healthy[0], request, body)
            headers = sent | headers
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


def _handed_on(url: str, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    dropped = ("host", "connection", EXPECTED_INSTANCE_HEADER.lower())
    headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
    try:
        connection.request(request.command, request.path, body, headers)
        answer = connection.getresponse()
        kept = {"content-type", "x-verl-error", "retry-after"}
        return answer.status, {k: v for k, v in answer.headers.items() if k.lower() in kept}, answer.read()
    finally:
        connection.close()
