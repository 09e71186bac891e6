"""`verl-server rollout`, `verl-server env serve` and the examples run as a user would run them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.router_process import RouterProcess
from tests.waiting import eventually
from verl_server.cli.main import main
from verl_server.cli.rollout import RolloutArgs
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.rollout.environment import EnvError, EnvTimeouts, RemoteEnvironment
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.trajectory import read_jsonl

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_ENV = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


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
        named = ["--environment", environment.url, "--out", str(out)]
        assert main(["rollout", "--server", f"{server.url}/v1", *named]) == 1
        assert f"Leave its path out: {server.url}." in capsys.readouterr().err
        assert main(["rollout", "--server", f"{server.url}/generate", *named]) == 1
        assert f"Leave the path out of the URL: {server.url}." in capsys.readouterr().err
        assert main(["rollout", "--server", server.url, *named, "--observation-key", "nope"]) == 1
        assert "Name one of them with observation_key (--observation-key)" in capsys.readouterr().err
        with RouterProcess([server.url], tmp_path) as router:
            assert eventually(lambda: router.is_healthy(1)), router.report()
            routed = ["--router", router.url, *named[:-1], str(tmp_path / "routed.jsonl"), "--groups", "1"]
            assert main(["rollout", *routed, "--server", "http://127.0.0.1:9"]) == 1
            assert "The servers at --server are not those of the router" in capsys.readouterr().err
            assert main(["rollout", *routed, "--server", server.url, "--max-new-tokens", "8"]) == 0
            assert sum(router.report()["placements"].values()) > 0
        where = ["--server", server.url.removeprefix("http://"), *named]
        assert main(["rollout", *where, "--groups", "3", "--group-size", "2", "--max-new-tokens", "8"]) == 0
        assert server.get_server_info()  # the rollout must not end a server that it did not start
    assert "6 episodes" in capsys.readouterr().out
    trajectories = read_jsonl(out)
    places = sorted((t.task.group, t.task.seed, t.member) for t in trajectories)
    assert places == [(g, g, m) for g in range(3) for m in range(2)]
    assert len({t.task.sampling_seed for t in trajectories}) == 6
    assert all(t.reward == 0.0 and "Count down" in t.turns[0].observation["text"] for t in trajectories)


def _run_reasoning_gym_example(folder: Path, *options: str) -> str:
    command = [sys.executable, str(EXAMPLES / "play_reasoning_gym.py"), *options]
    result = subprocess.run(command, cwd=folder, env=_ENV, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_reasoning_gym_example() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    said = _run_reasoning_gym_example(EXAMPLES, "--episodes", "2", "--max-new-tokens", "4", "--step-timeout", "60")
    assert "arithmetic problem" in said
    assert "trajectories=2" in said


def test_no_example_shadows_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment server searches the folder of the examples first. `reasoning_gym` must still be the package."""
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    monkeypatch.chdir(EXAMPLES)

    async def main() -> None:
        with EnvServer("verl_server.rollout.environments.games:ReasoningGym", kwargs={"task": "chain_sum"}) as server:
            async with RemoteEnvironment(server.url) as environment:
                assert (await environment.reset(1)).observation["text"]

    asyncio.run(asyncio.wait_for(main(), 100))


@pytest.mark.exhaustive
def test_the_reasoning_gym_example_starts_in_another_folder(tmp_path: Path) -> None:
    assert "--step-timeout" in _run_reasoning_gym_example(tmp_path, "--help")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (EXAMPLES, "my_environment:Countdown"),
        (ROOT, "examples.my_environment:Countdown"),
        (Path("/"), f"{EXAMPLES}/my_environment.py:Countdown"),
    ],
)
def test_the_environment_example_is_served_from_any_folder(folder: Path, name: str) -> None:
    command = [sys.executable, "-P", "-m", "verl_server", "env", "serve", name, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=_ENV, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("Ready: "), line + process.stderr.read()

            async def main() -> None:
                async with RemoteEnvironment(line.split()[1]) as environment:
                    first = (await environment.reset(1)).observation["text"]
                    with pytest.raises(EnvError, match=r"action_schema at `action`: 'text' is a required property"):
                        await environment.step({"answer": "3"})
                    number = first.removesuffix(".").split()[-1]
                    assert (await environment.step({"text": number})).reward != 0.0

            asyncio.run(asyncio.wait_for(main(), 30))
        finally:
            process.terminate()
            process.wait(20)


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["env"], 2, "usage: verl-server env serve MODULE:CLASS"),
        (["env", "--help"], 0, "usage: verl-server env serve MODULE:CLASS"),
        (["env", "serve", "json:NoSuchClass"], 1, "has no 'NoSuchClass'"),
        (["env", "serve", "json:JSONDecoder"], 1, r"json:JSONDecoder has no method reset\(seed=None\)"),
        (["env", "serve", "json:JSONDecoder", "--kwargs", "{a: 1}"], 1, "--kwargs is not valid JSON"),
        (["env", "serve", "json:JSONDecoder", "--kwargs", "[" * 50_000], 1, "--kwargs is not valid JSON"),
        (["env", "serve", "json:JSONDecoder", "--kwargs", "[1]"], 1, "--kwargs must be a JSON object"),
    ],
)
def test_env_serve_says_what_is_wrong(
    args: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == status
    said = capsys.readouterr()
    assert re.search(says, said.out if status == 0 else said.err)


def test_every_time_bound_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RolloutArgs] = []
    monkeypatch.setattr("verl_server.cli.rollout.rollout", lambda args: seen.append(args) or 0)
    bounds = {"connect": 1.0, "capacity": 2.0, "reset": 3.0, "step": 4.0, "close": 5.0}
    older = {"close": "env-timeouts"}
    flags = [f"--{older.get(name, 'env')}.{name}={seconds}" for name, seconds in bounds.items()]
    flags += ["--generate-timeout=6", "--trajectory-timeout=7", "--straggler-timeout=8", "--straggler-fraction=0.5"]
    assert main(["rollout", "--server", "http://s", "--environment", "http://e", *flags]) == 0
    limits = seen[0].limits
    assert limits.env == EnvTimeouts(**bounds)
    assert (limits.generate_timeout, limits.trajectory_timeout) == (6, 7)
    assert (limits.straggler_timeout, limits.straggler_fraction) == (8, 0.5)


def test_how_the_policy_writes_actions_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RolloutArgs] = []
    monkeypatch.setattr("verl_server.cli.rollout.rollout", lambda args: seen.append(args) or 0)
    where = ["rollout", "--server", "http://s", "--environment", "http://e"]
    assert main([*where, "--action-format", "json"]) == 0
    assert main([*where, "--action-key", "move"]) == 0
    assert [(args.action_format, args.action_key) for args in seen] == [("json", "text"), ("text", "move")]
