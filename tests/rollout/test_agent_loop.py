"""Many episodes use one engine, each at its own pace, and a bad environment fails only its own episode."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from websockets.asyncio.server import ServerConnection, serve

from tests.rollout.fakes import FakeEnvironment, WordRenderer, env_server, generated, observation, says
from verl_server import Engine, EngineBase
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    SessionNotFoundError,
    UnauthorizedError,
)
from verl_server.rollout import engine_pool
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import EnvError, EnvTimeouts
from verl_server.rollout.environment_setup import EnvironmentSetup
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import StopReason, Task
from verl_server.watch.pace import compare_pace

_KV_TOKENS = 480


class FakeEngine(EngineBase):
    """Answers every turn with the last prompt token plus one, and records the largest number of concurrent calls."""

    def __init__(self, fails: bool = False) -> None:
        self.scheduler_info = {"context_length": 1000}
        self.fails = fails
        self.now = self.most = 0
        self.sent: list[str] = []
        """Session of each generation, in order."""
        self.closed: list[str] = []

    async def async_close_session(self, session_id: str) -> None:
        self.closed.append(session_id)

    async def async_generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, session_id: Any = None, **_: Any
    ) -> Any:  # type: ignore[override]
        self.sent += session_id if isinstance(session_id, list) else [session_id]
        if self.fails:
            raise ServerUnavailableError("the weights are torn")
        if isinstance(input_ids[0], list):
            return [generated([ids[-1] + 1]) for ids in input_ids]
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return generated([input_ids[-1] + 1])

    _generate = _stream = _async_generate = _async_stream = _control = abort_request = None  # type: ignore[assignment]
    get_server_info = get_model_info = shutdown = close_session = None  # type: ignore[assignment]


def episode(turns: int = 3) -> FakeEnvironment:
    return FakeEnvironment(*[says("a")] * turns, says("z", 1.0, True))


def test_results_are_in_the_order_of_the_tasks() -> None:
    finished: list[int] = []
    with AgentLoop(FakeEngine(), episode, WordRenderer()) as loop:
        rollout = loop.run([Task(seed=i) for i in range(20)], lambda t: finished.append(t.task.seed))
        assert [t.task.seed for t in rollout.trajectories] == list(range(20)) == sorted(finished)
        assert all(t.reward == 1.0 and len(t.turns) == 3 for t in rollout.trajectories)
        assert loop.run([]).trajectories == []


def test_each_task_of_a_mixture_has_the_limits_of_its_environment() -> None:
    setups: dict[str | None, EnvironmentSetup] = {
        "short": EnvironmentSetup(episode, WordRenderer(), Limits(max_turns=1)),
        "long": EnvironmentSetup(episode, WordRenderer(), Limits(max_turns=9)),
    }
    with AgentLoop(FakeEngine(), setups) as loop:
        names = ["short", "long", "short"]
        rollout = loop.run([Task(seed=i, environment=name) for i, name in enumerate(names)])
        ends = [(t.task.environment, len(t.turns), t.stop_reason) for t in rollout.trajectories]
        assert ends == [
            ("short", 1, StopReason.MAX_TURNS), ("long", 3, StopReason.DONE), ("short", 1, StopReason.MAX_TURNS),
        ]  # fmt: skip
        with pytest.raises(BadRequestError, match="names the environment None, and the loop has long, short"):
            loop.run([Task(seed=0)])
    with AgentLoop(FakeEngine(), episode, WordRenderer()) as loop, pytest.raises(BadRequestError, match="'short'"):
        loop.run([Task(seed=0, environment="short")])


@pytest.mark.parametrize("lockstep", [False, True])
def test_each_episode_has_a_session_that_ends_with_it(lockstep: bool) -> None:
    engine = FakeEngine()
    with AgentLoop(engine, episode, WordRenderer(), max_concurrency=4) as loop:
        for _ in range(2):  # a second attempt at the same tasks has other ids
            run = loop.run_lockstep if lockstep else loop.run
            assert all(len(t.turns) == 3 for t in run([Task(seed=i) for i in range(6)]).trajectories)
    turns = Counter(engine.sent)
    assert len(turns) == 12 and set(turns.values()) == {3}
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in turns)
    assert sorted(engine.closed) == sorted(turns)


class UnendingEngine(FakeEngine):
    """Does with the end of a session what `act` does."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__()
        self._act = act

    async def async_close_session(self, session_id: str) -> None:
        await super().async_close_session(session_id)
        await self._act()


