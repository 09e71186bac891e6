"""Texts of a session's turns: each message is in one turn of a branch, whatever the history of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.sessions import test_reading as reading
from tests.server.sessions.building import plan
from tests.server.sessions.test_reading import ASK, CALL, Talk, calling, chat
from verl_server.messages.session_types import Branch, Message, MessageCall
from verl_server.server.sessions import turn_texts
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.records import Record, framed, read_record
from verl_server.server.sessions.session import Session
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.trajectory import branches
from verl_server.server.sessions.turn_texts import TurnTexts

SYSTEM = {"role": "system", "content": "Add numbers."}
tools = reading.tools


class Store:
    """Keeps the records as the journal writes them."""

    failure = None

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def put(self, record: Record) -> None:
        self.records.append(framed(record))

    async def flushed(self) -> None:
        pass


@pytest.fixture
def talk(tools: Any) -> Talk:
    talk = Talk(tools)
    talk.ledger.store = Store()
    return talk


def texts_of(session: Session, retries: bool = False) -> list[Branch]:
    turns, texts = stored_turns(session), TurnTexts(session)
    for turn in turns:
        texts.read(turn)
    return [texts.placed(branch) for branch in branches(turns, "once", retries)]


def session_of(talk: Talk) -> Session:
    return talk.ledger.table.find(talk.caller.session_id)


def said(talk: Talk, text: str, *messages: dict[str, Any]) -> dict[str, Any]:
    """Let the policy answer a request with `text`. Return the assistant's message that a client sends back."""
    read = talk.read("chat", chat(*messages))
    _, reply = talk.sample(read.next, read.output, text)
    return calling(reply) if reply.calls else {"role": "assistant", "content": reply.content}


def shown(branch: Branch) -> list[tuple[list[str], str | None]]:
    """Return (texts of the messages, text of the reply) of each turn."""
    return [([m.text for m in turn.messages], turn.reply and turn.reply.text) for turn in branch.turns]


def test_each_message_is_in_one_turn(talk: Talk) -> None:
    history = [SYSTEM, ASK]
    called = said(talk, CALL, *history)
    call_id = called["tool_calls"][0]["id"]
    history += [called, {"role": "tool", "tool_call_id": call_id, "content": "2"}]
    history += [said(talk, "<think>\nso\n</think>\n\nTwo.", *history), ASK | {"content": "and 2 + 2?"}]
    said(talk, "Four.", *history)
    (branch,) = texts_of(session_of(talk))
    first, second, third = branch.turns
    assert first.messages == [Message("system", "Add numbers."), Message("user", str(ASK["content"]))]
    call = MessageCall("add", '{"a": 1.0}', call_id)
    assert first.reply == Message("assistant", reasoning="hm", calls=[call])
    assert second.messages == [Message("tool", "2", call_id=call_id)]
    assert second.reply is not None and (second.reply.reasoning.strip(), second.reply.text.strip()) == ("so", "Two.")
    assert third.messages == [Message("user", "and 2 + 2?")] and third.reply == Message("assistant", "Four.")


def test_a_fork_has_what_is_new_behind_the_shared_tokens(talk: Talk) -> None:
    one = said(talk, "one", ASK)
    said(talk, "two", ASK, one, ASK | {"content": "b"})
    said(talk, "again", ASK, one, ASK | {"content": "b"})
    said(talk, "three", ASK, one, ASK | {"content": "c"})
    found = texts_of(session_of(talk), retries=True)
    assert {(*shown(branch)[1][0], shown(branch)[1][1]) for branch in found} == {
        ("b", "two"),
        ("b", "again"),  # another turn stored the message
        ("c", "three"),
    }
    main, *forks = found
    assert shown(main)[0] == ([ASK["content"]], "one")
    for branch in forks:
        assert shown(branch)[0] == ([], None) and branch.turns[0].end <= branch.shared_tokens
        assert branch.fork_of == 0


def test_a_history_that_was_edited_shows_the_edit(talk: Talk) -> None:
    one = said(talk, "one", ASK)
    said(talk, "two", ASK, one | {"content": "ONE"}, ASK | {"content": "b"})
    branches = texts_of(session_of(talk))
    edited = next(branch for branch in branches if any("ONE" in texts for texts, _ in shown(branch)))
    whole = [text for texts, reply in shown(edited) for text in [*texts, reply] if text]
    assert whole in ([ASK["content"], "ONE", "b", "two"], ["ONE", "b", "two"])


def test_a_whole_other_history_is_one_turn(talk: Talk) -> None:
    """An agent that replaces its history by a summary."""
    one = said(talk, "one", SYSTEM, ASK)
    said(talk, "two", SYSTEM, ASK, one, ASK | {"content": "b"})
    said(talk, "three", SYSTEM, ASK | {"content": "Summary: one, two."})
    last = next(branch for branch in texts_of(session_of(talk)) if shown(branch)[-1][1] == "three")
    assert shown(last)[-1][0][-1] == "Summary: one, two."
    assert "one" not in [reply for _, reply in shown(last)]


def test_long_texts_are_cut_and_counted(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_texts, "MOST_CHARACTERS", 10)
    said(talk, "y" * 25, ASK | {"content": "x" * 100})
    (branch,) = texts_of(session_of(talk))
    assert branch.turns[0].messages == [Message("user", "x" * 10, cut=90)]
    assert branch.turns[0].reply == Message("assistant", "y" * 10, cut=15)


def test_a_server_that_was_started_again_has_the_texts(talk: Talk) -> None:
    one = said(talk, CALL, SYSTEM, ASK)
    said(talk, "two", SYSTEM, ASK, one, ASK | {"content": "b"})
    before = texts_of(session_of(talk))
    again = SessionLedger()
    store = talk.ledger.store
    assert isinstance(store, Store)
    again.record(session_of(talk).record)  # the session was made before the store
    for data in store.records:
        again.table.apply(read_record(data, 0)[0])
    assert texts_of(again.table.find(talk.caller.session_id)) == before
    assert session_of(talk).size == pytest.approx(again.table.find(talk.caller.session_id).size, rel=0.1)


def test_a_prompt_of_ids_has_no_messages(talk: Talk) -> None:
    talk.sample(plan([1, 2, 3], generation_prompt=-1), None, "def")
    (branch,) = texts_of(session_of(talk))
    assert shown(branch) == [([], "def")]
