"""`Episode`: one policy plays one episode. `AgentLoop` runs many episodes, interleaved or in lock step.

An episode begins with `open`. Turns of `request`, generation, `accept` and `act` follow until `trajectory.stop_reason`
is set. `play` does all of this at the episode's own pace. A fault of the environment or of the server raises nothing:
it ends the trajectory, which keeps the reason and the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_server.errors import BadRequestError, ContextLengthError, ControlTimeoutError, VerlServerError
from verl_server.rollout.action_replay import replay_actions
from verl_server.rollout.environment import Action, EnvError, EnvTimeouts, StepResult, check_seconds
from verl_server.rollout.environment_ends import end_of, is_away
from verl_server.rollout.recorded_turns import RecordedTurn, restore
from verl_server.rollout.renderer import ActionError, Renderer
from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
from verl_server.sampling_params import EDITS, FILTERS, GRAMMARS

_MAX_RESUMES = 1000
"""The most aborted generations that one episode resumes. It bounds an episode whose server aborts every generation."""
_RESUME_PAUSE = 0.02
"""Seconds between an aborted generation and the next attempt."""


class Generator(Protocol):
    """The part of `EngineBase` that an episode needs."""

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        return_logprob: Any = False,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any: ...


class EnvClient(Protocol):
    """The part of `RemoteEnvironment` that an episode needs."""

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult: ...
    async def step(self, action: Action) -> StepResult: ...
    async def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Bounds of an episode, and of the batch that it belongs to. Times are in seconds."""

    max_turns: int = 32
    """Most turns. The episode ends as MAX_TURNS."""
    max_new_tokens: int = 256
    """Most sampled tokens in one turn. The turn's action is then played as it is; without an end of the reasoning there
    is none."""
    max_tokens: int | None = None
    """Most tokens in the trajectory, observations included. The episode ends as MAX_TOKENS."""
    generate_timeout: float = 600.0
    """Time for the generation of one turn. The episode ends as GENERATION_TIMEOUT."""
    trajectory_timeout: float = 3600.0
    """Time for the whole episode, without its wait for a place. The episode ends as TIME_LIMIT."""
    restart_timeout: float = 300.0
    """Time for a server that went away, or was started again, to come back and be healed by the engine that pushes
    (`heal` or `accept_restart`). Generations wait meanwhile. The episode then ends as GENERATION_ERROR."""
    straggler_timeout: float | None = None
    """Time for which the last episodes of a batch may delay the others. It counts from the moment when every episode
    has started and at least `straggler_fraction` of them have ended. The episodes that still run then end as STRAGGLER:
    they keep their tokens and have no reward, their generation is aborted and their connection is closed. None waits
    for every episode. If the time is shorter than honest episodes, training sees the short ones only."""
    straggler_fraction: float = 0.9
    """Share of the batch's episodes (rounded down, at least one) that must have ended before `straggler_timeout`
    counts."""
    env: EnvTimeouts = field(default_factory=EnvTimeouts)
    """Times for calls to the environment."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_new_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"Limits.{name} must be at least 1, not {value}.")
        check_seconds(
            "Limits", self, ("generate_timeout", "trajectory_timeout", "restart_timeout", "straggler_timeout")
        )
        if not 0 < self.straggler_fraction <= 1:
            raise BadRequestError(f"Limits.straggler_fraction must be in (0, 1], not {self.straggler_fraction}.")


class Episode:
    """One episode in progress. `trajectory` is what it has recorded so far."""

    def __init__(
        self,
        task: Task,
        environment: EnvClient,
        renderer: Renderer,
        sampling_params: dict[str, Any],
        limits: Limits,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """`capacity` is the length of the longest sequence that the server can hold, in tokens.

        `play` calls `on_turn` when the environment has answered a turn, and the episode goes on.
        """
        self.trajectory = Trajectory(task=task, member=task.member)
        self.session_id = secrets.token_hex(16)
        """Random name of this attempt at the task. Each generation has it: the server knows the turns of an episode."""
        self.environment_away = False
        """True if the episode ended because its environment could not be reached."""
        self._environment = environment
        self._renderer = renderer
        self._sampling_params = sampling_params
        self._limits = limits
        self._clock = clock
        self._on_turn = on_turn
        own = limits.max_tokens
        self._capacity = capacity if own is None else min(own, capacity)
        self._when_full = StopReason.CONTEXT_FULL if own is None or own >= capacity else StopReason.MAX_TOKENS
        self._deadline: asyncio.Timeout | None = None
        self._replayed_seconds = 0.0

    @property
    def is_over(self) -> bool:
        """True if the trajectory has a stop reason."""
        return self.trajectory.stop_reason is not None

    async def play(self, generator: Generator) -> Trajectory:
        """Play the episode to its end. If it is cancelled, the trajectory ends as ABORTED.

        The bound is `trajectory_timeout`, with a `replay` before it.
        """
        try:
            async with asyncio.timeout(self._limits.trajectory_timeout - self._replayed_seconds) as self._deadline:
                if not (self.is_over or self.trajectory.turns):
                    await self.open()
                while not self.is_over:
                    await self.generate(generator)
                    await self.act()
                    if not self.is_over:
                        self._on_turn(self.trajectory)
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
        """End an episode that `play` or `replay` is playing, and cancel what it waits for."""
        if self.is_over or (self._deadline is not None and self._deadline.expired()):
            return  # the episode is closing its connection
        self.trajectory.finish(reason, error)
        if self._deadline is not None:
            self._deadline.reschedule(0)

    async def replay(self, recorded: Sequence[RecordedTurn]) -> str | None:
        """Play recorded actions again in the environment. Return None if `play` can go on behind them.

        Otherwise, return the reason, what differs first, say. The environment is then closed, and only another episode
        can begin again. The bound is `trajectory_timeout`.
        """
        options, began = self._reset_options(), self._clock()

        async def reset() -> StepResult:
            with self._recorded("env"):
                return await self._environment.reset(self.trajectory.task.seed, **options)

        async def step(action: Action) -> StepResult:
            with self._recorded("generate"):
                pass  # readers count generations, and this one took no time
            with self._recorded("env"):
                return await self._environment.step(action)

        reason: str | None = "it was cancelled"
        try:
            async with asyncio.timeout(self._limits.trajectory_timeout) as self._deadline:
                reason = await replay_actions(recorded, reset, step) or self._restored(recorded)
        except TimeoutError:
            reason = f"the replay took longer than {self._limits.trajectory_timeout:.3g} s"
        finally:
            self._deadline = None
            if reason is not None:
                await self.close()
        self._replayed_seconds = self._clock() - began
        return reason

    def _restored(self, recorded: Sequence[RecordedTurn]) -> str | None:
        """Go on behind recorded turns, and return None. Return the reason if they do not fit in this episode."""
        length = sum(len(turn.observation_tokens) + len(turn.action_tokens) for turn in recorded)
        if length >= self._capacity or len(recorded) >= self._limits.max_turns:
            return f"its {length} tokens and {len(recorded)} turns exceed the limits of this start"
        answer = restore(self.trajectory, recorded)
        self.trajectory.kept_turns = len(recorded)
        with self._env_faults():
            self._observe(StepResult(answer, None, False))
        return None

    # -- the environment's side -----------------------------------------------------------------------------

    async def open(self) -> None:
        """Reset the environment. Its first observation begins the trajectory."""
        with self._recorded("env"), self._env_faults():
            result = await self._environment.reset(self.trajectory.task.seed, **self._reset_options())
            if result.done:
                raise EnvError("The environment was done before the first turn.")
            self._observe(result)

    def _reset_options(self) -> dict[str, Any]:
        name = self.trajectory.task.episode_id
        return {} if name is None else {"episode_id": name}

    async def act(self) -> None:
        """Send the turn's action to the environment, and record the reward and the next observation.

        If the sampled tokens stand for no action (wrong JSON, or a reasoning without an end), the environment is not
        called. The observation then says why, and the turn counts, without a reward.
        """
        if self.is_over:
            return
        trajectory = self.trajectory
        turn = trajectory.turns[-1]
        with self._recorded("env"), self._env_faults():
            try:
                prompt_ids = trajectory.tokens[: turn.action_span[0]]
                turn.action = self._renderer.action(trajectory.action_tokens(), prompt_ids)
                result = await self._environment.step(turn.action)
            except ActionError as error:
                result = StepResult(error.observation, None, False)
            turn.reward = result.reward
            if result.done or len(trajectory.turns) >= self._limits.max_turns:
                trajectory.final_observation = result.observation
                trajectory.finish(StopReason.DONE if result.done else StopReason.MAX_TURNS)
            else:
                self._observe(result)

    async def close(self) -> None:
        """Close the connection to the environment."""
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
        """Sample the turn's action. A generation that the server aborted is resumed after its last token."""
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
        """Return `input_ids` (all tokens so far), `sampling_params` and `session_id` of the next generation."""
        trajectory = self.trajectory
        left_in_turn = self._limits.max_new_tokens - len(trajectory.action_tokens())
        left = self._capacity - len(trajectory.tokens)
        sampling = self._sampling_params | {"max_new_tokens": min(left_in_turn, left)}
        if trajectory.task.sampling_seed is not None:
            sampling["sampling_seed"] = trajectory.task.sampling_seed
        return {"input_ids": list(trajectory.tokens), "sampling_params": sampling, "session_id": self.session_id}

    def accept(self, result: dict[str, Any]) -> bool:
        """Append what was sampled. Return False if the generation was aborted before its end and must be resumed."""
        trajectory = self.trajectory
        try:
            tokens, logprobs, versions, finish = _output(result)
            trajectory.append_output(tokens, logprobs, versions, **self._policy(result["meta_info"]))
        except (KeyError, TypeError, ValueError) as error:
            self.fail(VerlServerError(f"The server's answer cannot be used: {error!r}"))
            return True
        turn = trajectory.turns[-1]
        turn.finish_reason, turn.sampling = finish, self._shape()
        in_turn = len(trajectory.action_tokens())
        if finish == "abort" and in_turn < self._limits.max_new_tokens:
            trajectory.resumes += 1
            if trajectory.resumes > _MAX_RESUMES:
                trajectory.finish(StopReason.ABORTED, f"The server aborted the episode {_MAX_RESUMES} times.")
                return True
            if len(trajectory.tokens) < self._capacity:
                return False
            trajectory.finish(self._when_full)  # the token before the abort filled the trajectory
        if finish == "length" and in_turn < self._limits.max_new_tokens:
            trajectory.finish(self._when_full)  # the trajectory's limit ended the generation, not the turn's
        return True

    def _shape(self) -> dict[str, Any]:
        """Return the parameters of the caller that shape the distribution: `Turn.sampling`."""
        given = self._sampling_params
        named = {name: given[name] for name in (*FILTERS, *EDITS, *GRAMMARS) if given.get(name) is not None}
        temperature = given.get("temperature")
        return {"temperature": 1.0 if temperature is None else temperature} | named

    def _policy(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return a server's report about the policy's distribution, as arguments of `append_output`.

        Servers of other projects report nothing. Their log-probabilities count as the policy's if no requested
        parameter edits or filters the distribution.
        """
        known = meta.get("policy_logprobs")
        if known is None:
            return {"known": "same" if self._shape().keys() == {"temperature"} else "unknown"}
        return {
            "known": known,
            "policy_logprobs": meta.get("output_token_policy_logprobs"),
            "has_choice": meta.get("output_token_has_choice"),
        }

    def fail(self, error: Exception) -> None:
        """End the trajectory because of an error in the generation.

        A server that refuses the length of the tokens ends it as a full context.
        """
        if isinstance(error, ContextLengthError):
            self.trajectory.finish(StopReason.CONTEXT_FULL, str(error))
            return
        is_late = isinstance(error, ControlTimeoutError)
        reason = StopReason.GENERATION_TIMEOUT if is_late else StopReason.GENERATION_ERROR
        self.trajectory.finish(reason, f"{type(error).__name__}: {error}")

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
        except EnvError as error:
            self.environment_away = is_away(error)
            self.trajectory.finish(end_of(error), str(error))


def _output(result: dict[str, Any]) -> tuple[list[int], list[float], list[str], str]:
    """Return (token ids, their log-probabilities, their weight versions, finish type) of one generation."""
    meta = result["meta_info"]
    tokens: list[int] = result["output_ids"]
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
    versions = [str(meta.get("weight_version", ""))] * len(tokens)
    for span in meta.get("weight_versions") or ():
        versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return tokens, logprobs, versions, meta["finish_reason"]["type"]
