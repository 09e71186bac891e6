"""The table of paths without parameters finds the route that Starlette finds without it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from verl_server.server.dialects.operation import Handler, exact_first


def answer(text: str) -> Handler:
    async def handler(request: Request) -> Response:
        return PlainTextResponse(f"{text} {request.path_params}")

    return handler


def test_the_table_changes_no_answer() -> None:
    routes = [
        Route("/a", answer("first"), methods=["GET"]),
        Route("/a", answer("second"), methods=["GET", "POST"]),
        Route("/b/{name}", answer("any"), methods=["POST"]),
        Route("/b/c", answer("exact"), methods=["GET", "POST"]),
    ]
    plain, table = (TestClient(Starlette(routes=each)) for each in (routes, exact_first(routes)))
    for method in ("GET", "POST", "HEAD", "PUT"):
        for path in ("/a", "/a/", "/b/c", "/b/d", "/", "/none"):
            expected, found = plain.request(method, path), table.request(method, path)
            assert (found.status_code, found.text) == (expected.status_code, expected.text), (method, path)
    assert table.get("/a").text == "first {}" and table.post("/b/c").text == "any {'name': 'c'}"
