"""A server and rollouts in the test's process, for `AsyncGRPO` and `GRPO`.

The logits of the engine do not depend on the batch, so that two runs which make the same pushes sample the same tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.fake_engine import FakeEngine
from verl_server.errors import VerlServerError
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.loop_thread import LoopThread
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.journal import GroupJournal
from verl_server.train.policy import load_policy
from verl_server.train.rollouts.group_messages import (
    CancelGroup,
    EpisodeEnded,
    EpisodeWentOn,
    FromPlayer,
    GroupBegan,
    GroupEnded,
    NowServed,
    PlayGroup,
)
from verl_server.train.rollouts.group_player import GroupPlayer, GroupsOf


class PolicyEngine(FakeEngine):
    """Samples from a copy of the pushed weights, one sequence at a time. A draw depends on seed and position only."""

    url = "http://fake"

    def __init__(self, model: str) -> None:
        super().__init__()
        self.server_args: Any = SimpleNamespace(reasoning_parser=None, model_path=model)
        self.scheduler_info: Any = {"context_length": 64}
        self.version = "none"
        self._policy = load_policy(model, torch.device("cpu"), compute_dtype=torch.float32).requires_grad_(False)
        self._lock = threading.Lock()

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        with self._lock, torch.no_grad():
            own = dict(self._policy.named_weights())
            for name, weight in weights:
                own[name].copy_(weight)
            self.version = version

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Any:
        prompts = body["input_ids"]
        is_batch = isinstance(prompts[0], list)
        answers = [self._answer(prompt, body["sampling_params"]) for prompt in (prompts if is_batch else [prompts])]
        return answers if is_batch else answers[0]

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Any:
        return self._generate(body, timeout)

    async def async_close_session(self, session_id: str) -> None:
        pass

    def _answer(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        tokens, logprobs = list(prompt), list[list[Any]]()
        with self._lock, torch.no_grad():
            for _ in range(sampling["max_new_tokens"]):
                row = self._logprobs(tokens)[-1]
                draw = torch.Generator().manual_seed(sampling.get("sampling_seed", 0) * 1_000 + len(tokens))
                token = int(torch.multinomial(row.exp(), 1, generator=draw))
                logprobs.append([float(row[token]), token, None])
                tokens.append(token)
            known = self._logprobs(prompt)
            given = [[None, prompt[0], None]]
            given += [[float(known[place, token]), token, None] for place, token in enumerate(prompt[1:])]
            meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": logprobs}
            meta |= {"input_token_logprobs": given, "weight_version": self.version}
        return {"output_ids": tokens[len(prompt) :], "meta_info": meta}

    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        model: Any = self._policy.language_model
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


class OneServer:
    """Stands for `RolloutServers`, with one `PolicyEngine`."""

    urls = ("http://fake",)

    def __init__(self, engine: PolicyEngine) -> None:
        self.engine = engine
        self.adapters = [engine]
        self.pushed: list[str] = []

    def push(self, weights: Callable[[], Any], version: str) -> None:
        self.engine.push(weights(), version)
        self.pushed.append(version)

    def ensure(self, _: Any) -> None:
        pass

    def are_lost(self) -> bool:
        return False

    def counters(self) -> dict[str, Any]:
        return {}


class PlayedGroups:
    """`Rollouts` whose groups a `GroupPlayer` plays in a thread of this process."""

    environment_url = "http://nowhere"
    is_agent = False

    def __init__(self, player: GroupsOf, journal: GroupJournal | None = None) -> None:
        """`journal` takes the groups and turns, as in a `RolloutProcess`."""
        self._journal = journal
        self._begun: dict[int, GroupBegan] = {}
        self.started: list[PlayGroup] = []
        self.lines: list[bytes] = []
        self._news: queue.SimpleQueue[GroupBegan | GroupEnded] = queue.SimpleQueue()
        self._thread = LoopThread("groups")
        records = journal is not None and journal.records_turns
        self._groups = GroupPlayer(player, self._receive, "5f2c9a1e", records_turns=records)

    def serve(self, served: NowServed) -> None:
        self._handle(served)

    def play(self, group: PlayGroup) -> None:
        self.started.append(group)
        self._handle(group)

    def cancel(self, group: int) -> None:
        self._handle(CancelGroup(group=group))

    def news(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        found: list[GroupBegan | GroupEnded] = []
        try:
            while True:
                found.append(self._news.get(timeout=0 if found else timeout))
        except queue.Empty:
            return found

    def close(self) -> None:
        self._thread.start(self._groups.close()).wait(10)
        self._thread.close()

    def _handle(self, message: NowServed | PlayGroup | CancelGroup) -> None:
        async def handle() -> None:
            self._groups.handle(message)

        running = self._thread.start(handle())
        assert running.wait(10)
        running.result()

    def _receive(self, message: FromPlayer) -> None:
        if isinstance(message, EpisodeEnded):
            self.lines.append(message.line)
        elif isinstance(message, EpisodeWentOn) and self._journal is not None:
            begun = self._begun[message.group]
            self._journal.progress(message.group, begun.version, begun.step, message.progress)
        elif isinstance(message, GroupBegan | GroupEnded):
            self._news.put(message)
        if isinstance(message, GroupBegan):
            self._begun[message.group] = message
        if isinstance(message, GroupEnded) and self._journal is not None and message.rollout is not None:
            begun = self._begun[message.group]
            self._journal.put(message.group, begun.version, begun.step, message.rollout)


class Unscored:
    """An adapter that does not score."""

    url = "http://fake"

    def generate(self, **_: Any) -> Any:
        raise VerlServerError("It does not answer.")


class Pushes:
    """Stands for `RolloutServers`, and only notes what is pushed."""

    urls = ("http://nowhere",)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pushed: list[str] = []
        self.adapters: list[Any] = [Unscored()]
        self.ensured = 0

    def push(self, _: Any, version: str) -> None:
        self.pushed.append(version)

    def ensure(self, _: Any) -> None:
        self.ensured += 1
        assert self.ensured < 1000, "the step waits forever"

    def are_lost(self) -> bool:
        return False

    def counters(self) -> dict[str, Any]:
        return {}


class ScriptedGroups:
    """`Rollouts` that no environment plays: a call of `news` ends the groups that `choose` returns."""

    environment_url = "http://nowhere"
    is_agent = False

    def __init__(self, choose: Callable[[list[int]], Sequence[int]] = lambda playing: playing) -> None:
        """`choose` takes the numbers of the groups that play, in the order of their starts."""
        self.choose = choose
        self.served: Callable[[], str] = lambda: ""
        """Returns the label of the weights that sample the last token of a group that ends."""
        self.rewards: Callable[[int, int], float | None] = lambda group, member: float(member % 2)
        self.playing: dict[int, tuple[PlayGroup, str]] = {}
        """Groups that play, each with the label of the weights when it began."""
        self.finished: Callable[[int, str, int, Rollout], None] = lambda *_: None
        """Takes a group that has ended, as the `on_group` of a `RolloutProcess`."""
        self._begun: list[GroupBegan | GroupEnded] = []
        self._steps: dict[int, int] = {}
        self._now = NowServed(version="", step=0)
        self.starts: list[int] = []
        self.cancelled: list[int] = []

    def serve(self, served: NowServed) -> None:
        self._now = served

    def play(self, group: PlayGroup) -> None:
        assert group.group not in self.playing and self._now.version == self.served()
        self.starts.append(group.group)
        self.playing[group.group] = (group, self._now.version)
        self._steps[group.group] = self._now.step
        self._begun.append(GroupBegan(group=group.group, version=self._now.version, step=self._now.step))

    def cancel(self, group: int) -> None:
        self.cancelled.append(group)
        self.playing.pop(group, None)

    def news(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        begun, self._begun = self._begun, []
        return begun + [self._end(number) for number in list(self.choose(list(self.playing)))]

    def _end(self, number: int) -> GroupEnded:
        group, began = self.playing.pop(number)
        rollout = Rollout(trajectories=[self._trajectory(task, began, number) for task in group.tasks], seconds=0.1)
        self.finished(number, began, self._steps[number], rollout)
        return GroupEnded(group=number, rollout=rollout)

    def _trajectory(self, task: Task, began: str, group: int) -> Trajectory:
        trajectory = Trajectory(task=task, member=task.member)
        seed = task.sampling_seed or 0
        length = 2 + seed % 3
        trajectory.append_observation({}, [1, 2])
        labels = [began] * (length - 1) + [self.served()]
        trajectory.append_output([3 + (seed * 7 + i) % 30 for i in range(length)], [-3.0] * length, labels)
        trajectory.turns[0].reward = reward = self.rewards(group, task.member)
        if reward is None:
            trajectory.finish(StopReason.ENV_ERROR, "the sandbox is down")
        else:
            trajectory.finish(StopReason.DONE)
        return trajectory
