"""The page's server refuses foreign requests, and every answer has the security headers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.watch.site.conftest import Site
from tests.watch.site.recorded_runs import write_run
from verl_server.errors import BadRequestError
from verl_server.watch.site.doors import check_address

OpenSite = Callable[..., Site]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", 1).close()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8090"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:8090"}, 200),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_origins_are_refused(
    open_site: OpenSite, folder: Path, headers: dict[str, str], status: int
) -> None:
    answer = open_site(folder).request("/api/runs", **headers)
    assert answer.status_code == status
    assert (status == 200) == ("error" not in answer.json())


def test_a_link_leads_to_the_page_and_to_nothing_else(open_site: OpenSite, folder: Path) -> None:
    site = open_site(folder)
    link = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert site.request("/", **link).status_code == 200
    assert site.request("/", **link, Host="evil.example").status_code == 403
    assert site.request("/", **link | {"Sec_Fetch_Dest": "iframe"}).status_code == 403
    assert site.request("/api/runs", **link).status_code == 403
    assert site.request("/static/js/main.js", **link).status_code == 403


def test_the_api_wants_the_key_and_the_page_does_not(open_site: OpenSite, folder: Path) -> None:
    site = open_site(folder, host="0.0.0.0", key="secret")
    assert site.request("/").status_code == 200
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = site.request("/api/runs", **headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert "#key=KEY" in answer.json()["remedy"] and "secret" not in answer.text
    assert site.request("/api/runs", Authorization="Bearer secret").status_code == 200
    assert site.request("/api/live").status_code == 401


def test_an_address_off_loopback_needs_a_key() -> None:
    with pytest.raises(BadRequestError, match=r"Refusing to bind 0\.0\.0\.0 without a key"):
        check_address("0.0.0.0", None)
    check_address("0.0.0.0", "key")
    check_address("::1", None)


@pytest.mark.parametrize("url", ["/", "/api/runs", "/api/nothing", "/static/nothing", "/nothing"])
def test_every_answer_has_the_headers(open_site: OpenSite, folder: Path, url: str) -> None:
    headers = open_site(folder).request(url).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';") and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert headers["cache-control"] == ("no-store" if url.startswith("/api") else "no-cache")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../views.py",
        "/static/%2e%2e/views.py",
        "/static/..%2fviews.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/js/../../app.py",
        "/static/js\\..\\app.py",
        "/api/runs/../../etc/passwd",
        "/api/runs/..%2f..%2fetc",
    ],
)
def test_a_path_opens_no_file(open_site: OpenSite, folder: Path, path: str) -> None:
    answer = open_site(folder).request(path)
    assert answer.status_code == 404 and set(answer.json()) == {"error", "remedy"}


def test_control_characters_and_other_methods_are_refused(open_site: OpenSite, folder: Path) -> None:
    site = open_site(folder)
    assert site.request("/api/runs%0a").status_code == 400
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        answer = site.request("/api/runs", method, Content_Type="application/json")
        assert answer.status_code == 405 and "only reads" in answer.json()["remedy"]
