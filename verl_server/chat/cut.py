"""The cut: renders the ids that follow a stored turn without rendering the stored turns again.

Templates change earlier messages: they remove reasoning, add empty blocks, move tools and system texts. So new messages
are rendered after a short dummy conversation, and the dummy is cut off. `next_turn` calls this module in text workers;
`render` is the chat template, and `encode` the tokenizer without special tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import ReplyFacts
from verl_server.chat.templates import Message
from verl_server.chat.tools import template_messages
from verl_server.errors import BadRequestError

Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Returns the text of messages (as `template_messages` returns them) with options of `ChatTemplates.render`."""
Encode = Callable[[str], list[int]]

_USER: Message = {"role": "user", "content": "."}
_HEAD_OPTIONS = ("tools", "documents")
"""Options that templates write at the beginning of a prompt, or into its last message. The stored prompt has them."""
_MARK = "cut-here-"


class Extension(NamedTuple):
    """The ids and the text that follow a stored turn."""

    ids: list[int]
    text: str
    """The text that was encoded, for the end of the prompt."""


class EndTokens:
    """The tokens with which the model ends its answers."""

    def __init__(self, ids: Sequence[int], token_text: Callable[[int], str]) -> None:
        self.texts = {token: text for token in ids if (text := token_text(token))}

    def first(self, text: str) -> tuple[int, int] | None:
        """Return (position, id) of the first end token in a text. The longest one counts at the same position."""
        found = [(text.find(shown), -len(shown), token) for token, shown in self.texts.items() if shown in text]
        if not found:
            return None
        position, _, token = min(found)
        return position, token

    def occur_in(self, messages: Sequence[Message]) -> bool:
        """Return True if a caller's text contains the text of an end token."""
        written = json.dumps(list(messages), ensure_ascii=False, default=str)
        return any(text in written for text in self.texts.values())


def extension(
    turn: ReplyFacts,
    new: Sequence[Message],
    options: Mapping[str, Any],
    render: Render,
    encode: Encode,
    format: OutputFormat,
    ends: EndTokens,
) -> Extension | None:
    """Return the ids and text that follow the reply of `turn` if the messages `new` follow it.

    Return None if the template permits no cut.

    Tool results in `new` have the ids of the turn's calls (`with_call_ids`).
    """
    options = cut_options(options)
    for dummy in _dummies(turn, new):
        tail = _tail(dummy, new, options, render)
        if tail is None:
            continue
        found = ends.first(tail)
        if ends.occur_in(new):
            # An end token in a caller's text is no end of the dummy. Without the callers' texts, it must be there too.
            probe = _tail(dummy, [_without_text(message) for message in new], options, render)
            if probe is None or ends.first(probe) != found:
                found = None
        if found is None and dummy.calls:
            continue
        extended = _encoded(turn, tail, found, encode, format, ends)
        if extended is not None:
            return extended
    return None


def after_prompt(
    new: Sequence[Message], options: Mapping[str, Any], render: Render, encode: Encode
) -> Extension | None:
    """Return the ids and text that follow a prompt ending with a user's message, if the messages `new` follow it.

    The first of `new` is an assistant's message that was not sampled. None: the template permits no cut.
    """
    options = cut_options(options)
    try:
        start = render([_USER], {**options, "add_generation_prompt": False})
        text = render(template_messages([_USER, *new]), options)
    except BadRequestError:
        return None
    # Texts may agree where tokens do not: a tokenizer may join the end of `start` with what follows.
    before, ids = encode(start), encode(text)
    if not text.startswith(start) or ids[: len(before)] != before:
        return None
    return Extension(ids[len(before) :], text[len(start) :])


def opening_text(options: Mapping[str, Any], render: Render) -> str | None:
    """Return the text with which the template opens an answer after a user's message. None: it cannot be separated."""
    options = cut_options(options)
    if not options.get("add_generation_prompt", True):
        return ""
    try:
        closed = render([_USER], {**options, "add_generation_prompt": False})
        opened = render([_USER], {**options, "add_generation_prompt": True})
    except BadRequestError:
        return None
    return opened[len(closed) :] if opened.startswith(closed) else None


def opening_length(prompt: Sequence[int], opening: str | None, encode: Encode, ends: EndTokens) -> int:
    """Return the number of ids at the end of a prompt that only open the answer, or -1 if it is unknown."""
    if not opening:
        return -1 if opening is None else 0
    ids = encode_behind_end(opening, encode, ends)
    return len(ids) if list(prompt[-len(ids) :]) == ids else -1


