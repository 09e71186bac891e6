"""`TextTools`: tokenizer, chat templates and limits of the served model, as the work on one request needs them.

A text worker makes them from the `TextSetup` that the TokenizerManager sends it; the TokenizerManager has them as well,
for requests that are small enough for its event loop. `Job` names a piece of work that either of them can do.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from verl_server.chat.templates import ChatTemplates, Message
from verl_server.errors import BadRequestError
from verl_server.server.limits import Limits

R = TypeVar("R")
Decoder = Callable[[list[int]], str]
Ids = list[int] | bytes
"""Token ids: a list, or where they come from a text worker, an array of the machine's 32-bit integers."""


class NeedsWorkerError(Exception):
    """The work is too long for an event loop: a text worker must do it."""


class Tokens(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decoder(self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder: ...


class ModelBounds(msgspec.Struct, kw_only=True, frozen=True):
    """What prompts are checked against; of the scheduler's info."""

    context_length: int
    vocab_size: int
    max_req_input_len: int | None = None

    def check_length(self, count: int) -> None:
        """Refuse a prompt of `count` tokens that cannot be served; SGLang's messages where it has them."""
        if count == 0:
            raise BadRequestError("input_ids cannot be empty: the text has no tokens.")
        if count >= self.context_length:
            raise BadRequestError(
                f"The input ({count} tokens) is longer than the model's context length ({self.context_length} tokens)."
            )
        if self.max_req_input_len is not None and count > self.max_req_input_len:
            raise BadRequestError(
                f"The input ({count} tokens) is longer than the KV cache allows ({self.max_req_input_len} tokens): "
                "raise max_total_tokens, kv_cache_gib or mem_fraction_static."
            )

    def check_ids(self, name: str, ids: Sequence[int] | None) -> None:
        """Refuse ids outside the vocabulary; `name` says where they stand."""
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise BadRequestError(f"{name} holds token id {wrong}, outside the vocabulary of {self.vocab_size} tokens.")


class TextTools:
    def __init__(
        self,
        tokens: Tokens,
        limits: Limits,
        bounds: ModelBounds,
        templates: ChatTemplates | None = None,
        most_text: int | None = None,
        in_worker: bool = False,
    ) -> None:
        """Without `templates`, and for more than `most_text` characters at once, the work raises NeedsWorkerError.

        With `in_worker`, prompts are returned as arrays, which the parent process reads without a loop over them.
        """
        self.limits = limits
        self.bounds = bounds
        self._tokens = tokens
        self._templates = templates
        self._most_text = most_text
        self.in_worker = in_worker

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[list[int], list[str]]:
        """(token ids of a conversation, names of options that its template does not use)."""
        if self._templates is None:
            raise NeedsWorkerError
        text, unused = self._templates.render(messages, options)
        return self.encode([text], add_special_tokens=False)[0], unused

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        length = sum(map(len, texts))
        self.limits.check_text(length)
        self._check_place(length)
        return [self._tokens.encode(text, add_special_tokens) for text in texts]

    def decoder(self, skip_special_tokens: bool) -> Decoder:
        return self._tokens.decoder(skip_special_tokens)

    def prompts(self, given: Sequence[str | list[int]]) -> list[Ids]:
        """Token ids of prompts that are all texts or all ids, checked against the model."""
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        prompts = self.encode(texts) if texts else [prompt for prompt in given if isinstance(prompt, list)]
        return [self.prompt(ids) for ids in prompts]

    def prompt(self, ids: list[int]) -> Ids:
        """A prompt, checked against the model."""
        self.bounds.check_length(len(ids))
        self.bounds.check_ids("input_ids", ids)
        return array("i", ids).tobytes() if self.in_worker else ids

    def check_decode(self, count: int) -> None:
        """Before `count` token ids are decoded. A token is about as much work as a character of text is."""
        self.limits.check_text(count, "token ids to decode")
        self._check_place(count)

    def _check_place(self, length: int) -> None:
        if self._most_text is not None and length > self._most_text:
            raise NeedsWorkerError


class TextSetup(msgspec.Struct, kw_only=True):
    """What a text worker needs to make `TextTools`."""

    tokenizer: bytes | None
    """A `tokenizers.Tokenizer` as JSON; None: load it as `server_args` says, with transformers."""
    server_args: str
    templates: str | dict[str, str] | None
    allowed_templates: list[str]
    special_tokens: dict[str, Any]
    limits: Limits
    bounds: ModelBounds


class Answer(msgspec.Struct, array_like=True):
    """What a text worker returns for a job."""

    status: int
    """200, or the HTTP status of an error."""
    data: memoryview
    """The result as msgpack, or the error's message. A view, since a copy of several MB holds the loop."""
    is_malformed: bool = False
    """The error is that the body is no JSON."""


class EncodedPrompts(msgspec.Struct):
    prompts: list[Ids]


@dataclass(frozen=True)
class Job(Generic[R]):
    """Work on the body of one request. `result` is the type that `run` returns, and that crosses to the parent."""

    name: str
    run: Callable[[TextTools, bytes], R]
    result: type[R]


def _encode_prompts(tools: TextTools, body: bytes) -> EncodedPrompts:
    return EncodedPrompts(tools.prompts(msgspec.msgpack.decode(body, type=list[str])))


ENCODE = Job("encode", _encode_prompts, EncodedPrompts)
"""The prompts of a request that did not come as a body: its texts, as msgpack."""


def unpack(ids: Ids) -> list[int]:
    if isinstance(ids, list):
        return ids
    numbers = array("i")
    numbers.frombytes(ids)
    return numbers.tolist()
