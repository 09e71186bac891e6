"""The next turn's prompt begins with the stored tokens, whatever the chat template does to earlier messages."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import msgspec
import pytest

from tests.chat.session_fakes import (
    TEMPLATES,
    TOOLS,
    BadRequestError,
    PlayedSession,
    Turn,
    call_text,
    copied,
    result,
    system,
    user,
)
from verl_server.chat.history import text_digest
from verl_server.chat.next_turn import plan_text
from verl_server.chat.session_view import CompletionText, ReplyFacts, SessionView

THINK = "<think>\nthe sum\n</think>\n\n"
CALLS = {
    "qwen": call_text("add", a=1),
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefgh1"}]',
    "glm": call_text("add", a=1),
}


def answers(template: str) -> list[str]:
    """Return texts of eight turns, with thinking and calls as the template has them."""
    think = THINK if template == "qwen" else ""
    call = CALLS.get(template)
    turns = [think + "the answer", think + (call or "x"), think + "so: the end"] * 3
    return turns[:8]


def play(session: PlayedSession, *, keep_reasoning: bool = False, tools: Any = None) -> list[Turn]:
    """Play eight turns as an agent that sends back what it received."""
    messages: list[dict[str, Any]] = [user("the question")]
    if session.source != TEMPLATES["plain"]:
        messages.insert(0, system("Be brief."))
    for text in answers(next(name for name, source in TEMPLATES.items() if source == session.source)):
        reply = session.answer(session.ask(messages, tools), text)
        if not keep_reasoning:
            reply.pop("reasoning_content", None)
        messages.append(reply)
        calls = reply.get("tool_calls")
        messages += [result(call, '{"sum": 3}') for call in calls] if calls else [user("and the next?")]
    return session.turns


@pytest.mark.parametrize("keep_reasoning", [True, False])
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_prompts_of_one_conversation_extend_each_other(name: str, keep_reasoning: bool) -> None:
    session = PlayedSession(name)
    turns = play(session, keep_reasoning=keep_reasoning, tools=None if name == "plain" else TOOLS)
    assert [turn.began for turn in turns] == ["root"] + [None] * 7
    for before, turn in itertools.pairwise(turns):
        assert turn.prompt[: len(before.sequence)] == before.sequence
        assert turn.shared == len(before.sequence)
    # Nothing sampled was tokenized again: the sampled ids are not those that the tokenizer gives.
    texts = session.tokens.text(turns[-1].prompt)
    assert session.tokens.encode(texts) != turns[-1].prompt


@pytest.mark.parametrize("name", ["qwen", "llama", "glm"])
def test_the_cut_is_what_a_whole_render_has(name: str) -> None:
    # Without reasoning and tools, these templates leave earlier messages alone: both ways must agree.
    session = PlayedSession(name)
    messages = [user("the question")]
    end = "<|user|>" if name == "glm" else ""
    for text in ("yes", "no", "the end"):
        turn = session.ask(messages)
        assert turn.prompt == session.whole(messages)
        messages += [session.answer(turn, text, end, exact=True), user("why?")]


def asked(name: str = "qwen") -> tuple[PlayedSession, list[dict[str, Any]]]:
    """Return a session after two turns, and its messages."""
    session = PlayedSession(name)
    messages = [system("Be brief."), user("the question")]
    for text in (f"{THINK}first", f"{THINK}second"):
        messages.append(session.answer(session.ask(messages), text))
        messages.append(user("more"))
    return session, messages


def test_an_edited_reply_keeps_the_prompt_before_it() -> None:
    session, messages = asked()
    messages[2] = copied(messages[2], content="another", reasoning_content=None)
    turn = session.ask(messages[:4])
    first = session.turns[0]
    opening = first.planned.next.generation_prompt
    assert turn.began == "edited" and opening > 0
    assert turn.prompt[: len(first.prompt) - opening] == first.prompt[:-opening]
    assert session.tokens.text(turn.prompt).endswith(
        "another<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n" + ASSISTANT
    )
    assert session.tokens.text(turn.prompt) == session.tokens.text(session.whole(messages[:4]))
    assert turn.parent == -1 and turn.shared == 0  # a sibling of the first turn
    # The conversation goes on behind the edited reply.
    messages[4:] = [session.answer(turn, f"{THINK}third"), user("on")]
    after = session.ask(messages)
    assert after.began is None and after.prompt[: len(turn.sequence)] == turn.sequence


ASSISTANT = "<|im_start|>assistant\n"


def test_an_edited_question_is_a_fork_behind_the_last_common_turn() -> None:
    session, messages = asked()
    turn = session.ask([*messages[:3], user("less")])
    assert turn.began == "edited"
    assert turn.shared == len(session.turns[0].sequence) and turn.parent == 0
    assert session.tokens.text(turn.prompt).endswith("<|im_start|>user\nless<|im_end|>\n" + ASSISTANT)


def test_an_edited_first_question_is_rendered_anew() -> None:
    session, messages = asked()
    other = [messages[0], user("another question")]
    turn = session.ask(other)
    assert turn.began == "edited" and turn.prompt == session.whole(other)
    assert turn.planned.next.parent == 0 and turn.parent == -1  # a sibling of the turn that it differs from


def test_compacted_history_is_rendered_anew() -> None:
    session, messages = asked()
    compacted = [messages[0], user("Summary: the question was asked."), user("more")]
    turn = session.ask(compacted)
    assert turn.began == "edited" and turn.prompt == session.whole(compacted)


def test_a_retry_is_a_sibling_with_the_same_prompt() -> None:
    session, messages = asked()
    turn = session.ask(messages[:4])
    assert turn.began == "retry"
    assert (turn.prompt, turn.parent, turn.shared) == (
        session.turns[1].prompt,
        session.turns[1].parent,
        session.turns[1].shared,
    )
    reply = session.answer(turn, f"{THINK}other")
    after = session.ask([*messages[:4], reply, user("on")])
    assert after.began is None and after.parent == turn.number


def test_a_retry_with_other_options_has_another_opening() -> None:
    session, messages = asked()
    turn = session.ask(messages[:4], enable_thinking=False)
    assert turn.began == "retry" and turn.parent == 0
    assert session.tokens.text(turn.prompt).endswith(ASSISTANT + "<think>\n\n</think>\n\n")
    root = session.ask(messages[:2], enable_thinking=False)
    assert root.prompt == session.whole(messages[:2], enable_thinking=False)


def test_a_retry_of_an_open_reasoning_is_parsed_inside_it() -> None:
    source = TEMPLATES["qwen"].removesuffix("{% endif %}") + "<think>\n{% endif %}"
    session = PlayedSession(source)
    session.end_tokens = [session.tokens.id("<|im_end|>")]
    messages = [user("a")]
    session.answer(session.ask(messages), "the sum\n</think>\n\nfirst")
    assert session.ask(messages).planned.ending.endswith("<think>\n")


def test_equal_replies_are_told_apart_by_their_reasoning() -> None:
    session = PlayedSession()
    messages = [user("the question")]
    replies = [session.answer(session.ask(messages), f"<think>\n{why}\n</think>\n\nyes") for why in ("a", "b", "c")]
    for number, reply in enumerate(replies):
        assert session.ask([*messages, reply, user("so")]).parent == number
    silent = copied(replies[0], reasoning_content=None)
    assert session.ask([*messages, silent, user("so")]).parent == 2  # the latest
    other = copied(replies[0], reasoning_content="changed")
    assert session.ask([*messages, other, user("so")]).began == "edited"


def test_a_delivered_reply_is_preferred() -> None:
    session = PlayedSession()
    messages = [user("the question")]
    shown = session.answer(session.ask(messages), "yes")
    session.answer(session.ask(messages), "yes", delivered=False)
    assert session.ask([*messages, shown, user("so")]).parent == 0


@pytest.mark.parametrize(
    ("end", "text", "between"),
    [
        ("", f"{THINK}yes", "\n<|im_start|>user"),
        ("<|endoftext|>", f"{THINK}yes", "<|im_end|>\n<|im_start|>user"),
        (None, f"{THINK}yes, bu", "<|im_end|>\n<|im_start|>user"),
        (None, "<think>\nthe su", "</think><|im_end|>\n<|im_start|>user"),
        ("", "<think>\nthe su", "\n<|im_start|>user"),
    ],
    ids=["end", "other end", "length", "length in reasoning", "end in reasoning"],
)
def test_how_a_turn_ended(end: str | None, text: str, between: str) -> None:
    session = PlayedSession()
    turn = session.ask([user("a")])
    reply = session.answer(turn, text, end)
    after = session.ask([user("a"), reply, user("so")])
    assert after.began is None
    assert session.tokens.text(after.prompt[len(turn.sequence) :]).startswith(between)


def test_a_turn_that_was_cut_off_goes_on() -> None:
    session = PlayedSession()
    turn = session.ask([user("a")])
    part = session.answer(turn, "the first ", None)
    messages = [user("a"), part]
    after = session.ask(messages, continue_final_message=True)
    assert after.prompt == turn.sequence and after.began is None
    session.answer(after, "and the second")
    # The client joins both parts to one message.
    joined = copied(part, content="the first and the second")
    assert part["content"] == "the first "
    last = session.ask([user("a"), joined, user("so")])
    assert last.began is None and last.parent == after.number
    with pytest.raises(BadRequestError, match="complete turn"):
        session.ask([user("a"), joined], continue_final_message=True)


def test_other_tools_begin_a_branch_with_a_new_head() -> None:
    session, messages = asked()
    turn = session.ask(messages, TOOLS)
    assert turn.began == "head" and turn.prompt == session.whole(messages, TOOLS)
    reply = session.answer(turn, f"{THINK}third")
    after = session.ask([*messages, reply, user("on")], TOOLS)
    assert after.began is None and after.parent == turn.number
    # A system message with the time is no other conversation, either.
    messages[0] = system("Be brief. It is noon.")
    assert session.ask(messages).began == "head"


def test_a_sub_agent_is_a_child() -> None:
    session, messages = asked()
    other = [system("You search files."), user("the question")]
    turn = session.ask(other)
    assert (turn.began, turn.parent, turn.planned.next.matched_messages) == ("child", -1, 0)
    session.answer(turn, "found")
    assert session.ask(messages).began is None


def test_template_history_is_rendered_whole() -> None:
    session = PlayedSession(history="template")
    messages = [user("a")]
    for text in (f"{THINK}first", f"{THINK}second"):
        turn = session.ask(messages)
        assert turn.prompt == session.whole(messages)
        messages += [session.answer(turn, text), user("more")]
    assert turn.began == "template"  # the template removed the first reasoning
    assert turn.planned.next.parent == 0


def test_calls_are_matched_by_their_parsed_arguments() -> None:
    session = PlayedSession()
    turn = session.ask([user("a")], TOOLS)
    reply = session.answer(turn, '<tool_call>\n{"name": "add", "arguments": {"b": 1.0, "a": [2]}}\n</tool_call>')
    reply["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": [2], "b": 1})
    reply["tool_calls"][0]["id"] = "call_rewritten"
    after = session.ask([user("a"), reply, result(reply["tool_calls"][0], "3")], TOOLS)
    assert after.began is None and after.parent == 0
    reply["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": [2], "b": 2})
    assert session.ask([user("a"), reply, result(reply["tool_calls"][0], "3")], TOOLS).began == "edited"


def test_results_of_several_calls_follow_at_once() -> None:
    session = PlayedSession()
    turn = session.ask([user("a")], TOOLS)
    reply = session.answer(turn, f"{call_text('add', a=1)}\n{call_text('look', b=2)}")
    results = [result(call, "ok") for call in reply["tool_calls"]]
    both = session.ask([user("a"), reply, *results], TOOLS)
    assert both.began is None
    assert session.tokens.text(both.prompt).count("<|im_start|>user") == 2  # the question, and both results
    session.answer(both, "done")
    swapped = session.ask([user("a"), reply, *results[::-1]], TOOLS)
    assert swapped.began == "edited"


def test_messages_behind_a_named_turn() -> None:
    session, messages = asked()
    turn = session.ask([user("less")], previous=0)
    assert (turn.parent, turn.began) == (0, "edited")
    assert session.ask([user("more")], previous=0).began == "retry"
    assert session.ask([messages[0], user("x")], previous=1).parent == 1
    with pytest.raises(BadRequestError, match="head of a stored prompt"):
        session.ask([system("Be long."), user("x")], previous=1)
    with pytest.raises(BadRequestError, match="head of a stored prompt"):
        session.ask([user("x")], TOOLS, previous=1)
    with pytest.raises(BadRequestError, match="did not sample"):
        session.ask([user("x"), {"role": "assistant", "content": "y"}, user("z")], previous=1)


def test_messages_that_the_template_refuses() -> None:
    session = PlayedSession("mistral")
    turn = session.ask([user("a")])
    reply = session.answer(turn, " b")
    with pytest.raises(BadRequestError, match="alternate"):
        session.ask([user("a"), reply, user("c"), user("d")])


def test_new_messages_travel_with_the_plan() -> None:
    session, messages = asked()
    planned = session.plan(messages)
    assert msgspec.msgpack.decode(planned.next.messages) == messages[-1:]


# -- ids and texts -----------------------------------------------------------------------------------------------------


def facts(turn: int, prompt: int, output: int, end: int = -1, **more: Any) -> ReplyFacts:
    given: dict[str, Any] = {"parent": -1, "delivered": True} | more
    return ReplyFacts(
        turn=turn,
        prompt_tokens=prompt,
        output_tokens=output,
        generation_prompt=-1,
        end_token=end,
        in_reasoning=False,
        calls=[],
        options=b"",
        **given,
    )


def completion(prompt: str, shown: str, hidden: str = "") -> CompletionText:
    return CompletionText(len(prompt), text_digest(prompt), len(shown), text_digest(shown), hidden)


@pytest.mark.parametrize(
    ("end", "hidden", "text", "kept", "rest"),
    [
        (-1, "", "ask: yes and", 9, " and"),
        (-1, "\nObs:", "ask: yes\nObs: 42", 9, " 42"),
        (-1, "\nObs: ", "ask: yes\nObs:42", None, None),
        (2, "", "ask: yes and", 8, " and"),
        (2, "", "ask: yes</s> and", 9, " and"),
        (-1, "", "ask: no", None, None),
    ],
    ids=["length", "stop string", "more than the stop string", "end cut", "end shown", "other"],
)
def test_texts_follow_a_completion(end: int, hidden: str, text: str, kept: int | None, rest: str | None) -> None:
    turn = facts(0, 5, 4, end, text=completion("ask:", " yes", hidden))
    plan = plan_text(SessionView("stored", b"", [turn], [2]), text, lambda t: [*map(ord, t)], lambda token: "</s>")
    if kept is None:
        assert plan is None
    else:
        assert plan is not None and rest is not None
        assert (plan.kept, array("i", plan.added).tolist()) == (kept, [*map(ord, rest)])


def test_the_same_text_behind_an_unseen_output_is_a_retry() -> None:
    """The client of a lost reply, or of one without text, sends the same prompt: it does not continue the output."""
    turns = [
        facts(0, 5, 4, text=completion("ask:", " yes")),
        facts(1, 12, 1, text=completion("ask: yes and", ""), parent=0),
    ]
    view = SessionView("stored", b"", turns, [2])
    plan = plan_text(view, "ask: yes and", lambda t: [*map(ord, t)], lambda token: "</s>")
    assert plan is not None and (plan.parent, plan.kept) == (0, 9)
    assert plan_text(SessionView("stored", b"", turns[1:], [2]), "ask: yes and", lambda t: [0], str) is None