def encode_behind_end(text: str, encode: Encode, ends: EndTokens) -> list[int]:
    """Return the ids of a text that follows an end token. Tokenizers encode the start of a text differently."""
    for token, shown in ends.texts.items():
        ids = encode(shown + text)
        if ids[:1] == [token]:
            return ids[1:]
    return encode(text)


def cut_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` without the options of the stored prompt's head and without `continue_final_message`.

    New messages are rendered with the returned options.
    """
    kept = {name: value for name, value in options.items() if name not in _HEAD_OPTIONS}
    kept.pop("continue_final_message", None)
    return kept


def with_call_ids(turn: ReplyFacts, reply: Message | None, new: Sequence[Message]) -> list[Message]:
    """Return `new` with the sampled ids of the calls that its tool results answer.

    `reply` is the turn's reply as the client sent it back. Clients may have changed the ids; some templates write them.
    """
    given = [call.get("id") for call in (reply or {}).get("tool_calls") or () if isinstance(call, dict)]
    sampled = {old: call_id for old, (call_id, _) in zip(given, turn.calls, strict=False) if isinstance(old, str)}
    return [
        message | {"tool_call_id": sampled[message["tool_call_id"]]}
        if message.get("role") == "tool" and message.get("tool_call_id") in sampled
        else message
        for message in new
    ]


class _Dummy(NamedTuple):
    """An assistant's message that stands for the stored reply."""

    message: Message
    mark: str
    calls: bool


def _dummies(turn: ReplyFacts, new: Sequence[Message]) -> Iterator[_Dummy]:
    """Yield the shapes of the dummy, the best first: with all calls, with one call, with content only.

    Templates look up the calls of tool results. Some templates refuse more than one call, and some omit calls.
    """
    written = json.dumps(list(new), default=str)
    taken = set(re.findall(rf"{_MARK}(\d+)\.", written))
    number = next(i for i in itertools.count() if str(i) not in taken)
    mark = f"{_MARK}{number}."
    if turn.calls:
        yield _Dummy(_calling(turn.calls, mark), mark, True)
        if len(turn.calls) > 1:
            answered = next((message.get("tool_call_id") for message in new if message.get("role") == "tool"), None)
            first = next((call for call in turn.calls if call[0] == answered), turn.calls[0])
            yield _Dummy(_calling([first], mark), mark, True)
    yield _Dummy({"role": "assistant", "content": mark}, mark, False)


def _calling(calls: Sequence[tuple[str, str]], mark: str) -> Message:
    """Return a message with these calls (id, name). The last one has the mark in its arguments."""
    marks = ["." for _ in calls[1:]] + [mark]
    shown = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"mark": text}}}
        for (call_id, name), text in zip(calls, marks, strict=True)
    ]
    return {"role": "assistant", "content": "", "tool_calls": shown}


def _tail(dummy: _Dummy, new: Sequence[Message], options: Mapping[str, Any], render: Render) -> str | None:
    """Return the text after the mark. None if the template refuses the messages, or drops or repeats the mark."""
    try:
        text = render(template_messages([_USER, dummy.message, *new]), options)
    except BadRequestError:
        return None
    before, mark, tail = text.rpartition(dummy.mark)
    return tail if mark and mark not in before else None


def _encoded(
    turn: ReplyFacts, tail: str, end: tuple[int, int] | None, encode: Encode, format: OutputFormat, ends: EndTokens
) -> Extension | None:
    if end is None:
        return Extension(encode_behind_end(tail, encode, ends), tail)
    position, token = end
    text = tail[position:]
    ids = encode(text)
    if ids[:1] != [token]:
        return None
    if turn.end_token == token:
        return Extension(ids[1:], text)
    reasoning = format.reasoning_format
    if turn.in_reasoning and turn.end_token < 0 and reasoning is not None:
        ids = [*encode(reasoning.close), *ids]  # a turn that was cut off in its reasoning
    return Extension(ids, text)


def _without_text(message: Message) -> Message:
    """Return the message with a dot for each text of the caller."""
    kept = {key: value for key, value in message.items() if key in ("role", "tool_call_id", "name", "tool_calls")}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [
            call | {"function": {"name": call["function"]["name"], "arguments": {}}} for call in kept["tool_calls"]
        ]
    return kept | {"content": "."}
