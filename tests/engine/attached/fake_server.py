"""A server of another project that answers what the test says, and records what it was sent."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = dict[str, tuple[int, Any]]
"""Path without its query -> (status, body)."""


class FakeServer:
    def __init__(self, answers: Answers, headers: dict[str, str] | None = None) -> None:
        self.answers, self.headers = answers, headers or {}
        self.posted: list[tuple[str, Any]] = []
        """(path with its query, body) of each POST, in order."""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.posted.append((self.path, json.loads(data) if data else None))
                self._answer()

            def _answer(self) -> None:
                status, body = outer.answers.get(self.path.partition("?")[0], (404, {"detail": "Not Found"}))
                data = json.dumps(body).encode()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def called(self) -> list[str]:
        """Paths of the POSTs."""
        return [path for path, _ in self.posted]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
