"""Runs on a mixture of three environments: shares, figures, records, a resumed run, a fork, one that is down."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train import async_grpo, grpo, ppo
from verl_server.train.held_out import HELD_OUT

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--grpo.groups", "6", "--grpo.group-size", "4", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.003", "--grpo.warmup-steps", "1", "--max-skipped-steps", "100"]
NAMES, SHARES = ("two", "three", "four"), (3, 2, 1)
Main = Callable[[Sequence[str]], int]


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Games with 3, 4 and 5 numbers."""
    with (
        EnvServer("tests.train.environments:FailingGame", kwargs={"failing": [], "numbers": 3, "guesses": 2}) as two,
        EnvServer("tests.train.environments:FailingGame", kwargs={"failing": [], "numbers": 4, "guesses": 3}) as three,
        EnvServer("tests.train.environments:FailingGame", kwargs={"failing": [], "numbers": 5, "guesses": 4}) as four,
    ):
        yield [two.url, three.url, four.url]


def mixture_file(path: Path, urls: Sequence[str], shares: Sequence[float] = SHARES) -> Path:
    """The last environment has turns of its own, and its bound of success is the lowest reward."""
    own = ["", "", "max_turns = 1\nsuccess = 0.0\n"]
    rows = zip(NAMES, urls, shares, own, strict=True)
    tables = [f'[[environment]]\nname = "{n}"\nurl = "{u}"\nweight = {w}\n{o}' for n, u, w, o in rows]
    path.write_text("\n".join(tables))
    return path


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def command(policy_folder: Path, server_url: str, urls: list[str], tmp_path: Path) -> list[str]:
    where = ["--model-path", str(policy_folder), "--server", server_url, "--out", str(tmp_path / "run")]
    return [*where, "--mixture", str(mixture_file(tmp_path / "mixture.toml", urls)), *SETTINGS]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("main", [grpo.main, async_grpo.main], ids=["sync", "async"])
