"""`run_agents` with functions: ends, rewards, groups, retries, several servers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from tests.rollout.agents.common import FAST, Echo, chat, player, run, says_number
from tests.rollout.fake_sessions import OWNER_KEY, FakeServer, fake_server
from verl_server.errors import BadRequestError, ServerDiedError
from verl_server.messages.session_types import CreateSession
from verl_server.rollout.agents.run import arun_agents, session_seed
from verl_server.rollout.agents.servers import ServerPool
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask, Server
from verl_server.rollout.trajectory import StopReason


def _echo(task: AgentTask) -> Echo:
    return Echo()


def test_an_episode_has_the_servers_tokens_and_the_environments_reward() -> None:
    def check(fake: FakeServer) -> None:
        assert fake.sessions == {}  # the session is deleted
        session = next(iter(fake.ended.values()))
        assert (session.state, session.reason, session.rewards[0].reward) == ("finished", "done", 1.0)
        ends = [entry.rpartition("/")[2] for entry in fake.log if entry.startswith(("POST", "DELETE"))]
        assert [end for end in ends if end in ("finish", "reward")] == ["finish", "reward"]

    result = run(player, [AgentTask(seed=5)], environment=_echo, check=check)
    (trajectory,) = result.trajectories
    assert "".join(map(chr, trajectory.tokens)) == "say 55"
    assert trajectory.loss_mask == [0] * 5 + [1]
    assert trajectory.logprobs == [0.0] * 5 + [-0.5]
    assert trajectory.weight_versions == [""] * 5 + ["7"]
    assert (trajectory.reward, trajectory.stop_reason, trajectory.turns[0].action_span) == (1.0, "done", (5, 6))
    assert result.episodes[0].result == "5"


def test_groups_share_the_task_and_have_seeds_of_their_own() -> None:
    seen: list[tuple[str, int | None]] = []

    def check(fake: FakeServer) -> None:
        seen.extend((s.request.group.split("/")[1], s.request.seed) for s in fake.ended.values())

    result = run(player, 2, environment=_echo, group_size=3, seed=9, check=check)
    assert sorted(seen) == sorted((str(i), session_seed(9, i, member)) for i in range(2) for member in range(3))
    assert len({seed for _, seed in seen}) == 6
    assert [(t.task.group, t.member, t.task.seed) for t in result.trajectories] == [
        (i, member, i) for i in range(2) for member in range(3)
    ]


def test_the_seeds_of_sessions_may_be_named() -> None:
    seen: list[int | None] = []

    def check(fake: FakeServer) -> None:
        seen.extend(s.request.seed for s in fake.ended.values())

    result = run(player, 2, environment=_echo, group_size=2, session_seeds=[5, 6, 5, 7], check=check)
    assert sorted(seen) == [5, 5, 6, 7]  # type: ignore[type-var]
    assert [(e.index, e.member, e.seed) for e in sorted(result.episodes, key=lambda e: (e.index, e.member))] == [
        *((0, 0, 5), (0, 1, 6), (1, 0, 5), (1, 1, 7))
    ]
    with pytest.raises(BadRequestError, match="session_seeds has 3 seeds for 2 tasks with 2 episodes each"):
        run(player, 2, environment=_echo, group_size=2, session_seeds=[5, 6, 5])


async def _two_turns(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")
    await chat(session, "say 2")


async def _raises(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")
    raise RuntimeError("the agent has a bug")


async def _hangs(session: AgentSession, task: AgentTask) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("agent", "limits", "reason", "says", "reward"),
    [
        (_two_turns, {"max_turns": 1}, StopReason.MAX_TURNS, "403", 0.5),
        (_two_turns, {"max_tokens": 1}, StopReason.MAX_TOKENS, "403", 0.5),
        (_raises, {}, StopReason.AGENT_ERROR, "RuntimeError: the agent has a bug", 0.5),
        (_hangs, {"seconds": 0.3}, StopReason.TIME_LIMIT, "AgentLimits.seconds", None),
        (_hangs, {"idle_seconds": 0.2}, StopReason.IDLE, "AgentLimits.idle_seconds", None),
    ],
)
def test_every_end_is_recorded(
    agent: Any, limits: dict[str, Any], reason: StopReason, says: str, reward: float | None
) -> None:
    result = run(agent, limits=dataclasses.replace(FAST, **limits), reward=lambda episode: 0.5)
    (episode,) = result.episodes
    assert (episode.reason, episode.reward, episode.final) == (reason, reward, True)
    assert says in (episode.error or "")


def test_a_failed_generation_is_no_fault_of_the_agent() -> None:
    openai = pytest.importorskip("openai")

    async def agent(session: AgentSession, task: AgentTask) -> None:
        client: openai.AsyncOpenAI = session.openai(max_retries=0)
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])

    result = run(agent, policy=lambda messages: JSONResponse({"error": "x"}, 500), reward=lambda episode: 1.0)
    assert result.episodes[0].reason is StopReason.GENERATION_ERROR
    assert result.episodes[0].reward is None


def test_a_server_error_is_tried_again_by_the_rule_and_names_the_server() -> None:
    """An agent with httpx; the first two generations answer 500. Without retries left, the last end is final."""
    answers: list[Any] = [JSONResponse({"error": "x"}, 500)] * 2 + ["1"]

    async def agent(session: AgentSession, task: AgentTask) -> None:
        await chat(session, "say 1")

    result = run(agent, policy=lambda messages: answers.pop(0), reward=lambda episode: 1.0, retries=2)
    assert [(e.reason, e.reward, e.final) for e in result.episodes] == [
        (StopReason.GENERATION_ERROR, None, False),
        (StopReason.GENERATION_ERROR, None, False),
        (StopReason.DONE, 1.0, True),
    ]
    assert result.episodes[0].error is not None
    assert result.episodes[0].error.startswith(f"{result.episodes[0].server}: HTTPStatusError")


@pytest.mark.parametrize(("fault", "reason"), [("hang", StopReason.ENV_TIMEOUT), ("boom", StopReason.ENV_ERROR)])
def test_a_fault_of_the_environment_has_no_reward(fault: str, reason: StopReason) -> None:
    made: list[Echo] = []

    def make(task: AgentTask) -> Echo:
        made.append(Echo(fault))
        return made[-1]

    limits = dataclasses.replace(FAST, environment_seconds=0.3) if fault == "hang" else FAST
    result = run(player, environment=make, limits=limits)
    assert (result.episodes[0].reason, result.episodes[0].reward) == (reason, None)
    assert made[0].closed == 1


def test_a_generation_that_runs_is_no_idleness() -> None:
    async def slow(messages: list[dict[str, Any]]) -> str:
        await asyncio.sleep(1.6)
        return "1"

    async def agent(session: AgentSession, task: AgentTask) -> None:
        await chat(session, "say 1")

    limits = dataclasses.replace(FAST, idle_seconds=1.0)
    result = run(agent, policy=slow, limits=limits, reward=lambda episode: 1.0)
    assert result.episodes[0].reason is StopReason.DONE


def test_an_episode_that_the_environment_failed_is_tried_again_in_a_new_session() -> None:
    faults = ["boom", "boom", None]

    def make(task: AgentTask) -> Echo:
        return Echo(faults.pop(0))

    result = run(player, environment=make, retries=2)
    assert [(e.attempt, e.reason, e.final) for e in result.episodes] == [
        (0, StopReason.ENV_ERROR, False),
        (1, StopReason.ENV_ERROR, False),
        (2, StopReason.DONE, True),
    ]
    assert len({e.session for e in result.episodes}) == 3
    assert [t.attempt for t in result.trajectories] == [2]


def test_the_agent_sees_no_reward_and_cannot_play_again() -> None:
    seen: list[Any] = []

    async def agent(session: AgentSession, task: AgentTask) -> None:
        environment = session.environment
        assert environment is not None
        seen.append(await environment.step("wrong"))
        seen.append(not hasattr(environment, "reset"))
        with pytest.raises(BadRequestError, match="episode is over"):
            await environment.step("0")

    result = run(agent, environment=_echo)
    assert seen == [("over", True), True]
    assert result.episodes[0].reward == 0.0


def test_what_the_agent_left_behind_samples_nothing_after_the_end() -> None:
    """The session is finished before the reward is computed, so a task that the agent left behind has no key."""
    late: list[Any] = []

    async def agent(session: AgentSession, task: AgentTask) -> None:
        async def linger() -> None:
            await computed.wait()
            try:
                late.append(await chat(session, "say 1"))
            except Exception as error:
                late.append(error)
            tried.set()

        left.append(asyncio.ensure_future(linger()))

    left: list[Any] = []

    async def reward(episode: AgentEpisode) -> float:
        computed.set()
        await tried.wait()
        return 1.0

    computed, tried = asyncio.Event(), asyncio.Event()
    result = run(agent, reward=reward)
    assert "401" in str(late[0])
    assert result.trajectories == []  # nothing was sampled


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda episode: "0.7", "finite number, not '0.7'"),
        (lambda episode: float("nan"), "finite number"),
        (lambda episode: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_reward_function_that_fails_leaves_no_reward(function: Any, says: str) -> None:
    result = run(_two_turns, reward=function)
    assert result.episodes[0].reward is None
    assert says in (result.episodes[0].error or "")


def test_sessions_spread_over_servers_and_stay() -> None:
    async def main() -> None:
        async with fake_server(says_number) as one, fake_server(says_number) as two:
            servers = [Server(fake.url, OWNER_KEY) for fake in (one, two)]
            tasks = [AgentTask(seed=i) for i in range(8)]
            result = await arun_agents(player, tasks, servers=servers, environment=_echo, limits=FAST)
            assert (len(one.ended), len(two.ended)) == (4, 4)
            assert all(t.reward == 1.0 for t in result.trajectories)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_server_that_is_away_gets_no_session() -> None:
    async def main() -> None:
        async with fake_server(says_number) as two:
            async with fake_server(says_number) as one:
                gone = one.url
            servers = [Server(gone, OWNER_KEY), Server(two.url, OWNER_KEY)]
            options: dict[str, Any] = {"environment": _echo, "limits": FAST, "allow_open_server": True}
            result = await arun_agents(player, [AgentTask(seed=i) for i in range(4)], servers=servers, **options)
            assert [t.reward for t in result.trajectories] == [1.0] * 4
            lost = await arun_agents(player, [AgentTask()], servers=servers[:1], retries=0, **options)
            assert lost.episodes[0].reason is StopReason.SESSION_LOST

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_episodes_of_a_server_that_dies_are_replayed_on_another() -> None:
    """Four episodes run, two on each server, when one server dies for good. Its two are played again on the other."""

    async def main() -> None:
        together = asyncio.Barrier(4)
        away, closed = asyncio.Event(), asyncio.Event()

        async def agent(session: AgentSession, task: AgentTask) -> None:
            await chat(session, "say 1")
            if not away.is_set():
                await together.wait()
                await kill_one()
            await chat(session, "say 2")

        async def kill_one() -> None:
            if not away.is_set():
                away.set()
                await stack.aclose()
                closed.set()
            await closed.wait()  # an episode that asks earlier may still be answered

        async with fake_server(says_number) as two:
            stack = contextlib.AsyncExitStack()
            one = await stack.enter_async_context(fake_server(says_number))
            servers = [Server(fake.url, OWNER_KEY) for fake in (one, two)]
            tasks = [AgentTask(seed=i) for i in range(4)]
            limits = dataclasses.replace(FAST, restart_timeout=0.5)
            result = await arun_agents(agent, tasks, servers=servers, reward=lambda e: 1.0, limits=limits, retries=1)
            lost = [e for e in result.episodes if not e.final]
            assert [(e.server, e.reason, e.reward) for e in lost] == [(one.url, StopReason.SESSION_LOST, None)] * 2
            assert all(one.url in (e.error or "") for e in lost)
            assert [t.reward for t in result.trajectories] == [1.0] * 4
            replayed = {(e.index, e.server) for e in result.episodes if e.attempt == 1}
            assert replayed == {(e.index, two.url) for e in lost}
            assert len(two.ended) == 4 and two.sessions == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_session_that_vanishes_is_lost() -> None:
    def check(fake: FakeServer) -> None:
        return

    async def agent(session: AgentSession, task: AgentTask) -> None:
        fakes[0].sessions.clear()
        await asyncio.Event().wait()

    fakes: list[FakeServer] = []

    async def main() -> None:
        async with fake_server(says_number) as fake:
            fakes.append(fake)
            limits = dataclasses.replace(FAST, idle_seconds=1.0)
            server = Server(fake.url, OWNER_KEY)
            result = await arun_agents(
                agent, [AgentTask()], servers=[server], reward=lambda e: 1.0, limits=limits, retries=0
            )
            assert result.episodes[0].reason is StopReason.SESSION_LOST

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_open_server_that_comes_back_gets_no_session() -> None:
    """One of two servers is away when the run begins, so it could not be asked whether it generates for anybody."""

    async def main() -> None:
        async with fake_server(says_number) as closed:
            async with fake_server(says_number) as gone:
                port = int(gone.url.rpartition(":")[2])
            servers = [Server(gone.url, OWNER_KEY), Server(closed.url, OWNER_KEY)]
            async with ServerPool(servers) as pool:
                await pool.check_closed()
                async with fake_server(says_number, generates_openly=True, port=port) as back:
                    await pool._probe()
                    for _ in range(2):
                        async with pool.session(CreateSession(), 5) as (client, _created):
                            assert client.url == closed.url
                    assert not back.sessions
                async with fake_server(says_number, port=port):
                    await pool._probe()
                    async with (
                        pool.session(CreateSession(), 5) as (one, _),
                        pool.session(CreateSession(), 5) as (two, _),
                    ):
                        assert {one.url, two.url} == {gone.url, closed.url}
            with pytest.raises(ServerDiedError):
                await arun_agents(player, [AgentTask()], servers=servers[:1], environment=_echo)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("fault", ["version", "503"])
def test_a_server_that_answers_but_cannot_be_used_does_not_keep_sessions_from_the_others(fault: str) -> None:
    """It has the fewest sessions, because it has none."""

    async def main() -> None:
        async with fake_server(says_number) as unfit, fake_server(says_number) as fit:
            unfit.model = fit.model = "m"
            if fault == "version":
                unfit.version = "default"
            else:
                unfit.is_available = False
            servers = [Server(unfit.url, OWNER_KEY), Server(fit.url, OWNER_KEY)]
            async with ServerPool(servers, version="7") as pool:
                for _ in range(2):
                    async with pool.session(CreateSession(), 2) as (client, _created):
                        assert client.url == fit.url
                    await pool._probe()
                assert not unfit.sessions
                unfit.version, unfit.is_available = "7", True
                await pool._probe()
                async with pool.session(CreateSession(), 5) as (one, _), pool.session(CreateSession(), 5) as (two, _):
                    assert {one.url, two.url} == {unfit.url, fit.url}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_interruption_during_the_reward_leaves_no_session() -> None:
    async def main() -> None:
        computing = asyncio.Event()

        async def reward(episode: AgentEpisode) -> float:
            computing.set()
            await asyncio.Event().wait()
            return 1.0

        async with fake_server(says_number) as fake:
            servers = [Server(fake.url, OWNER_KEY)]
            playing = arun_agents(player, [AgentTask()], servers=servers, environment=_echo, reward=reward, limits=FAST)
            task = asyncio.ensure_future(playing)
            await computing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fake.sessions == {}

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_failure_of_another_server_is_the_agents() -> None:
    async def agent(session: AgentSession, task: AgentTask) -> None:
        request = httpx.Request("GET", "http://elsewhere.example/search")
        httpx.Response(503, request=request).raise_for_status()

    result = run(agent, reward=lambda episode: 1.0)
    assert (result.episodes[0].reason, result.episodes[0].reward) == (StopReason.AGENT_ERROR, None)


def test_a_timeout_inside_a_reward_function_is_its_own() -> None:
    def reward(episode: AgentEpisode) -> float:
        raise TimeoutError("the judge is slow")

    (episode,) = run(player, environment=_echo, reward=reward).episodes
    assert (episode.reason, episode.reward) == (StopReason.DONE, None)
    assert "raised TimeoutError: the judge is slow" in (episode.error or "")


def test_an_open_server_is_refused() -> None:
    async def main() -> None:
        async with fake_server(says_number, generates_openly=True) as fake:
            servers = [Server(fake.url, OWNER_KEY)]
            with pytest.raises(BadRequestError, match="allow_open_server=True"):
                await arun_agents(player, [AgentTask()], servers=servers, environment=_echo)
            assert fake.log == []  # no session was created
            result = await arun_agents(
                player, [AgentTask()], servers=servers, environment=_echo, allow_open_server=True, limits=FAST
            )
            assert result.trajectories[0].reward == 1.0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("agent", "options", "says"),
    [
        (player, {}, 'reward="environment" needs an environment'),
        (player, {"reward": "exit"}, 'reward="exit" is for programs'),
        ("python agent.py", {"reward": "exit"}, r"as a list, for example \['python', 'agent.py'\]"),
        (["no-such-program"], {"reward": "exit"}, "no program 'no-such-program'"),
        (["sh"], {"reward": "exit", "pass_env": ["VERL_SERVER_API_KEY"]}, "no agent receives the owner's key"),
        (["sh"], {"reward": "exit", "pass_env": ["HOME"]}, "must not name HOME: each episode has its own"),
        (["sh"], {"reward": "exit", "pass_env": ["OPENAI_BASE_URL"]}, "must not name OPENAI_BASE_URL: each episode"),
        (says_number, {"reward": lambda e: 1.0}, "no async function"),
        (player, {"environment": _echo, "group_size": 0}, "must be at least 1"),
        (player, {"environment": _echo, "resume": True}, "resume needs the folder"),
    ],
)
def test_input_that_cannot_work_is_refused(agent: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        run(agent, **options)


@pytest.mark.parametrize("name", ["sampling_params", "forced_sampling_params"])
def test_wrong_sampling_params_are_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequestError, match=r"sampling_params\.temperature must be finite"):
        run(player, 1, out=tmp_path / "run", reward=lambda _: 1.0, **{name: {"temperature": -1.0}})
    assert not (tmp_path / "run").exists()
