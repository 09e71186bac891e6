"""The message tree of a session: digests of messages, the records of the tree, and the match of a conversation.

The session ledger stores the tree as bytes and appends to it: `NextTurn.new_nodes`, and one node for each reply. A text
worker gets a copy and finds the messages of a request in it (`MessageTree.match`). No text is stored: two messages are
the same if their digests are.

Digests do not depend on details that clients change when they send messages back: ids of calls, the order of keys in
arguments and in tools, white space around a reply's content, null or "" instead of an absent key, `developer` instead
of `system`, marks of caches.
The reasoning has a digest of its own, because many clients do not send it back.

A reply that comes back with the ids of its calls is known by these ids, whatever its digest is. Programs rewrite calls
before they send them back: they add the defaults of a schema, convert "5" to 5, strip white space or wrap arguments
that are no JSON. The policy shall see what it sampled.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any, NamedTuple

from verl_server.chat.cut_json import completed
from verl_server.chat.templates import Message
from verl_server.chat.tools import Tool

HEAD, SYSTEM, USER, ASSISTANT, TOOL, OTHER = range(6)
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_HEAD_OPTIONS = ("tools", "documents", "chat_template")
"""Template options that change the beginning of a prompt: the options of the head. Other options belong to one turn."""
NO_REASONING = bytes(8)

NODE = struct.Struct("<iiB3s16s8sii")
"""A record of the tree, 44 bytes: parent, turn (-1: not a reply), role, flags, digest, digest of the reasoning, and two
numbers that only the ledger uses. In `NextTurn.new_nodes`, a parent of -1-i is the i-th record of this field."""


class MessageKey(NamedTuple):
    """Role and digests of a message. `fits` compares them."""

    role: int
    digest: bytes
    reasoning: bytes
    """Digest of the reasoning, or `NO_REASONING` if there is none."""
    calls: tuple[str, ...] = ()
    """Ids of the calls, if each call has one."""

    def fits(self, node: Node, calls: tuple[str, ...]) -> bool:
        """Return True if a client that received the message of `node` may have sent this message.

        `calls` are the ids of the calls in the message of `node`.
        """
        is_same = self.digest == node.digest or (bool(calls) and self.calls == calls)
        return is_same and self.reasoning in (NO_REASONING, node.reasoning)


class Node(NamedTuple):
    """A record of the tree."""

    parent: int
    turn: int
    role: int
    digest: bytes
    reasoning: bytes


class Match(NamedTuple):
    """The path of a conversation in the tree."""

    path: list[int]
    """Nodes from the start on: the start itself, then one node for each matched message. Empty: the head is unknown."""
    ends: list[int]
    """All nodes that fit the last matched message; `path` ends with the preferred one."""

    @property
    def matched(self) -> int:
        """Number of the messages that matched."""
        return max(len(self.path) - 1, 0)


class MessageTree:
    """The nodes of a session, for one request."""

    def __init__(
        self,
        nodes: bytes,
        undelivered: AbstractSet[int] = frozenset(),
        calls: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        """`undelivered` are turns whose reply no client received in full. Other turns are preferred in a match.

        `calls`: turn -> ids of the calls of its reply. Ids that several turns have identify none of them.
        """
        counts = Counter((calls or {}).values())
        self._calls = {turn: ids for turn, ids in (calls or {}).items() if counts[ids] == 1}
        self.nodes = [Node(*record[:3], *record[4:6]) for record in NODE.iter_unpack(nodes)]
        self._undelivered = undelivered
        self._children: dict[int, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            self._children[node.parent].append(i)

    def children(self, node: int) -> list[int]:
        """Return the nodes that follow a node, in the order in which they were appended."""
        return self._children.get(node, [])

    def replies_to(self, node: int) -> list[int]:
        """Return the turns whose prompt ends with this node."""
        return [self.nodes[child].turn for child in self.children(node) if self.nodes[child].turn >= 0]

    def heads(self, digest: bytes | None = None) -> list[int]:
        """Return the nodes of all heads, or of the heads with this digest."""
        roots = [i for i in self.children(-1) if self.nodes[i].role == HEAD]
        return [i for i in roots if digest is None or self.nodes[i].digest == digest]

    def reply(self, turn: int) -> int | None:
        """Return the node of a turn's reply."""
        return next((i for i, node in enumerate(self.nodes) if node.turn == turn), None)

    def path_to(self, node: int) -> list[int]:
        """Return the nodes from the head to `node`."""
        path = [node]
        while (node := self.nodes[node].parent) >= 0:
            path.append(node)
        return path[::-1]

    def turn_through(self, node: int) -> int:
        """Return the latest turn whose prompt or reply contains `node`, or else the nearest node above it. -1: none."""
        above = node
        searched = -1  # the node below which everything was looked at
        while above >= 0:
            below = [above]
            while below:
                last = below.pop()
                if self.nodes[last].turn >= 0:
                    return self.nodes[last].turn
                below += [child for child in self.children(last) if child != searched]
            searched, above = above, self.nodes[above].parent
        return -1

    def match(self, starts: Sequence[int], keys: Sequence[MessageKey]) -> Match:
        """Follow a conversation from the nodes `starts` as far as its messages are known.

        All nodes that fit are followed. Among those that fit the last matched message, the path with more equal
        messages is preferred, then the path with more equal reasoning, then the path with fewer undelivered replies,
        then the latest path.
        """
        ranks = {
            start: (0, 0, 0) for start in starts
        }  # node -> (equal messages, equal reasoning, -undelivered replies)
        depth = 0
        for key in keys:
            fitting: dict[int, tuple[int, int, int]] = {}
            for node, (same, equal, delivered) in ranks.items():
                for child in self.children(node):
                    known = self.nodes[child]
                    if key.fits(known, self._calls.get(known.turn, ())):
                        late = known.turn in self._undelivered
                        fitting[child] = (
                            same + (key.digest == known.digest),
                            equal + (key.reasoning == known.reasoning),
                            delivered - late,
                        )
            if not fitting:
                break
            ranks, depth = fitting, depth + 1
        if not ranks:
            return Match([], [])
        best = max(ranks, key=lambda node: (*ranks[node], node))
        path = [best]
        for _ in range(depth):
            path.append(self.nodes[path[-1]].parent)
        return Match(path[::-1], sorted(ranks))


