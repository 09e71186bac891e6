"""The URL of a running server, as users write it."""

from __future__ import annotations

import pytest

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.server_address import path_remedy, server_address
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.sessions_client import SessionsClient


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("127.0.0.1:31311", "http://127.0.0.1:31311"),
        ("host", "http://host"),
        ("http://host:1/", "http://host:1"),
        ("https://host/proxy/a", "https://host/proxy/a"),
        ("http://[::1]:1", "http://[::1]:1"),
    ],
)
def test_an_address(written: str, address: str) -> None:
    assert server_address(written) == address


@pytest.mark.parametrize("written", ["", "ftp://host", "http://", "http://host:x", "http://[::1", "a b", "host?x=1"])
def test_what_is_no_address(written: str) -> None:
    with pytest.raises(BadRequestError, match="is not the URL of a rollout server; write it as http://HOST:PORT"):
        server_address(written)


@pytest.mark.parametrize("written", ["http://host:1/v1", "host:1/v1/"])
def test_the_base_url_of_other_clients(written: str) -> None:
    for use in (server_address, HttpServerEngineAdapter.attach, lambda url: SessionsClient(url, "key")):
        with pytest.raises(BadRequestError, match=r"Leave its path out: http://host:1\.$"):
            use(written)


def test_the_remedy_for_a_path() -> None:
    assert path_remedy("http://host:1") == ""
    assert path_remedy("https://host:1/a/b") == " Leave the path out of the URL: https://host:1."
