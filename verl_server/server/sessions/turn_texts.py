"""`TurnTexts`: the messages and replies of a session's turns as texts, for the branches of its trajectory.

The route of a session's trajectory reads all turns, and then adds texts to each branch. A request repeats the history
of its conversation, and a turn stores only messages that no earlier turn has. The message tree says which messages a
turn follows, so each message of a branch is in the first of its turns that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from verl_server.chat.history import NODE, content_text, message_calls, message_reasoning
from verl_server.messages.session_types import Branch, BranchTurn, Message, MessageCall
from verl_server.server.sessions.stored_turn import StoredTurn, TurnsOfSession
from verl_server.server.sessions.turn import Turn

MOST_CHARACTERS = 2**20
"""Most characters of one text. The rest is cut off and counted."""
_MESSAGES = msgspec.msgpack.Decoder(list[dict[str, Any]])


class TurnTexts:
    """The texts of one session. Call `read` with each of its turns, then `placed`."""

    def __init__(self, session: TurnsOfSession) -> None:
        self._session = session
        self._messages: dict[int, Message] = {}  # node of the message tree -> message

    def read(self, turn: StoredTurn) -> None:
        """Read the messages that a turn was the first to store."""
        stored = turn.stored
        if not stored.messages or stored.prompt_node < 0:
            return
        messages = _MESSAGES.decode(stored.messages)
        for (node, _), message in zip(self._up(stored.prompt_node), reversed(messages), strict=False):
            self._messages.setdefault(node, _recorded(message))

    def placed(self, branch: Branch) -> Branch:
        """Return a branch whose turns have their new messages and their replies.

        Turns within the `shared_tokens` have none: the branch `fork_of` has them.
        """
        shown: set[int] = set()
        own = {turn.turn for turn in branch.turns if turn.finish_reason != "cut"}
        turns = []
        for turn in branch.turns:
            if turn.turn in own:
                new = self._new(self._session.turn(turn.turn), own, shown)
                if turn.end > branch.shared_tokens:
                    turn = self._with_texts(turn, new)
            turns.append(turn)
        return msgspec.structs.replace(branch, turns=turns)

    def _with_texts(self, turn: BranchTurn, messages: list[Message]) -> BranchTurn:
        return msgspec.structs.replace(turn, messages=messages, reply=_reply(self._session.turn(turn.turn)))

    def _new(self, turn: Turn, own: set[int], shown: set[int]) -> list[Message]:
        """Return the messages of a turn's prompt that are not `shown`, and add them there.

        `own` are the turns of the branch: their replies are no messages of a prompt.
        """
        messages: list[Message] = []
        for node, replied in self._up(turn.prompt_node):
            if node in shown:
                break
            shown.add(node)
            if replied < 0 and node in self._messages:  # a head has no message
                messages.append(self._messages[node])
            elif replied >= 0 and replied not in own and (reply := _reply(self._session.turn(replied))) is not None:
                messages.append(reply)
        return messages[::-1]

    def _up(self, node: int) -> Iterator[tuple[int, int]]:
        """Yield (node, turn whose reply it is or -1) from a node up to its head."""
        while node >= 0:
            parent, turn = NODE.unpack_from(self._session.nodes.data, node * NODE.size)[:2]
            yield node, turn
            node = parent


def _reply(turn: Turn) -> Message | None:
    """Return the reply of a turn, or None if it has no text."""
    content, reasoning = turn.parsed or (turn.reply, "")
    calls = [] if turn.calls is None else msgspec.json.decode(turn.calls, type=list[MessageCall])
    if not (content or reasoning or calls):
        return None
    return _bounded("assistant", content, reasoning, calls)


def _recorded(message: dict[str, Any]) -> Message:
    """Return the message of a request, which is in OpenAI's shape."""
    calls = []
    for call in message_calls(message):
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        arguments = function.get("arguments") or ""
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        calls.append(MessageCall(str(function.get("name")), text, str(call.get("id") or "")))
    reasoning = message_reasoning(message) or ""
    call_id = str(message.get("tool_call_id") or "")
    return _bounded(str(message.get("role")), content_text(message.get("content")), reasoning, calls, call_id)


def _bounded(role: str, text: str, reasoning: str, calls: list[MessageCall], call_id: str = "") -> Message:
    """Return a message whose texts have at most `MOST_CHARACTERS` each."""
    texts = [text, reasoning, *(call.arguments for call in calls)]
    cut = sum(max(0, len(each) - MOST_CHARACTERS) for each in texts)
    if cut:
        text, reasoning = text[:MOST_CHARACTERS], reasoning[:MOST_CHARACTERS]
        calls = [msgspec.structs.replace(call, arguments=call.arguments[:MOST_CHARACTERS]) for call in calls]
    return Message(role, text, reasoning, calls, call_id, cut)
