"""A Prometheus scrapes a running server by our configuration, and answers each query of both boards."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.reserved_port import reserved_port
from tests.waiting import eventually
from tests.watch.boards import OUR_BOARD, board_queries, sglang_queries
from tests.watch.metrics_server import busy_server, play

PROMETHEUS = shutil.which("prometheus")
EMPTY_WHEN_HEALTHY = {'verl_server:weights_state{job=~".+", model_name=~".+", instance=~".+", state!="serving"} > 0'}
"""Queries without an answer while nothing is wrong."""

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus, of the distribution's package"),
]


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[httpx.Client]:
    """Yield a client of a Prometheus that scrapes `target` every second, by our configuration."""
    assert PROMETHEUS is not None
    text = OUR_BOARD.with_name("prometheus.yml").read_text(encoding="utf-8")
    assert text.count("127.0.0.1:30000") == 1 and text.count("scrape_interval: 5s") == 1
    configuration = folder / "prometheus.yml"
    text = text.replace("127.0.0.1:30000", target).replace("scrape_interval: 5s", "scrape_interval: 1s")
    configuration.write_text(text, encoding="utf-8")
    with reserved_port() as port, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={configuration}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
                assert eventually(lambda: is_ready(client), 60), (folder / "log").read_text(errors="replace")[-3000:]
                yield client
        finally:
            process.kill()
            process.wait(30)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def asked(client: httpx.Client, query: str) -> list[Any]:
    """Return the series of the answer to a query, which must succeed."""
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    result: list[Any] = answer["data"]["result"]
    return result


@pytest.mark.timeout(300)
def test_prometheus_answers_each_query_of_both_boards(tiny_qwen3: Path, tmp_path: Path) -> None:
    board = json.loads(OUR_BOARD.read_text(encoding="utf-8"))
    with busy_server(tiny_qwen3, tmp_path / "store") as server:
        target = f"{server.base_url.host}:{server.base_url.port}"
        with prometheus(target, tmp_path) as client:

            def scraped_after(moment: float) -> bool:
                times = asked(client, "timestamp(verl_server:busy_seconds_total)")
                return any(float(each["value"][1]) > moment for each in times)

            # A rate needs a sample before and one after the requests that it counts.
            assert eventually(lambda: scraped_after(0), 60), "the server was not scraped"
            play(server, tiny_qwen3)
            ended = time.time()
            assert eventually(lambda: scraped_after(ended), 60), "the server was not scraped again"
            assert {each["value"][1] for each in asked(client, "up")} == {"1"}
            for query in [*board_queries(board), *sglang_queries()]:
                answered = asked(client, query)
                assert (query in EMPTY_WHEN_HEALTHY) == (not answered), f"{query}: {answered}"
                assert all(each["value"][1] != "NaN" for each in answered), f"{query}: {answered}"
