"""The player of a run's episodes: the built-in loop (`AgentLoop`), or the user's agent (`AgentGroups`).

`grpo` opens a player on each rank, the rollout process of `async_grpo` opens one for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.files.model_folder import load_tokenizer
from verl_server.rollout.agent_loop import AgentLoop, OnGroup, Rollout
from verl_server.rollout.loop_thread import Running
from verl_server.rollout.renderer import ChatRenderer, Renderer, TextRenderer
from verl_server.rollout.trajectory import Task, Trajectory
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.options import TrainArgs


class Player(Protocol):
    """The player of a step's episodes: an `AgentLoop`, or `AgentGroups`."""

    @property
    def environment_url(self) -> str:
        """URL or name of the environment, for reports of failures."""

    @property
    def is_agent(self) -> bool:
        """True if an agent of the user plays. Such an agent may call another server than its session's."""

    def start(
        self,
        tasks: Sequence[Task],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        version: str | None = None,
        replaces: bool = True,
        on_group: OnGroup | None = None,
    ) -> Running[Rollout]:
        """Play all tasks in another thread, in which `on_finish` is called with each trajectory that has ended.

        `on_group` is called there with the episodes of each group when all of them have ended.

        Episodes play on servers whose weights have `version`, and wait while there is none. An episode that fails
        raises nothing: its trajectory has no reward. Without `replaces`, no other episode takes its place.
        """

    def stranded(self, version: str | None = None) -> str | None:
        """Return why no server can play the episodes until the trainer brings one back, or None if one can."""


def prepare(args: TrainArgs) -> AgentGroups | Renderer:
    """Load the agent with its tasks, or the renderer of the built-in loop. Raise BadRequestError if one is wrong.

    It needs no server, so that wrong options end a run before anything starts.
    """
    if args.agent is not None:
        return AgentGroups(args)
    make = ChatRenderer if args.chat else TextRenderer
    tokenizer = load_tokenizer(args.model_path, "--model-path")
    return make(tokenizer, observation_key=args.observation_key, action_key=args.action_key)


@contextlib.contextmanager
def open_player(
    args: TrainArgs, urls: Sequence[str], keys: Sequence[str | None], prepared: AgentGroups | Renderer | None = None
) -> Iterator[AgentLoop | AgentGroups]:
    """Yield the player, attached to the servers `urls`, whose API keys are `keys` (owners' keys for an agent)."""
    prepared = prepared or prepare(args)
    with contextlib.ExitStack() as stack:
        attach = HttpServerEngineAdapter.attach
        clients = [stack.enter_context(attach(url, key)) for url, key in zip(urls, keys, strict=True)]
        if isinstance(prepared, AgentGroups):
            stack.enter_context(prepared.serving(clients))
            yield prepared
            return
        assert args.env_url is not None
        yield stack.enter_context(
            AgentLoop(
                clients,
                args.env_url,
                prepared,
                sampling_params={"temperature": args.grpo.temperature},
                limits=args.limits,
                max_concurrency=args.max_concurrency,
                faults=args.faults,
                replacements=args.replacements,
            )
        )
