"""`verl-server rollout --agent` and `verl-server trajectories`, as a user runs them, against a fake server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import tyro

from tests.rollout.agents.common import PROGRAM_HEAD, says_number, wait_for
from tests.rollout.fake_sessions import OWNER_KEY, FakeServer, served
from verl_server.cli.agents import AgentRolloutArgs
from verl_server.cli.main import main
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.loading import read_tasks
from verl_server.rollout.agents.output import read_lines
from verl_server.rollout.agents.types import AgentTask
from verl_server.rollout.environments import verifiers
from verl_server.rollout.trajectory import read_jsonl

ROOT = Path(__file__).parents[2]
_AGENT = """
import httpx
async def play(session, task):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": f"say {task.input['number']}"}]}
        answer = await client.post(session.base_url + "/chat/completions", json=body)
        return answer.json()["choices"][0]["message"]["content"]
def right(episode):
    return float(episode.result == str(episode.task.input["number"]))
"""


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    """A fake server in a thread, because the command has an event loop of its own."""
    with served(says_number) as fake:
        yield fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_agent.py").write_text(_AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"number": 4}\n{"input": {"number": 5}, "seed": 9}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_SERVER_API_KEY", OWNER_KEY)
    return tmp_path


def test_a_run_from_the_command_line(fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rollout", "--agent", f"{folder}/my_agent.py:play", "--tasks", "tasks.jsonl", "--group-size", "2"]
    command += ["--reward", f"{folder}/my_agent.py:right", "--server", fake.url, "--out", "runs/x"]
    assert main(command) == 0
    assert "VERL_SERVER_API_KEY" not in os.environ
    assert re.search(r"4 episodes in 4 attempts, 4 tokens, mean reward\s1\.000", capsys.readouterr().out)
    assert OWNER_KEY not in "".join(p.read_text() for p in (folder / "runs").rglob("*") if p.is_file())
    report = (folder / "runs/x/report.html").read_text()
    assert "mean reward" in report and "play" in report

    assert main(command) == 1  # the folder has a run
    assert "VERL_SERVER_API_KEY" in capsys.readouterr().err  # the first run took the key out of the environment
    os.environ["VERL_SERVER_API_KEY"] = OWNER_KEY
    assert main([*command, "--resume"]) == 0
    assert "4 episodes in 4 attempts" in capsys.readouterr().out

    (folder / "other").mkdir()
    (folder / "other/my_agent.py").write_text(_AGENT)
    for option, value, says in (
        ("--agent", f"{folder}/other/my_agent.py:play", "agent_from: was"),
        ("--reward", f"{folder}/other/my_agent.py:right", "reward_from: was"),
        ("--temperature", "0.5", "sampling_params: was {'temperature': 1.0}, is {'temperature': 0.5}"),
    ):
        os.environ["VERL_SERVER_API_KEY"] = OWNER_KEY
        changed = [value if before == option else word for before, word in zip(["", *command], command, strict=False)]
        changed += [] if option in command else [option, value]
        assert main([*changed, "--resume"]) == 1
        assert says in capsys.readouterr().err
    os.environ["VERL_SERVER_API_KEY"] = OWNER_KEY
    other_spelling = [word.replace(f"{folder}/my_agent", "my_agent") for word in command]
    assert main([*other_spelling, "--resume", "--limits.seconds", "99", "--retries", "0"]) == 0
    capsys.readouterr()

    assert main(["trajectories", "ls", "runs"]) == 0
    assert main(["trajectories", "ls", "runs/x"]) == 0
    assert re.findall(r"\d-\d", capsys.readouterr().out) == ["0-0", "0-1", "1-0", "1-1"], "sorted, not as they ended"
    for color in ("logprob", "mask", "version"):
        assert main(["trajectories", "show", "runs/x", "--episode", "1-1", "--color", color]) == 0
    said = capsys.readouterr().out
    assert "reward 1" in said and "assistant: 5" in said and "version 7" in said
    assert main(["trajectories", "stats", "runs/x"]) == 0
    assert re.search(r"mean reward\s* 1 ", capsys.readouterr().out)
    assert main(["trajectories", "show", "runs/x", "--episode", "9-9"]) == 1
    assert "no trajectory of the episode 9-9" in capsys.readouterr().err


def test_a_program_from_the_command_line(fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "program.py").write_text(f"{PROGRAM_HEAD}\nchat('say 3')\nsys.exit('OPENAI_API_KEY' not in os.environ)")
    where = ["--tasks", "tasks.jsonl", "--server", fake.url, "--out", "runs/y"]
    assert main(["rollout", "--agent", "python program.py", *where]) == 0
    assert "mean reward 1.000, ends" in capsys.readouterr().out


_SAMPLES_SOMETIMES = """
async def play(session, task):
    if task.input["number"] in {numbers}:
        async with session.http() as client:
            await client.post("/chat/completions", json={{"messages": [{{"role": "user", "content": "say 4"}}]}})
def three(episode):
    return 3.0
