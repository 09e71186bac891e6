"""`saying`: a relay in front of a server that makes the policy say given texts in their order, whatever the prompt.

The n-th chat request of each session gets a structural tag which permits the n-th text only. The server samples it, so
tokens, log-probabilities and turns are recorded as always.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_OWN = {"connection", "content-length", "transfer-encoding", "keep-alive", "host", "accept-encoding"}


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the tiny models write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Relay:
    """The bodies that the programs sent: one list for each session, in order."""

    def __init__(self, url: str, texts: Sequence[str]) -> None:
        self.url = ""
        self.chats: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.refused: list[str] = []
        self._server = urlsplit(url)
        self._texts = texts

    def send(self, request: BaseHTTPRequestHandler) -> None:
        """Send a request on, and its whole answer back."""
        body: bytes | None = request.rfile.read(int(request.headers.get("content-length", 0)))
        if request.path.endswith("/chat/completions"):
            body = self._scripted(request.path, json.loads(body or b"{}"))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OWN}
        connection = http.client.HTTPConnection(self._server.hostname or "", self._server.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(request.command, request.path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        if answer.status >= 400 and "/s/" in request.path:
            self.refused.append(f"{request.command} {request.path.rpartition('/s/')[2]}: {data[:2000]!r}")
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OWN:
                request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _scripted(self, path: str, body: dict[str, Any]) -> bytes:
        bodies = self.chats[path]
        bodies.append(body)
        text = self._texts[min(len(bodies), len(self._texts)) - 1]
        tag = {"type": "structural_tag", "format": {"type": "const_string", "value": text}}
        return json.dumps(body | {"response_format": tag}).encode()


@contextlib.contextmanager
def saying(url: str, texts: Sequence[str]) -> Iterator[Relay]:
    """Serve a relay to the server at `url` on a free port of this host."""
    relay = Relay(url, texts)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self) -> None:
            relay.send(self)

        do_GET = do_POST = do_DELETE = do_HEAD = do_PUT = _send

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    relay.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield relay
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
