"""Types of the arguments and of the result of `run_agents`."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from verl_server.engine.http_clients import aiohttp_transport, certificates
from verl_server.errors import BadRequestError
from verl_server.messages.session_types import SessionTrajectory
from verl_server.rollout.environment import check_seconds
from verl_server.rollout.environments.text import TextEnvironment
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory

if TYPE_CHECKING:
    from verl_server.rollout.agents.gateway import GuardedEnvironment


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task. A group of episodes plays it."""

    seed: int = 0
    """Seed of the environment's episode."""
    input: Any = None
    """Input of the agent: any JSON value."""
    environment: dict[str, Any] = {}
    """Options for the environment of this task. The agent does not see them."""


@dataclass(frozen=True)
class Server:
    """A rollout server and an owner's key of it."""

    url: str
    """URL of the server, without a path: http://HOST:PORT."""
    api_key: str = field(repr=False)
    """The server's API key or admin key. No agent receives it."""


@dataclass(frozen=True)
class Served:
    """What a program must know about the model behind its session."""

    model: str
    """Name of the served model."""
    context: int
    """Most tokens of a prompt with its output."""


@dataclass(frozen=True)
class AgentLimits:
    """Bounds of one episode. Times are in seconds. An episode that reaches a bound is scored.

    None is no bound. Bounds of processes and files are for agents that are programs.
    """

    max_turns: int | None = None
    """Most generations. The episode ends as MAX_TURNS."""
    max_tokens: int | None = None
    """Most sampled tokens. The episode ends as MAX_TOKENS."""
    max_context: int | None = None
    """Most tokens of a prompt with its output. The episode ends as CONTEXT_FULL."""
    max_concurrent: int = 16
    """Most generations of one episode at one time."""
    seconds: float = 3600.0
    """Time for the episode, which then ends as TIME_LIMIT."""
    idle_seconds: float = 600.0
    """Time without a generation, without a call of the environment, and without work of a program (a tenth of a core,
    such as a compiler needs). The episode ends as IDLE."""
    environment_seconds: float = 60.0
    """Time for one call of the environment. The episode ends as ENV_TIMEOUT."""
    reward_seconds: float = 60.0
    """Time for the reward function."""
    restart_timeout: float = 300.0
    """Time for a server that went away to come back. The episode ends as SESSION_LOST."""
    kill_grace: float = 5.0
    """Time between SIGTERM and SIGKILL at the end of a program."""
    cpu_seconds: int | None = None
    """CPU time of each process of a program."""
    memory_bytes: int | None = None
    """Address space of each process of a program."""
    processes: int | None = None
    """Processes and threads: those of the user (RLIMIT_NPROC), or of an isolated episode, where None is 4096."""
    open_files: int = 1024
    """Open files of each process of a program."""
    file_bytes: int = 2**30
    """Size of a file that a program writes."""
    disk_bytes: int = 2**33
    """Bytes on the disk of all files in HOME, TMPDIR and the workspace of a program, which then ends as AGENT_ERROR.
    They are measured every few seconds."""
    log_bytes: int = 2**20
    """The most bytes of a program's output that are kept."""

    def __post_init__(self) -> None:
        seconds = [f.name for f in fields(self) if f.name.endswith(("seconds", "timeout", "grace"))]
        check_seconds("AgentLimits", self, seconds)
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in seconds and value is not None and value < 1:
                raise BadRequestError(f"AgentLimits.{f.name} must be at least 1, not {value}.")


