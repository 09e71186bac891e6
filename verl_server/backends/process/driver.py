"""`EngineDriver`: the interface of another project's engine for `Backend`. Each engine has one implementation.

A driver starts the engine, and translates requests and results. It decides nothing. `Backend` decides which requests
are admitted, the effect of a pause, an update or an abort, and the version of each token. Every method is called on
`Backend`'s thread. No method waits, unless its docstring says that it waits. Then it waits for at most `timeout`
seconds. The engine's outputs arrive on a thread of the driver, which calls the `ring` that its constructor received;
`take` returns them.

The protocol uses this project's names only, so that `Backend` is the same for every engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits and properties of a started engine."""

    name: str
    """Name and version, for messages and `/server_info`."""
    device: str
    dtype: str
    context_length: int
    """Most tokens in prompt and output together."""
    vocab_size: int
    kv_cache_tokens: int
    """Capacity of the KV cache in tokens."""
    page_size: int
    """Tokens in a page of the KV cache."""
    max_running_requests: int
    prefill_chunk: int
    """Most prompt tokens in one step."""
    unsupported: tuple[str, ...] = ()
    """Names of the settings and calls that the engine refuses."""
    logprobs_after_filters: bool = False
    """True if log-probabilities of output tokens are those after top-k, top-p and min-p, if a request has these."""
    releases_memory: bool = False
    """True if the engine can free the memory of weights and KV cache."""


@dataclass(slots=True)
class NewTokens:
    """The tokens that one step added to one request."""

    rid: str
    output_ids: list[int]
    logprobs: list[float]
    """Log-probabilities of `output_ids`. Empty unless they were requested."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Number of prompt tokens that were read from the prefix cache."""
    top_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None


Step = list[NewTokens]
"""Outputs of one step of the engine. All of them were computed with the same weights."""


class EngineDriver(Protocol):
    info: EngineInfo

    def refusal(self, req: TokenizedGenerateReq) -> BadRequestError | None:
        """Return the error that refuses `req`, or None if the engine can compute it."""

    def submit(self, req: TokenizedGenerateReq, seed: int, cache_key: str) -> None:
        """Start a request. Only requests with the same `cache_key` may share pages of the KV cache."""

    def abort(self, rids: list[str]) -> None:
        """Stop requests. `take` returns no more tokens of these requests. Unknown ids are ignored."""

    def take(self) -> list[Step]:
        """Return the steps since the last call, in order. Raise ServerDiedError if the engine has died."""

    def hold(self, timeout: float) -> None:
        """Stop the engine before its next step, and wait for the running step.

        Afterwards `take` returns all results. Requests stay in the engine, with their KV cache.
        """

    def resume(self) -> None:
        """Continue after `hold`."""

    def retract(self, timeout: float) -> None:
        """Drop the KV cache of every request, and empty the prefix cache. Only during `hold`."""

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        """Run a method of this project's worker extension on every worker, between two steps.

        Wait for the results, and return them in the order of the ranks.
        """

    def close(self) -> None:
        """End all processes of the engine, and wait until they have ended or a timeout has passed. Idempotent."""
