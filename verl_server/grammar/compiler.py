"""`GrammarCompiler`: compiles translated grammars into matchers for the served model's tokenizer.

A `Matcher` follows one output token by token, and computes which tokens may follow. llguidance compiles lazily: each
step extends the automata that it needs. `_LIMITS` bound the work of the compilation and of each step. Compilation and
masks release the interpreter's lock; the constructor of `GrammarCompiler` holds it for a second with a large
vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from verl_server.errors import BadRequestError
from verl_server.grammar.failure import GrammarFailedError
from verl_server.grammar.json_schema import schema_refusal
from verl_server.grammar.token_bytes import spelled_tokens, with_one_kind

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=25_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A step takes some milliseconds at most, and the automata of a matcher some ten MB."""
COMPILER_STACK = 16 << 20
"""Bytes of the stack of threads that compile.

A trial's stack has a quarter of this, because an overflow ends the process.
"""
_MOST_COMPARED = 4096
"""The most tokens whose bytes are compared with the bytes that llguidance reads."""
_MOST_MESSAGE = 400
"""Most characters of llguidance's error messages, which may quote the whole grammar."""


class Matcher:
    """The state of a grammar after the tokens that were consumed so far. Use it in one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.inner = matcher

    def copy(self) -> Matcher:
        """Return a matcher in the same state. The two are independent."""
        return Matcher(self.inner.deep_copy())

    def reset(self) -> None:
        """Reset to the start of the output. The automata that were built are kept."""
        self.inner.reset()

    def write_mask(self, address: int, num_bytes: int) -> None:
        """Write the mask of the tokens that may follow to `address`, as words, without the interpreter's lock.

        See `check`.
        """
        self.inner.unsafe_compute_mask_ptr(address, num_bytes)

    def consume(self, token: int) -> None:
        """Advance by a token. See `check`."""
        self.inner.consume_token(token)

    def check(self) -> None:
        """Raise GrammarFailedError if a mask could not be computed, or if the grammar does not allow a token."""
        if self.inner.is_error():
            raise GrammarFailedError(self.error())

    def error(self) -> str:
        """Return the message of the failure. Used if `inner.is_error()`."""
        return _short(self.inner.get_error())

    @property
    def is_complete(self) -> bool:
        """True if the output satisfies the grammar and no further token is allowed, except EOS."""
        stopped: bool = self.inner.is_stopped()
        return stopped


class GrammarCompiler:
    def __init__(self, tokenizer: bytes, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer` as JSON. `vocab_size` is the model's, which may be padded.

        Raise BadRequestError for a tokenizer that llguidance cannot read.
        """
        eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        try:
            content = orjson.loads(tokenizer)
            readable = with_one_kind(content)
            text = tokenizer if readable is content else orjson.dumps(readable)
            self._tokenizer = LLTokenizer(text.decode(), n_vocab=vocab_size, eos_token=eos or None)
        except Exception as error:  # llguidance raises ValueError, and a panic is no Exception
            raise BadRequestError(
                f"This model's tokenizer does not permit constrained decoding: {_short(str(error))}"
            ) from None
        self._compare(content, vocab_size)
        self.num_words = -(-vocab_size // 32)
        """Number of words of a mask."""

    def _compare(self, content: dict[str, Any], vocab_size: int) -> None:
        """Raise BadRequestError if llguidance and the tokenizer's decoder decode a token into different bytes."""
        for token, spelled in spelled_tokens(content, _MOST_COMPARED):
            if token >= vocab_size or b"\xff" in spelled:  # no UTF-8 text has 0xFF, llguidance's mark of special tokens
                continue
            if (read := self._tokenizer.decode_bytes([token])) != spelled:
                raise BadRequestError(
                    f"This model's tokenizer does not permit constrained decoding: llguidance reads token {token} as "
                    f"{read!r}, but it stands for {spelled!r}. Start the server with grammar_backend=none, or report "
                    "the tokenizer."
                )

    def compile(self, grammar: str) -> Matcher:
        """Compile a translated grammar. Raise BadRequestError if it is malformed or exceeds a limit."""
        matcher = Matcher(LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS))
        try:
            matcher.check()
        except GrammarFailedError as error:
            named = schema_refusal(matcher.inner.get_error(), grammar)
            raise BadRequestError(named or f"The grammar was refused: {error}") from None
        return matcher


@contextmanager
def stack_size(size: int) -> Iterator[None]:
    """Start new threads with a stack of `size` bytes."""
    previous = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(previous)


def _short(message: str) -> str:
    """Return the message without its marks, cut to `_MOST_MESSAGE` characters."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MOST_MESSAGE else text[:_MOST_MESSAGE] + " ..."
