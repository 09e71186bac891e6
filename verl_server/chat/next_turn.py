"""The plan of a session's next turn: the stored ids that the prompt keeps, and the new ids that follow them.

A text worker calls `plan_next_turn` for a conversation and `plan_text` for a completion; `sessions/ids_plan` plans
prompts of token ids. The functions are pure: they read a snapshot of the session, and the ledger joins the ids of the
plan. A turn that ends after the snapshot adds a branch and changes no stored turn, so the plan stays valid.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from verl_server.chat import cut
from verl_server.chat.cut import Encode, EndTokens, Extension, Render
from verl_server.chat.history import (
    ASSISTANT,
    SYSTEM,
    Match,
    MessageKey,
    MessageTree,
    chain,
    head_digest,
    message_keys,
    options_digest,
    text_digest,
)
from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import Ids32, NextTurn, ReplyFacts, SessionView
from verl_server.chat.templates import Message
from verl_server.chat.tools import Tool, template_messages
from verl_server.errors import BadRequestError

_SAME_HEAD = "the head of a stored prompt cannot change: send the whole conversation in input"


class PlannedTurn(NamedTuple):
    """A plan, and the text at the end of its prompt, which determines how the output begins."""

    next: NextTurn
    ending: str


def plan_next_turn(
    view: SessionView,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    render: Render,
    encode: Encode,
    format: OutputFormat,
    token_text: Callable[[int], str],
) -> PlannedTurn:
    """Plan the turn of a conversation in OpenAI's shape, with contents that are strings.

    `options` are the keyword arguments of `ChatTemplates.render`, including `tools` in the template's shape. `render`
    renders messages in the shape of `template_messages` as text. `token_text` returns the text of one token id; special
    tokens have a text, too.

    Raise BadRequestError if the template refuses the messages, or if they cannot follow `view.previous`.
    """
    ends = EndTokens(view.end_tokens, token_text)
    return _Planner(view, options, tools, render, encode, format, ends).plan(messages)


class _Planner:
    """One plan. The methods are the cases, in the order in which they are tried."""

    def __init__(
        self,
        view: SessionView,
        options: Mapping[str, Any],
        tools: Sequence[Tool],
        render: Render,
        encode: Encode,
        format: OutputFormat,
        ends: EndTokens,
    ) -> None:
        self._view = view
        self._options = options
        self._render = render
        self._encode = encode
        self._format = format
        self._ends = ends
        self._facts = {facts.turn: facts for facts in view.replies}
        self._tree = MessageTree(
            view.nodes,
            {facts.turn for facts in view.replies if not facts.delivered},
            {facts.turn: tuple(call_id for call_id, _ in facts.calls) for facts in view.replies if facts.calls},
        )
        self._head = head_digest(tools, options)
        self._has_tools = bool(tools)
        self._turn_options = options_digest(options)
        self._continues = bool(options.get("continue_final_message"))

    def plan(self, messages: Sequence[Message]) -> PlannedTurn:
        if self._view.previous is not None:
            return self._behind_previous(self._view.previous, messages)
        keys = message_keys(messages)
        match = self._tree.match(self._tree.heads(self._head), keys)
        if not match.matched:
            return self._without_common_message(messages, keys)
        place = _Place(match, messages, keys)
        if self._view.history == "template":
            return self._whole(place, "template")
        planned = self._known(place) or self._extended(place) or self._edited(place)
        return planned or self._whole(place, "edited")

    # -- the cases ----------------------------------------------------------------------------------------------------

    def _known(self, place: _Place) -> PlannedTurn | None:
        """Plan a conversation of known messages: the prompt of a turn again, or the continuation of a turn."""
        if place.matched < len(place.messages):
            return None
        if self._continues:
            turn = self._facts.get(self._tree.nodes[place.node].turn)
            if turn is None:
                return None
            if turn.end_token >= 0:
                raise BadRequestError(
                    "continue_final_message: the last message is a complete turn of this session. Leave "
                    "continue_final_message out, or add a user's message."
                )
            again = any(f.parent == turn.turn and f.options == self._turn_options for f in self._view.replies)
            inside = self._ending_inside(turn)
            planned = self._planned(place, turn, _length(turn), [], "retry" if again else None, inside, opening=-1)
            # The client joins the two outputs to one message: the reply takes the place of the one that it continues.
            next = msgspec.structs.replace(
                planned.next,
                after_node=self._tree.nodes[place.node].parent,
                continued=str(place.messages[-1].get("content") or ""),
            )
            return PlannedTurn(next, inside)
        repeated = [
            (node == place.node, turn, facts)
            for node in place.match.ends
            for turn in self._tree.replies_to(node)
            if (facts := self._facts.get(turn)) is not None and facts.options == self._turn_options
        ]
        if not repeated:
            return None
        _, _, turn = max(repeated, key=lambda each: each[:2])
        ending = cut.opening_text(self._options, self._render)
        if ending is None:
            ending = self._render(template_messages(place.messages), self._options)
        return self._planned(place, turn, turn.prompt_tokens, [], "retry", ending, opening=turn.generation_prompt)

    def _extended(self, place: _Place) -> PlannedTurn | None:
        """Plan a prompt that continues a stored turn: its last assistant message is the turn's reply.

        Return None if the last assistant message is no stored reply.
        """
        if self._continues:
            return None
        last = next((i for i in range(len(place.messages)) if place.messages[~i].get("role") == "assistant"), None)
        if last is None:
            return None
        new = place.messages[len(place.messages) - last :]
        reply = len(place.messages) - last - 1
        if reply >= place.matched:
            return None
        node = place.match.path[reply + 1]
        turn = self._facts.get(self._tree.nodes[node].turn)
        if turn is None:
            return None
        began = None
        if self._tree.children(node):
            began = "retry" if place.matched == len(place.messages) and self._is_prompt(place) else "edited"
        return self._extension(place, turn, place.messages[reply], new, began) or self._whole(place, "template")

    def _edited(self, place: _Place) -> PlannedTurn | None:
        """Plan a prompt with an assistant's message that was not sampled: keep the stored prompt, render the rest."""
        if self._continues:
            return None
        for depth in range(min(place.matched, len(place.messages) - 1), 0, -1):
            if place.messages[depth].get("role") != "assistant":
                continue
            if depth < place.matched and self._tree.nodes[place.match.path[depth + 1]].turn >= 0:
                return None  # this reply was sampled: the change is behind it
            turns = [self._facts.get(turn) for turn in self._tree.replies_to(place.match.path[depth])]
            known = [turn for turn in turns if turn is not None and turn.generation_prompt >= 0]
            turn = max(known, key=lambda facts: facts.turn, default=None)
            if turn is None:
                continue
            added = cut.after_prompt(place.messages[depth:], self._options, self._render, self._encode)
            if added is None:
                return None
            return self._planned(
                place, turn, turn.prompt_tokens - turn.generation_prompt, added.ids, "edited", added.text
            )
        return None

    def _without_common_message(self, messages: Sequence[Message], keys: Sequence[MessageKey]) -> PlannedTurn:
        """Plan a conversation that is new under this head. It may be known with other tools."""
        began = "child" if self._view.replies else "root"
        parent = -1
        if (known := self._under_other_head(keys)) is not None:
            began, parent = "head", self._tree.turn_through(known)
        heads = self._tree.heads(self._head)
        ids, text = self._rendered(messages)
        next = NextTurn(
            parent=parent,
            kept=-1 if parent >= 0 else 0,
            added=_ids32(ids),
            generation_prompt=self._opening(ids),
            new_nodes=chain(keys, None if heads else self._head),
            after_node=heads[-1] if heads else -1,
            began=began,
            options=self._turn_options,
            messages=_packed(messages),
        )
        return PlannedTurn(next, text)

    def _under_other_head(self, keys: Sequence[MessageKey]) -> int | None:
        """Return the last node of the conversation as it is known with other tools, or with another system message."""
        heads = self._tree.heads()
        match = self._tree.match(heads, keys)
        if any(key.role != SYSTEM for key in keys[: match.matched]):
            return match.path[-1]
        below = [node for head in heads for node in self._tree.children(head)]
        starts = [*heads, *(node for node in below if self._tree.nodes[node].role == SYSTEM)]
        match = self._tree.match(starts, keys[1:] if keys[0].role == SYSTEM else keys)
        # Sub-agents may begin with the same user's message. A reply in common makes it the same conversation.
        return match.path[-1] if any(self._tree.nodes[node].role == ASSISTANT for node in match.path) else None

    def _whole(self, place: _Place, began: str) -> PlannedTurn:
        """Render the whole conversation. The ledger finds the ids at the start that are stored."""
        ids, text = self._rendered(place.messages)
        parent = self._facts.get(self._tree.turn_through(place.node))
        return self._planned(place, parent, -1 if parent is not None else 0, ids, began, text)

    def _behind_previous(self, previous: int, messages: Sequence[Message]) -> PlannedTurn:
        """Plan messages that follow a turn which the caller named. The messages before it are not known as text."""
        node = self._tree.reply(previous)
        turn = self._facts.get(previous)
        if node is None or turn is None:
            raise BadRequestError(f"previous_response_id: turn {previous} of the session has no reply to follow.")
        path = self._tree.path_to(node)
        if self._has_tools and self._tree.nodes[path[0]].digest != self._head:
            raise BadRequestError(f"tools: {_SAME_HEAD}.")
        self._head = self._tree.nodes[path[0]].digest
        keys = message_keys(messages)
        if keys and keys[0].role == SYSTEM:
            if not (len(path) > 1 and keys[0].fits(self._tree.nodes[path[1]], ())):
                raise BadRequestError(f"instructions: {_SAME_HEAD}.")
            messages, keys = messages[1:], keys[1:]
        place = _Place(self._tree.match([node], keys), messages, keys)
        planned = self._known(place) or self._extended(place)
        if planned is None and any(message.get("role") == "assistant" for message in messages):
            raise BadRequestError(
                "input behind previous_response_id holds an assistant's message that this session did not sample: send "
                "the whole conversation in input, without previous_response_id."
            )
        if planned is None:
            began = "edited" if self._tree.children(node) else None
            planned = self._extension(place, turn, None, messages, began)
        if planned is None:
            raise BadRequestError(
                "previous_response_id: the chat template cannot render these messages behind a stored turn: send the "
                "whole conversation in input, without previous_response_id."
            )
        return planned

    # -- parts --------------------------------------------------------------------------------------------------------

    def _extension(
        self, place: _Place, turn: ReplyFacts, reply: Message | None, new: Sequence[Message], began: str | None
    ) -> PlannedTurn | None:
        new = cut.with_call_ids(turn, reply, new)
        added = cut.extension(turn, new, self._options, self._render, self._encode, self._format, self._ends)
        if added is None:
            return None
        return self._planned(place, turn, _length(turn), added.ids, began, added.text)

    def _planned(
        self,
        place: _Place,
        parent: ReplyFacts | None,
        kept: int,
        added: Sequence[int],
        began: str | None,
        ending: str,
        opening: int | None = None,
    ) -> PlannedTurn:
        next = NextTurn(
            parent=-1 if parent is None else parent.turn,
            kept=kept,
            added=_ids32(added),
            generation_prompt=self._opening(added) if opening is None else opening,
            new_nodes=chain(place.keys[place.matched :]),
            after_node=place.node,
            matched_messages=place.matched,
            began=began,
            options=self._turn_options,
            messages=_packed(place.messages[place.matched :]),
        )
        return PlannedTurn(next, ending)

    def _rendered(self, messages: Sequence[Message]) -> Extension:
        text = self._render(template_messages(messages), self._options)
        return Extension(self._encode(text), text)

    def _opening(self, ids: Sequence[int]) -> int:
        if self._continues:
            return -1
        opening = cut.opening_text(self._options, self._render)
        return cut.opening_length(ids, opening, self._encode, self._ends)

    def _ending_inside(self, turn: ReplyFacts) -> str:
        """Return a text that ends as the turn's sequence does, inside or outside of the reasoning."""
        reasoning = self._format.reasoning_format
        if reasoning is None:
            return ""
        return reasoning.open if turn.in_reasoning else reasoning.close

    def _is_prompt(self, place: _Place) -> bool:
        return any(self._tree.replies_to(node) for node in place.match.ends)