@dataclass(frozen=True)
class AgentSession:
    """The argument of an agent: the addresses and the key of the agent's session, and the environment."""

    session_id: str
    """Id of the session on the server."""
    base_url: str
    """Base URL for OpenAI clients."""
    anthropic_base_url: str
    """Base URL for Anthropic clients."""
    api_key: str = field(repr=False)
    """The session key. It permits generation in this session only."""
    environment: GuardedEnvironment | None = None
    """The environment without its rewards, None if the run has none."""

    def openai(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI` client of this session, with further `options` of that class.

        Raise BadRequestError if the package is not installed (the extra `agents` has it).
        """
        return self._sdk_client("openai", "AsyncOpenAI", self.base_url, options)

    def anthropic(self, **options: Any) -> Any:
        """Return an `anthropic.AsyncAnthropic` client of this session, with further `options` of that class.

        Raise BadRequestError if the package is not installed (the extra `agents` has it).
        """
        return self._sdk_client("anthropic", "AsyncAnthropic", self.anthropic_base_url, options)

    def _sdk_client(self, package: str, client: str, base_url: str, options: dict[str, Any]) -> Any:
        try:
            sdk = importlib.import_module(package)
        except ImportError as error:
            raise BadRequestError(
                f"AgentSession.{package} needs {package}: pip install 'verl-server[agents]'."
            ) from error
        if "http_client" not in options:
            options["http_client"] = sdk.DefaultAsyncHttpxClient(verify=certificates(), trust_env=False)
        return getattr(sdk, client)(base_url=base_url, api_key=self.api_key, **options)

    def http(self, **options: Any) -> httpx.AsyncClient:
        """Return an `httpx.AsyncClient` of this session, which sends the session key to paths below `base_url`.

        It has no time-out, because the runner bounds the episode. An `httpx.AsyncClient()` that an agent makes itself
        loads the certificates, which holds the runner's event loop for about 50 ms in each episode.
        """
        headers = {"Authorization": f"Bearer {self.api_key}"} | dict(options.pop("headers", {}))
        settings: dict[str, Any] = {"base_url": self.base_url, "timeout": None} | options
        if "transport" not in settings:
            settings["transport"] = aiohttp_transport()
        return httpx.AsyncClient(headers=headers, **settings)


@dataclass(frozen=True)
class Scored:
    """The result of an agent function whose own code, not the policy, judged the episode: `reward="agent"`."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Further figures of the episode: name -> finite number."""


@dataclass
class AgentEpisode:
    """One attempt of an agent at a task."""

    task: AgentTask
    """The task that the attempt played."""
    index: int
    """Number of the task, which is the number of its group."""
    member: int
    """Number of the episode in its group."""
    attempt: int
    """Number of attempts before this one."""
    seed: int
    """Seed of the session's samples. Each attempt has its own."""
    session: str = ""
    """Id of the session, "" if none was created."""
    server: str = ""
    """URL of the session's server."""
    reason: StopReason | None = None
    """Reason for the end, None before it."""
    fault: Fault | None = None
    """The party that caused the end. None before the end."""
    error: str | None = None
    """Cause of a failure, None if the attempt did not fail."""
    environment_away: bool = False
    """True if the attempt ended because its environment could not be reached."""
    exit_code: int | None = None
    """Exit code of a program. A negative code is the signal that ended it."""
    result: Any = None
    """The value that an agent function returned, or the final answer of an installed agent. It is no reward by
    itself."""
    output: str = ""
    """The last lines that a program wrote."""
    reward: float | None = None
    """Reward of the attempt, None if it has none: its end is not the policy's, or the reward function failed."""
    reward_failed: bool = False
    """True if the reward function failed, so that a resumed run plays the episode again."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Figures beside the reward, if the agent returned a `Scored`."""
    environment_reward: float | None = None
    """Sum of the rewards that the runner saw in the environment, None without an environment."""
    seconds: float = 0.0
    """Time that the attempt took."""
    tokens: int = 0
    """Sampled tokens."""
    turns: int = 0
    """Generations of the session."""
    final: bool = False
    """True if no other attempt follows."""
    trajectory: SessionTrajectory | None = None
    """The session's tokens as the server recorded them."""
    events: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, start, end) of the waits for the environment, in seconds since the run began."""
    began: float | None = None
    """Wall time of second 0 of `events`, in seconds since 1970."""
    server_clock: float | None = None
    """Seconds to add to the server's wall times to get seconds since the run began. None: an older server."""

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens in all branches, with those of sub-agents. Without a trajectory, `tokens`."""
        if self.trajectory is None:
            return self.tokens
        return sum(sum(branch.loss_mask) for branch in self.trajectory.branches)

    @property
    def is_unsampled(self) -> bool:
        """True if the episode has a reward or a regular end, and no sampled token."""
        is_regular = self.reason is not None and self.reason.is_regular
        return (is_regular or self.reward is not None) and not self.sampled_tokens

    @property
    def name(self) -> str:
        """The episode's name: "TASK-MEMBER-ATTEMPT", three integers."""
        return f"{self.index}-{self.member}-{self.attempt}"


@dataclass
class AgentRun:
    """The result of `run_agents`."""

    episodes: list[AgentEpisode]
    """Every attempt that this call made, in the order of their ends."""
    trajectories: list[Trajectory]
    """The branches of the final attempts, in the order of tasks and members. A resumed run includes earlier ones."""
    seconds: float
    """Time that the call took."""

    @property
    def unsampled(self) -> int:
        """Number of episodes of this call that have a reward or a regular end, and no sampled token."""
        return sum(episode.final and episode.is_unsampled for episode in self.episodes)


AgentFunction = Callable[[AgentSession, AgentTask], Awaitable[Any]]
RewardFunction = Callable[[AgentEpisode], "float | Awaitable[float]"]
EnvironmentFactory = Callable[[AgentTask], TextEnvironment]
