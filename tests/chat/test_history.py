"""Messages are recognized by what they say, whatever clients change on the way; a slow reference tree agrees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from verl_server.chat.history import (
    ASSISTANT,
    HEAD,
    NO_REASONING,
    NODE,
    MessageKey,
    MessageTree,
    chain,
    head_digest,
    message_keys,
    options_digest,
    reasoning_digest,
    reply_digest,
)
from verl_server.chat.tools import read_tools


def assistant(content: str | None = "", arguments: Any = None, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content} | more
    if arguments is not None:
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        message["tool_calls"] = [call]
    return message


def key(message: dict[str, Any]) -> MessageKey:
    return message_keys([message])[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (assistant("a"), assistant(" a\n")),
        (assistant(None, "{}"), assistant("", {})),
        (assistant("", '{"a": 1, "b": 2}'), assistant("", '{"b":2,"a":1}')),
        (assistant("", '{"a": 1.0}'), assistant("", '{"a": 1}')),
        (assistant("", ""), assistant("", "{}")),
        (assistant("a"), {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "name": "x"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        (assistant("a", reasoning="r"), assistant("a", reasoning_content=" r ")),
        (assistant("a", reasoning=""), assistant("a")),
    ],
)
def test_the_same_message(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert key(first) == key(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (assistant("a"), assistant("b")),
        (assistant("a"), {"role": "user", "content": "a"}),
        (assistant("", '{"a": 1}'), assistant("", '{"a": 2}')),
        (assistant("", '{"a": 1}'), assistant("", '{"a": "1"}')),
        (assistant("", '{"a": 1'), assistant("", '{"a": 1}')),
        (assistant("", "{}"), assistant("")),
        (assistant("", '{"a": 1.5}'), assistant("", '{"a": 1}')),
    ],
)
def test_another_message(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert key(first).digest != key(second).digest


def test_a_result_is_told_by_the_ordinal_of_its_call() -> None:
    def results(*ids: str, calls: tuple[str, str] = ("x", "y")) -> list[MessageKey]:
        function = {"name": "add", "arguments": "{}"}
        asking = {"role": "assistant", "tool_calls": [{"id": each, "function": function} for each in calls]}
        return message_keys([asking, *({"role": "tool", "tool_call_id": i, "content": "3"} for i in ids)])[1:]

    assert results("x", "y") == results("p", "q", calls=("p", "q"))
    assert results("x", "y") != results("y", "x")
    assert results("x", "y") == results("?", "!")  # ids that no call has: in their order


def test_a_reply_has_the_digest_of_the_message_that_comes_back() -> None:
    sent = assistant("text\n", '{"b": 1, "a": "ä"}', reasoning_content="why")
    assert key(sent).digest == reply_digest("text", [("add", '{"a":"ä","b":1}')])
    assert key(sent).reasoning == reasoning_digest("why") != NO_REASONING
    assert key(assistant("\ud800")).digest == reply_digest("\ud800", [])


def test_nothing_in_a_message_raises() -> None:
    odd: list[Any] = ["[" * 100_000, '{"a": NaN}', '{"a": 1e999}', [1], 7, {"a": {1: 2}}]
    for arguments in odd:
        key(assistant("", arguments))
    message_keys([{"role": "assistant", "tool_calls": ["x", {"function": None}]}, {"content": 5}])


def test_the_head_has_tools_and_template_and_a_turn_has_the_rest() -> None:
    tools = read_tools([{"type": "function", "function": {"name": "add"}}])
    assert head_digest(tools, {}) != head_digest([], {})
    assert head_digest(tools, {"chat_template": "x"}) != head_digest(tools, {})
    assert head_digest(tools, {"enable_thinking": True}) == head_digest(tools, {})
    assert options_digest({"a": 1, "b": 2}) == options_digest({"b": 2, "a": 1, "tools": [1]})
    assert options_digest({"a": 1}) != options_digest({"a": 2})


# -- the tree against a slow reference ---------------------------------------------------------------------------------


class SlowTree:
    """All paths of a tree, written out."""

    def __init__(self) -> None:
        self.paths: list[list[tuple[MessageKey, int]]] = []  # one for each node: (message, turn) from the head on
        self.nodes = bytearray()
        self.calls: dict[int, tuple[str, ...]] = {}
        self._head = self._append(-1, HEAD, b"h" * 16, NO_REASONING, -1)

    def _append(self, parent: int, role: int, digest: bytes, reasoning: bytes, turn: int) -> int:
        self.nodes += NODE.pack(parent, turn, role, b"", digest, reasoning, 0, 0)
        above = self.paths[parent] if parent >= 0 else []
        self.paths.append([*above, (MessageKey(role, digest, reasoning), turn)])
        return len(self.paths) - 1

    def grow(self, rng: random.Random, turn: int) -> None:
        node = rng.randrange(len(self.paths))
        for _ in range(rng.randrange(3)):
            message = random_key(rng)
            node = self._append(node, message.role, message.digest, message.reasoning, -1)
        reply = random_key(rng)
        self._append(node, ASSISTANT, reply.digest, reply.reasoning, turn)
        if reply.calls:
            self.calls[turn] = reply.calls

    def _known_by_calls(self, turn: int, sent: MessageKey) -> bool:
        calls = self.calls.get(turn)
        return calls is not None and sent.calls == calls and list(self.calls.values()).count(calls) == 1

    def best(self, keys: list[MessageKey], undelivered: set[int]) -> tuple[int, list[int]]:
        """Return (preferred node, all nodes) that fit the most messages."""
        for count in range(len(keys), -1, -1):
            fits = []
            for i, path in enumerate(self.paths):
                pairs = list(zip(path[1:], keys, strict=False))
                if len(path) == count + 1 and all(
                    (known.digest == sent.digest or self._known_by_calls(turn, sent))
                    and (sent.reasoning == NO_REASONING or sent.reasoning == known.reasoning)
                    for (known, turn), sent in pairs[:count]
                ):
                    same = sum(known.digest == sent.digest for (known, _), sent in pairs[:count])
                    equal = sum(known.reasoning == sent.reasoning for (known, _), sent in pairs[:count])
                    lost = sum(turn in undelivered for _, turn in path[1:])
                    fits.append((same, equal, -lost, i))
            if fits:
                return max(fits)[3], sorted(i for *_, i in fits)
        raise AssertionError("the head always fits")


def random_key(rng: random.Random) -> MessageKey:
    """Return a message that may have ids of calls, which some turn's reply may have, too."""
    reasoning = rng.choice([NO_REASONING, NO_REASONING, b"r" * 8, b"s" * 8])
    calls = (f"call_{rng.randrange(12)}",) if rng.random() < 0.5 else ()
    return MessageKey(ASSISTANT, bytes([rng.randrange(2)]) * 16, reasoning, calls)


