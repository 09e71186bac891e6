"""`Episode`: one policy plays one episode. `AgentLoop` runs many of them, interleaved or in lock step.

An episode is `open`, then turns of `request` -> generate -> `accept` -> `act` until `trajectory.stop_reason`
is set. `play` does all of that at the episode's own pace. No method raises for a fault of the environment or
the server: the trajectory says what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout.environment import Action, EnvError, EnvTimeoutError, EnvTimeouts, StepResult, check_seconds
from verl_server.rollout.renderer import Renderer
from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory

_MAX_RESUMES = 1000
"""Aborts that one episode may live through; with `_RESUME_PAUSE` a server that only aborts ends it."""
_RESUME_PAUSE = 0.02


class Generator(Protocol):
    """The part of `EngineBase` that an episode needs."""

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        return_logprob: Any = False,
        timeout: float | None = None,
    ) -> Any: ...


class EnvClient(Protocol):
    """The part of `RemoteEnvironment` that an episode needs."""

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult: ...
    async def step(self, action: Action) -> StepResult: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Bounds of an episode. Time bounds are seconds."""

    max_turns: int = 32
    max_new_tokens: int = 256
    """Sampled tokens per turn."""
    max_tokens: int | None = None
    """Tokens per trajectory, read and sampled."""
    generate_timeout: float = 600.0
    """One turn's generation."""
    trajectory_timeout: float = 3600.0
    """The whole episode, from its start (not from its place in the queue). Ends it as TIME_LIMIT."""
    straggler_timeout: float | None = None
    """How long the last episodes of a batch may hold up the others. The time counts from the moment when every
    episode has started and at least `straggler_fraction` of them have ended. The episodes that still run after it end
    as STRAGGLER: they keep their tokens, have no reward, their generation is aborted and their connection closed.
    None waits for all. The time should be longer than an honest episode, or training sees the short ones only."""
    straggler_fraction: float = 0.9
    """Share of a batch's episodes, rounded down but at least one, that must have ended before
    `straggler_timeout` counts."""
    env: EnvTimeouts = field(default_factory=EnvTimeouts)
    """Bounds of each call to the environment."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_new_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"Limits.{name} must be at least 1, not {value}.")
        check_seconds("Limits", self, ("generate_timeout", "trajectory_timeout", "straggler_timeout"))
        if not 0 < self.straggler_fraction <= 1:
            raise BadRequestError(f"Limits.straggler_fraction must be in (0, 1], not {self.straggler_fraction}.")


class Episode:
    def __init__(
        self,
        task: Task,
        environment: EnvClient,
        renderer: Renderer,
        sampling_params: dict[str, Any],
        limits: Limits,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` is the length in tokens of the longest sequence that the server can hold."""
        self.trajectory = Trajectory(task=task)
        self._environment = environment
        self._renderer = renderer
        self._sampling_params = sampling_params
        self._limits = limits
        self._clock = clock
        own = limits.max_tokens
        self._capacity = capacity if own is None else min(own, capacity)
        self._when_full = StopReason.CONTEXT_FULL if own is None or own >= capacity else StopReason.MAX_TOKENS
        self._deadline: asyncio.Timeout | None = None

    @property
    def is_over(self) -> bool:
        return self.trajectory.stop_reason is not None

    async def play(self, generator: Generator) -> Trajectory:
        """The whole episode, within its time limit. Cancelling it ends the trajectory as aborted."""
        try:
            async with asyncio.timeout(self._limits.trajectory_timeout) as self._deadline:
                await self.open()
                while not self.is_over:
                    await self.generate(generator)
                    await self.act()
        except TimeoutError:
            limit = self._limits.trajectory_timeout
            self.trajectory.finish(StopReason.TIME_LIMIT, f"The episode took longer than {limit:.3g} s.")
        except asyncio.CancelledError:
            self.trajectory.finish(StopReason.ABORTED, "The rollout was cancelled.")
            raise
        finally:
            await self.close()
        return self.trajectory

    def cut(self, reason: StopReason, error: str) -> None:
        """End an episode that `play` plays now: whatever it waits for is cancelled."""
        if self.is_over or self._deadline is None or self._deadline.expired():
            return  # it closes its connection already
        self.trajectory.finish(reason, error)
        self._deadline.reschedule(0)

    # -- the environment's side -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Reset the environment; the trajectory begins with its first observation."""
        task = self.trajectory.task
        options = {} if task.episode_id is None else {"episode_id": task.episode_id}
        with self._recorded("env"), self._env_faults():
            result = await self._environment.reset(task.seed, **options)
            if result.done:
                raise EnvError("The environment was done before the first turn.")
            self._observe(result)

    async def act(self) -> None:
        """Give the turn's action to the environment, and take what follows."""
        if self.is_over:
            return
        trajectory = self.trajectory
        turn = trajectory.turns[-1]
        turn.action = self._renderer.action(trajectory.action_tokens())
        with self._recorded("env"), self._env_faults():
            result = await self._environment.step(turn.action)
            turn.reward = result.reward
            if result.done or len(trajectory.turns) >= self._limits.max_turns:
                trajectory.final_observation = result.observation
                trajectory.finish(StopReason.DONE if result.done else StopReason.MAX_TURNS)
            else:
                self._observe(result)

    async def close(self) -> None:
        await self._environment.close()

    def _observe(self, result: StepResult) -> None:
        last = self.trajectory.tokens[-1] if self.trajectory.tokens else None
        try:
            tokens = self._renderer.observation_tokens(result.observation, last)
        except VerlServerError as error:
            raise EnvError(str(error)) from error
        if len(self.trajectory.tokens) + len(tokens) >= self._capacity:
            self.trajectory.final_observation = result.observation
            self.trajectory.finish(self._when_full)
        else:
            self.trajectory.append_observation(result.observation, tokens)

    # -- the policy's side ----------------------------------------------------------------------------------

    async def generate(self, generator: Generator) -> None:
        """Sample the turn's action. A generation that was aborted (a weight update) is resumed from its tokens."""
        while not self.is_over:
            with self._recorded("generate"):
                try:
                    result = await generator.async_generate(
                        **self.request(), return_logprob=True, timeout=self._limits.generate_timeout
                    )
                except VerlServerError as error:
                    self.fail(error)
                    return
            if self.accept(result):
                return
            await asyncio.sleep(_RESUME_PAUSE)

    def request(self) -> dict[str, Any]:
        """`input_ids` and `sampling_params` of the next generation: all tokens so far, verbatim."""
        trajectory = self.trajectory
        left_in_turn = self._limits.max_new_tokens - len(trajectory.action_tokens())
        left = self._capacity - len(trajectory.tokens)
        sampling = self._sampling_params | {"max_new_tokens": min(left_in_turn, left)}
        if trajectory.task.sampling_seed is not None:
            sampling["sampling_seed"] = trajectory.task.sampling_seed
        return {"input_ids": list(trajectory.tokens), "sampling_params": sampling}

    def accept(self, result: dict[str, Any]) -> bool:
        """Append what was sampled. False: the generation was aborted in the middle and must be resumed."""
        trajectory = self.trajectory
        try:
            tokens, logprobs, versions, finish = _output(result)
            trajectory.append_output(tokens, logprobs, versions)
        except (KeyError, TypeError, ValueError) as error:
            self.fail(VerlServerError(f"The server's answer cannot be used: {error!r}"))
            return True
        trajectory.turns[-1].finish_reason = finish
        in_turn = len(trajectory.action_tokens())
        if finish == "abort" and in_turn < self._limits.max_new_tokens:
            trajectory.resumes += 1
            if trajectory.resumes > _MAX_RESUMES:
                trajectory.finish(StopReason.ABORTED, f"The server aborted the episode {_MAX_RESUMES} times.")
                return True
            if len(trajectory.tokens) < self._capacity:
                return False
            trajectory.finish(self._when_full)  # aborted at the very token that filled it
        if finish == "length" and in_turn < self._limits.max_new_tokens:
            trajectory.finish(self._when_full)  # cut short by the trajectory's limit, not by the turn's
        return True

    def fail(self, error: Exception) -> None:
        """The generation failed for a reason that is not the policy's."""
        self.trajectory.finish(StopReason.GENERATION_ERROR, f"{type(error).__name__}: {error}")

    # -- bookkeeping ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _recorded(self, kind: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.trajectory.events.append(Event(kind, start, self._clock()))

    @contextlib.contextmanager
    def _env_faults(self) -> Iterator[None]:
        try:
            yield
        except EnvTimeoutError as error:
            self.trajectory.finish(StopReason.ENV_TIMEOUT, str(error))
        except EnvError as error:
            self.trajectory.finish(StopReason.ENV_ERROR, str(error))


def _output(result: dict[str, Any]) -> tuple[list[int], list[float], list[str], str]:
    """Token ids, log-probabilities, weight versions and the finish type of one generation."""
    meta = result["meta_info"]
    tokens: list[int] = result["output_ids"]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    versions = [str(meta.get("weight_version", ""))] * len(tokens)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return tokens, logprobs, versions, meta["finish_reason"]["type"]
