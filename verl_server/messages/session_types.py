"""The wire format of sessions: the bodies of `/sessions`, and trajectories.

The server's session routes write them; `rollout` reads them. Ids are int32, loss masks 0 or 1. `logprobs` are those of
the mode "default" of `SamplingParams.logprobs_mode`; `policy_logprobs` are the policy's. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

History = Literal["stored", "template"]
SessionState = Literal["open", "finished", "expired"]
BranchKind = Literal["main", "fork", "retry"]
PolicyLogprobs = Literal["same", "given", "unknown"]
"""Field with the policy's log-probabilities of a turn's tokens: log-softmax(model's logits / temperature), as in a
trainer.

"same": `logprobs`. "given": `policy_logprobs`, because the tokens were drawn under a mask, a penalty or a bias.
"unknown": no field has them, because the engine did not compute them, or because the record is old.
"""
ForcedMode = Literal["override", "refuse"]
"""The treatment of a request that sets a forced sampling parameter to another value: it is sampled with the forced
value, and its turn records the requested value; or it is refused with 400.
"""


class SessionLimits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Bounds of a session. None: the server's own bound."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Sampled tokens of the session and its children."""
    max_context: int | None = None
    """Tokens of the longest prompt with its output."""
    max_concurrent: int = 16
    """Generations that run at once, children included."""
    seconds: float | None = None
    idle_seconds: float | None = None


class CreateSession(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of `POST /sessions`."""

    id: str | None = None
    """Name of the session: letters, digits, "_" and "-". Default: a random one."""
    group: str = ""
    """Any name by which `GET /sessions` selects, for example the run and the task."""
    metadata: dict[str, Any] = {}
    """Any JSON object of at most 16 KiB. It is returned with the session and with its trajectory."""
    limits: SessionLimits = SessionLimits()
    """Bounds of the session and its children."""
    history: History = "stored"
    """`stored`: the next prompt keeps the sampled ids. `template`: the chat template renders the next prompt."""
    sampling_params: dict[str, Any] = {}
    """Sampling parameters for requests that do not set them."""
    forced_sampling_params: dict[str, Any] = {}
    """Sampling parameters that replace those of a request. Null forces the default."""
    forced_mode: ForcedMode = "override"
    """Treatment of requests with another value: `override` records the requested value, `refuse` answers 400."""
    seed: int | None = None
    """A turn's own seed depends on this one, on its prompt, and on the number of earlier samples of the prompt."""
    streaming: bool = False
    """A `/generate` request whose `session_params` name no request continues the last one, as in SGLang."""
    min_weight_version: str | None = None
    """`min_weight_version` of `/generate`, for requests that state no demand on the weight version."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `/generate`, for requests that state no demand on the weight version."""


class CreatedSession(msgspec.Struct, frozen=True):
    """Reply to `POST /sessions`. `key` is shown only once."""

    id: str
    key: str
    base_url: str
    """Path for OpenAI clients: "/s/KEY/v1"."""
    anthropic_base_url: str
    """Path for Anthropic clients: "/s/KEY"."""
    expires: float | None
    weight_version: str


class TurnInfo(msgspec.Struct, frozen=True):
    """One node of the session's tree, without its tokens."""

    turn: int
    parent: int
    """Id of the parent turn. -1 for a root."""
    shared: int
    """Number of leading tokens of the prompt that are also the beginning of the parent's prompt and output."""
    prompt_tokens: int
    output_tokens: int
    finish_reason: str
    sibling: int
    spans: list[tuple[str, int]]
    """(weight version, index of the first sampled token under it), in order."""
    calls: list[dict[str, Any]]
    times: tuple[float, float, float]
    """Times at which the request was accepted, the first token was sampled, and the turn finished."""
    delivered: bool = True
    aborted: bool = False
    resampled: bool = False


class SessionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session in `GET /sessions` and, with children and turns, in `GET /sessions/{id}`."""

    id: str
    group: str
    state: SessionState
    reason: str
    turns: int
    tokens: int
    """Sampled tokens."""
    reward: float | None
    created: float
    active: float
    metadata: dict[str, Any] = {}
    in_flight: int = 0
    """Generations that run now."""
    limit: str | None = None
    """Field of `SessionLimits` that refused or cut a generation last. `max_context` is also the context of the server:
    the model's, that of the KV cache, and `max_session_turn_tokens`."""
    children: list[str] = []
    tree: list[TurnInfo] = []


class SessionList(msgspec.Struct, frozen=True):
    """Reply to `GET /sessions`. Send `next` as the parameter `after` to get the next page.

    It is None on the last page.
    """

    sessions: list[SessionInfo]
    next: str | None


class RewardBody(msgspec.Struct, frozen=True):
    """Body of `POST /sessions/{id}/reward`. The same name and turn replace an earlier value."""

    reward: float
    """Any finite number."""
    turn: int | None = None
    """The turn that the reward is for. Default: the whole session."""
    name: str = "reward"
    """The rewards of the whole session add up over their names."""


class FinishBody(msgspec.Struct, frozen=True):
    """Body of `POST /sessions/{id}/finish`."""

    reason: str = "done"
    """Any text, which is returned with the session."""


class MessageCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call of a message."""

    name: str
    arguments: str = ""
    """Arguments as JSON text. What a policy sampled may be no JSON."""
    id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a conversation as the agent sent or received it."""

    role: str
    """system, user, assistant, tool, or another name that the agent gave."""
    text: str = ""
    reasoning: str = ""
    """Reasoning of the policy before `text`."""
    calls: list[MessageCall] = []
    """Tool calls of an assistant's message."""
    call_id: str = ""
    """Id of the call whose result a tool's message is."""
    cut: int = 0
    """Number of characters that are missing at the ends of texts. Each text has at most 1,048,576 characters."""


class BranchTurn(msgspec.Struct, frozen=True):
    """A turn's place in its branch: ids[start:prompt_end] are new prompt ids, ids[prompt_end:end] were sampled."""

    turn: int
    start: int
    prompt_end: int
    end: int
    finish_reason: str
    """ "cut" if another branch has the rest of the turn."""
    calls: list[dict[str, Any]] = []
    sampling: dict[str, Any] = {}
    """Parameters that shaped the distribution: `temperature`, the `sampling_seed` if there is one, and the other
    parameters of `SamplingParams` that differ from their defaults.

    `grammar` is a digest of the output's grammar.
    """
    policy_logprobs: PolicyLogprobs = "unknown"
    """Field that has the policy's log-probabilities of the sampled tokens."""
    overridden: dict[str, Any] = {}
    """Sampling parameters for which the request set other values than the session forces."""
    times: tuple[float, float, float] | None = None
    """`TurnInfo.times`. None: an older server."""
    began: str | None = None
    """Why a branch begins with this turn: root, retry, edited, child, head or template. None: the turn continues the
    one before it, as another sample of one request may do beside the first one; or an older server recorded it."""
    messages: list[Message] = []
    """Messages of the prompt that no earlier turn of the branch has. [] unless the query asks for `text`, for prompts
    without messages, and within `Branch.shared_tokens`: there the branch `fork_of` has them."""
    reply: Message | None = None
    """The output as the client received it. None unless the query asks for `text`, if there is none, and within
    `Branch.shared_tokens`."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens ids[start:end] are of one weight version."""

    version: str
    start: int
    end: int


class Branch(msgspec.Struct, frozen=True):
    """One linear path through a session's tree, ready to train on."""

    branch: int
    kind: BranchKind
    session: str
    turns: list[BranchTurn]
    shared_tokens: int
    """Number of leading ids that an earlier branch has, too, with their loss mask."""
    ids: Any
    """list of int, or an int32 column."""
    loss_mask: Any
    """list of 0 and 1, or a uint8 column: 1 for a token that was sampled and is masked in no earlier branch."""
    logprobs: Any
    """list of float, or a float32 column: 0.0 where the token was read."""
    weight_versions: list[VersionSpan]
    rewards: list[RewardBody] = []
    policy_logprobs: Any = None
    """None if all turns have `policy_logprobs` "same". Otherwise a list or a float32 column, parallel to `ids`: the
    policy's log-probability of each sampled token, null (NaN in a column) if it is unknown; 0.0 for tokens that were
    read."""
    has_choice: Any = None
    """None if no mask was counted. Otherwise a list of 0 and 1, or a uint8 column: 0 for a token that was read, and for
    a sampled token that was the only allowed token, which says nothing about the policy."""
    fork_of: int | None = None
    """Number of the branch that has the `shared_tokens`. None: no earlier branch begins with them."""


class SessionTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to `GET /sessions/{id}/trajectory`."""

    session: str
    state: SessionState
    reason: str
    reward: float | None
    group: str
    metadata: dict[str, Any]
    now: float | None = None
    """Time of the reply on the server's clock, with which a client converts `BranchTurn.times` to its own clock. None:
    an older server."""
    sampled_tokens: int | None = None
    """Sampled tokens of all finished turns of these sessions, in branches or not. None: an older server."""
    retry_tokens: int | None = None
    """Number of `sampled_tokens` that only branches of kind retry have. None: an older server."""
    unrecorded_turns: int | None = None
    """Turns that began and of which no token is recorded: the request was refused or cancelled before its first token,
    it failed, or the server was killed meanwhile. None: an older server."""
    branches: list[Branch]
