"""A scrape shows each figure that other parts of the server know, and leaves out the others."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from verl_server.server.metrics import Metrics
from verl_server.server.scraped_figures import Scrape
from verl_server.worker.weights.transaction import State


class Store:
    failure: str | None = None
    backlog = 3
    size = 400


def values(metrics: Metrics, scrape: Scrape) -> dict[str, float]:
    """Return 'name{labels besides the model}' -> value of an exposition."""
    lines = [line.rpartition(" ") for line in metrics.render(scrape).decode().splitlines() if not line.startswith("#")]
    shown = {series.replace('model_name="m",', "").replace('model_name="m"', ""): value for series, _, value in lines}
    return {series.replace(",}", "}").removesuffix("{}"): float(value) for series, value in shown.items()}


def test_figures_that_the_scheduler_knows() -> None:
    state: dict[str, Any] = {
        "num_running_reqs": 2, "num_waiting_reqs": 7, "token_usage": 0.25, "num_retractions": 4,
        "output_tokens_total": 50, "prompt_tokens_total": 30, "cached_tokens_total": 10, "weights_state": "torn",
    }  # fmt: skip
    shown = values(Metrics("m"), Scrape(state, paused_seconds=1.5, busy_seconds=8.0))
    expected = {
        "sglang:num_running_reqs": 2, "sglang:num_queue_reqs": 7, "sglang:token_usage": 0.25,
        "sglang:num_retracted_requests_total": 4, 'sglang:realtime_tokens_total{mode="decode"}': 50,
        'sglang:realtime_tokens_total{mode="prefill_compute"}': 20,
        'sglang:realtime_tokens_total{mode="prefill_cache"}': 10, 'verl_server:weights_state{state="torn"}': 1,
        'verl_server:weights_state{state="serving"}': 0, "verl_server:scheduler_answered": 1,
        "verl_server:paused_seconds": 1.5, "verl_server:busy_seconds_total": 8,
    }  # fmt: skip
    assert expected.items() <= shown.items()


def test_a_figure_that_nobody_knows_is_left_out() -> None:
    metrics = Metrics("m")
    values(metrics, Scrape({"num_running_reqs": 2, "token_usage": 0.25, "weights_state": "serving"}))
    shown = values(metrics, Scrape({"num_running_reqs": 3}))
    assert shown["sglang:num_running_reqs"] == 3
    absent = ("sglang:token_usage", "sglang:realtime_tokens", "verl_server:weights_state", "verl_server:session_store")
    assert not [series for series in shown if series.startswith(absent)]
    shown = values(metrics, Scrape())
    assert shown["verl_server:scheduler_answered"] == 0 and "sglang:num_running_reqs" not in shown


@pytest.mark.parametrize("state", get_args(State))
def test_each_state_of_the_weights_has_its_series(state: str) -> None:
    shown = values(Metrics("m"), Scrape({"weights_state": state}))
    of_states = {series: value for series, value in shown.items() if "weights_state" in series}
    assert len(of_states) == 4 and sum(of_states.values()) == 1
    assert of_states[f'verl_server:weights_state{{state="{state}"}}'] == 1


@pytest.mark.parametrize(
    ("label", "series"),
    [
        ("13@5f2c9a1e", ('verl_server:weight_version_number{incarnation="5f2c9a1e"}', 13)),
        ("12", ('verl_server:weight_version_number{incarnation=""}', 12)),
        ("default", None),
        ("", None),
        ("-1", None),
        ("\N{SUPERSCRIPT TWO}", None),
        ("9" * 16, None),
    ],
)
def test_a_version_has_a_series_if_it_has_a_number(label: str, series: tuple[str, float] | None) -> None:
    shown = values(Metrics("m"), Scrape(weight_version=label))
    found = [(name, value) for name, value in shown.items() if "weight_version" in name]
    assert found == ([] if series is None else [series])


def test_the_store_is_shown_while_it_works_and_while_it_fails() -> None:
    metrics, store = Metrics("m"), Store()
    metrics.watch_store(store)
    names = (
        "verl_server:session_store_failing",
        "verl_server:session_store_backlog",
        "verl_server:session_store_bytes",
    )
    assert [values(metrics, Scrape())[name] for name in names] == [0, 3, 400]
    store.failure = "the disk is full in /home/somebody"
    text = metrics.render(Scrape()).decode()
    assert 'verl_server:session_store_failing{model_name="m"} 1.0' in text
    assert "somebody" not in text, "everybody may read the metrics"
