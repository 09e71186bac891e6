"""Who may call what, over the table of SGLang's key levels."""

from __future__ import annotations

import pytest

from tests.server.conftest import MakeStack

NORMAL, ADMIN, OPEN = "/model_info", "/flush_cache", "/health"


@pytest.mark.parametrize(
    ("settings", "key", "allowed"),
    [
        ({}, None, {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k"}, None, {OPEN}),
        ({"api_key": "k"}, "k", {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k"}, "wrong", {OPEN}),
        ({"admin_api_key": "a"}, None, {NORMAL, OPEN}),
        ({"admin_api_key": "a"}, "a", {NORMAL, ADMIN, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "k", {NORMAL, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "a", {ADMIN, OPEN}),
        ({"api_key": "k", "admin_api_key": "a"}, "ké", {OPEN}),
    ],
)
def test_levels(make_stack: MakeStack, settings: dict[str, str], key: str | None, allowed: set[str]) -> None:
    stack = make_stack(**settings)
    headers = {} if key is None else {"Authorization": f"bearer {key}".encode()}
    for path in (NORMAL, ADMIN, OPEN):
        response = stack.get(path, headers=headers)
        assert response.status_code == (200 if path in allowed else 401), path
        if path not in allowed:
            assert response.json() == {"error": "Unauthorized"}


@pytest.mark.parametrize("header", ["k", "Basic k", "Bearer", "Bearer  k x", ""])
def test_malformed_headers_are_refused(make_stack: MakeStack, header: str) -> None:
    stack = make_stack(api_key="k")
    assert stack.get(NORMAL, headers={"Authorization": header}).status_code == 401
