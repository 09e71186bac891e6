"""`ToolLoop` against scripted replies, and against a tiny model whose ledger must have one exact branch."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from starlette.responses import JSONResponse

from tests.rollout.agents.common import FAST, Echo, run
from tests.rollout.agents.redraw import Redraw
from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.tool_loop import ToolLoop
from verl_server.rollout.agents.types import AgentEpisode, AgentTask, Server
from verl_server.rollout.environment import EnvError
from verl_server.rollout.trajectory import StopReason


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def fails(text: str) -> str:
    raise ValueError(f"no {text}")


async def hangs() -> None:
    await asyncio.Event().wait()


class Tools(Echo):
    """Has the tool `read`, and ends with the final answer."""

    def __init__(self) -> None:
        super().__init__()
        properties = {"page": {"type": "integer"}}
        parameters = {"type": "object", "properties": properties, "required": ["page"]}
        self.tools = [{"type": "function", "function": {"name": "read", "parameters": parameters}}]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        if arguments["page"] == 9:
            await asyncio.Event().wait()
        return f"page {arguments['page']}" + " long" * 30


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call{number}", "type": "function", "function": {"name": name, "arguments": text}}


class Script:
    """A policy that plays replies in order, texts or lists of calls, and keeps the messages that it was sent."""

    def __init__(self, *replies: Any, finish: str = "stop") -> None:
        self.replies = list(replies)
        self.finish = finish
        self.seen: list[list[dict[str, Any]]] = []

    def __call__(self, messages: list[dict[str, Any]]) -> Any:
        self.seen.append(messages)
        reply = self.replies.pop(0)
        if isinstance(reply, JSONResponse):
            return reply
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else {"role": "assistant"}
        message |= {} if isinstance(reply, str) else {"content": None, "tool_calls": reply}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": self.finish}]})


def play(loop: ToolLoop, policy: Any, **options: Any) -> AgentEpisode:
    settings = {"reward": lambda episode: 1.0} | options
    (episode,) = run(loop, [AgentTask(input="question", seed=3)], policy=policy, **settings).episodes
    return episode


def test_calls_run_at_once_and_the_answer_is_the_result() -> None:
    met: list[asyncio.Event] = []

    async def meet(mine: int) -> str:
        """Answers when both calls run."""
        met.append(asyncio.Event())
        if len(met) == 2:
            for event in met:
                event.set()
        await met[-1].wait() if mine == 2 else await met[0].wait()
        return f"met {mine}"

    policy = Script([call("meet", {"mine": 1}, 1), call("meet", {"mine": 2}, 2)], "done")
    episode = play(ToolLoop([meet], system="be brief"), policy)
    assert (episode.reason, episode.result, episode.reward) == (StopReason.DONE, "done", 1.0)
    assert [m["role"] for m in policy.seen[1]] == ["system", "user", "assistant", "tool", "tool"]
    answers = [(m["tool_call_id"], m["content"]) for m in policy.seen[1][3:]]
    assert answers == [("call1", "met 1"), ("call2", "met 2")], "in the order of the calls"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (call("no_tool", {}), "There is no tool 'no_tool'. The tools: read, add, fails, hangs."),
        (call("add", "{broken"), "The arguments of add are no JSON"),
        (call("add", "[1]"), "must be a JSON object"),
        (call("add", {"a": 1}), "missing required field `b`"),
        (call("add", {"a": 1, "b": "x"}), "Expected `int`, got `str`"),
        (call("read", {"page": "x"}), "The arguments of read are wrong: `arguments.page`: 'x' is not of type"),
        (call("fails", {"text": "way"}), "fails raised ValueError: no way"),
        (call("hangs", {}), "hangs did not answer within 0.2 s"),
        (call("read", {"page": 9}), "read did not answer within 0.2 s"),
    ],
)
def test_a_wrong_call_is_answered_with_its_error(wrong: dict[str, Any], says: str) -> None:
    policy = Script([wrong, call("add", {"a": 1, "b": 2}, 1)], "3")
    loop = ToolLoop([add, fails, hangs], tool_seconds=0.2)
    episode = play(loop, policy, environment=lambda task: Tools(), reward="environment")
    assert (episode.reason, episode.result) == (StopReason.DONE, "3")
    assert episode.reward == 1.0, "the final answer is the environment's step"
    first, second = policy.seen[1][-2:]
    assert first["content"].startswith("Error: ") and says in first["content"]
    assert second["content"] == "3"


def test_a_call_that_cannot_be_read_is_answered() -> None:
    text = '<tool_call>{"name": "add", "arguments": {</tool_call>'
    policy = Script(text, "sorry")
    assert play(ToolLoop([add]), policy).result == "sorry"
    assert policy.seen[1][-2]["content"] == text
    assert "could not be read" in policy.seen[1][-1]["content"]


def test_a_long_result_is_cut() -> None:
    policy = Script([call("read", {"page": 1})], "3")
    play(ToolLoop(result_characters=12), policy, environment=lambda task: Tools())
    assert policy.seen[1][-1]["content"] == "page 1 long \n(The result had 156 characters. The rest was cut.)"


def test_a_text_environment_is_played_step_by_step() -> None:
    class Twice(Echo):
        steps = 0

        async def step(self, text: str) -> tuple[str, float | None, bool]:
            self.steps += 1
            if self.steps == 1:
                raise BadRequestError("say a number")
            return f"step {self.steps}", 0.5, self.steps == 3

    policy = Script("x", "1", "2")
    episode = play(ToolLoop(), policy, environment=lambda task: Twice(), reward="environment")
    assert (episode.reason, episode.reward) == (StopReason.DONE, 1.0)
    assert [m["content"] for m in policy.seen[2] if m["role"] == "user"] == [
        "question\n\nsay 3",
        "Error: say a number",
        "step 2",
    ]


def _full(messages: Any) -> JSONResponse:
    text = "Any text: its code counts."
    return JSONResponse({"error": {"message": text, "code": "context_length_exceeded"}}, 400)


def _proxy(messages: Any) -> JSONResponse:
    return JSONResponse([], 403)


@pytest.mark.parametrize(
    ("policy", "limits", "reason", "says"),
    [
        (Script(*[[call("add", {"a": 1, "b": 1})]] * 3), {}, StopReason.MAX_TURNS, "2 turns (ToolLoop.max_turns)"),
        (Script("half", finish="length"), {}, StopReason.MAX_TOKENS, "finish_reason length"),
        (_full, {}, StopReason.CONTEXT_FULL, "Any text"),
    ],
)
def test_limits_end_with_their_reason_and_a_reward(
    policy: Any, limits: dict[str, Any], reason: StopReason, says: str
) -> None:
    episode = play(ToolLoop([add], max_turns=2), policy, limits=dataclasses.replace(FAST, **limits))
    assert (episode.reason, episode.reward) == (reason, 1.0)
    assert says in (episode.error or "")


def test_an_error_without_a_code_is_the_agents() -> None:
    episode = play(ToolLoop(), _proxy)
    assert (episode.reason, episode.reward) == (StopReason.AGENT_ERROR, None)
    assert "HTTP 403" in (episode.error or "")


def test_an_aborted_reply_is_no_answer() -> None:
    episode = play(ToolLoop(), Script("half", finish="abort"))
    assert (episode.reason, episode.reward) == (StopReason.GENERATION_ERROR, None)
    assert "finish_reason abort" in (episode.error or "")


def test_an_end_cancels_the_other_calls_of_the_reply() -> None:
    left: list[str] = []

    class Broken(Tools):
        async def call(self, name: str, arguments: dict[str, Any]) -> str:
            raise EnvError("the environment broke")

    async def slow() -> str:
        """Waits for ever."""
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cancelled")
        return ""

    policy = Script([call("slow", {}, 1), call("read", {"page": 1}, 2)])
    episode = play(ToolLoop([slow]), policy, environment=lambda task: Broken())
    assert episode.reason is StopReason.ENV_ERROR and left == ["cancelled"]


def test_a_server_that_is_not_ready_is_asked_again_and_one_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("verl_server.rollout.agents.tool_loop._RETRY_SECONDS", 0.01)
    assert play(ToolLoop(), Script(JSONResponse({}, 503), "hello")).result == "hello"
    episode = play(ToolLoop(), Script(JSONResponse({"error": "broken"}, 500)))
    assert (episode.reason, episode.reward) == (StopReason.GENERATION_ERROR, None)
    assert episode.error is not None and episode.server in episode.error and "HTTP 500" in episode.error


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ToolLoop([add, add]), "the same name"),
        (lambda: ToolLoop([len]), "has no JSON schema"),
        (lambda: ToolLoop([3]), "must be a function"),  # type: ignore[list-item]
        (lambda: ToolLoop(max_turns=0), "must be positive"),
        (lambda: ToolLoop(request={"messages": []}), "must not have 'messages'"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        make()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    small: dict[str, Any] = {"kv_cache_gib": 0.1, "cpu_threads": 1, "port": 0}
    with HttpServerEngineAdapter(model_path=str(folder), api_key="owner", **small) as engine:
        assert engine.url is not None
        yield Server(engine.url, "owner")


def test_the_ledger_has_one_exact_branch(server: Server, tmp_path: Path) -> None:
    """A random model is forced to call; the branch has each reply's sampled ids, and calls and answers alternate."""
    played: list[str] = []

    def press(button: Literal["red", "green"]) -> str:
        """Press a button."""
        played.append(button)
        return f"{button} pressed"

    loop = ToolLoop([press], max_turns=3, request={"tool_choice": "required", "max_tokens": 1500})
    result = run_agents(
        loop, [AgentTask(input="Press.")], servers=[server], reward=lambda e: 1.0, group_size=3, out=tmp_path
    )
    for episode in result.episodes:
        assert (episode.reason, episode.turns) == (StopReason.MAX_TURNS, 3), episode.error
    assert len(played) >= 9, "every turn has a call"
    assert [t.member for t in result.trajectories] == [0, 1, 2], "one branch for each episode"
    for trajectory in result.trajectories:
        spans = [turn.action_span for turn in trajectory.turns]
        assert sum(trajectory.loss_mask) == sum(end - start for start, end in spans)
        assert all(all(trajectory.loss_mask[start:end]) for start, end in spans)
        pairs = list(zip(trajectory.logprobs, trajectory.loss_mask, strict=True))
        assert all(p == 0.0 for p, m in pairs if not m)
        assert any(p < 0.0 for p, m in pairs if m), "not all: a token that the grammar forces has 0.0"
        assert all(turn.action.get("calls") for turn in trajectory.turns)


class Talk(Echo):
    """Answers each reply, three times."""

    async def reset(self, seed: int | None) -> str:
        self.left = 3
        return f"begin {seed}"

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        self.left -= 1
        return f"go on {self.left}", 1.0, self.left == 0


def test_every_token_is_the_draw_that_was_recorded(server: Server, folder: Path) -> None:
    """Three turns of free text: transformers draws the same tokens, with the same log-probabilities."""
    loop = ToolLoop([add], max_turns=3, request={"max_tokens": 24, "ignore_eos": True, "tool_choice": "none"})
    tasks = [AgentTask(seed=i) for i in range(4)]
    options: dict[str, Any] = {"environment": lambda task: Talk(), "limits": FAST, "seed": 5}
    result = run_agents(loop, tasks, servers=[server], **options)
    model = Redraw(folder)
    for episode, trajectory in zip(result.episodes, result.trajectories, strict=True):
        assert episode.reason in (StopReason.MAX_TOKENS, StopReason.DONE), episode.error
        lost, errors = model.check(trajectory)
        assert len(errors) >= 24 and float(errors.max()) < 1e-4 and float(lost.max()) < 1e-4
