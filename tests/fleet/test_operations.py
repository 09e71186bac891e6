"""The router's table has the operations that a server mounts, and an error has the shape that a server chooses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.test_error_shapes import mounted
from verl_server.fleet.operations import Dialects, server_operations
from verl_server.server.http.routing import _Shapes
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import error_response
from verl_server.web.resolver import Found, Resolver

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(text_folder: Path) -> Iterator[list[Operation]]:
    """The operations that a server mounts."""
    stack = Stack(text_folder)
    yield mounted(stack)
    stack.close()


def test_the_table_has_what_a_server_mounts(served: list[Operation]) -> None:
    known = server_operations()
    assert {(path, method) for each in known for path in each.paths for method in each.methods} >= {
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
                    each.replayed,
                ), path


@pytest.mark.timeout(120)
def test_the_table_is_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


PATHS = [
    "/", "//", "/nothing", "/generate/x", "/v1", "/v1/embeddings", "/v1/messages/", "/v1/messages/batches", "/v1/files",
    "/v1/chat/completions/x", "/inference/v1/generate/x", "/sessions/x/turns", "/fleet/x", "/v1/models/a/b",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [[], [(b"anthropic-version", b"2023-06-01")]])
def test_a_path_that_is_not_served_has_the_dialect_that_a_server_chooses(
    served: list[Operation], path: str, headers: list[Any]
) -> None:
    scope = {"path": path, "headers": headers, "type": "http"}
    shape = _Shapes(served).of(scope)
    dialects = {each.dialect for each in served if each.answer_error is shape} | (
        {"sglang"} if shape is error_response else set()
    )
    if headers:
        dialects = {"anthropic"}
    assert Dialects(server_operations()).of(scope, None) in dialects, dialects