"""


def test_an_agent_that_bypasses_its_session_is_counted_and_ends_with_a_status(
    fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """None of its episodes has a sampled token; then one of two has, after the same run went on."""
    command = ["rollout", "--agent", "bypass.py:play", "--reward", "bypass.py:three", "--tasks", "tasks.jsonl"]
    command += ["--server", fake.url, "--group-size", "2", "--out", "runs/b"]
    for numbers, status, says in (
        ("()", 1, "0 tokens, mean reward none, 4 without a sampled token"),
        ("(4,)", 0, "mean reward 3.000, 2 without a sampled token"),
    ):
        (folder / "bypass.py").write_text(_SAMPLES_SOMETIMES.format(numbers=numbers))
        sys.modules.pop("bypass", None)
        os.environ["VERL_SERVER_API_KEY"] = OWNER_KEY
        caplog.clear()
        assert main([*command, *(["--resume"] if numbers != "()" else [])]) == status
        assert says in capsys.readouterr().out
        warnings = [r.getMessage() for r in caplog.records if "sampled no token" in r.getMessage()]
        assert len(warnings) == 1 and "session.base_url" in warnings[0] and "OPENAI_BASE_URL" in warnings[0]
    summary = json.loads((folder / "runs/b/summary.json").read_text())
    assert (summary["episodes"], summary["scored"], summary["unsampled"], summary["mean_reward"]) == (4, 2, 2, 3.0)
    assert "unsampled" in (folder / "runs/b/report.html").read_text()
    assert main(["trajectories", "ls", "runs"]) == 0
    assert "unsampled" in capsys.readouterr().out


def test_reasoning_gym_by_name(fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    (folder / "gym_agent.py").write_text("""
async def play(session, task):
    assert session.environment.observation
    async with session.http() as client:
        await client.post("/chat/completions", json={"messages": [{"role": "user", "content": "say 4"}]})
    await session.environment.step("no answer")
""")
    where = ["--tasks", "reasoning-gym:chain_sum", "--groups", "3", "--server", fake.url, "--out", "runs/z"]
    assert main(["rollout", "--agent", f"{folder}/gym_agent.py:play", *where]) == 0
    assert "3 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--agent", "no_such_module:play"], "no module 'no_such_module'"),
        (["--agent", "json:no_such"], "has no function 'no_such'"),
        (["--agent", "no-such-program x"], "no recipe 'no-such-program', and no program of this name on PATH"),
        (["--tasks", "missing.jsonl"], "Cannot read missing.jsonl"),
        (["--tasks", "reasoning-gym:no_such"], "reasoning-gym has no task 'no_such'"),
        (["--groups", "5"], "fewer than --groups 5"),
        (["--environment", "nothing"], "is no environment"),
        (["--reward", "environment"], 'reward="environment" needs an environment'),
    ],
)
def test_what_is_wrong_is_said(
    fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str], change: list[str], says: str
) -> None:
    if "reasoning" in str(change):
        pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")
    given: dict[str, str] = {"--agent": f"{folder}/my_agent.py:play", "--tasks": "tasks.jsonl", "--out": "runs/e"}
    given |= {"--server": fake.url, "--reward": f"{folder}/my_agent.py:right", change[0]: change[1]}
    assert main(["rollout", *(word for pair in given.items() for word in pair)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ([], "pip install 'verl-server[verifiers]'"),
        (["--agent", "tools"], "--agent cannot be combined with --tasks verifiers:NAME"),
        (["--environment", "code"], "--environment cannot be combined with --tasks verifiers:NAME"),
    ],
)
def test_tasks_of_verifiers_need_the_package_and_no_agent(
    fake: FakeServer,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    says: str,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(verifiers, "version", missing)
    command = ["rollout", "--tasks", "verifiers:maze", "--server", fake.url, "--out", "runs/v", *more]
    assert main(command) == (2 if more else 1)
    assert says in " ".join(capsys.readouterr().err.split())


def test_tasks_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"seed": 7}\n\n"a question"\n{"question": 1, "seed": 2}\n')
    expected: list[Any] = [AgentTask(seed=7), AgentTask(seed=2, input="a question")]
    assert read_tasks(file) == [*expected, AgentTask(seed=3, input={"question": 1, "seed": 2})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input": "x"}', "tasks.jsonl:3: environment.check is missing"),
        (
            '{"input": "x", "environment": {"check": {"command": ["true"]}, "files": {"../x": ""}}}',
            "tasks.jsonl:3: env",
        ),
        ('{"input": "x", "environment": {"check": {"command": ["no-such"]}}}', "no program 'no-such'"),
        ('{"id": 1, "environment": {"check": {"command": ["true"]}}}', "because of its key 'id'"),
    ],
)
def test_tasks_are_checked_for_their_workspace_before_the_run(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "tasks.jsonl"
    right = '{"environment": {"check": {"command": ["true"]}}}'
    file.write_text(f"{right}\n\n{line}\n{right}\n")
    with pytest.raises(BadRequestError, match=re.escape(says)):
        read_tasks(file, environment="workspace")
    assert len(read_tasks(file)) == 3, "another environment has other options"


_SLOW_AGENT = """
import asyncio, httpx
async def play(session, task):
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": f"say {task.seed}"}]}
        await client.post(session.base_url + "/chat/completions", json=body)
        if task.seed >= 3:
            await asyncio.Event().wait()
