"""`TextTools`: tokenizer, chat templates and limits of the served model, to process the text of one request.

A text worker builds its `TextTools` from the `TextSetup` that the TokenizerManager sends. The TokenizerManager has
`TextTools`, too, for requests that are small enough for its event loop. Either of them can run a `Job`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import SessionView
from verl_server.chat.templates import ChatTemplate, ChatTemplates, Message
from verl_server.errors import BadRequestError, ContextLengthError
from verl_server.messages.packed import pack_ids, unpack_ids
from verl_server.server.limits import Limits

if TYPE_CHECKING:  # a process that checks no grammars does not load llguidance
    from verl_server.grammar.compiler import GrammarCompiler

R = TypeVar("R")
Decoder = Callable[[list[int]], str]
Ids = list[int] | bytes
"""Token ids: a list, or an array of little-endian int32 (from a text worker, or from a caller who sends one)."""

_MOST_REGEX_ON_LOOP = 48
"""The most characters of regular expressions that are compiled on the loop, which takes at most 5 ms."""


class NeedsWorkerError(Exception):
    """The work takes too long for the event loop. A text worker must do it."""


class Tokens(Protocol):
    """A tokenizer: it converts text into token ids and back."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token with exactly this text, or None."""
        ...

    def is_special(self, token: int) -> bool:
        """Return True if `decoder` with `skip_special_tokens` omits the token."""
        ...

    def decoder(self, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True) -> Decoder: ...


class ModelBounds(msgspec.Struct, kw_only=True, frozen=True):
    """The model's bounds for prompts, from the scheduler's info."""

    context_length: int
    """Largest number of tokens of prompt and output together."""
    vocab_size: int
    max_req_input_len: int | None = None
    """Largest number of prompt tokens that the KV cache can hold."""

    @property
    def longest(self) -> int:
        """The most tokens of prompt and output together that the context and the whole KV cache can hold."""
        if self.max_req_input_len is None:
            return self.context_length
        return min(self.context_length, self.max_req_input_len + 1)  # the last token needs no place in the KV cache

    def room_for_prompt(self, max_new_tokens: int | None) -> int:
        """Return the most prompt tokens that can be served with `max_new_tokens`. None reserves one output token."""
        new = max_new_tokens if max_new_tokens is not None else 1
        return max(self.longest - max(new, 1), 1)

    def check_length(self, prompt_tokens: int, max_new_tokens: int = 0) -> None:
        """Raise BadRequestError for an empty prompt, and ContextLengthError for a sequence that cannot be served."""
        if prompt_tokens == 0:
            raise BadRequestError("input_ids cannot be empty: the text has no tokens.")
        if prompt_tokens < self.longest and prompt_tokens + max_new_tokens <= self.longest:
            return
        cause = ""
        if self.longest < self.context_length:
            cause = "the KV cache holds no more: raise max_total_tokens, kv_cache_gib or mem_fraction_static"
        raise ContextLengthError.of(prompt_tokens, max_new_tokens, self.longest, cause)

    def check_ids(self, name: str, ids: Sequence[int] | bytes | None) -> None:
        """Raise BadRequestError if an id is outside the vocabulary. `name` is the field that holds the ids.

        `ids` is a sequence or an array of int32, which takes a fiftieth of the time.
        """
        if not ids:
            return
        numbers: Any = np.frombuffer(ids, np.int32) if isinstance(ids, bytes) else ids
        lowest, highest = (numbers.min(), numbers.max()) if isinstance(ids, bytes) else (min(ids), max(ids))
        if lowest < 0 or highest >= self.vocab_size:
            wrong = next(int(i) for i in numbers if not 0 <= i < self.vocab_size)
            raise BadRequestError(f"{name} holds token id {wrong}, outside the vocabulary of {self.vocab_size} tokens.")


