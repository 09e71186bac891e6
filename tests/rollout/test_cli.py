"""`verl-server rollout` and the examples, as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_server.cli import main
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.rollout.cli import RolloutArgs
from verl_server.rollout.env_server import EnvServer, load_factory
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.trajectory import read_jsonl

ROOT = Path(__file__).parents[2]


def test_rollout_against_running_servers(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with (
        HttpServerEngineAdapter(model_path=str(tiny_llama), device="cpu", port=0, cpu_threads=1) as server,
        EnvServer("examples.my_environment:Countdown") as environment,
    ):
        assert server.url is not None
        out = tmp_path / "trajectories.jsonl"
        where = ["--server", server.url, "--environment", environment.url, "--out", str(out)]
        assert main(["rollout", *where, "--episodes", "6", "--max-new-tokens", "8"]) == 0
        assert server.get_server_info()  # an attached server is not ours to end
    assert "6 episodes" in capsys.readouterr().out
    trajectories = read_jsonl(out)
    assert sorted(t.task.seed for t in trajectories) == list(range(6))
    assert all(t.reward == 0.0 and "Count down" in t.turns[0].observation["text"] for t in trajectories)


def test_the_reasoning_gym_example() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    command = [sys.executable, "examples/reasoning_gym.py", "--episodes", "8", "--max-new-tokens", "4"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "arithmetic problem" in result.stdout
    assert "trajectories=8" in result.stdout


def test_every_time_bound_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RolloutArgs] = []
    monkeypatch.setattr("verl_server.rollout.cli.rollout", lambda args: seen.append(args) or 0)
    bounds = {"connect": 1.0, "capacity": 2.0, "reset": 3.0, "step": 4.0, "close": 5.0}
    flags = [f"--env-timeouts.{name}={seconds}" for name, seconds in bounds.items()]
    flags += ["--generate-timeout=6", "--trajectory-timeout=7", "--straggler-timeout=8", "--straggler-fraction=0.5"]
    assert main(["rollout", "--server", "http://s", "--environment", "http://e", *flags]) == 0
    limits = seen[0].limits()
    assert limits.env == EnvTimeouts(**bounds)
    assert (limits.generate_timeout, limits.trajectory_timeout) == (6, 7)
    assert (limits.straggler_timeout, limits.straggler_fraction) == (8, 0.5)


@pytest.mark.parametrize(
    ("name", "says"),
    [("games", "MODULE:CLASS"), ("no.such.module:X", "No module named"), ("json:NoSuchClass", "NoSuchClass")],
)
def test_an_environment_that_cannot_be_loaded(name: str, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        load_factory(name)
