"""`VerifiersAgent`: the rollout code of an environment of `verifiers` plays an episode through its session.

`--tasks verifiers:NAME` makes one, for `run_agents` and for trainers. An episode is one `run_episode` of verifiers,
whose requests reach the session through verifiers' own interception server. It runs in a thread of this process, whose
event loop all environments share, so that code that blocks does not delay other parts of the runner. Rewards and
metrics are those that verifiers computed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadRequestError, ContextLengthError
from verl_server.rollout.agents.ends import End
from verl_server.rollout.agents.types import AgentSession, AgentTask, Scored
from verl_server.rollout.environment import EnvError
from verl_server.rollout.environments.verifiers import VerifiersEnvironment, parse_name
from verl_server.rollout.loop_thread import LoopThread
from verl_server.rollout.trajectory import StopReason

_MODEL = "policy"
_NO_KEY = "VERL_SERVER_NO_KEY"
"""Name of a variable that does not exist: the base URL of a session contains its key."""
_END_SECONDS = 30.0
"""Most seconds for the end of what an environment serves. What does not end by then ends with the process."""
_STOPS = {
    "max_turns": StopReason.MAX_TURNS,
    "max_input_tokens": StopReason.CONTEXT_FULL,
    "max_output_tokens": StopReason.MAX_TOKENS,
    "max_total_tokens": StopReason.CONTEXT_FULL,
    "agent_timeout": StopReason.TIME_LIMIT,
    "setup_timeout": StopReason.ENV_TIMEOUT,
    "finalize_timeout": StopReason.ENV_TIMEOUT,
    "scoring_timeout": StopReason.ENV_TIMEOUT,
}
"""`Trace.stop_condition` of verifiers -> reason. Other conditions are regular ends."""


class VerifiersAgent:
    """An `AgentFunction` that plays tasks of `verifiers:NAME`, and scores them: `run_agents(reward="agent")`."""

    def __init__(self, text: str, *, max_turns: int | None = None, needs_held_out: bool = False) -> None:
        """Load the environment that `text` names. Raise BadRequestError if that is not possible.

        With `needs_held_out`, also if the name has no settings for held-out tasks. `max_turns` bounds the policy's
        turns, if the settings have no lower bound: verifiers scores an episode that its own bound ended.
        """
        name = parse_name(text)
        if needs_held_out and name.held_out is None:
            raise BadRequestError(
                f"--eval-every needs tasks that no step trains on: name them with `eval` in the settings, such as "
                f'verifiers:{name.name}?{{"eval": {{"taskset": {{"split": "test"}}}}}}.'
            )
        self._text = text
        splits = {"train": name.settings}
        if name.held_out is not None:
            splits["eval"] = _merged(name.settings, name.held_out)
        self._hosts = {
            split: _Host(VerifiersEnvironment(name.name, block, max_turns)) for split, block in splits.items()
        }

    def __repr__(self) -> str:
        """Return the name with its settings, because a resumed run must have the same ones."""
        return f"VerifiersAgent({self._text!r})"

    def task(self, row: int, *, held_out: bool = False) -> AgentTask:
        """Return the task of a row, which repeats if the environment has fewer."""
        split = "eval" if held_out else "train"
        task = self._hosts[split].environment.task(row)
        return AgentTask(seed=row, input=task.data.prompt_text, environment={"split": split, "key": task.key})

    def tasks(self, first: int, count: int) -> list[AgentTask]:
        """Return the tasks of `count` rows from `first` on."""
        return [self.task(row) for row in range(first, first + count)]

    async def __call__(self, session: AgentSession, task: AgentTask) -> Scored:
        """Play one episode. Raise End with the reason, and with what verifiers scored, if it did not end regularly."""
        end = await self._hosts[task.environment["split"]].play(task.seed, session.base_url)
        if end.reason is not StopReason.DONE:
            raise end
        scored: Scored = end.result
        return scored

    def close(self) -> None:
        """End the servers of tools and the interception of the environments. A later episode starts them again."""
        for host in self._hosts.values():
            host.close()


_thread = LoopThread("verifiers")
"""The event loop of all environments of this process, which never ends: verifiers keeps locks for the process."""


class _Host:
    """An environment on the event loop of `_thread`, with the resources that its episodes share."""

    def __init__(self, environment: VerifiersEnvironment) -> None:
        self.environment = environment
        self._serving: asyncio.Task[None] | None = None
        self._up: asyncio.Future[None] | None = None

    async def play(self, row: int, base_url: str) -> End:
        """Play the task of a row through a session. Call it on any event loop."""
        return await _thread.start(self._episode(row, base_url)).joined()

    def close(self) -> None:
        """End the resources, within a bound."""
        if self._serving is not None:
            _thread.start(self._end_serving(self._serving)).wait(_END_SECONDS)
            self._serving = None

    async def _episode(self, row: int, base_url: str) -> End:
        try:
            await self._served()
        except Exception as error:
            return End(StopReason.ENV_ERROR, f"The environment's shared resources: {type(error).__name__}: {error}")
        try:
            api = self.environment.api
            client = api.EvalClientConfig(base_url=base_url, api_key_var=_NO_KEY)
            context = api.ModelContext(model=_MODEL, client=client)
            episode = await self.environment.env.run_episode(self.environment.task(row), context)
            return end_of(episode, self.environment.role)
        except Exception as error:
            return End(StopReason.ENV_ERROR, f"verifiers: {type(error).__name__}: {error}"[:2000])

    async def _served(self) -> None:
        """Wait until the resources that episodes share (servers of tools, the interception) are up. Start them once."""
        if self._serving is None or self._serving.done():
            self._up = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._up))
        assert self._up is not None
        await asyncio.shield(self._up)

    async def _end_serving(self, serving: asyncio.Task[None]) -> None:
        serving.cancel()
        await asyncio.wait([serving])

    async def _serve(self, up: asyncio.Future[None]) -> None:
        """Hold the resources until `close` cancels this task."""
        try:
            async with self.environment.env.serving():
                up.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not up.done():
                up.set_exception(error)
        finally:
            if not up.done():  # closed before the resources were up
                up.set_exception(EnvError("the environment was closed"))


def end_of(episode: Any, role: str) -> End:
    """Return the end of a `verifiers.v1.Episode`, whose policy played `role`, with a `Scored` if it was scored.

    Failures of the environment, its sandbox and its tools are the infrastructure's. A prompt that is longer than the
    context, and limits of verifiers, are the policy's. Scores of an episode that reached a limit count.
    """
    for trace in episode.traces:
        if not trace.ok:
            return _failure(trace.errors[-1], is_policys=trace.agent.name == role)
    if episode.errors:
        return _failure(episode.errors[-1], is_timeout=episode.is_timeout)
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if len(traces) != 1 or not traces[0].agent.trainable:
        text = f"The environment played {role!r} {len(traces)} times in one episode, or as a role that is not trained."
        return End(StopReason.ENV_ERROR, f"{text} An episode has one reward, for one trained role.")
    trace = traces[0]
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    reason = _STOPS.get(trace.stop_condition or "", StopReason.DONE)
    if reason is StopReason.ENV_TIMEOUT or unscored:
        text = f"{trace.stop_condition} of verifiers" + (f", before {', '.join(unscored)}" if unscored else "")
        return End(StopReason.ENV_TIMEOUT if trace.is_timeout else StopReason.ENV_ERROR, text)
    if trace.calls and trace.calls[-1].error is not None:  # the harness ended in order after a refused request
        end = _failure(trace.calls[-1].error)
        if end.reason is not StopReason.CONTEXT_FULL:
            return end
        reason = end.reason
    error = None if reason is StopReason.DONE else f"verifiers: {trace.stop_condition}"
    return End(reason, error, result=scored(trace))


def _failure(error: Any, *, is_policys: bool = True, is_timeout: bool = False) -> End:
    """Return the end for an `Error` of verifiers. `is_policys`: in the trace of the role that the policy plays."""
    text = f"verifiers: {error.type}: {error.message}"[:2000]
    if error.type == "ProviderError" and is_policys:
        is_overflow = ContextLengthError.code in error.message
        return End(StopReason.CONTEXT_FULL if is_overflow else StopReason.GENERATION_ERROR, text)
    return End(StopReason.ENV_TIMEOUT if is_timeout else StopReason.ENV_ERROR, text)


def scored(trace: Any) -> Scored:
    """Return the reward of a trace, and its metrics with the scores of its reward functions, before their weights."""
    named = {name: reward.score for name, reward in trace.rewards.items()} | dict(trace.metrics)
    metrics = {name: value for name, value in named.items() if value is not None and math.isfinite(value)}
    return Scored(reward=trace.reward, metrics=metrics)


def close_agent(agent: object) -> None:
    """End what a `VerifiersAgent` started. Other agents start nothing that outlives their episodes."""
    if isinstance(agent, VerifiersAgent):
        agent.close()


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`. Objects in both are merged."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