@pytest.mark.parametrize("lockstep", [False, True])
def test_the_end_of_a_session_neither_fails_nor_delays_an_episode(
    monkeypatch: pytest.MonkeyPatch, lockstep: bool
) -> None:
    """A server that does not answer delays the end of the batch only, within a bound."""
    monkeypatch.setattr(engine_pool, "_LAST_CLOSES", 0.05)
    engine = UnendingEngine(asyncio.Event().wait)
    finished: list[int] = []
    with AgentLoop(engine, episode, WordRenderer(), max_concurrency=1) as loop:
        run = loop.run_lockstep if lockstep else loop.run
        rollout = run([Task(seed=i) for i in range(5)], lambda t: finished.append(t.task.seed or 0))
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.DONE] * 5
    assert finished == list(range(5)) and len(engine.closed) == 5


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (BadRequestError("no such route"), 1),
        (UnauthorizedError("no key"), 1),
        (SessionNotFoundError("an older server"), 1),
        (ServerDiedError("gone"), 5),
        (ControlTimeoutError("late"), 5),
        (RuntimeError("anything"), 5),
    ],
)
def test_a_server_that_refuses_the_hint_gets_it_once(error: Exception, sent: int) -> None:
    async def refuse() -> None:
        raise error

    engine = UnendingEngine(refuse)
    with AgentLoop(engine, episode, WordRenderer(), max_concurrency=1) as loop:
        rollout = loop.run([Task(seed=i) for i in range(5)])
    assert [t.stop_reason for t in rollout.trajectories] == [StopReason.DONE] * 5
    assert len(engine.closed) == sent


def test_concurrency_is_bounded() -> None:
    engine, before = FakeEngine(), time.time()
    with AgentLoop(engine, episode, WordRenderer(), max_concurrency=3) as loop:
        rollout = loop.run([Task(seed=i) for i in range(12)])
    assert engine.most <= 3
    assert [t.events[0].kind for t in rollout.trajectories] == ["queue"] * 12
    assert len({t.began for t in rollout.trajectories}) == 1
    assert rollout.trajectories[0].began is not None and before <= rollout.trajectories[0].began <= time.time()


def test_a_slow_environment_holds_up_nobody() -> None:
    """Nine episodes end while the tenth waits for them; the end of the ninth releases the tenth."""
    others_ended = asyncio.Event()

    class Slow(FakeEnvironment):
        async def step(self, action: Any) -> Any:
            await asyncio.wait_for(others_ended.wait(), 10)
            return await super().step(action)

    environments = [Slow(says("a"), says("z", 1.0, True)), *(episode() for _ in range(9))]
    finished: list[int] = []

    def on_finish(trajectory: Any) -> None:
        finished.append(trajectory.task.seed)
        if len(finished) == 9:
            others_ended.set()

    with AgentLoop(FakeEngine(), lambda: environments.pop(0), WordRenderer()) as loop:
        loop.run([Task(seed=i) for i in range(10)], on_finish)
    assert finished[-1] == 0


def test_lock_step_plays_the_same_episodes() -> None:
    tasks = [Task(seed=i) for i in range(10)]
    for concurrency in (None, 4):
        environments = [episode(1 + i % 3) for i in range(10)] * 2
        with AgentLoop(
            FakeEngine(), lambda e=environments: _fresh(e.pop(0)), WordRenderer(), max_concurrency=concurrency
        ) as loop:
            own = loop.run(tasks).trajectories
            lockstep = loop.run_lockstep(tasks).trajectories
        assert [t.tokens for t in own] == [t.tokens for t in lockstep]
        assert [t.reward for t in lockstep] == [1.0] * 10