class TextTools:
    def __init__(
        self,
        tokens: Tokens,
        limits: Limits,
        bounds: ModelBounds,
        templates: ChatTemplates | None = None,
        parsers: tuple[str | None, str | None] = (None, None),
        default_format: OutputFormat | None = None,
        most_text: int | None = None,
        in_worker: bool = False,
    ) -> None:
        """`parsers` are the settings `tool_call_parser` and `reasoning_parser`. `default_format` is the format of the
        default template, for a place without `templates`.

        `most_text` is the largest number of characters for one call; None means any number.

        Work on more characters raises NeedsWorkerError, as does rendering without `templates`. With `in_worker`,
        prompts are returned as arrays, which the parent process reads without a loop over their tokens.
        """
        self.limits = limits
        self.bounds = bounds
        self.tokens = tokens
        self._templates = templates
        self._parsers = parsers
        self._default_format = default_format
        self._most_text = most_text
        self.in_worker = in_worker
        self.grammars: GrammarCompiler | None = None
        """Compiles grammars, in a process that checks them."""
        self.special_tokens: dict[str, int] = {}
        """Text -> id of the tokenizer's special tokens. Set together with `grammars`."""
        self.grammar_refusal = "This process checks no grammars."
        """The reason if `grammars` is None."""
        self.session: SessionView | None = None
        """The session of the request that is being read."""

    def with_session(self, session: SessionView) -> TextTools:
        """Return the same tools for a request in a session."""
        tools = copy.copy(self)
        tools.session = session
        return tools

    def render_text(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return (text of a conversation, names of the options that its template does not use)."""
        if self._templates is None:
            raise NeedsWorkerError
        return self._templates.render(messages, options)

    def output_format(self, options: Mapping[str, Any]) -> OutputFormat:
        """Return the formats of the output for the template that these options choose."""
        if self._templates is None:
            if self._default_format is None or options.get("chat_template") or options.get("tools"):
                raise NeedsWorkerError
            return self._default_format
        return OutputFormat.of(self.template(options).source, *self._parsers)

    def template(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template that these options choose."""
        if self._templates is None:
            raise NeedsWorkerError
        return self._templates.choose(options)

    def tag_ids(self, tags: Sequence[str]) -> dict[str, int]:
        """Return tag -> id of the tags that are single added tokens of the tokenizer."""
        found = {tag: self.tokens.token_id(tag) for tag in tags}
        return {tag: token for tag, token in found.items() if token is not None}

    def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text. Raise ContextLengthError for more text than the server tokenizes."""
        length = sum(map(len, texts))
        if length > (most := self.limits.max_text_length):
            raise ContextLengthError(
                f"This model's maximum context length is {self.bounds.longest} tokens. However, the request has "
                f"{length} characters of text; this server accepts at most {most} (setting max_text_length)."
            )
        self._check_place(length)
        return [self.tokens.encode(text, add_special_tokens) for text in texts]

    def decoder(self, skip_special_tokens: bool) -> Decoder:
        return self.tokens.decoder(skip_special_tokens)

    def prompts(self, given: Sequence[str | list[int]], kept: Sequence[int | None] | None = None) -> list[Ids]:
        """Return the token ids of prompts, checked against the model. The prompts must be all texts or all ids.

        `kept` is the number of tokens that are kept at the end of each prompt, None for all.
        """
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        prompts = self.encode(texts) if texts else [prompt for prompt in given if isinstance(prompt, list)]
        return [self.prompt(ids, keep) for ids, keep in zip(prompts, kept or [None] * len(prompts), strict=True)]

    def prompt(self, ids: Ids, keep: int | None = None) -> Ids:
        """Check the last `keep` token ids of one prompt against the model, and return them."""
        if keep is not None:
            ids = ids[-keep:] if isinstance(ids, list) else ids[-4 * keep :]
        self.bounds.check_length(count_ids(ids))
        self.bounds.check_ids("input_ids", ids)
        return pack(ids) if self.in_worker else ids

    def check_regex_place(self, patterns: Sequence[str]) -> None:
        """Raise NeedsWorkerError if these regular expressions take too long to compile here."""
        if self._most_text is not None and sum(map(len, patterns)) > _MOST_REGEX_ON_LOOP:
            raise NeedsWorkerError

    def check_decode(self, count: int) -> None:
        """Check that `count` token ids may be decoded. Decoding a token takes about as long as encoding a character."""
        self.limits.check_text(count, "token ids to decode")
        self._check_place(count)

    def _check_place(self, length: int) -> None:
        if self._most_text is not None and length > self._most_text:
            raise NeedsWorkerError


class TextSetup(msgspec.Struct, kw_only=True):
    """The data from which a text worker builds its `TextTools`."""

    tokenizer: bytes | None
    """A `tokenizers.Tokenizer` as JSON. None: the worker loads the tokenizer of `server_args` with transformers."""
    server_args: str
    """`ServerArgs` as JSON, without the keys."""
    templates: str | dict[str, str] | None
    allowed_templates: list[str]
    special_tokens: dict[str, Any]
    limits: Limits
    bounds: ModelBounds
    eos_token_ids: list[int] = []
    checks_grammars: bool = False
    """The worker checks grammars."""


class Answer(msgspec.Struct, array_like=True):
    """The message with which a text worker answers a job."""

    status: int
    """200, or the HTTP status of an error."""
    data: memoryview
    """The result as msgpack, or the error's message. A view, because a copy of several MB would block the loop."""
    is_malformed: bool = False
    """True if the body is not JSON."""
    code: str | None = None
    """`VerlServerError.code` of the error."""


class TextPrompts(msgspec.Struct):
    """Body of the job `ENCODE`. `TextTools.prompts` describes the fields."""

    texts: list[str]
    kept: list[int | None]


class EncodedPrompts(msgspec.Struct):
    """Result of the job `ENCODE`."""

    prompts: list[Ids]


@dataclass(frozen=True)
class Job(Generic[R]):
    """Work on the body of one request. `result` is the type that `run` returns and the text worker sends back."""

    name: str
    run: Callable[[TextTools, bytes], R]
    result: type[R]


def _encode_prompts(tools: TextTools, body: bytes) -> EncodedPrompts:
    given = msgspec.msgpack.decode(body, type=TextPrompts)
    return EncodedPrompts(tools.prompts(given.texts, given.kept))


ENCODE = Job("encode", _encode_prompts, EncodedPrompts)
"""Tokenizes the prompts of a request that was created in this process. The body is a `TextPrompts` as msgpack."""


def unpack(ids: Ids) -> list[int]:
    """Return token ids as a list."""
    return ids if isinstance(ids, list) else unpack_ids(ids)


def pack(ids: Ids) -> bytes:
    """Return token ids as an array of int32."""
    return pack_ids(ids) if isinstance(ids, list) else ids


def count_ids(ids: Ids) -> int:
    return len(ids) if isinstance(ids, list) else len(ids) // 4
