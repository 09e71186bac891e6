"""The work of planning a prompt grows with the conversation, not with its square. Steps are counted, not seconds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.steps import Steps
from verl_server.chat import cut
from verl_server.chat.cut import extension
from verl_server.chat.history import NODE, MessageTree, message_keys
from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import ReplyFacts

REPLY = ReplyFacts(
    delivered=True,
    turn=0,
    parent=-1,
    prompt_tokens=1,
    output_tokens=1,
    generation_prompt=0,
    end_token=-1,
    in_reasoning=False,
    calls=[],
    options=b"",
)


def test_a_search_for_the_nearest_turn_looks_at_each_node_once() -> None:
    counts: list[int] = []
    for size in (100, 200):
        tree = MessageTree(b"".join(NODE.pack(i - 1, -1, 2, b"", bytes(16), bytes(8), 0, 0) for i in range(size)))
        with Steps() as steps:
            assert tree.turn_through(size // 2) == -1
        counts.append(steps.count)
    assert counts[1] < 2.5 * counts[0], counts


def test_results_find_their_calls_without_a_search() -> None:
    class Id(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Id.compared += 1
            return str.__eq__(self, other)

    count = 200
    calls = [{"id": Id(f"call {k}"), "function": {"name": "f", "arguments": "{}"}} for k in range(count)]
    results = [{"role": "tool", "tool_call_id": Id(f"call {k}"), "content": "x"} for k in reversed(range(count))]
    keys = message_keys([{"role": "assistant", "content": "", "tool_calls": calls}, *results])
    assert len(set(keys)) == count + 1
    assert Id.compared <= 4 * count


def test_marks_in_a_callers_text_are_counted_once() -> None:
    text = "".join(f"cut-here-{k}." for k in range(300))
    rendered: list[str] = []

    def render(messages: Any, options: Any) -> str:
        rendered.append(str(messages))
        return str(messages)

    class Written(str):
        searched = 0

        def __contains__(self, part: object) -> bool:
            Written.searched += 1
            return str.__contains__(self, part)  # type: ignore[arg-type]

    real = cut.json.dumps
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cut.json, "dumps", lambda *args, **kwargs: Written(real(*args, **kwargs)))
        extension(
            REPLY,
            [{"role": "user", "content": text}],
            {},
            render,
            lambda t: [1],
            OutputFormat.of(None, None, None),
            cut.EndTokens([], str),
        )
    assert any("cut-here-300." in each for each in rendered)
    assert Written.searched < 10