def _fresh(environment: FakeEnvironment) -> FakeEnvironment:
    return FakeEnvironment(*environment.answers)


def test_a_server_that_answers_nobody_is_an_error() -> None:
    with (
        AgentLoop(FakeEngine(fails=True), episode, WordRenderer()) as loop,
        pytest.raises(ServerUnavailableError, match=r"No generation succeeded.*the weights are torn"),
    ):
        loop.run([Task(seed=i) for i in range(3)])


async def _misbehave(connection: ServerConnection) -> None:
    """Select a fault by the seed of the reset: a slow reply, an error 500, a dropped connection, or invalid data.

    Other seeds play a good episode.
    """
    good = json.dumps(observation("a"))
    reset = json.loads(await connection.recv())
    await connection.send(good)
    await connection.recv()
    match reset["data"]["seed"]:
        case 0:
            await connection.wait_closed()
        case 1:
            await connection.send(json.dumps({"type": "error", "data": {"message": "500", "code": "EXECUTION_ERROR"}}))
        case 2:
            connection.transport.abort()
        case 3:
            await connection.send("<html>Bad Gateway</html>")
        case _:
            await connection.send(json.dumps(observation("z", 1.0, True)))


def test_bad_environments_cost_their_own_trajectories_only() -> None:
    limits = Limits(env=EnvTimeouts(connect=5, reset=5, step=0.5, close=0.2))

    async def main() -> list[tuple[int, StopReason | None, float | None]]:
        async with serve(_misbehave, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            loop = AgentLoop(FakeEngine(), url, WordRenderer(), limits=limits)
            rollout = await loop.arun([Task(seed=i) for i in range(10)])
            loop.close()
            assert all(t.error for t in rollout.trajectories[:4])
            return [(t.task.seed, t.stop_reason, t.reward) for t in rollout.trajectories]

    failed = [StopReason.ENV_TIMEOUT, StopReason.ENV_ERROR, StopReason.ENV_ERROR, StopReason.ENV_ERROR]
    assert asyncio.run(main()) == [(i, reason, None) for i, reason in enumerate(failed)] + [
        (i, StopReason.DONE, 1.0) for i in range(4, 10)
    ]


class WaitingEngine(FakeEngine):
    """Never completes the generation of a prompt that ends with `slow`; `cancelled` counts the cancelled ones."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.slow = ord(slow)
        self.cancelled = 0

    async def async_generate(  # type: ignore[override]
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, **_: Any
    ) -> Any:
        if input_ids[-1] == self.slow:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return generated([input_ids[-1] + 1])


def test_stragglers_end_when_the_rest_of_the_batch_has_ended() -> None:
    """One of ten episodes hangs in its environment and another one in its generation. Both keep their tokens."""
    hung = [
        FakeEnvironment(says("a"), says("b", 0.5), asyncio.Event()),
        FakeEnvironment(says("a"), says("s")),
    ]
    environments = [*hung, *(episode() for _ in range(8))]
    engine = WaitingEngine("s")
    limits = Limits(straggler_timeout=0.05, straggler_fraction=0.8)
    with AgentLoop(engine, lambda: environments.pop(0), WordRenderer(), limits=limits) as loop:
        trajectories = loop.run([Task(seed=i) for i in range(10)]).trajectories
    assert [t.stop_reason for t in trajectories] == [StopReason.STRAGGLER] * 2 + [StopReason.DONE] * 8
    for trajectory, kind in zip(trajectories, ("env", "generate"), strict=False):
        assert "8 of the batch's 10 episodes had ended" in str(trajectory.error)
        assert trajectory.reward is None and not trajectory.is_trainable
        assert trajectory.events[-1].kind == kind
    assert trajectories[0].tokens == [ord(letter) for letter in "abbc"]
    assert trajectories[1].tokens == [ord(letter) for letter in "abs"]
    assert engine.cancelled == 1
    assert [environment.closed for environment in hung] == [1, 1]


def test_nobody_is_a_straggler_before_all_have_started_and_enough_have_ended() -> None:
    """With a concurrency of one, each episode takes longer than the bound, but queued episodes are not stragglers."""

    class Slow(FakeEnvironment):
        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0.05)
            return await super().step(action)

    limits = Limits(straggler_timeout=0.02, straggler_fraction=0.5)
    environments = [*(Slow(says("a"), says("z", 1.0, True)) for _ in range(3)), FakeEnvironment(asyncio.Event())]
    with AgentLoop(FakeEngine(), lambda: environments.pop(0), WordRenderer(), limits=limits, max_concurrency=1) as loop:
        trajectories = loop.run([Task(seed=i) for i in range(4)]).trajectories
    assert [t.stop_reason for t in trajectories] == [StopReason.DONE] * 3 + [StopReason.STRAGGLER]


def test_an_episode_that_plays_alone_is_no_straggler() -> None:
    hung = FakeEnvironment(asyncio.Event())
    limits = Limits(straggler_timeout=0.01, trajectory_timeout=0.1)
    with AgentLoop(FakeEngine(), lambda: hung, WordRenderer(), limits=limits) as loop:
        assert loop.run([Task(seed=0)]).trajectories[0].stop_reason is StopReason.TIME_LIMIT


def test_the_kv_cache_bounds_an_episode_like_the_context() -> None:
    engine = FakeEngine()
    engine.scheduler_info |= {"max_total_num_tokens": 5, "max_req_input_len": 5}
    with AgentLoop(engine, lambda: episode(6), WordRenderer()) as loop:
        trajectory = loop.run([Task(seed=0)]).trajectories[0]
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.CONTEXT_FULL, 0)
    assert len(trajectory.tokens) == 6  # five tokens in the KV cache and the last sampled token


# -- with the real engine -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    settings = {"device": "cpu", "cpu_threads": 1, "weight_version": "v0", "max_total_tokens": _KV_TOKENS}
    with Engine(model_path=str(tiny_llama), **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def game() -> Iterator[str]:
    with EnvServer(
        "verl_server.rollout.environments.games:GuessNumber", kwargs={"latency": 0.001, "guesses": 3}
    ) as server:
        yield server.url


def test_episodes_of_a_real_model_over_http(engine: Engine, game: str, tiny_llama: Path) -> None:
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    tasks = [Task(seed=i, episode_id=str(i), sampling_seed=i) for i in range(24)]
    with AgentLoop(engine, game, renderer, limits=Limits(max_turns=3, max_new_tokens=4)) as loop:
        pace = compare_pace(loop, tasks, rounds=1)
        again = loop.run(tasks).trajectories
    # The sampling seed determines the result, independent of the batch, except for a draw at the edge of rounding.
    assert pace.same_trajectories >= 22
    assert sum(a.tokens == b.tokens for a, b in zip(again, pace.own_pace, strict=True)) >= 22
    assert min(pace.longest_alone_seconds, pace.work_seconds, pace.ratio, pace.ideal_ratio) > 0
    for trajectory in again:
        assert trajectory.stop_reason is StopReason.DONE
        assert {v for v, m in zip(trajectory.weight_versions, trajectory.loss_mask, strict=True) if m} == {"v0"}
        assert all((lp < 0) == bool(m) for lp, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True))


def test_an_abort_in_the_middle_is_resumed(engine: Engine, tiny_llama: Path) -> None:
    """Long generations are aborted repeatedly, and the episode continues from the partial output."""
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    sampling = {"ignore_eos": True}
    ended = threading.Event()

    def abort() -> None:
        while not ended.wait(0.05):
            engine.abort_request(abort_all=True)

    with AgentLoop(
        engine,
        lambda: FakeEnvironment(says("count"), says("z", 1.0, True)),
        renderer,
        sampling_params=sampling,
        limits=Limits(max_new_tokens=400),
    ) as loop:
        quiet = loop.run([Task(seed=0, sampling_seed=5)]).trajectories[0]
        thread = threading.Thread(target=abort)
        thread.start()
        try:
            disturbed = loop.run([Task(seed=0, sampling_seed=5)]).trajectories[0]
        finally:
            ended.set()
            thread.join()
    assert disturbed.resumes > 0
    assert disturbed.tokens == quiet.tokens
    assert disturbed.reward == 1.0


def test_an_episode_that_fills_the_kv_cache_ends_as_context_full(engine: Engine, tiny_llama: Path) -> None:
    """The KV cache holds less than the context. The server would answer 400 to a request that does not fit."""
    assert engine.scheduler_info["max_total_num_tokens"] == _KV_TOKENS < engine.scheduler_info["context_length"]
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    long_observation = says("x" * 100)
    for new_tokens, fills in ((50, False), (400, True)):
        with AgentLoop(
            engine,
            lambda: FakeEnvironment(*[long_observation] * 50),
            renderer,
            sampling_params={"ignore_eos": True},
            limits=Limits(max_new_tokens=new_tokens),
        ) as loop:
            trajectory = loop.run([Task(seed=0, sampling_seed=1)]).trajectories[0]
        assert (trajectory.stop_reason, trajectory.error) == (StopReason.CONTEXT_FULL, None)
        assert (len(trajectory.tokens) == _KV_TOKENS + 1) == fills


def test_a_straggler_leaves_no_generation_behind(engine: Engine, tiny_llama: Path) -> None:
    """The engine is paused, so that only an abort can end the request."""
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    environments = [FakeEnvironment(says("a", 1.0)), FakeEnvironment(EnvError("gone"))]
    limits = Limits(straggler_timeout=0.3, straggler_fraction=0.5)
    engine.pause_generation(mode="in_place")
    try:
        with AgentLoop(engine, lambda: environments.pop(0), renderer, limits=limits) as loop:
            trajectory = loop.run([Task(seed=i) for i in range(2)]).trajectories[0]
        state = engine.get_internal_state()
        deadline = time.monotonic() + 10
        while (pending := state["num_running_reqs"] + state["num_waiting_reqs"]) and time.monotonic() < deadline:
            time.sleep(0.01)
            state = engine.get_internal_state()
    finally:
        engine.continue_generation()
    assert trajectory.stop_reason is StopReason.STRAGGLER
    assert pending == 0


def test_a_real_environment_server_that_dies(engine: Engine, tiny_llama: Path) -> None:
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    start = time.monotonic()
    limits = Limits(max_turns=3, max_new_tokens=1)
    with (
        EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs={"latency": 5.0}) as server,
        AgentLoop(engine, server.url, renderer, limits=limits) as loop,
    ):
        threading.Timer(0.5, server.shutdown).start()
        rollout = loop.run([Task(seed=i, episode_id="x") for i in range(4)])
    assert {t.stop_reason for t in rollout.trajectories} <= {StopReason.ENV_ERROR, StopReason.DONE}
    assert any(t.stop_reason is StopReason.ENV_ERROR and t.reward is None for t in rollout.trajectories)
    assert time.monotonic() - start < 30


def test_episodes_end_with_their_environment_class() -> None:
    async def main() -> None:
        async with env_server(GuessNumber) as url:
            loop = AgentLoop(FakeEngine(), url, WordRenderer(), limits=Limits(max_turns=5, max_new_tokens=1))
            trajectories = (await loop.arun([Task(seed=i) for i in range(50)])).trajectories
            loop.close()
            assert {t.stop_reason for t in trajectories} == {StopReason.DONE}

    asyncio.run(main())