# -- digests -----------------------------------------------------------------------------------------------------------


def message_keys(messages: Sequence[Message]) -> list[MessageKey]:
    """Return the keys of messages in OpenAI's shape."""
    keys = []
    calls: dict[Any, int] = {}  # id -> ordinal, of the last message with calls
    results = 0
    for message in messages:
        role = str(message.get("role"))
        ordinal = None
        if role == "assistant":
            calls, results = {}, 0
            for i, call in enumerate(message_calls(message)):
                calls.setdefault(str(call.get("id")), i)
        elif role == "tool":
            # The id of a call is not compared: the ordinal of the call says which result this is.
            ordinal, results = calls.get(str(message.get("tool_call_id")), results), results + 1
        shown = [_call_key(call) for call in message_calls(message)]
        digest = _message_digest(role, content_text(message.get("content")), shown, ordinal)
        ids = tuple(call.get("id") for call in message_calls(message))
        named = tuple(each for each in ids if isinstance(each, str) and each)
        keys.append(
            MessageKey(
                _ROLES.get(role, OTHER),
                digest,
                reasoning_digest(message_reasoning(message)),
                named if len(named) == len(ids) else (),
            )
        )
    return keys


def reply_digest(content: str, calls: Sequence[tuple[str, str]]) -> bytes:
    """Return the digest that `message_keys` returns for this reply. `calls` has (name, arguments as JSON text)."""
    return _message_digest("assistant", content, [(name, _canonical(arguments)) for name, arguments in calls], None)


def reasoning_digest(reasoning: str | None) -> bytes:
    """Return the digest of a reply's reasoning, 8 bytes. `NO_REASONING` if there is no text."""
    stripped = (reasoning or "").strip()
    return text_digest(stripped, 8) if stripped else NO_REASONING


def head_digest(tools: Sequence[Tool], options: Mapping[str, Any]) -> bytes:
    """Return the digest of the head, which precedes the messages: tools, documents, and the template itself."""
    definitions = [_definition(tool.definition) for tool in tools]
    return text_digest(_json([definitions, options.get("documents"), options.get("chat_template")]))


def _definition(tool: Mapping[str, Any]) -> str:
    """Return a tool's definition as JSON with sorted keys, without absent values and without marks of caches."""
    shown = {name: value for name, value in tool.items() if value is not None and name != "cache_control"}
    if isinstance(function := shown.get("function"), dict):
        shown["function"] = {k: v for k, v in function.items() if v is not None and k != "cache_control"}
    return json.dumps(shown, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def options_digest(options: Mapping[str, Any]) -> bytes:
    """Return the digest of the template options of one turn, without those of the head."""
    return text_digest(_json({name: value for name, value in sorted(options.items()) if name not in _HEAD_OPTIONS}))


def _message_digest(role: str, content: str, calls: Sequence[tuple[str, str]], ordinal: int | None) -> bytes:
    role = "system" if role == "developer" else role
    shown = content.strip() if role == "assistant" else content  # agents strip the replies that they send back
    return text_digest(_json([role, shown, list(calls), ordinal]))


def text_digest(text: str, size: int = 16) -> bytes:
    """Return the digest of a text, for example of a completion's prompt or output."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def content_text(content: Any) -> str:
    """Return the content of a message as one text. A list of parts is joined."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def message_reasoning(message: Message) -> str | None:
    """Return the reasoning that a message has under one of the usual keys, or None."""
    given = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
    return None if given is None else str(given)


def message_calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message, in OpenAI's shape."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _call_key(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(function.get("name")), _canonical(function.get("arguments"))


def _canonical(arguments: Any) -> str:
    """Return a call's arguments as JSON with sorted keys, or the text as it is if it is no JSON object.

    Arguments that were cut count as their whole members: that is what an Anthropic client gets, and sends back.
    """
    try:
        value = _loaded(arguments) if isinstance(arguments, str) and arguments else arguments or {}
        if isinstance(value, dict):
            return json.dumps(_plain_numbers(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        pass
    return arguments if isinstance(arguments, str) else repr(arguments)


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return json.loads(completed(arguments))


def _plain_numbers(value: Any) -> Any:
    """Return the value with whole numbers as integers: JavaScript clients write 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(each) for key, each in value.items()}
    return value


# -- records -----------------------------------------------------------------------------------------------------------


def chain(keys: Sequence[MessageKey], head: bytes | None = None) -> bytes:
    """Return the records of consecutive messages, after a new head if there is one: `NextTurn.new_nodes`."""
    new = [MessageKey(HEAD, head, NO_REASONING)] if head is not None else []
    return b"".join(
        NODE.pack(-i, -1, key.role, b"", key.digest, key.reasoning, 0, 0) for i, key in enumerate([*new, *keys])
    )