def test_groups_are_in_proportion_to_the_weights(
    main: Main, command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluates = ["--eval-every", "3", "--eval-tasks", "7"]
    assert main([*command, *evaluates, "--steps", "3"]) == 0, capfd.readouterr().err[-6000:]
    out = tmp_path / "run"
    played = lines(out / "trajectories-rank0.jsonl")
    groups = {(line["step"], line["task"]["group"]): line["task"]["environment"] for line in played}
    assert Counter(groups.values()) == {"two": 9, "three": 6, "four": 3}
    seeds = {name: {line["task"]["seed"] for line in played if line["task"]["environment"] == name} for name in NAMES}
    assert seeds == {"two": set(range(9)), "three": set(range(6)), "four": set(range(3))}
    assert all(len(line["turns"]) == 1 for line in played if line["task"]["environment"] == "four"), "max_turns"

    metrics = lines(out / "metrics.jsonl")
    total = {name: sum(step["environments"][name]["groups"] for step in metrics) for name in NAMES}
    assert total == {"two": 9, "three": 6, "four": 3}
    for step in metrics:
        figures = step["environments"].values()
        assert sum(f["episodes"] for f in figures) == step["trajectories"] == 24
        assert sum(f["sampled_tokens"] for f in figures) == step["sampled_tokens"]
        assert sum(f["groups_without_spread"] for f in figures) == step["groups_without_spread"]
        assert sum(f.get("reward", 0.0) * f["episodes"] for f in figures) / 24 == pytest.approx(step["reward"])
        own = step["environments"]["four"]  # an asynchronous step may have none of its groups
        assert (own.get("success"), own.get("turns")) == ((1.0, 1.0) if own["groups"] else (None, None))

    first, last = lines(out / "evaluations.jsonl")
    assert [f["episodes"] for f in first["environments"].values()] == [3, 2, 2]
    weighed = sum(share * f["reward"] for share, f in zip(SHARES, first["environments"].values(), strict=True)) / sum(
        SHARES
    )
    assert first["reward"] == pytest.approx(weighed) and last["step"] == 3
    held = [line["task"] for line in lines(out / "held-out-rank0.jsonl") if line["step"] == 0]
    assert {(t["environment"], t["seed"] - HELD_OUT) for t in held} == {
        *(("two", i) for i in range(3)),
        *(("three", i) for i in range(2)),
        *(("four", i) for i in range(2)),
    }


@pytest.mark.timeout(300)
def test_a_run_that_goes_on_keeps_the_order_and_a_fork_may_have_other_weights(
    command: list[str], urls: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each step plays four groups of the period of six: two, three, two, three, two, four."""
    small = [*command, "--grpo.groups", "4", "--grpo.group-size", "2"]
    assert grpo.main([*small, "--steps", "1"]) == 0, capfd.readouterr().err[-6000:]
    other = mixture_file(tmp_path / "other.toml", urls, (1, 1, 2))
    changed = ["--mixture", str(other)]
    assert grpo.main([*small, *changed, "--steps", "2", "--resume"]) == 1
    error = capfd.readouterr().err
    assert "mixture: was [{" in error and "Repeat its settings to continue it" in error

    assert grpo.main([*small, "--steps", "2", "--resume"]) == 0, capfd.readouterr().err[-6000:]
    assert played(tmp_path / "run") == {
        *(("two", seed) for seed in range(4)),
        *(("three", seed) for seed in range(3)),
        ("four", 0),
    }
    fork = [*small, *changed, "--fork", str(tmp_path / "run"), "--out", str(tmp_path / "fork"), "--steps", "3"]
    assert grpo.main(fork) == 0, capfd.readouterr().err[-6000:]
    assert played(tmp_path / "fork") == {("two", 4), ("three", 3), ("four", 1), ("four", 2)}
    again = [*small, *changed, "--out", str(tmp_path / "fork"), "--steps", "4", "--resume"]
    assert grpo.main(again) == 0, capfd.readouterr().err[-6000:]
    assert len(played(tmp_path / "fork")) == 8, "the resumed fork goes on, and repeats no task"


def played(out: Path) -> set[tuple[str, int]]:
    """(environment, seed) of the groups of a run."""
    tasks = [line["task"] for line in lines(out / "trajectories-rank0.jsonl")]
    return {(task["environment"], task["seed"]) for task in tasks}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("main", [ppo.main, async_grpo.main], ids=["ppo", "async"])
def test_an_environment_that_fails_stops_no_other_one(
    main: Main,
    command: list[str],
    urls: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the first task of the environment `three` can be played."""
    game = {"failing": list(range(1, 100)), "numbers": 4, "guesses": 3}
    options = [word.replace("--grpo.", "--ppo.") if main is ppo.main else word for word in command]
    with EnvServer("tests.train.environments:FailingGame", kwargs=game) as failing:
        file = mixture_file(tmp_path / "failing.toml", [urls[0], failing.url, urls[2]])
        assert main([*options, "--mixture", str(file), "--steps", "2"]) == 0, capfd.readouterr().err[-6000:]
        url = failing.url
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    total = {name: sum(step["environments"][name]["failed"] for step in metrics) for name in NAMES}
    assert total == {"two": 0, "three": 12, "four": 0}, "three of its groups have four episodes each"
    assert sum(step["environments"]["three"]["replaced"] for step in metrics) == 6, "two of a group"
    assert all(step["trainable"] >= 12 for step in metrics)
    errors = lines(tmp_path / "run" / "errors.jsonl")
    assert {(error["environment"], error["url"]) for error in errors} == {("three", url)}
    assert "episodes failed" in caplog.text and " x three: ws://" in caplog.text


def test_each_environment_that_cannot_be_played_is_named_before_anything_starts(
    command: list[str],
    urls: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_early(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded before the environments were tried")

    monkeypatch.setattr("verl_server.train.run.load_policy", too_early)
    nowhere = ["http://127.0.0.1:9", urls[1], "http://127.0.0.1:7"]
    file = mixture_file(tmp_path / "nowhere.toml", nowhere)
    assert grpo.main([*command, "--mixture", str(file)]) == 1
    error = capsys.readouterr().err
    for name, url in (("two", nowhere[0]), ("four", nowhere[2])):
        assert f"The environment at --mixture ({name}) {url} cannot be played" in error
    assert "(three)" not in error and "Start the environment server" in error
