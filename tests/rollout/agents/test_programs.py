"""Agents that are programs: their environment, their limits, and their end as a whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.bubblewrap import ISOLATIONS
from tests.rollout.agents.common import FAST, Echo, is_alive, program, run, says_number, wait_for
from tests.rollout.fake_sessions import OWNER_KEY, FakeServer
from verl_server.rollout.agents.gateway import EnvironmentGateway, Referee
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.environments.isolation import Isolation
from verl_server.rollout.trajectory import StopReason

_PLAY = """
url = os.environ["VERL_ENVIRONMENT_URL"]
observation = json.load(urllib.request.urlopen(url + "/observation"))["observation"]
print("answer", post(url + "/step", {"text": chat(observation)}))
"""


def test_a_program_plays_its_environment() -> None:
    seen: list[AgentEpisode] = []
    result = run(program(_PLAY), 2, environment=lambda task: Echo(), on_finish=seen.append)
    assert [(t.reward, t.stop_reason) for t in result.trajectories] == [(1.0, StopReason.DONE)] * 2
    assert all("'done': True" in e.output and "reward" not in e.output for e in seen)


@pytest.mark.parametrize(
    ("code", "reason", "reward", "says"),
    [
        ("chat('say 1')", StopReason.DONE, 1.0, ""),
        ("print('it broke'); sys.exit(3)", StopReason.AGENT_ERROR, 0.0, "exit code 3. Its last lines:\nit broke"),
        ("os.kill(os.getpid(), 9)", StopReason.AGENT_KILLED, None, "Signal 9"),
        ("time.sleep(60)", StopReason.TIME_LIMIT, None, "AgentLimits.seconds"),
        ("chat('say 1'); chat('say 2')", StopReason.MAX_TURNS, 0.0, "403"),
    ],
)
def test_every_end_of_a_program_is_recorded(code: str, reason: StopReason, reward: float | None, says: str) -> None:
    limits = dataclasses.replace(FAST, seconds=1.5 if "sleep" in code else 20.0, max_turns=1)
    (episode,) = run(program(code), reward="exit", limits=limits).episodes
    assert (episode.reason, episode.reward) == (reason, reward), episode.error
    assert says in (episode.error or "")


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("while time.monotonic() < end: pass", StopReason.DONE),
        ("time.sleep(600)", StopReason.IDLE),
    ],
)
def test_a_program_that_computes_is_not_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: Isolation, work: str, reason: StopReason
) -> None:
    """A child of the program computes for twice the time after which the episode would end as idle."""
    monkeypatch.chdir(tmp_path)
    child = f"import time; end = time.monotonic() + 4.0\n{work}"
    code = f"import subprocess; subprocess.run([sys.executable, '-I', '-S', '-c', {child!r}], check=True)"
    limits = dataclasses.replace(FAST, seconds=30.0, idle_seconds=2.0)
    (episode,) = run(program(code), reward="exit", limits=limits, isolation=isolation).episodes
    assert episode.reason is reason, episode.error


def test_a_program_that_does_not_start_is_an_error_of_the_agent(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    (episode,) = run([str(script)], reward="exit").episodes
    assert episode.reason is StopReason.AGENT_ERROR
    assert "does not start" in (episode.error or "")


_HIDDEN_CHILD = """
import subprocess
code = "import os, time; os.setsid(); open({path!r}, 'w').write(str(os.getpid())); time.sleep(600)"
# The parent of the one that calls setsid ends at once, so that the child is an orphan of another session.
subprocess.Popen([sys.executable, "-I", "-S", "-c",
    "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "subprocess.Popen([sys.executable, '-I', '-S', '-c', sys.argv[1]])", code])
while not (os.path.exists({path!r}) and open({path!r}).read()):
    time.sleep(0.01)
{end}
"""


@pytest.mark.parametrize("end", ["", "time.sleep(600)", "os.kill(os.getpid(), 9)"])
def test_descendants_that_called_setsid_are_killed(tmp_path: Path, end: str) -> None:
    pid_file = tmp_path / "pid"
    code = _HIDDEN_CHILD.replace("{path!r}", repr(str(pid_file))).replace("{end}", end)
    limits = dataclasses.replace(FAST, seconds=6.0 if "sleep" in end else 20.0)
    run(program(code), reward="exit", limits=limits)
    assert not is_alive(int(pid_file.read_text()))


def test_a_program_that_kills_its_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = _HIDDEN_CHILD.replace("{path!r}", repr(str(pid_file))).replace("{end}", "os.kill(os.getppid(), 9)")
    (episode,) = run(program(code), reward="exit").episodes
    assert episode.reason is StopReason.AGENT_KILLED
    assert not is_alive(int(pid_file.read_text()))


def test_programs_end_with_a_runner_that_is_killed(tmp_path: Path) -> None:
    """The runner dies by SIGKILL: the launcher sees the end of its stdin and ends the program."""
    pid_file = tmp_path / "pid"
    code = f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = f"from tests.rollout.agents.common import program, run\nrun(program({code!r}), reward='exit')\n"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", script], env=env) as runner:
        try:
            assert wait_for(lambda: pid_file.exists() and pid_file.read_text() != "", 60)
        finally:
            runner.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not is_alive(int(pid_file.read_text())))


_LOOK = """
def texts():
    yield from os.environ.values()
    yield from sys.argv
    pid = os.getpid()
    while pid > 1:  # its own ancestors: the launcher and the runner
        for name in ("cmdline", "environ"):
            try:
                yield open(f"/proc/{pid}/{name}", "rb").read().decode(errors="replace")
            except OSError:
                pass
        pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    yield open(os.environ["VERL_TASK_FILE"]).read()
found = "owner" + "-key-that-no-agent-may-see"
print(json.dumps({"found": any(found in text for text in texts()), "names": sorted(os.environ)}))
chat("say 1")
"""


def test_the_owners_key_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "secret")
    monkeypatch.setenv("WANTED", "yes")
    seen: list[AgentEpisode] = []
    out = tmp_path / "run"
    options: dict[str, Any] = {"reward": "exit", "pass_env": ["WANTED"], "out": out}
    run(program(_LOOK), [AgentTask(input={"question": 1})], on_finish=seen.append, **options)
    said = json.loads(seen[0].output.splitlines()[0])
    assert said["found"] is False
    assert "WANTED" in said["names"] and "SOME_SECRET" not in said["names"]
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "HOME"} <= set(
        said["names"]
    )
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not any(OWNER_KEY in path.read_text() for path in files)
    assert not any("vs-" in path.read_text() for path in files)  # no session key either


def test_a_key_is_overwritten_in_the_environment_that_proc_shows() -> None:
    script = (
        "import os\nfrom verl_server.rollout.agents.own_memory import take_from_environment\n"
        "assert take_from_environment('VERL_SERVER_API_KEY') == 'hidden-key'\n"
        "assert 'VERL_SERVER_API_KEY' not in os.environ\n"
        "assert b'hidden-key' not in open('/proc/self/environ', 'rb').read()\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "VERL_SERVER_API_KEY": "hidden-key"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=60)


def test_output_is_bounded(tmp_path: Path) -> None:
    limits = dataclasses.replace(FAST, log_bytes=1000)
    run(program("print('x' * 1000000)"), reward="exit", limits=limits, out=tmp_path / "run")
    log = (tmp_path / "run/agents/0-0-0.log").read_text()
    assert len(log) < 1100 and log.endswith("(the rest of the output was dropped)\n")


def test_resource_limits_hold() -> None:
    limits = dataclasses.replace(FAST, memory_bytes=2**28, open_files=50, file_bytes=1000)
    code = "import resource as r; print([r.getrlimit(x)[0] for x in (r.RLIMIT_AS, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE)])"
    (episode,) = run(program(code), reward="exit", limits=limits).episodes
    assert episode.output.strip() == str([2**28, 50, 1000])


def test_the_gateway_refuses_other_tokens_and_wrong_bodies() -> None:
    code = """
import urllib.error
url = os.environ["VERL_ENVIRONMENT_URL"]
def status(url, body):
    try:
        post(url, body)
    except urllib.error.HTTPError as error:
        return error.code
    return 200
print([status(url + "x/step", {"text": "1"}), status(url + "/step", {"no": 1}), status(url + "/reset", {}),
       status(url + "/call", {"name": "x"}), *(status(url + "/step", {"text": "0"}) for _ in range(2))])
"""
    (episode,) = run(program(code), environment=lambda task: Echo()).episodes
    assert episode.output.strip() == str([404, 400, 404, 400, 200, 400])
    assert episode.reward == 1.0


def test_every_error_of_the_gateway_is_json() -> None:
    async def check() -> None:
        gateway = EnvironmentGateway()
        async with asyncio.timeout(30), gateway.running():
            with gateway.serving(cast(Referee, object())) as url:
                async with httpx.AsyncClient(trust_env=False) as client:
                    for method, path, status in (
                        ("GET", "/nothing", 404),
                        ("DELETE", "/step", 405),
                        ("POST", "/step", 400),
                        ("GET", "/tools", 500),  # this episode has no referee
                        ("GET", "x/tools", 404),
                    ):
                        answer = await client.request(method, url + path)
                        assert answer.status_code == status and answer.json()["error"], (path, answer.text)

    asyncio.run(check())


def test_the_policy_is_the_fake_one() -> None:
    def check(fake: FakeServer) -> None:
        assert [s.reason for s in fake.ended.values()] == ["done"]

    run(program("chat('say 1')"), reward="exit", policy=says_number, check=check)
