"""Installed agents: what is checked before a run, and an episode from the prompt to the environment's judgement."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bubblewrap import ISOLATIONS, needs_bubblewrap
from tests.rollout.agents import recipe_files
from tests.rollout.agents.common import FAST, Echo, is_alive, program, run, says_number, wait_for
from tests.rollout.agents.recipe_files import RECIPE, installed, script
from tests.rollout.fake_sessions import FakeServer, served
from verl_server.errors import BadRequestError
from verl_server.rollout.agents import activity as activity_module
from verl_server.rollout.agents.recipes.recipe import Recipe, Start
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.environments.isolation import Isolation
from verl_server.rollout.trajectory import Fault, StopReason


class Judge(Echo):
    """An environment with a folder, which rewards the last step."""

    def __init__(self, folder: Path, fault: Any = None) -> None:
        super().__init__(fault)
        self.folder = folder
        self.answers: list[str] = []

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        self.answers.append(text)
        return await super().step(text)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_episode_from_the_prompt_to_the_reward(tmp_path: Path, isolation: Isolation) -> None:
    """The prompt is the input and the observation, and the answer is the environment's last step."""
    seen: list[AgentEpisode] = []
    prompts: list[str] = []

    def policy(messages: list[dict[str, Any]]) -> str:
        prompts.append(messages[-1]["content"])
        return says_number(messages)

    tasks = [AgentTask(seed=7, input="A game."), AgentTask(seed=8, input={"question": 1})]
    result = run(
        installed(script(tmp_path), isolation),
        tasks,
        policy=policy,
        environment=lambda task: Echo(),
        on_finish=seen.append,
        out=tmp_path / "run",
    )
    assert sorted(prompts) == ["A game.\n\nsay 7", '{"question":1}\n\nsay 8']
    assert [(t.reward, t.stop_reason) for t in result.trajectories] == [(1.0, StopReason.DONE)] * 2
    assert sorted((e.result, e.exit_code, e.environment_reward) for e in seen) == [("7", 0, 1.0), ("8", 0, 1.0)]
    settings = json.loads((tmp_path / "run/run.json").read_text())
    assert settings["agent"] == ["script"] and settings["program_version"] == "script 1.2.3"
    assert settings["isolation"] == isolation and settings["program"] == str(tmp_path / "script")


_LOOK = """
print(json.dumps({"argv": sys.argv[1:], "names": sorted(os.environ), "model": os.environ["MODEL"], "cwd": os.listdir(),
    "home": os.listdir(os.environ["HOME"]), "turns": json.load(open(os.path.expanduser("~/config/settings.json")))}))
chat("say 1")
"""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_program_gets_its_words_files_and_variables_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: Isolation
) -> None:
    monkeypatch.setenv("SOME_SECRET", "secret")
    monkeypatch.setenv("WANTED", "yes")
    agent = installed(script(tmp_path, _LOOK), isolation, words=["--extra", "a b"])
    limits = dataclasses.replace(FAST, max_turns=3, max_context=1000)
    options: dict[str, Any] = {"limits": limits, "reward": lambda e: 1.0, "pass_env": ["WANTED"]}
    (episode,) = run(agent, [AgentTask(input="x")], **options).episodes
    said = json.loads(episode.output.splitlines()[0])
    assert said["argv"] == ["--context", "1000", "--extra", "a b"]
    assert said["model"] == "served" and said["turns"] == {"turns": 3} and said["cwd"] == []
    assert {"OPENAI_API_KEY", "OPENAI_BASE_URL", "HOME", "PATH", "TMPDIR", "LANG", "WANTED"} <= set(said["names"])
    assert not {"SOME_SECRET", "VERL_ENVIRONMENT_URL", "VERL_SERVER_API_KEY"} & set(said["names"])


