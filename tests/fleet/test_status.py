"""The router answers /fleet, /metrics, /health, /ready and its own control routes itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.fakes import FakeServer, Running, answered, refused, run, running
from verl_server.fleet import page
from verl_server.fleet.placement import REASONS

ROOT = Path(__file__).parents[2]
HTML = {"accept": "text/html,application/xhtml+xml,*/*"}


async def figures(fleet: Running) -> dict[tuple[str, ...], float]:
    """Return (name, values of its labels) -> value of each figure of /metrics."""
    text = (await fleet.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_state_of_the_fleet() -> None:
    async def scenario() -> None:
        servers = [FakeServer(version="3@0000000a"), FakeServer(version="2@0000000a", tokens=500, capacity=1000)]
        async with running(*servers, name="night-run") as fleet:
            await fleet.post("/generate")
            state = (await fleet.get("/fleet")).json()
            assert (state["fleet"], state["committed"], state["newest"]) == ("night-run", "2@0000000a", "3@0000000a")
            assert state["placements"] == {"load": 1} and state["sessions"] == 0 and state["spread"] is None
            first, second = state["servers"]
            assert (first["url"], first["state"], first["reason"]) == (servers[0].url, "healthy", None)
            assert (first["lag"], second["lag"]) == (0, 1)
            assert (second["load"], second["tokens_in_flight"], second["capacity"]) == (0.5, 500, 1000)
            assert (first["model"], first["context_length"]) == ("tiny", 4096), "no path of the server's disk is shown"

    run(scenario())


@pytest.mark.parametrize(
    ("path", "headers", "is_page"),
    [
        ("/fleet", {}, False),
        ("/fleet", {"accept": "*/*"}, False),
        ("/fleet", {"accept": "application/json"}, False),
        ("/fleet", HTML, True),
        ("/fleet?format=json", HTML, False),
    ],
)
def test_the_page_is_for_browsers(path: str, headers: dict[str, str], is_page: bool) -> None:
    async def scenario() -> None:
        async with running(FakeServer()) as fleet:
            answer = await fleet.get(path, headers=headers)
            assert answer.headers["content-type"].startswith("text/html" if is_page else "application/json")
            assert ("content-security-policy" in answer.headers) == is_page
            assert answer.headers["x-verl-fleet"] == "fleet"
            head = await fleet.client.head(path, headers=headers)
            assert head.status_code == 200 and head.content == b""

    run(scenario())


def test_the_page_shows_foreign_texts_as_texts() -> None:
    hostile = "<script>alert('x')</script>\ud800{0}"
    server = {
        "url": f"http://{hostile}", "state": "stale", "reason": hostile, "weight_version": hostile, "lag": 3,
        "requests": 1234, "load": 7.5, "capacity": 100_000, "paused": True, "model": hostile,
    }  # fmt: skip
    nothing = server | {"state": "dead", "weight_version": None, "requests": 0, "lag": 0, "model": None, "reason": None}
    state: dict[str, Any] = {
        "fleet": hostile, "version": "1", "committed": "5@0000000a", "newest": "6@0000000a", "sessions": 12345,
        "spread": {"weight_version": hostile, "seconds": 1.25}, "placements": {"prefix": 3, "load": 10_000},
        "servers": [server, nothing],
    }  # fmt: skip
    text = page.fleet_page(state).decode()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "0 of 2 servers healthy" in text and "stale, paused" in text and "3 behind" in text
    assert "6@0000000a is on its way" in text and "10,000 to the least loaded" in text and "12,345" in text
    assert "width:100%" in text and "750 %" in text
    empty = state | {"committed": None, "newest": None, "spread": None, "placements": {}, "servers": [nothing]}
    assert "no trainer has pushed" in page.fleet_page(empty).decode()


def test_the_page_names_every_reason_of_a_placement() -> None:
    assert set(page._REASONS) == set(REASONS)


def test_health_and_readiness() -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server) as fleet:
            for path in ("/health", "/ping", "/liveness", "/ready"):
                assert (await fleet.get(path)).status_code == 200
            await server.stop()
            await fleet.until_states("dead")
            assert (await fleet.get("/health")).status_code == 200
            away = await fleet.get("/ready")
            assert away.status_code == 503 and away.headers["retry-after"] == "1"

    run(scenario())


def test_metrics_have_a_prefix_a_help_and_a_place_in_the_docs() -> None:
    docs = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(verl_router:\w+)`", docs))

    async def scenario() -> None:
        async with running(FakeServer(version="1@0000000a")) as fleet:
            await fleet.post("/generate")
            families = list(text_string_to_metric_families((await fleet.get("/metrics")).text))
            names = set()
            for family in families:
                assert family.name.startswith("verl_router:") and family.documentation.endswith("."), family.name
                if not family.name.endswith("_created"):
                    names.add(f"{family.name}_total" if family.type == "counter" else family.name)
            assert names == documented

    run(scenario())


def test_what_is_counted() -> None:
    async def scenario() -> None:
        servers = [FakeServer(version="1@0000000a") for _ in range(2)]
        async with running(*servers, hold_seconds=0.1) as fleet:
            for _ in range(3):
                await fleet.post("/generate")
            servers[0].answers["/generate"] = refused(503, "full", "ServerUnavailableError")
            for _ in range(2):
                assert (await fleet.post("/generate")).status_code == 200
            servers[1].answers["/generate"] = servers[0].answers["/generate"]
            assert (await fleet.post("/generate")).status_code == 503
            await fleet.post("/pull_weights")
            found = await figures(fleet)
            assert found["verl_router:responses_total", "server", "200"] == 5
            assert found["verl_router:responses_total", "router", "409"] == 1
            assert found["verl_router:responses_total", "router", "503"] == 1
            placed = sum(value for name, value in found.items() if name[0] == "verl_router:placements_total")
            assert found["verl_router:repeated_requests_total", "refused"] == placed - 6 >= 2
            assert found["verl_router:choice_seconds_count",] == 6
            assert found["verl_router:held_requests",] == 0
            assert found["verl_router:server_state", servers[0].url, "healthy"] == 1
            assert found["verl_router:weight_version_number", "0000000a"] == 1
            again = await figures(fleet)
            assert again["verl_router:responses_total", "server", "200"] == 5, "a scrape changes nothing"

    run(scenario())


def test_held_requests_are_counted_with_their_seconds() -> None:
    async def scenario() -> None:
        server = FakeServer(version="1@0000000a")
        async with running(server, hold_seconds=0.2) as fleet:
            server.answers["/generate"] = refused(409, "behind", "VersionBehindError")
            body = {"min_weight_version": "2@0000000a"}
            assert (await fleet.post("/generate", body)).status_code == 409
            found = await figures(fleet)
            assert found["verl_router:holds_total",] == 1 and found["verl_router:held_requests",] == 0
            assert found["verl_router:held_seconds_total",] >= 0.15
            assert found["verl_router:choice_seconds_sum",] < 0.15

    run(scenario())


def test_a_push_is_committed() -> None:
    async def scenario() -> None:
        servers = [FakeServer(version="1@0000000a") for _ in range(3)]
        async with running(*servers) as fleet:
            for server in servers[:2]:
                server.version = "2@0000000a"
            answer = await fleet.post("/fleet/commit", {"weight_version": "2@0000000a"})
            assert answer.status_code == 200 and answer.json()["committed"] == "2@0000000a"
            assert [each["state"] for each in answer.json()["servers"]] == ["healthy", "healthy", "stale"]
            unknown = await fleet.post("/fleet/commit", {"weight_version": "3@0000000a"})
            assert unknown.status_code == 400 and "3@0000000a" in unknown.text

    run(scenario())


def test_a_server_is_retired_and_admitted() -> None:
    async def scenario() -> None:
        servers = [FakeServer(), FakeServer()]
        async with running(*servers) as fleet:
            retired = await fleet.post("/fleet/retire", {"url": servers[0].url + "/"})
            assert [each["state"] for each in retired.json()["servers"]] == ["retired", "healthy"]
            assert {fleet.at(await fleet.post("/generate")) for _ in range(4)} == {1}
            admitted = await fleet.post("/fleet/admit", {"url": servers[0].url})
            assert [each["state"] for each in admitted.json()["servers"]] == ["healthy", "healthy"]
            unknown = await fleet.post("/fleet/retire", {"url": "http://other:1"})
            assert unknown.status_code == 400 and servers[1].url in unknown.text

    run(scenario())


@pytest.mark.parametrize("path", ["/fleet/commit", "/fleet/retire", "/fleet/admit"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"url": 1, "weight_version": 1}', b"\xff", b"[" * 10**5, b"x" * 10**5]
)
def test_bodies_that_are_refused(path: str, body: bytes) -> None:
    async def scenario() -> None:
        async with running(FakeServer()) as fleet:
            answer = await fleet.post(path, body)
            assert answer.status_code == (413 if len(body) > 64 * 1024 and body[:1] == b"x" else answer.status_code)
            assert answer.status_code in (400, 413) and answer.json()["error"]["message"]

    run(scenario())


def test_other_methods_and_paths_below_are_a_servers_matter() -> None:
    async def scenario() -> None:
        server = FakeServer()
        for path in ("/fleet", "/fleet/commit", "/fleet/x"):
            server.answers[path] = answered({"error": {"message": "Not Found"}}, 404)
        async with running(server) as fleet:
            assert (await fleet.post("/fleet")).status_code == 404
            assert (await fleet.get("/fleet/commit")).status_code == 404
            assert (await fleet.get("/fleet/x")).status_code == 404

    run(scenario())
