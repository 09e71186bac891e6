"""The messages between a scheduler's `MatcherClient` and the `matcher_process`, as msgpack.

The scheduler numbers the matchers. Its main thread sends the messages of steps over one connection, so that their order
is kept. Threads that compile have connections of their own, on each of which one call follows the other.
"""

from __future__ import annotations

import msgspec

from verl_server.errors import BadRequestError
from verl_server.grammar.failure import GrammarFailedError, GrammarLibraryError


class Setup(msgspec.Struct):
    """The first message of the connection of steps. An `Answer` follows."""

    tokenizer: bytes
    """A `tokenizers.Tokenizer` as JSON."""
    eos_token_ids: list[int]
    vocab_size: int
    buffers: int
    rows: int
    num_words: int
    """The layout of the `MaskMemory`."""


class Compile(msgspec.Struct, tag=True):
    """Compile a translated grammar. An `Answer` follows."""

    matcher: int
    grammar: str


class Copy(msgspec.Struct, tag=True):
    """Copy a matcher. An `Answer` follows."""

    matcher: int
    of: int


Call = Compile | Copy
"""A thread that compiles sends one of these."""


class Consume(msgspec.Struct, tag=True):
    """Advance matchers by tokens. A state for each of them follows, as bytes: see `GOES_ON`.

    Then compute the masks of those that go on, as `Start` does.
    """

    matchers: list[int]
    tokens: list[int]
    buffer: int
    rows: list[int]
    """The row of the buffer for the mask of each matcher, -1 for no mask."""
    reset: list[int]
    """Matchers to reset first, because their requests ended."""
    dropped: list[int]
    """Matchers that nobody uses any more."""


class Start(msgspec.Struct, tag=True):
    """Compute masks, and set the states of their rows, in a buffer of the `MaskMemory`. Nothing follows."""

    buffer: int
    rows: list[int]
    """The rows of the buffer that this process writes. Other processes write other rows."""
    matchers: list[int]
    """Matcher of each of them."""
    reset: list[int]
    dropped: list[int]


class Explain(msgspec.Struct, tag=True):
    """Say why a matcher failed. An `Answer` follows."""

    matcher: int


StepMessage = Consume | Start | Explain
"""The main thread of the scheduler sends one of these."""

GOES_ON, COMPLETE, BROKEN = 0, 1, 2
"""States of a matcher after a token: it goes on, its output is complete, or it failed."""


class Answer(msgspec.Struct):
    """The end of a call."""

    seconds: float = 0.0
    """Seconds of processor time that the compilation took."""
    kind: str = ""
    """Kind of the error, "" for none: a key of `_ERRORS`."""
    message: str = ""


_ERRORS: dict[str, type[Exception]] = {
    "request": BadRequestError,
    "grammar": GrammarFailedError,
    "library": GrammarLibraryError,
}


def answer_of(error: BaseException) -> Answer:
    """Return the answer that carries an error. `error_of` returns the error again."""
    for kind, known in _ERRORS.items():
        if isinstance(error, known):
            return Answer(kind=kind, message=str(error))
    return Answer(kind="library", message=f"{type(error).__name__}: {error}")


def error_of(answer: Answer) -> Exception | None:
    return _ERRORS[answer.kind](answer.message) if answer.kind else None