def test_a_program_works_in_the_folder_of_its_environment(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    judge = Judge(tmp_path / "work")
    code = "open('made.txt', 'w').write('x'); chat(prompt)"
    (episode,) = run(installed(script(tmp_path, code)), environment=lambda task: judge).episodes
    assert (tmp_path / "work/made.txt").read_text() == "x"
    assert judge.answers == [""] and episode.reward == 0.0  # it wrote no answer


def test_a_command_works_there_too_and_cannot_ask_for_the_judgement(tmp_path: Path) -> None:
    judge = Judge(tmp_path)
    code = "open('made.txt', 'w').write('x'); print('VERL_ENVIRONMENT_URL' in os.environ); chat('say 1')"
    (episode,) = run(program(code), environment=lambda task: judge).episodes
    assert (tmp_path / "made.txt").exists() and episode.output == "False\n"
    assert judge.answers == [""] and episode.reason is StopReason.DONE


def test_a_prompt_of_any_kind_is_no_option_and_fits(tmp_path: Path) -> None:
    agent = installed(script(tmp_path))
    prompts = ["--version", "-x " + "long " * 100_000 + "9"]
    policy = lambda messages: str(len(messages[-1]["content"]))  # noqa: E731
    result = run(agent, [AgentTask(input=p) for p in prompts], policy=policy, reward=lambda e: float(e.result))
    assert [t.reward for t in result.trajectories] == [9.0, 500_004.0]


# -- ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason", "reward", "answers"),
    [
        ("sys.exit(3)", StopReason.AGENT_ERROR, 1.0, ["0"]),
        ("time.sleep(60)", StopReason.TIME_LIMIT, 0.0, [""]),
        ("os.kill(os.getpid(), 9)", StopReason.AGENT_KILLED, None, []),
    ],
)
def test_the_environment_judges_each_end_of_the_policy(
    tmp_path: Path, code: str, reason: StopReason, reward: float | None, answers: list[str]
) -> None:
    judge = Judge(tmp_path)
    limits = dataclasses.replace(FAST, seconds=3.0 if "sleep" in code else 20.0)
    agent = installed(script(tmp_path, recipe_files.ANSWERS + code))
    (episode,) = run(agent, environment=lambda task: judge, limits=limits).episodes
    assert (episode.reason, episode.reward, judge.answers) == (reason, reward, answers), episode.error


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("folder", ["~", "."])
def test_a_program_that_fills_the_disk_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: Isolation, folder: str
) -> None:
    """HOME and the workspace are measured together, and the program is at fault."""
    monkeypatch.setattr("verl_server.rollout.disk_bound._PERIOD", 0.05)
    (tmp_path / "work").mkdir()
    code = f"chat(prompt); open(os.path.expanduser('{folder}/big'), 'wb').write(b'x' * 3_000_000); time.sleep(600)"
    limits = dataclasses.replace(FAST, disk_bytes=2_000_000)
    agent = installed(script(tmp_path, code), isolation)
    (episode,) = run(agent, environment=lambda task: Judge(tmp_path / "work"), limits=limits).episodes
    assert (episode.reason, episode.fault, episode.reward) == (StopReason.AGENT_ERROR, Fault.POLICY, 0.0)
    assert "take more than 2,000,000 bytes (AgentLimits.disk_bytes)" in (episode.error or "")


def test_a_run_without_a_token_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent = installed(script(tmp_path, "print('no server'); sys.exit(7)"))
    result = run(agent, reward=lambda episode: 1.0)
    assert result.trajectories == [] and [e.reason for e in result.episodes] == [StopReason.AGENT_ERROR]
    assert "None of the first 1 episodes has a recorded token. Episode 0-0-0 ended as agent_error" in caplog.text
    assert "exit code 7" in caplog.text and "no server" in caplog.text
    assert "Likely causes: the agent asks another base URL" in caplog.text and "login" in caplog.text


@needs_bubblewrap
@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("", "The program asked its session for no generation."),
        (
            "chat_of_another_server()",
            "no generation, and 1 of its requests are none that a session serves.",
        ),
    ],
)
def test_an_isolated_program_that_asks_nothing_is_known(tmp_path: Path, code: str, says: str) -> None:
    another = f"""
def chat_of_another_server():
    post(os.environ["OPENAI_BASE_URL"] + "/login", {{}})
{code}
"""
    (episode,) = run(installed(script(tmp_path, another), "bubblewrap"), reward=lambda episode: 1.0).episodes
    assert says in (episode.error or "") and episode.reason is (StopReason.AGENT_ERROR if code else StopReason.DONE)


def test_a_recipe_that_cannot_read_the_answer_says_so(tmp_path: Path) -> None:
    def broken(stdout: str, read: Any) -> str:
        return str(json.loads(stdout)["result"])

    agent = dataclasses.replace(installed(script(tmp_path)), recipe=changed(answer=broken))
    judge = Judge(tmp_path)
    (episode,) = run(agent, environment=lambda task: judge).episodes
    assert (episode.reason, episode.reward, judge.answers) == (StopReason.DONE, 0.0, [""])
    assert "The recipe read no answer: JSONDecodeError" in (episode.error or "")


