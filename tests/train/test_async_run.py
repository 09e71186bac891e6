"""`python -m verl_server.train.async_grpo` with a real server, a real rollout process, and slow environments."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.async_grpo import AsyncGRPO, main
from verl_server.train.rollouts.rollout_process import RolloutProcess
from verl_server.train.run import Step
from verl_server.watch.run_files import read_events
from verl_server.watch.run_records import GroupDone

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--grpo.groups", "2", "--grpo.group-size", "8", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.003", "--grpo.warmup-steps", "1", "--max-skipped-steps", "100"]


@pytest.fixture(scope="module")
def slow_url() -> Iterator[str]:
    """A game whose waits are heavy-tailed: some episodes take many steps of the trainer."""
    game = {"failing": [], "latency": 0.05, "numbers": 3, "guesses": 3}
    with EnvServer("tests.train.environments:FailingGame", kwargs=game) as environment:
        yield environment.url


def fates(out: Path) -> list[GroupDone]:
    return [event for event in read_events(out) if isinstance(event, GroupDone)]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def command(policy_folder: Path, server_url: str, slow_url: str, tmp_path: Path) -> list[str]:
    where = ["--model-path", str(policy_folder), "--env-url", slow_url, "--server", server_url]
    return [*where, "--out", str(tmp_path / "run"), *SETTINGS]


@pytest.mark.timeout(200)
def test_slow_episodes_are_trained_within_the_bound(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, steps = tmp_path / "run", 12
    assert main([*command, "--steps", str(steps), "--max-staleness", "2"]) == 0, capfd.readouterr().err[-6000:]
    lines = metrics(out)
    assert len(lines) == steps and sum(m["failed"] for m in lines) == 0
    assert sum(m["skipped"] is None for m in lines) >= steps // 3
    assert sorted(fate.group for fate in fates(out)) == list(range(2 * steps))
    assert all(m["age_max"] <= 2 for m in lines) and max(m["age_max"] for m in lines) > 0
    assert all(m["logprob_gap"] < 1e-4 for m in lines if m["skipped"] is None)
    spans = sum((Counter(m["version_spans"]) for m in lines), Counter[str]())
    assert sum(spans.values()) == 2 * 8 * steps and sum(n for span, n in spans.items() if int(span) > 1) > 0
    recorded = [json.loads(line) for line in (out / "trajectories-rank0.jsonl").read_text().splitlines()]
    names = [(line["task"]["group"], line["task"]["member"]) for line in recorded]
    assert sorted(names) == [(group, member) for group in range(2 * steps) for member in range(8)]


@pytest.mark.timeout(200)
def test_dropping_loses_only_what_it_counts(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, steps = tmp_path / "run", 10
    options = ["--steps", str(steps), "--max-staleness", "1", "--stale", "drop"]
    assert main([*command, *options]) == 0, capfd.readouterr().err[-6000:]
    lines, counts = metrics(out), Counter(fate.fate for fate in fates(out))
    assert all(m["age_max"] <= 1 and "deadline" not in m["waits"] for m in lines)
    assert counts["trained"] + counts["skipped"] == 2 * steps
    assert counts["dropped"] == sum(m["dropped_groups"] for m in lines)
    numbers = [fate.group for fate in fates(out)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.timeout(200)
def test_a_run_whose_rollout_process_is_killed_goes_on(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process is killed after steps 1 and 4, while groups play."""
    step, killed = AsyncGRPO.step, list[int]()

    def kills(run: AsyncGRPO, *arguments: Any) -> Step:
        result = step(run, *arguments)
        if run.next_step in (2, 5):
            assert isinstance(run._rollouts, RolloutProcess) and run._rollouts._playing
            killed.append(run._rollouts._child.pid)
            os.kill(killed[-1], signal.SIGKILL)
        return result

    monkeypatch.setattr(AsyncGRPO, "step", kills)
    out = tmp_path / "run"
    assert main([*command, "--steps", "8", "--max-staleness", "2"]) == 0, capfd.readouterr().err[-6000:]
    assert len(set(killed)) == 2
    assert sorted(fate.group for fate in fates(out)) == list(range(16))
    assert all(m["age_max"] <= 2 and m["failed"] == 0 for m in metrics(out))
