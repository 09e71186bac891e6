"""A request has the operation whose path and method are its own, and no other spelling has one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from verl_server.web.resolver import Found, NotServed, Resolver


@dataclass(frozen=True)
class Operation:
    name: str
    paths: tuple[str, ...]
    methods: tuple[str, ...] = ("GET",)


RESOLVER = Resolver(
    [
        Operation("first", ("/a", "/alias")),
        Operation("second", ("/a",), ("GET", "POST")),
        Operation("any", ("/b/{name}",), ("GET", "POST")),
        Operation("exact", ("/b/c",), ("POST",)),
        Operation("rest", ("/m/{name:path}",)),
        Operation("inner", ("/s/{id}/reward",), ("POST",)),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "name", "parameters"),
    [
        ("GET", "/a", "first", {}),
        ("HEAD", "/a", "first", {}),
        ("POST", "/a", "second", {}),
        ("GET", "/alias", "first", {}),
        ("POST", "/b/c", "exact", {}),
        ("GET", "/b/c", "any", {"name": "c"}),
        ("POST", "/b/d e", "any", {"name": "d e"}),
        ("GET", "/m/x/y", "rest", {"name": "x/y"}),
        ("POST", "/s/7/reward", "inner", {"id": "7"}),
    ],
)
def test_what_is_found(method: str, path: str, name: str, parameters: dict[str, str]) -> None:
    found = RESOLVER.find(method, path)
    assert isinstance(found, Found)
    assert (found.operation.name, found.parameters) == (name, parameters)


@pytest.mark.parametrize(
    ("method", "path", "status", "allowed"),
    [
        ("GET", "/a/", 404, ()),
        ("GET", "//a", 404, ()),
        ("GET", "/A", 404, ()),
        ("GET", "a", 404, ()),
        ("GET", "", 404, ()),
        ("GET", "/b/", 404, ()),
        ("GET", "/b/c/d", 404, ()),
        ("GET", "/m/", 404, ()),
        ("GET", "/a\n", 400, ()),
        ("GET", "/b/c\n", 400, ()),
        ("GET", "/m/x\n", 400, ()),
        ("POST", "/s/7\n/reward", 400, ()),
        ("GET", "/a\x7f", 400, ()),
        ("GET", "/a\x85", 400, ()),
        ("get", "/a", 405, ("GET", "HEAD", "POST")),
        ("DELETE", "/b/c", 405, ("GET", "POST")),
        ("HEAD", "/b/c", 405, ("GET", "POST")),
        ("OPTIONS", "/s/7/reward", 405, ("POST",)),
    ],
)
def test_what_is_refused(method: str, path: str, status: int, allowed: tuple[str, ...]) -> None:
    refused = RESOLVER.find(method, path)
    assert isinstance(refused, NotServed), path
    assert (refused.status, refused.allowed) == (status, allowed)


def test_a_slash_too_many_is_named() -> None:
    refused = RESOLVER.find("GET", "//a/")
    assert isinstance(refused, NotServed)
    assert "Did you mean /a?" in refused.message
