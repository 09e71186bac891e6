"""The folder of a run, and its resumption."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.rollout.agents.common import FAST, Echo, chat, player, run, says_number
from tests.rollout.fake_sessions import OWNER_KEY, FakeServer, FakeSession, fake_server
from verl_server.errors import BadRequestError
from verl_server.messages.session_types import CreateSession
from verl_server.rollout.agents.output import read_lines, trained_tokens
from verl_server.rollout.agents.run import MAY_DIFFER, arun_agents
from verl_server.rollout.agents.types import AgentEpisode, AgentLimits, AgentSession, AgentTask, Server
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.token_counts import TokenCounts
from verl_server.rollout.trajectory import StopReason, read_jsonl

_OPTIONS: dict[str, Any] = {"environment": lambda task: Echo(), "group_size": 2}


def test_the_folder_has_all_of_the_run(tmp_path: Path) -> None:
    result = run(player, 3, out=tmp_path, **_OPTIONS)
    assert [(t.task.group, t.member) for t in read_jsonl(tmp_path / "trajectories.jsonl")] != []
    lines = read_lines(tmp_path / "episodes.jsonl")
    assert sorted((e.task, e.member, e.reason, e.final) for e in lines) == [
        (i, member, "done", True) for i in range(3) for member in range(2)
    ]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["episodes"], summary["expected"], summary["mean_reward"]) == (6, 6, 1.0)
    assert len(result.trajectories) == 6
    settings = json.loads((tmp_path / "run.json").read_text())
    assert settings["group_size"] == 2 and settings["run"].startswith("run-")


def test_a_run_counts_how_often_its_tokens_are_trained(tmp_path: Path) -> None:
    async def agent(session: AgentSession, task: AgentTask) -> None:
        await chat(session, "say 12345")
        if task.seed == 1 and not failed:
            failed.append(session.session_id)
            raise RuntimeError("the first attempt fails")
        await chat(session, "say 7")

    failed: list[str] = []
    faults = FaultRules(fault=("agent_error=infrastructure",))
    run(agent, 2, out=tmp_path, reward=lambda episode: 1.0, retries=1, faults=faults)
    lines = {(e.task, e.attempt): e for e in read_lines(tmp_path / "episodes.jsonl")}
    assert lines[0, 0].counts == TokenCounts(
        episodes=1, sampled=6, once=6, branches={"root": 1}, context=len("say 12345say 7")
    )
    assert lines[1, 0].trained.never == {"replaced": 5}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["token_counts"] == {
        "episodes": 3,
        "sampled": 17,
        "once": 12,
        "repeatedly": 0,
        "never": {"replaced": 5},
        "branches": {"root": 3},
        "context": 28,
        "shared": 0,
        "unrecorded_turns": 0,
    }
    old = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    for entry in old:
        del entry["counts"]
    (tmp_path / "episodes.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in old))
    assert trained_tokens(read_lines(tmp_path / "episodes.jsonl")) == TokenCounts()


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    """Two episodes have ended, the others run when the caller cancels; a torn line and a stray trajectory are left."""
    played: list[int] = []

    async def stalls(session: AgentSession, task: AgentTask) -> None:
        played.append(task.seed)
        await player(session, task)
        if task.seed >= 2:
            await asyncio.Event().wait()

    async def main() -> None:
        async with fake_server(says_number) as fake:
            servers = [Server(fake.url, OWNER_KEY)]
            options = {"servers": servers, "limits": FAST, "out": tmp_path, "environment": _OPTIONS["environment"]}
            options |= {"describe": {"agent": "the same"}}
            tasks = [AgentTask(seed=i) for i in range(4)]
            ended = asyncio.Event()
            count: list[Any] = []

            def note(episode: Any) -> None:
                count.append(episode)
                if len(count) == 2:
                    ended.set()

            running = asyncio.ensure_future(arun_agents(stalls, tasks, on_finish=note, **options))
            await ended.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert fake.sessions == {}
            assert [e.reason for e in count[2:]] == [StopReason.ABORTED] * 2
            await left_behind(fake)
            result = await arun_agents(player, tasks, resume=True, **options)
            assert sorted(e.task.seed for e in result.episodes) == [2, 3]
            assert [t.task.seed for t in result.trajectories] == [0, 1, 2, 3]
            assert fake.sessions.keys() == {"other"}  # a session of the interrupted run was deleted

    async def left_behind(fake: FakeServer) -> None:
        name = json.loads((tmp_path / "run.json").read_text())["run"]
        fake.sessions["left"] = FakeSession(CreateSession(group=f"{name}/2"), "left", "vs-left")
        fake.sessions["other"] = FakeSession(CreateSession(group="another/2"), "other", "vs-other")
        trajectories = tmp_path / "trajectories.jsonl"
        stray = read_jsonl(trajectories)[0]
        stray.task = msgspec.structs.replace(stray.task, group=3)
        with trajectories.open("ab") as file:
            file.write(msgspec.json.encode(stray) + b"\n" + b'{"task": {"se')
        with (tmp_path / "episodes.jsonl").open("ab") as file:
            file.write(b'{"task": 3, "mem')

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_run_that_was_refused_leaves_nothing_in_the_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server is not there, or generates for everybody. Then the same place takes a run with other settings."""
    folder = tmp_path / "a/b"
    for resume in (False, True):
        with pytest.raises(BadRequestError, match="model_path"):
            asyncio.run(arun_agents(player, [AgentTask()], out=folder, seed=3, resume=resume, **_OPTIONS))
    assert "there is nothing to resume" in caplog.text
    assert not any(folder.iterdir())
    run(player, 1, out=folder, **_OPTIONS)
    assert len(read_jsonl(folder / "trajectories.jsonl")) == 2


