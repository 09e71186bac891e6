"""The data of a session that a text worker receives and returns: input and result of `next_turn.plan_next_turn`.

The text worker decodes a `SessionView` from the bytes of the session ledger. The ledger joins the prompt of a
`NextTurn` from stored and new ids.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Ids32 = bytes
"""Token ids as little-endian int32."""


class CompletionText(msgspec.Struct, frozen=True, array_like=True):
    """The text of a completion, as lengths and digests."""

    prompt_length: int
    """Number of characters of the prompt's text."""
    prompt: bytes
    """`history.text_digest` of the prompt's text."""
    shown_length: int
    shown: bytes
    """`history.text_digest` of the output's text that the client was shown."""
    hidden: str
    """Text of the sampled tokens that the client did not receive: a stop string, and the text after it."""


class ReplyFacts(msgspec.Struct, frozen=True, array_like=True):
    """The data of a finished turn that the plan of the next prompt needs."""

    delivered: bool
    """True if a client received the whole reply. This field is the first, because the ledger changes it in place."""
    turn: int
    parent: int
    prompt_tokens: int
    output_tokens: int
    generation_prompt: int
    """Number of ids at the end of the prompt that only open the answer. -1: unknown."""
    end_token: int
    """Last sampled id if it is one of the model's end tokens, else -1."""
    in_reasoning: bool
    """The turn ended inside an open reasoning part."""
    calls: list[tuple[str, str]]
    """(id, name) of its tool calls, in order."""
    options: bytes
    """Digest of the template options of its prompt."""
    text: CompletionText | None = None


class SessionView(msgspec.Struct, frozen=True):
    """A snapshot of a session for the text worker that plans the next prompt."""

    history: Literal["stored", "template"]
    nodes: bytes
    """The message tree: records of chat/history.py."""
    replies: list[ReplyFacts]
    end_tokens: list[int]
    previous: int | None = None
    """The turn that previous_response_id names: matching starts behind it."""


class NextTurn(msgspec.Struct, frozen=True):
    """The prompt of the next turn: the first `kept` ids of the parent's sequence, followed by `added`."""

    parent: int
    """The turn whose sequence the prompt begins with; -1: none. If `kept` ends within the prompt of this turn (a retry,
    an edited reply), the new turn is its sibling: the ledger takes the turn's own parent instead."""
    kept: int
    """-1: `added` is the whole prompt, and the ledger compares it with the parent's sequence."""
    added: Ids32
    began: str | None
    """The reason why a branch begins here, or None: "root", "edited", "retry", "head", "template", "child".

    With `kept` -1, no branch begins if all of the parent's sequence stays.
    """
    generation_prompt: int = -1
    """See `ReplyFacts`."""
    new_nodes: bytes = b""
    """Node records of the new messages, `history.NODE`. A parent of -1-i is the i-th record of this field."""
    after_node: int = -1
    """The node that the first new message follows; -1: a root."""
    matched_messages: int = 0
    options: bytes = b""
    """Digest of the template options of this turn."""
    messages: bytes = b""
    """The new messages as msgpack, for the journal."""
    text: tuple[int, bytes] | None = None
    """Completions: (characters, `history.text_digest`) of the prompt's text."""
    continued: str = ""
    """Content of the last message that this turn continues. The reply's message is this text and the output."""


class ReplyMessage(msgspec.Struct, frozen=True):
    """A finished turn in the form that the client received."""

    digest: bytes
    reasoning: bytes
    calls: list[tuple[str, str, str]]
    """(id, name, arguments)."""
    in_reasoning: bool
    text: str
    """The text that the client received, with reasoning and calls as they were sampled."""
    hidden: str = ""
    """Text of sampled tokens after `text` that the client did not receive."""
    content: str = ""
    """`text` without reasoning and calls."""
    thoughts: str = ""
    """The reasoning in `text`."""