def test_a_fault_of_the_environment_in_the_last_step_is_replaced(tmp_path: Path) -> None:
    judges = [Judge(tmp_path, fault="broken"), Judge(tmp_path)]
    made = iter(judges)
    seen: list[AgentEpisode] = []
    deleted: list[int] = []

    def check(fake: FakeServer) -> None:
        deleted.extend([len(fake.sessions), len(fake.ended)])

    run(
        installed(script(tmp_path)),
        environment=lambda task: next(made),
        retries=1,
        on_finish=seen.append,
        check=check,
    )
    assert [(e.reason, e.fault, e.reward) for e in seen] == [
        (StopReason.ENV_ERROR, Fault.INFRASTRUCTURE, None),
        (StopReason.DONE, Fault.POLICY, 1.0),
    ]
    assert "broken" in (seen[0].error or "") and seen[0].result == "0"
    assert deleted == [0, 2]


def test_the_last_step_may_take_as_long_as_its_environment_says(tmp_path: Path) -> None:
    class Slow(Judge):
        step_seconds = 20.0

        async def step(self, text: str) -> tuple[str, float | None, bool]:
            import asyncio

            await asyncio.sleep(1.5)
            return await super().step(text)

    limits = dataclasses.replace(FAST, environment_seconds=1.0)
    (episode,) = run(installed(script(tmp_path)), environment=lambda task: Slow(tmp_path), limits=limits).episodes
    assert (episode.reason, episode.reward) == (StopReason.DONE, 1.0), episode.error


def test_an_environment_that_is_done_is_not_played_again(tmp_path: Path) -> None:
    class Done(Judge):
        async def reset(self, seed: int | None) -> str:
            return await super().reset(seed)

    judge = Done(tmp_path)
    (episode,) = run(installed(script(tmp_path)), environment=lambda task: judge).episodes
    assert judge.answers == ["0"] and episode.reward == 1.0


def test_a_program_that_tries_again_after_its_last_turn_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_module, "LIMIT_SECONDS", 0.5)
    code = """
import urllib.error
chat(prompt)
while True:
    try:
        chat("again")
    except urllib.error.HTTPError:
        time.sleep(0.05)
"""
    judge = Judge(tmp_path)
    limits = dataclasses.replace(FAST, max_turns=1)
    (episode,) = run(installed(script(tmp_path, code)), environment=lambda task: judge, limits=limits).episodes
    assert episode.reason is StopReason.MAX_TURNS and episode.seconds < 15
    assert judge.answers == [""] and episode.reward == 0.0


def test_a_program_that_vanishes_is_the_infrastructures_fault(tmp_path: Path) -> None:
    path = script(tmp_path)
    agent = installed(path)
    agent.check()
    path.unlink()
    seen: list[AgentEpisode] = []
    run(agent, environment=lambda task: Echo(), on_finish=seen.append, retries=1)
    assert [(e.reason, e.fault) for e in seen] == [(StopReason.ISOLATION_FAILED, Fault.INFRASTRUCTURE)] * 2
    assert "/script" in (seen[0].error or "")


# -- what is checked before a run -----------------------------------------------------------------------------


