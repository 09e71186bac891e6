"""The router's table has the operations that a server mounts, and an error has the shape that a server chooses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.test_error_shapes import mounted
from verl_server.errors import BadRequestError, SessionUnavailableError, UnauthorizedError
from verl_server.fleet.answers import NoServerError, error_answer
from verl_server.fleet.operations import UnservedPaths, server_operations
from verl_server.server.http.operation import Operation
from verl_server.server.http.routing import _Shapes
from verl_server.web.resolver import Found, Resolver


@pytest.fixture(scope="module")
def served(text_folder: Path) -> Iterator[list[Operation]]:
    """The operations that a server mounts."""
    stack = Stack(text_folder)
    yield mounted(stack)
    stack.close()


def test_the_table_has_what_a_server_mounts(served: list[Operation]) -> None:
    known = server_operations()
    assert {(path, method) for each in known for path in each.paths for method in each.methods} == {
        (path, method) for each in served for path in each.paths for method in each.methods
    }
    ours = Resolver(known)
    for each in served:
        for path in each.paths:
            for method in each.methods:
                found = ours.find(method, path.replace("{", "").replace("}", "").replace(":path", ""))
                assert isinstance(found, Found), path
                operation = found.operation
                assert (operation.access, operation.in_session, operation.dialect, operation.generates) == (
                    each.access,
                    each.in_session,
                    each.dialect,
                    each.generates,
                ), path
    assert sum(each.generates for each in known) == 6


PATHS = [
    "/", "//", "/nothing", "/generate/x", "/v1", "/v1/embeddings", "/v1/messages/", "/v1/messages/batches", "/v1/files",
    "/v1/chat/completions/x", "/inference/v1/generate/x", "/sessions/x/turns", "/fleet/x", "/v1/models/a/b",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [[], [(b"anthropic-version", b"2023-06-01")]])
def test_a_path_that_is_not_served_has_the_dialect_that_a_server_chooses(
    served: list[Operation], path: str, headers: list[Any]
) -> None:
    error = BadRequestError("x")
    shape = _Shapes(served).of({"path": path, "headers": headers, "type": "http"})
    operation = UnservedPaths(server_operations()).operation(path)
    status, _, body = error_answer(operation.errors_of(headers), error)
    assert json.loads(body) == json.loads(bytes(shape(error).body)) and status == 400


def test_an_error_has_the_shape_that_a_server_gives_it(served: list[Operation]) -> None:
    """Every operation, with and without the headers that name another dialect."""
    resolver = Resolver(server_operations())
    errors = [
        kind("the reason") for kind in (UnauthorizedError, SessionUnavailableError, BadRequestError, NoServerError)
    ]
    for each in served:
        for path in each.paths:
            plain = re.sub(r"{\w+(:path)?}", "x", path)
            for method in each.methods:
                found = resolver.find(method, plain)
                assert isinstance(found, Found)
                for headers in ([], [(header.encode(), b"1") for header in each.shared_with]):
                    shape = next((s for h, s in each.shared_with.items() if headers), each.answer_error)
                    for error in errors:
                        operation = found.operation
                        dialect = operation.errors_of(headers)
                        status, sent, body = error_answer(dialect, error, says_success=operation.says_success)
                        theirs = shape(error)
                        case = (method, path, headers, error)
                        assert status == theirs.status_code, case
                        assert json.loads(body) == json.loads(bytes(theirs.body)), case
                        ours = {name.decode(): value.decode() for name, value in sent}
                        wanted = dict(theirs.headers)
                        if isinstance(error, NoServerError):
                            assert wanted.pop("x-verl-error") == "NoServerError"
                            assert ours.pop("x-verl-error") == "ServerDiedError", "engines know this class"
                        assert wanted.pop("retry-after", "1") == ours.pop("retry-after", "1")
                        assert ours == wanted, case
                        assert (status == 503) == any(name == b"retry-after" for name, _ in sent)
