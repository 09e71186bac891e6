"""The engine's benchmarks run on the CPU and print the figures that they document."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import ablation, decode_steps, first_minute, multi_turn, offline, rl_shapes, serving, startup
from tests.benchmark.lines import figures
from verl_server import Engine

SMALL = ["--set", "cpu_threads=1", "--set", "kv_cache_gib=0.1"]


def test_offline(capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--uniform", "2", "8", "4", "--requests", "2"]
    offline.main([*SMALL, *work, "--prefix-cache", "--single", "--sampling", "without_logprobs", "top_p"])
    found = figures(capsys)
    assert found["run"]["command"].startswith("python -m benchmarks.offline --set cpu_threads=1")
    rate = found["output_tokens_per_s"]
    assert rate["value"] == found["output_tokens_per_s_run"]["value"] and found["output_tokens_per_s_run"]["run"] == 2
    assert rate["logprobs"] is rate["prefix_cache"] is True
    assert "peer" not in rate, "there is no measurement of another engine for this work"
    assert 0 < rate["value"] < rate["limit"]
    assert found["single_sequence_tokens_per_s"]["value"] > 0
    for setting in ("without_logprobs", "top_p"):
        line = found[setting]
        assert line["of_plain"] == pytest.approx(line["value"] / line["limit"], rel=1e-2)


def test_a_run_that_generates_less_does_not_pass() -> None:
    class Short:
        def generate(self, **_: Any) -> list[dict[str, Any]]:
            return [{"output_ids": [1]}]

    engine: Engine = Short()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="did not generate"):
        offline.run_once(engine, offline.uniform_workload(1, 1, 2), logprobs=False)


@pytest.mark.exhaustive
def test_rl_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    rl_shapes.main([*SMALL, "--requests", "2", "--runs", "1"])
    found = figures(capsys)
    assert set(found) == {"run", *rl_shapes.SETTINGS, "prompts", "prompt_logprobs"}
    setting = found[list(rl_shapes.SETTINGS)[1]]
    assert setting["of_plain"] == pytest.approx(setting["value"] / setting["limit"], rel=1e-2)
    assert setting["spread"] == pytest.approx([setting["of_plain"]] * 2, rel=1e-2), "one pair of runs"


def test_decode_steps(capsys: pytest.CaptureFixture[str]) -> None:
    decode_steps.main([*SMALL, "--rows", "3", "--context", "20"])
    step = figures(capsys)["decode_step"]
    assert step["value"] > 0 and step["unit"] == "us" and step["rows"] == 3


@pytest.mark.exhaustive
def test_serving(capsys: pytest.CaptureFixture[str]) -> None:
    serving.main([*SMALL, "--requests", "3", "--concurrency", "2", "--runs", "1"])
    found = figures(capsys)
    in_process = found["in_process_tokens_per_s"]["value"]
    for name in ("http_json_tokens_per_s", "http_columnar_tokens_per_s"):
        assert found[name]["ratio"] == pytest.approx(found[name]["value"] / in_process, rel=1e-3)
        assert found[name]["server_cpu_us"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--session-ids"]])
def test_multi_turn(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    multi_turn.main([*SMALL, "--agents", "4", "--turns", "2", "--group", "2", "--wait-scale", "0.01", *options])
    found = figures(capsys)
    hits = found["prefix_hit_rate"]
    assert 0 < hits["value"] <= hits["limit"] < 1
    assert found["own_pace_seconds"]["output_tokens"] == found["lock_step_seconds"]["output_tokens"]
    assert found["ideal_ratio"]["value"] > 0 and found["lock_step_ratio"]["value"] > 0


def test_the_first_run_is_compared_with_the_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: list[tuple[Any, bool]] = []

    def run_twice(args: Any, folder: Any, cache: Any) -> dict[str, Any]:
        caches.append((cache, cache.exists()))
        cache.mkdir(exist_ok=True)
        return {"ready": 3.0, "runs": [4.0, 3.0], "tokens": 1200, "memory": {"kernels_compiled": 2}}

    monkeypatch.setattr(first_minute, "run_twice", run_twice)
    first_minute.main(["--shape", "tiny"])
    found = figures(capsys)
    assert found["bare_ratio"]["value"] == 0.75 and found["bare_ratio"]["kernels_compiled"] == 2
    assert (found["warm_run"]["value"], found["warm_run"]["run"], found["warm_ready"]["value"]) == (400, 2, 3)
    (bare, was_there), (warm, is_there) = caches
    assert bare == warm and not was_there and is_there


@pytest.mark.exhaustive
def test_first_minute(capsys: pytest.CaptureFixture[str]) -> None:
    first_minute.main([*SMALL, "--requests", "2", "--ahead"])
    found = figures(capsys)
    starts = ("bare", "warm", "ahead")
    assert set(found) == {
        *("run", "warm_up_seconds"),
        *(f"{start}_{name}" for start in starts for name in ("ready", "run", "ratio")),
    }
    assert all(found[f"{start}_ready"]["value"] > 0 and found[f"{start}_ratio"]["value"] > 0 for start in starts)
    assert found["warm_run"]["run"] == 2


@pytest.mark.exhaustive
def test_startup(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main([*SMALL, "--runs", "1", "--weights", "safetensors"])
    found = figures(capsys)
    value = found["seconds_to_first_token"]["value"]
    assert found["seconds_to_first_token"]["limit"] > 0
    assert value == found["seconds_to_first_token_run"]["value"]
    phases = [line for name, line in found.items() if name.startswith("start_")]
    assert [line["name"] for line in phases[-2:]] == ["start_first_token", "start_first_16_tokens"]
    assert sum(line["value"] for line in phases[:-1]) == pytest.approx(value, abs=0.01)
    assert all(line["value"] >= 0 for line in phases), "each phase must end after the previous one"
    assert found["seconds_to_first_token"]["weights"] == "safetensors"


@pytest.mark.exhaustive
def test_startup_served(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main([*SMALL, "--runs", "1", "--served"])
    found = figures(capsys)
    served = found["seconds_to_serve"]
    assert served["value"] == found["seconds_to_serve_run"]["value"]
    assert served["ratio"] == pytest.approx(served["value"] / served["limit"], rel=0.01)


def test_ablation_measures_each_switch_against_everything_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"disable_cuda_graph": 50.0, "logprobs": 80.0}
    monkeypatch.setattr(
        ablation, "measure", lambda args, folder, work, different: rates.get(next(iter(different), ""), 100.0)
    )
    monkeypatch.setattr(ablation, "report_run", lambda *_: None)
    ablation.main(["--device", "cpu"])
    assert set(figures(capsys)) == {
        *("everything", "everything_again", "fused_kernels", "attention_backend", "logprobs", "prefix_cache")
    }
    ablation.main(["--device", "cuda"])
    found = figures(capsys)
    assert found["disable_cuda_graph"]["ratio"] == 0.5 and found["disable_cuda_graph"]["set"] is True
    assert found["logprobs"]["ratio"] == 0.8
    assert found["everything"]["ratio"] == found["everything_again"]["ratio"] == found["fused_kernels"]["ratio"] == 1.0


def test_an_ablation_starts_its_engine_with_the_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    started: list[dict[str, Any]] = []

    class FakeEngine:
        def __init__(self, **settings: Any) -> None:
            started.append(settings)

        def __enter__(self) -> FakeEngine:
            return self

        def __exit__(self, *_: object) -> None: ...

        def flush_cache(self, timeout: float) -> bool:
            return True

        def generate(self, **_: Any) -> list[dict[str, Any]]:
            return [{"output_ids": [1] * 128, "meta_info": {"output_token_logprobs": [0] * 128}}]

    monkeypatch.setattr(ablation, "Engine", FakeEngine)
    args = ablation.parse_args(["--requests", "1"])
    work = ablation.make_workload("tiny").first(1)
    for different in ({}, *ablation.variants().values()):
        ablation.measure(args, tmp_path, work, different)
    assert started[0]["disable_radix_cache"] is True
    by_name = dict(zip(["everything", *ablation.variants()], started, strict=True))
    assert by_name["fused_kernels"]["fused_kernels"] is False
    assert by_name["prefix_cache"]["disable_radix_cache"] is False
    assert "logprobs" not in by_name["logprobs"]