def changed(**fields: Any) -> Recipe:
    return dataclasses.replace(RECIPE, **fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"program": None}, r"'no-such-script' on PATH. Install it \(make script\), or name its path with --program"),
        ({"program": "/no/such/program"}, "there is none at /no/such/program"),
        ({"recipe": changed(needs=["no-such-git"])}, "needs 'no-such-git', which is not on PATH"),
        ({"words": ["--context=5"]}, "'--context' is an option that the recipe script sets itself"),
        ({"words": ["x"], "recipe": changed(takes_words=False)}, "script has no options: leave 'x' out"),
        (
            {"recipe": changed(version=["--no-version"])},
            r"script cannot be run.*--no-version` failed \(exit code 9\)",
        ),
        ({"recipe": changed(start=lambda place: 1 / 0)}, "ZeroDivisionError"),
        ({"recipe": changed(start=lambda place: Start(argv=[]))}, "must return a command"),
        ({"recipe": changed(start=lambda place: Start(["/x"], files={"../x": ""}))}, "outside of HOME"),
        ({"recipe": changed(start=lambda place: Start(["x"]))}, "must start place.program, not 'x'"),
        ({"recipe": changed(least_context=40_000)}, "needs a context of 40000 tokens.*served has 32768"),
        ({"readable": [Path("/no/such/folder")], "isolation": "bubblewrap"}, "/no/such/folder is no folder"),
        ({"isolation": "docker"}, "isolation must be"),
    ],
)
def test_what_is_missing_is_said_before_the_first_episode(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    agent = dataclasses.replace(installed(script(tmp_path, "sys.exit(9)")), **change)
    with pytest.raises(BadRequestError, match=says):
        run(agent, environment=lambda task: Echo())


@pytest.mark.parametrize("name", ["MODEL", "OPENAI_API_KEY", "HOME", "OTHER_TOKEN"])
def test_a_variable_of_the_recipe_is_not_passed_on(tmp_path: Path, name: str) -> None:
    agent = dataclasses.replace(installed(script(tmp_path)), recipe=changed(reserved=["OTHER_TOKEN"]))
    with pytest.raises(BadRequestError, match=f"must not name {name}: each episode has its own"):
        run(agent, environment=lambda task: Echo(), pass_env=[name])


def test_an_exit_code_is_no_reward_of_an_installed_agent(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="exits with 0 whatever it did"):
        run(installed(script(tmp_path)), reward="exit")


def test_a_server_that_names_no_context_is_refused(tmp_path: Path) -> None:
    agent = installed(script(tmp_path))
    from tests.rollout.agents import common

    def without_context(*arguments: Any, **options: Any) -> FakeServer:
        fake = FakeServer(*arguments, **options)
        fake.context = None
        return fake

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.rollout.fake_sessions.FakeServer", without_context)
        with pytest.raises(BadRequestError, match="names no model with its context length"):
            common.run(agent, environment=lambda task: Echo())


def test_no_isolation_is_said_aloud_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from verl_server.rollout.agents import installed as module

    module._warn_of_no_isolation.cache_clear()
    for _ in range(2):
        run(installed(script(tmp_path)), environment=lambda task: Echo())
    assert [r.getMessage().count("without isolation") for r in caplog.records if "isolation" in r.getMessage()] == [1]


# -- a run that goes on ---------------------------------------------------------------------------------------

_RUN = """
import sys
from pathlib import Path
from tests.rollout.agents.common import Echo
from tests.rollout.agents.recipe_files import installed
from tests.rollout.fake_sessions import OWNER_KEY
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentTask, Server
folder, url, resume = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "resume"
result = run_agents(installed(folder / "script"), [AgentTask(seed=i) for i in range(2)], max_concurrency=1,
    servers=[Server(url, OWNER_KEY)], environment=lambda task: Echo(), out=folder / "run", resume=resume,
    limits=AgentLimits(kill_grace=0.2))
assert [t.reward for t in result.trajectories] == [1.0, 1.0], result.episodes
"""
_HANGS_ONCE = """
if "say 1" in prompt and not os.path.exists({go!r}):
    open({pid!r}, "w").write(str(os.getpid()))
    time.sleep(600)
"""


def test_a_run_goes_on_after_its_runner_was_killed(tmp_path: Path) -> None:
    """The program ends with its runner. The next one removes its folders and its session, and plays the rest."""
    pid_file, go = tmp_path / "pid", tmp_path / "go"
    code = _HANGS_ONCE.format(go=str(go), pid=str(pid_file))
    script(tmp_path, code + recipe_files.ANSWERS)
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path / "tmp")}
    with served(says_number) as fake:
        command = [sys.executable, "-c", _RUN, str(tmp_path), fake.url]
        with subprocess.Popen([*command, "new"], env=env) as runner:
            try:
                assert wait_for(lambda: pid_file.exists() and pid_file.read_text() != "", 60)
            finally:
                runner.send_signal(signal.SIGKILL)
        assert wait_for(lambda: not is_alive(int(pid_file.read_text())))
        (left,) = fake.sessions
        assert list((tmp_path / "tmp").glob("verl-scratch-*/agent-*/home"))
        go.touch()
        subprocess.run([*command, "resume"], env=env, check=True, timeout=120)
        assert not fake.sessions and left in fake.ended
    assert not list((tmp_path / "tmp").glob("verl-scratch-*"))
    played = [json.loads(line) for line in (tmp_path / "run/episodes.jsonl").read_text().splitlines()]
    assert [(line["task"], line["reward"]) for line in played] == [(0, 1.0), (1, 1.0)]


def test_another_version_of_the_program_is_noted_when_a_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"environment": lambda task: Echo(), "out": tmp_path / "run"}
    run(installed(script(tmp_path)), **options)
    (tmp_path / "other").mkdir()
    path = script(tmp_path / "other")
    path.write_text(path.read_text().replace("1.2.3", "1.2.4"))
    run(installed(path), resume=True, **options)
    assert "began with script 1.2.3, and goes on with script 1.2.4" in caplog.text
    with pytest.raises(BadRequestError, match=r"agent: was \['script'\], is \['script', '--other'\]"):
        run(installed(path, words=["--other"]), resume=True, **options)