class _Place:
    """The point at which the messages of a request diverge from the tree of stored turns."""

    def __init__(self, match: Match, messages: Sequence[Message], keys: Sequence[MessageKey]) -> None:
        self.match = match
        self.messages = messages
        self.keys = keys
        self.matched = match.matched
        self.node = match.path[-1]


def plan_text(view: SessionView, text: str, encode: Encode, token_text: Callable[[int], str]) -> NextTurn | None:
    """Plan the turn of a completion whose prompt begins with the text of a stored prompt and output, else return None.

    `encode` adds no special tokens.
    """
    found = [
        (facts, *behind)
        for facts in view.replies
        if (behind := _behind_completion(facts, text, token_text)) is not None
    ]
    if not found:
        return None
    turn, kept, rest = max(found, key=lambda each: (each[1], each[0].delivered, each[0].turn))
    is_continued = kept < _length(turn) or any(facts.parent == turn.turn for facts in view.replies)
    began = "edited" if is_continued else None
    added = _ids32(encode(rest) if rest else [])
    return NextTurn(turn.turn, kept, added, began, text=(len(text), text_digest(text)))


def _behind_completion(facts: ReplyFacts, text: str, token_text: Callable[[int], str]) -> tuple[int, str] | None:
    """Return (number of kept ids, text after them) if `text` follows the completion of a turn, else None."""
    known = facts.text
    if known is None or known.prompt_length + known.shown_length > len(text):
        return None
    end = known.prompt_length + known.shown_length
    if text_digest(text[known.prompt_length : end]) != known.shown:
        return None
    if text_digest(text[: known.prompt_length]) != known.prompt:
        return None
    rest = text[end:]
    if not known.shown_length and not rest:
        return None  # the same prompt again: a retry of a turn whose tokens were never shown
    if facts.end_token >= 0:
        # The client did not see the end token. If the client's text does not have it either, the prompt has not.
        shown = token_text(facts.end_token)
        if shown and rest.startswith(shown):
            return _length(facts), rest[len(shown) :]
        return _length(facts) - 1, rest
    # A stop string was sampled, but not shown. Clients that know the string write it themselves.
    return (_length(facts), rest[len(known.hidden) :]) if rest.startswith(known.hidden) else None


def _packed(messages: Sequence[Message]) -> bytes:
    return msgspec.msgpack.encode(list(messages), enc_hook=str)


def _length(turn: ReplyFacts) -> int:
    return turn.prompt_tokens + turn.output_tokens


def _ids32(ids: Sequence[int]) -> Ids32:
    return array("i", ids).tobytes()