@pytest.mark.parametrize("seed", range(60))
def test_matches_what_a_slow_tree_matches(seed: int) -> None:
    rng = random.Random(seed)
    slow = SlowTree()
    for turn in range(rng.randrange(1, 40)):
        slow.grow(rng, turn)
    undelivered = {turn for turn in range(40) if rng.random() < 0.3}
    tree = MessageTree(bytes(slow.nodes), undelivered, slow.calls)
    for _ in range(40):
        keys = [random_key(rng) for _ in range(rng.randrange(7))]
        if rng.random() < 0.5:  # a conversation that is known
            keys = [known for known, _ in slow.paths[rng.randrange(len(slow.paths))][1:]] + keys[:2]
        match = tree.match(tree.heads(b"h" * 16), keys)
        node, nodes = slow.best(keys, undelivered)
        assert (match.path[-1], match.ends) == (node, nodes)
        assert match.matched == len(slow.paths[node]) - 1
        assert match.path == tree.path_to(node)


def test_an_unknown_head_matches_nothing() -> None:
    tree = MessageTree(chain([random_key(random.Random(0))], b"h" * 16))
    assert tree.match(tree.heads(b"x" * 16), [random_key(random.Random(0))]).matched == 0
    assert MessageTree(b"").heads() == []


def test_the_turn_nearest_to_a_node() -> None:
    slow = SlowTree()
    rng = random.Random(3)
    for turn in range(20):
        slow.grow(rng, turn)
    tree = MessageTree(bytes(slow.nodes))
    for node, path in enumerate(slow.paths):
        through = [each[-1][1] for each in slow.paths if each[: len(path)] == path and each[-1][1] >= 0]
        found = tree.turn_through(node)
        assert path[-1][1] == found if path[-1][1] >= 0 else (found in through or not through)