def test_a_run_that_recorded_nothing_is_no_run(tmp_path: Path) -> None:
    """Its files are there, but no attempt had ended. Output of a program counts as recorded."""
    run(player, 0, out=tmp_path, **_OPTIONS)
    first = json.loads((tmp_path / "run.json").read_text())
    run(player, 0, out=tmp_path, **(_OPTIONS | {"seed": 1}))
    assert json.loads((tmp_path / "run.json").read_text())["run"] != first["run"]
    (tmp_path / "agents/0-0-0.log").write_text("x")
    with pytest.raises(BadRequestError, match="has a run already"):
        run(player, 1, out=tmp_path, **_OPTIONS)


@pytest.mark.parametrize("resume", [False, True])
def test_sessions_of_a_runner_that_died_before_its_first_episode_ended_are_deleted(
    tmp_path: Path, resume: bool
) -> None:
    async def main() -> None:
        async with fake_server(says_number) as fake:
            options = {"servers": [Server(fake.url, OWNER_KEY)], "limits": FAST, "out": tmp_path, **_OPTIONS}
            await arun_agents(player, [], **options)
            name = json.loads((tmp_path / "run.json").read_text())["run"]
            for id, run_name in (("left", name), ("other", "another")):
                fake.sessions[id] = FakeSession(CreateSession(group=f"{run_name}/0"), id, f"vs-{id}")
            await arun_agents(player, [AgentTask(seed=1)], resume=resume, **options)
            assert fake.sessions.keys() == {"other"}

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_altogether_is_replaced(
    tmp_path: Path, resume: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong agent function sampled nothing. The corrected command, with other settings, takes the same folder."""

    async def wrong(session: AgentSession, task: AgentTask) -> None:
        raise TypeError("a bug")

    run(wrong, 2, out=tmp_path, **_OPTIONS, retries=1)
    assert len(read_lines(tmp_path / "episodes.jsonl")) == 4
    (tmp_path / "agents/0-0-0.log").write_text("x")
    run(player, 2, out=tmp_path, resume=resume, seed=4, **_OPTIONS)
    assert "every episode failed. It is replaced" in caplog.text
    assert len(read_lines(tmp_path / "episodes.jsonl")) == len(read_jsonl(tmp_path / "trajectories.jsonl")) == 4
    assert not any((tmp_path / "agents").iterdir())
    with pytest.raises(BadRequestError, match=r"has a run already\. .*name another folder\.$"):
        run(player, 2, out=tmp_path, **_OPTIONS)


def test_a_wrong_reward_is_corrected_by_a_resumption(tmp_path: Path) -> None:
    """Tokens were sampled, so the run is not replaced; the message says how it goes on."""
    rewards = [float("nan")]

    def reward(episode: AgentEpisode) -> float:
        return rewards[-1]

    options: dict[str, Any] = {"out": tmp_path, "reward": reward, "environment": lambda task: Echo()}
    run(player, 2, **options)
    with pytest.raises(BadRequestError, match=r"The reward of 2 episodes failed: correct .* --resume plays them again"):
        run(player, 2, **options)
    rewards.append(0.5)
    assert [e.reward for e in run(player, 2, resume=True, **options).episodes] == [0.5, 0.5]


def test_an_episode_that_is_there_twice_is_kept_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(player, 2, out=tmp_path, **_OPTIONS)
    episodes = tmp_path / "episodes.jsonl"
    lines = episodes.read_bytes().splitlines(keepends=True)
    episodes.write_bytes(b"".join([*lines, lines[0]]))
    assert run(player, 2, out=tmp_path, resume=True, **_OPTIONS).episodes == []
    assert "1 final lines of episodes that have another one" in caplog.text
    assert len(read_lines(episodes)) == 4
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 4


def test_the_place_is_checked_before_a_server_is_asked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options: dict[str, Any] = {"servers": [Server("http://127.0.0.1:9", "key")], **_OPTIONS}
    with pytest.raises(BadRequestError, match="cannot be a folder"):
        asyncio.run(arun_agents(player, [AgentTask()], out=tmp_path / "file", **options))
    for name in ("metrics.jsonl", "report.html"):  # of a training run, or of nobody knows whom
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(BadRequestError, match=rf"files of a run .{name}., but no run\.json"):
            asyncio.run(arun_agents(player, [AgentTask()], out=folder, **options))


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    async def nested(session: AgentSession, task: AgentTask) -> None:
        await arun_agents(
            player, [AgentTask()], out=tmp_path, servers=[Server("http://127.0.0.1:9", "key")], **_OPTIONS
        )

    result = run(nested, 1, out=tmp_path, **(_OPTIONS | {"group_size": 1}))
    assert "Another process writes a run" in str(result.episodes[0].error)


def test_bounds_of_time_may_differ_and_other_limits_may_not(tmp_path: Path) -> None:
    run(player, 1, out=tmp_path, **_OPTIONS)
    slower = {name.removeprefix("limits."): 77 for name in MAY_DIFFER if name.startswith("limits.")}
    run(player, 1, out=tmp_path, resume=True, **(_OPTIONS | {"limits": replace(FAST, **slower)}))
    others = {f.name for f in fields(AgentLimits)} - slower.keys()
    for name in others:
        limits = replace(FAST, **{name: 77})
        with pytest.raises(BadRequestError, match=rf"\(limits\.{name}: was .*, is 77\)"):
            run(player, 1, out=tmp_path, resume=True, **(_OPTIONS | {"limits": limits}))


def test_servers_with_another_model_are_refused(tmp_path: Path) -> None:
    """A server that does not name its model, as one that is away, is not compared."""

    async def play(models: list[str | None], out: Path, resume: bool = True) -> None:
        async with contextlib.AsyncExitStack() as stack:
            fakes = [await stack.enter_async_context(fake_server(says_number)) for _ in models]
            for fake, model in zip(fakes, models, strict=True):
                fake.model = model
            servers = [Server(fake.url, OWNER_KEY) for fake in fakes]
            options: dict[str, Any] = {"servers": servers, "limits": FAST, "out": out, "resume": resume}
            await arun_agents(player, [AgentTask()], environment=lambda task: Echo(), **options)

    asyncio.run(play(["a", "a"], tmp_path, resume=False))
    assert json.loads((tmp_path / "run.json").read_text())["models"] == ["a"]
    for models in (["a"], [None, "a"], [None]):
        asyncio.run(play(models, tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    with pytest.raises(BadRequestError, match=r"models: was \['a'\], is \['a', 'b'\]"):
        asyncio.run(play(["a", "b"], tmp_path))
    assert before == {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    asyncio.run(play([None], tmp_path / "unknown", resume=False))
    asyncio.run(play(["b"], tmp_path / "unknown"))


def test_agents_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """An object without a name has no address in run.json, so it is the same one in another process."""
    run(player, 1, out=tmp_path, **_OPTIONS)

    async def other(session: AgentSession, task: AgentTask) -> None: ...

    other.__qualname__ = "player"
    with pytest.raises(BadRequestError, match=r"agent: was 'tests\.rollout\.agents\.common:player', is"):
        run(other, 1, out=tmp_path, resume=True, **_OPTIONS)
    again = tmp_path / "again"
    run(functools.partial(player), 1, out=again, **_OPTIONS)
    assert "0x" not in (again / "run.json").read_text()
    run(functools.partial(player), 1, out=again, resume=True, **_OPTIONS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"resume": False}, "has a run already"),
        ({"seed": 5}, "other settings .seed: was 0, is 5"),
        ({"group_size": 4}, "group_size: was 2, is 4"),
    ],
)
def test_another_run_does_not_mix_with_it(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    run(player, 1, out=tmp_path, **_OPTIONS)
    with pytest.raises(BadRequestError, match=says):
        run(player, 1, out=tmp_path, **(_OPTIONS | {"resume": True} | change))
    with pytest.raises(BadRequestError, match="tasks"):
        run(player, 2, out=tmp_path, **(_OPTIONS | {"resume": True}))


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    run(player, 1, out=tmp_path, **_OPTIONS)
    episodes = tmp_path / "episodes.jsonl"
    episodes.write_bytes(b"{broken}\n" + episodes.read_bytes())
    with pytest.raises(BadRequestError, match=r"episodes\.jsonl:1 is damaged"):
        run(player, 1, out=tmp_path, resume=True, **_OPTIONS)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("run.json", b"", r"run\.json is not valid JSON.*: restore it, or begin another run"),
        ("run.json", b'{"run": "run-0', r"run\.json is not valid JSON"),
        ("run.json", None, r"episodes\.jsonl.*, but no run\.json"),
        ("episodes.jsonl", None, r"episodes\.jsonl of this run is missing"),
        ("trajectories.jsonl", None, r"trajectories\.jsonl of this run is missing"),
    ],
)
def test_a_file_that_was_lost_or_cut_off_is_named(tmp_path: Path, file: str, content: bytes | None, says: str) -> None:
    run(player, 1, out=tmp_path, **_OPTIONS)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    others = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    with pytest.raises(BadRequestError, match=says):
        run(player, 1, out=tmp_path, resume=True, **_OPTIONS)
    assert others == {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}, "nothing was removed"


def test_episodes_whose_trajectories_were_lost_are_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(player, 2, out=tmp_path, **_OPTIONS)
    trajectories = tmp_path / "trajectories.jsonl"
    trajectories.write_bytes(b"".join(trajectories.read_bytes().splitlines(keepends=True)[:-1]))
    again = run(player, 2, out=tmp_path, resume=True, **_OPTIONS)
    assert len(again.episodes) == 1 and len(again.trajectories) == 4
    assert "lost trajectories of 1 episodes" in caplog.text


def test_a_resumed_run_plays_again_what_a_failed_reward_function_left(tmp_path: Path) -> None:
    works: list[bool] = []

    def reward(episode: AgentEpisode) -> float:
        if episode.index == 1 and not works:
            raise ValueError("a bug")
        return 0.5

    options: dict[str, Any] = {"out": tmp_path, "reward": reward, "environment": lambda task: Echo()}
    first = run(player, 3, **options)
    assert sorted((e.index, e.reward) for e in first.episodes if e.reward is not None) == [(0, 0.5), (2, 0.5)]
    works.append(True)
    again = run(player, 3, resume=True, **options)
    assert [(e.index, e.reward) for e in again.episodes] == [(1, 0.5)]
    assert [(t.task.group, t.reward) for t in again.trajectories] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["episodes"] == 3