def one(episode):
    return 1.0
"""


def test_a_run_that_was_killed_goes_on_and_repeats_nothing(fake: FakeServer, folder: Path) -> None:
    """SIGKILL in mid-run: the second run plays only what is left, and removes the sessions of the first."""
    (folder / "slow.py").write_text(_SLOW_AGENT)
    (folder / "six.jsonl").write_text("".join(f'{{"seed": {i}}}\n' for i in range(6)))
    command = [sys.executable, "-m", "verl_server", "rollout", "--agent", "slow.py:play", "--tasks", "six.jsonl"]
    command += ["--reward", "slow.py:one", "--server", fake.url, "--out", "runs/k"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    episodes = folder / "runs/k/episodes.jsonl"
    first = subprocess.Popen(command, env=env, cwd=folder)
    try:
        stuck = "six sessions, three of which have ended"
        assert wait_for(lambda: len(read_lines(episodes)) == 3 and len(fake.sessions) == 3, 60), stuck
    finally:
        first.kill()
        first.wait(10)
    before = episodes.read_text()
    left = set(fake.sessions)
    (folder / "slow.py").write_text(_SLOW_AGENT.replace("task.seed >= 3", "False"))
    second = subprocess.run([*command, "--resume"], env=env, cwd=folder, timeout=60, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "6 episodes in 6 attempts" in second.stdout
    assert not left & set(fake.sessions), "the sessions of the killed run are deleted"
    assert episodes.read_text().startswith(before)
    played = sorted((t.task.group, t.member) for t in read_jsonl(folder / "runs/k/trajectories.jsonl"))
    assert played == [(i, 0) for i in range(6)], "each episode once"


def test_tools_from_the_command_line(fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_tools.py").write_text('def double(n: int) -> int:\n    "Double."\n    return 2 * n\n')
    command = ["rollout", "--tasks", "tasks.jsonl", "--reward", f"{folder}/ends.py:ended", "--server", fake.url]
    (folder / "ends.py").write_text("def ended(episode):\n    return float(episode.reason == 'done')\n")
    own = ["--tool", f"{folder}/my_tools.py:double", "--system", "be brief"]
    assert main([*command, "--agent", "tools", *own, "--out", "runs/t"]) == 0
    assert "mean reward 1.000" in capsys.readouterr().out
    assert "ToolLoop(tools=['double'], max_turns=16, system='be brief'" in (folder / "runs/t/run.json").read_text()
    os.environ["VERL_SERVER_API_KEY"] = OWNER_KEY
    assert main([*command, "--agent", "true", *own, "--out", "runs/u"]) == 1
    assert "--tool and --system are for --agent tools" in capsys.readouterr().err


def test_options_may_be_repeated() -> None:
    words = "--agent x --tasks t --out o --server a --server b --pass-env C --pass-env D --tool e:f --tool g:h"
    args = tyro.cli(AgentRolloutArgs, args=words.split())
    assert (args.server, args.pass_env, args.tool) == (("a", "b"), ("C", "D"), ("e:f", "g:h"))


def test_tools_without_a_reward_function_are_refused(
    fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", types.ModuleType("mcp"))
    command = ["rollout", "--agent", "tools", "--tasks", "tasks.jsonl", "--server", fake.url, "--out", "runs/m"]
    assert main([*command, "--environment", "mcp:http://127.0.0.1:1/mcp"]) == 1
    assert "--reward is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--api-key-file", "absent"], "--api-key-file='absent' cannot be read: No such file"),
        (["--api-key-file", "binary"], "--api-key-file='binary' cannot be read: 'utf-8' codec"),
        (["--api-key-file", "empty"], "--api-key-file='empty' must be one or more"),
        (["--agent", '"unclosed'], "--agent: '\"unclosed' is not a command: No closing quotation"),
        (["--environment", 'mcp:"unclosed'], "mcp:COMMAND: '\"unclosed' is not a command"),
        (["--tasks", "deep.jsonl"], "deep.jsonl:1 is not valid JSON"),
        (["--tasks", "binary"], "binary:1 is not valid JSON"),
        (["--tasks", "a" * 300], "Cannot read aaa"),
        (["--tasks", "absent"], "Cannot read absent"),
        (["--out", "empty"], "cannot be a folder, because it or one above it is a file"),
    ],
)
def test_a_damaged_file_or_option_is_named(
    fake: FakeServer, folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    (folder / "binary").write_bytes(b"\xff\xfe")
    (folder / "empty").write_bytes(b"")
    (folder / "deep.jsonl").write_text("[" * 3000 + "]" * 3000 + "\n")
    command = {"--agent": "true", "--tasks": "tasks.jsonl", "--server": fake.url, "--out": "runs/n"}
    command |= dict(zip(options[::2], options[1::2], strict=True))
    assert main(["rollout", *(word for pair in command.items() for word in pair)]) == 1
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error
