"""The player of a run's episodes: the built-in loop (`AgentLoop`), or the user's agent (`AgentGroups`).

`grpo` opens a player on each rank, the rollout process of `async_grpo` opens one for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.files.model_folder import load_tokenizer
from verl_server.rollout.agent_loop import AgentLoop, OnGroup, Rollout
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.environment_setup import EnvironmentSetup
from verl_server.rollout.environments.named import is_url
from verl_server.rollout.loop_thread import Running
from verl_server.rollout.recorded_turns import Recording
from verl_server.rollout.renderer import ChatRenderer, TextRenderer
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
        recording: Recording | None = None,
    ) -> Running[Rollout]:
        """Play all tasks in another thread, in which `on_finish` is called with each trajectory that has ended.

        `on_group` is called there with the episodes of each group when all of them have ended. `recording` takes the
        turns of episodes that go on, and has those of an earlier start. An agent has none.

        Episodes play on servers whose weights have `version`, and wait while there is none. An episode that fails
        raises nothing: its trajectory has no reward. Without `replaces`, no other episode takes its place.
        """

    def stranded(self, version: str | None = None) -> str | None:
        """Return why no server can play the episodes until the trainer brings one back, or None if one can."""


Prepared = AgentGroups | Mapping[str | None, EnvironmentSetup]
"""What a player needs beside the servers: an agent, or `Task.environment` -> what it names (None: `--env-url`)."""


def prepare(args: TrainArgs) -> Prepared:
    """Load the agent with its tasks, or the renderers of the built-in loop. Raise BadRequestError if one is wrong.

    It needs no server, so that wrong options end a run before anything starts.
    """
    if args.is_played_by_agent:
        return AgentGroups(args)
    make = ChatRenderer if args.chat else TextRenderer
    tokenizer = load_tokenizer(args.model_path, "--model-path")
    keys = args.observation_key, args.action_key
    if args.mixture is None:
        assert args.env_url is not None
        renderer = make(tokenizer, observation_key=keys[0], action_key=keys[1])
        return {None: EnvironmentSetup(args.env_url, renderer, args.limits)}
    setups: dict[str | None, EnvironmentSetup] = {}
    for environment in args.mixture.environments:
        observation_key, action_key = environment.observation_key or keys[0], environment.action_key or keys[1]
        renderer = make(tokenizer, observation_key=observation_key, action_key=action_key)
        setups[environment.name] = EnvironmentSetup(environment.url, renderer, environment.limits(args.limits))
    return setups


def check_environments(args: TrainArgs, prepared: Prepared) -> None:
    """Reset one session of each environment server of a run, before anything starts.

    Raise BadRequestError, which names those that cannot be played, with the remedies.
    """
    timeouts = args.limits.env
    if isinstance(prepared, AgentGroups):
        if args.env_url is not None and is_url(args.env_url):
            check_environment(args.env_url, None, timeouts)  # the agent reads its observations
        return
    errors = []
    for name, setup in prepared.items():
        option = "--env-url" if name is None else f"--mixture ({name})"
        try:
            check_environment(setup.url, setup.renderer, timeouts, option=option)
        except BadRequestError as error:
            errors.append(str(error))
    if errors:
        raise BadRequestError(" ".join(errors))


@contextlib.contextmanager
def open_player(
    args: TrainArgs, urls: Sequence[str], keys: Sequence[str | None], prepared: Prepared | None = None
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
        yield stack.enter_context(
            AgentLoop(
                clients,
                prepared,
                sampling_params={"temperature": args.grpo.temperature},
                limits=args.limits,
                max_concurrency=args.max_concurrency,
                faults=args.faults,
                replacements=args.replacements,
            )
        )
