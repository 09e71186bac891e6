"""Conversations over HTTP: what the trajectory holds is what the scheduler sampled, whatever the dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO
from tests.server.test_http_routes import events
from verl_server.errors import SessionUnavailableError
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.server.sessions.turn_ledger import TurnLedger

OWNER = {"Authorization": "Bearer owner"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


class Session:
    """One session on a stack, called as an agent calls it."""

    def __init__(self, stack: Stack, **body: Any) -> None:
        self.stack = stack
        created = stack.post("/sessions", body, headers=OWNER)
        assert created.status_code == 201, created.text
        self.id, self.key = created.json()["id"], created.json()["key"]

    def says(self, *texts: str) -> None:
        """Let the scheduler answer with these texts and EOS, one after the other."""
        left, text = list(texts), self.stack.text
        self.stack.scheduler.script = lambda req: [*text.encode(left.pop(0)), text.eos_token_ids[0]]

    def cuts(self, *texts: str) -> None:
        """Let the scheduler answer with these texts, which end at the largest number of tokens."""
        left, text = list(texts), self.stack.text
        self.stack.scheduler.script = lambda req: text.encode(left.pop(0))

    def post(self, path: str, **body: Any) -> Any:
        response = self.stack.post(path, body, headers={"Authorization": f"Bearer {self.key}"})
        assert response.status_code == 200, response.text
        return response

    def chat(self, messages: list[Any], **body: Any) -> dict[str, Any]:
        """Return the choice of a chat completion."""
        choice: dict[str, Any] = self.post("/v1/chat/completions", messages=messages, **body).json()["choices"][0]
        return choice

    def sent(self) -> TokenizedGenerateReq:
        return [m for m in self.stack.scheduler.received if isinstance(m, TokenizedGenerateReq)][-1]

    def trajectory(self, query: str = "") -> dict[str, Any]:
        answer = self.stack.get(f"/sessions/{self.id}/trajectory{query}", headers=OWNER)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def stack(text_folder: Path) -> Iterator[Stack]:
    small = {name: INFO[name] for name in ("context_length", "max_req_input_len")}
    INFO.update(context_length=4000, max_req_input_len=3999)
    one = Stack(text_folder, api_key="owner")
    yield one
    one.close()
    INFO.update(small)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_eight_turns_are_one_branch_of_sampled_ids(stack: Stack) -> None:
    session = Session(stack)
    replies = [CALL if turn % 2 else f"answer {turn}" for turn in range(8)]
    session.says(*replies)
    messages, sequence, made = [user("begin")], [], []
    for turn, text in enumerate(replies):
        choice = session.chat(messages, tools=[TOOL], max_tokens=200)
        prompt = session.sent().input_ids
        assert prompt[: len(sequence)] == sequence, "the prompt begins with everything before it"
        assert choice["meta_info"]["session"]["began"] == ("root" if turn == 0 else None)
        sequence = [*prompt, *stack.text.encode(text), stack.text.eos_token_ids[0]]
        message = choice["message"]
        messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
        if calls := message.get("tool_calls"):
            assert calls[0]["function"]["name"] == "add"
            made.append(calls[0]["id"])
            messages.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": "3"})
        else:
            messages.append(user(f"next {turn}"))
    (branch,) = session.trajectory()["branches"]
    assert branch["ids"] == sequence and branch["kind"] == "main"
    assert [call["id"] for turn in branch["turns"] for call in turn["calls"]] == made
    sampled = [token for text in replies for token in [*stack.text.encode(text), stack.text.eos_token_ids[0]]]
    assert [token for token, mask in zip(branch["ids"], branch["loss_mask"], strict=True) if mask] == sampled
    assert [value != 0.0 for value in branch["logprobs"]] == [bool(mask) for mask in branch["loss_mask"]]
    spans = [(span["version"], span["end"] - span["start"]) for span in branch["weight_versions"]]
    assert spans == [("default", len(text) + 1) for text in replies]


def test_an_edit_begins_a_branch_and_a_retry_is_a_sibling(stack: Stack) -> None:
    session = Session(stack)
    session.says("one", "two", "two again", "other")
    first = session.chat([user("a")])["message"]["content"]
    history = [user("a"), {"role": "assistant", "content": first}]
    told = [session.chat([*history, user("b")])["meta_info"]["session"] for _ in range(2)]
    assert [each["began"] for each in told] == [None, "retry"] and told[0]["parent"] == told[1]["parent"] == 0
    edited = session.chat([user("a"), {"role": "assistant", "content": "ONE"}, user("b")])["meta_info"]["session"]
    assert edited["began"] == "edited"
    branches = session.trajectory("?retries=true")["branches"]
    assert len(branches) == 3
    masked = sum(sum(branch["loss_mask"]) for branch in branches)
    assert masked == sum(len(text) + 1 for text in ("one", "two", "two again", "other"))


def test_the_trajectory_counts_what_no_branch_has(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(stack)
    session.says("one", "lost", "two", "sub")
    first = session.chat([user("a")])["message"]["content"]
    history = [user("a"), {"role": "assistant", "content": first}, user("b")]
    monkeypatch.setattr(TurnLedger, "delivered", lambda *_: None)  # no further reply reaches its client
    told = [session.chat(history)["meta_info"]["session"]["began"] for _ in range(2)]
    session.chat([user("z")])
    found = session.trajectory()
    began = [[turn["began"] for turn in branch["turns"]] for branch in found["branches"]]
    assert told == [None, "retry"] and began == [["root", "retry"], ["child"]]
    assert sum(sum(branch["loss_mask"]) for branch in found["branches"]) == 4 + 4 + 4
    assert (found["sampled_tokens"], found["retry_tokens"], found["unrecorded_turns"]) == (17, 5, 0)


def test_a_conversation_of_its_own_is_a_child(stack: Stack) -> None:
    session = Session(stack)
    session.says("one", "sub")
    session.chat([{"role": "system", "content": "main"}, user("a")])
    other = session.chat([{"role": "system", "content": "helper"}, user("z")])["meta_info"]["session"]
    assert other["began"] == "child" and other["child"]


def test_a_trajectory_has_texts_if_the_query_asks_for_them(stack: Stack) -> None:
    session = Session(stack)
    session.says("one", "sub", "sub again")
    session.chat([{"role": "system", "content": "main"}, user("a")])
    helper = [{"role": "system", "content": "helper"}, user("z")]
    session.chat(helper)
    session.chat([*helper, {"role": "assistant", "content": "SUB"}, user("y")])
    plain, full = session.trajectory(), session.trajectory("?text=true")
    assert all(turn["messages"] == [] and turn["reply"] is None for b in plain["branches"] for turn in b["turns"])
    assert full["branches"][0]["fork_of"] is None
    first, child = full["branches"][0]["turns"][0], full["branches"][1]["turns"][0]
    assert first["messages"] == [{"role": "system", "text": "main"}, {"role": "user", "text": "a"}]
    assert first["reply"] == {"role": "assistant", "text": "one"} and child["messages"][0]["text"] == "helper"
    accepted, sampled, ended = first["times"]
    assert accepted <= sampled <= ended <= full["now"]
    assert stack.get(f"/sessions/{session.id}/trajectory?text=1", headers=OWNER).status_code == 400


def test_a_stream_is_stored_like_a_whole_reply(stack: Stack) -> None:
    session = Session(stack)
    session.says("hello", "again")
    frames = events(session.post("/v1/chat/completions", messages=[user("a")], stream=True).text)
    text = "".join(f["choices"][0]["delta"].get("content") or "" for f in frames if f.get("choices"))
    last = [f for f in frames if f.get("choices") and f["choices"][0]["finish_reason"]][-1]
    assert text == "hello" and last["choices"][0]["meta_info"]["session"]["turn"] == 0
    choice = session.chat([user("a"), {"role": "assistant", "content": text}, user("b")])
    assert choice["meta_info"]["session"]["began"] is None
    assert len(session.trajectory()["branches"]) == 1


def test_both_dialects_continue_one_conversation(stack: Stack) -> None:
    session = Session(stack)
    session.says("hello", "bye")
    message = session.post("/v1/messages", model="m", max_tokens=50, messages=[user("a")]).json()
    assert message["meta_info"]["session"]["turn"] == 0
    text = message["content"][0]["text"]
    choice = session.chat([user("a"), {"role": "assistant", "content": text}, user("b")])
    assert choice["meta_info"]["session"] | {"new_tokens": 0} == {
        **{"id": session.id, "turn": 1, "parent": 0, "branch": 0, "began": None, "child": None, "replayed": False},
        **{"shared_tokens": len(session.sent().input_ids) - choice["meta_info"]["session"]["new_tokens"]},
        **{"new_tokens": 0, "matched_messages": 2},
    }


def test_a_schema_beside_tools_stays_one_conversation(stack: Stack) -> None:
    session = Session(stack)
    session.says('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', '{"sum": 1}')
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"tools": [tool], "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    first = session.chat([user("a")], **body)
    (call,) = first["message"]["tool_calls"]
    assert "<tool_call>" in session.sent().grammar and "sum" in session.sent().grammar
    result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
    second = session.chat([user("a"), first["message"], result], **body)
    assert second["message"]["content"] == '{"sum": 1}' and "tool_calls" not in second["message"]
    info = second["meta_info"]["session"]
    assert (info["parent"], info["branch"], info["matched_messages"]) == (0, 0, 2)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_a_forced_call_that_is_cut_stays_one_conversation(stack: Stack, dialect: str) -> None:
    session = Session(stack)
    session.cuts('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2', "ok")
    if dialect == "chat":
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        message = session.chat([user("a")], tools=[tool], tool_choice="required")["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "1"}
        info = session.chat([user("a"), message, result], tools=[tool])["meta_info"]["session"]
    else:
        body: Any = {"model": "m", "max_tokens": 90, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}
        asked = {**body, "messages": [user("a")], "tool_choice": {"type": "any"}}
        content = session.post("/v1/messages", **asked).json()["content"]
        assert content[0]["input"] == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": content[0]["id"], "content": "1"}
        messages = [user("a"), {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        info = session.post("/v1/messages", **body, messages=messages).json()["meta_info"]["session"]
    assert (info["parent"], info["matched_messages"], info["began"]) == (0, 2, None)


def test_completions_and_generate_follow_by_text_and_ids(stack: Stack) -> None:
    session = Session(stack)
    session.cuts("def", "jkl", "mno")
    first = session.post("/v1/completions", prompt="abc", max_tokens=3).json()["choices"][0]
    assert first["meta_info"]["session"]["began"] == "root"
    second = session.post("/v1/completions", prompt="abc" + first["text"] + "ghi", max_tokens=3).json()["choices"][0]
    assert second["meta_info"]["session"]["began"] is None
    ids = [*session.sent().input_ids, *stack.text.encode("jkl"), 65]
    third = session.post("/generate", input_ids=ids, sampling_params={"max_new_tokens": 3}).json()
    assert third["meta_info"]["session"]["began"] is None and "output_token_logprobs" not in third["meta_info"]
    (branch,) = session.trajectory()["branches"]
    assert branch["ids"][: len(ids)] == ids


def test_samples_of_one_request_are_siblings_with_seeds_of_their_own(stack: Stack) -> None:
    session = Session(stack, seed=7)
    session.says("x", "y", "z")
    answer = session.post("/v1/chat/completions", messages=[user("a")], n=3).json()
    told = [choice["meta_info"]["session"] for choice in answer["choices"]]
    assert [each["turn"] for each in told] == [0, 1, 2]
    sent = [m for m in stack.scheduler.received if isinstance(m, TokenizedGenerateReq)][-3:]
    assert len({each.sampling.sampling_seed for each in sent}) == 3


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"messages": [user("a")], "logprobs_mode": "raw"}, "logprobs_mode"),
        ("/v1/chat/completions", {"messages": [user("a")], "priority": 5}, "owner"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several prompts"),
        ("/generate", {"text": ["a", "b"]}, "one prompt"),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}, "/generate"),
    ],
)
def test_what_a_session_cannot_do_is_refused_by_name(stack: Stack, path: str, body: dict[str, Any], words: str) -> None:
    session = Session(stack)
    session.says("x", "y")
    response = stack.post(path, body, headers={"Authorization": f"Bearer {session.key}"})
    assert response.status_code == 400 and words in json.dumps(response.json()), response.text
    assert session.trajectory()["branches"] == []


def test_the_headers_name_session_and_turn(stack: Stack) -> None:
    session = Session(stack)
    session.says("x")
    response = session.post("/v1/chat/completions", messages=[user("a")])
    assert (response.headers["X-Session-ID"], response.headers["X-Session-Turn"]) == (session.id, "0")


def test_a_finished_session_aborts_its_running_turn_and_records_it(stack: Stack) -> None:
    session = Session(stack)
    session.says("long answer")
    before = sum(isinstance(each, TokenizedGenerateReq) for each in stack.scheduler.received)
    stack.scheduler.hold = True
    try:
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(session.chat, [user("a")])
            stack.scheduler.wait_for(TokenizedGenerateReq, before + 1)
            finished = stack.post(f"/sessions/{session.id}/finish", {}, headers=OWNER)
            assert finished.status_code == 200, finished.text
            choice = running.result(20)
    finally:
        stack.scheduler.release()
    assert choice["finish_reason"] in ("abort", "stop", "length")
    refused = stack.post("/v1/chat/completions", {"messages": [user("a")]}, headers={"Authorization": session.key})
    assert refused.status_code == 401


def test_a_key_that_comes_again_gets_the_same_answer_and_samples_once(stack: Stack) -> None:
    session = Session(stack)
    session.says("x", "y")
    headers = {"Authorization": f"Bearer {session.key}", "Idempotency-Key": "k"}
    body = {"messages": [user("a")]}
    first, second = (stack.post("/v1/chat/completions", body, headers=headers) for _ in range(2))
    assert first.status_code == 200 and first.content == second.content
    other = stack.post("/v1/chat/completions", {"messages": [user("b")]}, headers=headers)
    assert other.status_code == 409
    (branch,) = session.trajectory()["branches"]
    assert sum(branch["loss_mask"]) == 2
    (turn,) = stack.get(f"/sessions/{session.id}", headers=OWNER).json()["tree"]
    assert turn["delivered"] is True


def test_a_response_follows_the_one_that_it_names(stack: Stack) -> None:
    session = Session(stack)
    session.says("one", "two", "three")
    first = session.post("/v1/responses", input="a", instructions="Be short.").json()
    second = session.post("/v1/responses", input="b", previous_response_id=first["id"]).json()
    third = session.post("/v1/responses", input="c", previous_response_id=second["id"], store=True).json()
    assert third["store"] is first["store"] is True
    (branch,) = session.trajectory()["branches"]
    assert len(branch["turns"]) == 3
    headers = {"Authorization": f"Bearer {session.key}"}
    unknown = stack.post("/v1/responses", {"input": "a", "previous_response_id": "resp_ses_0_9"}, headers=headers)
    assert unknown.status_code == 404
    outside = stack.post("/v1/responses", {"input": "a", "previous_response_id": first["id"]}, headers=OWNER)
    assert outside.status_code == 400 and "POST /sessions" in outside.text


@pytest.mark.parametrize("stream", [False, True])
def test_no_reply_ends_before_its_turn_is_stored(stack: Stack, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    async def refuse(self: TurnLedger, *_: Any) -> None:
        raise SessionUnavailableError("the disk is full")

    session = Session(stack)
    session.says("x")
    monkeypatch.setattr(TurnLedger, "commit", refuse)
    body = {"messages": [user("a")], "stream": stream}
    response = stack.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {session.key}"})
    assert "the disk is full" in response.text and '"finish_reason":"stop"' not in response.text
    assert stream or (response.status_code, response.headers["Retry-After"]) == (503, "1")


def test_session_params_continue_a_request(stack: Stack) -> None:
    """SGLang's continual prompting: offset, dropped output, branches, and who may."""

    def ask(ids: list[int], key: str = "owner", **params: Any) -> Any:
        body = {"input_ids": ids, "session_params": {"id": session.id, **params}}
        return stack.post("/generate", body, headers={"Authorization": f"Bearer {key}"})

    session = Session(stack)
    session.cuts("one", "two", "three", "four", "five")
    first = ask([5, 6, 7]).json()
    rid, known = first["meta_info"]["id"], [5, 6, 7, *first["output_ids"]]
    second = ask([8, 9], rid=rid).json()
    assert session.sent().input_ids == [*known, 8, 9]
    assert second["meta_info"]["session"]["parent"] == 0 and second["meta_info"]["session"]["began"] is None
    ask([8], rid=rid, drop_previous_output=True)
    assert session.sent().input_ids == [5, 6, 7, 8]
    ask([8], rid=rid, offset=4)
    assert session.sent().input_ids == [*known[:4], 8]
    ask([8], key=session.key, rid=rid, offset=-1, replace=True)
    assert session.sent().input_ids == [*known[:-1], 8]
    branches = session.trajectory()["branches"]
    assert branches[0]["ids"] == [*known, 8, 9, *second["output_ids"]]
    assert len(branches) == 4 and sum(sum(branch["loss_mask"]) for branch in branches) == len("onetwothreefourfive")
    other = Session(stack)
    for key, wrong, status in ((session.key, other.id, 400), ("owner", "nobody", 404)):
        assert ask([1], key=key, id=wrong).status_code == status
    assert "no finished request" in ask([1], rid="unknown").text


def test_a_streaming_session_continues_its_last_request(stack: Stack) -> None:
    """SGLang's sessions that are opened with `streaming` need no names of requests, and others do."""

    def ask(ids: list[int], **params: Any) -> Any:
        body = {"input_ids": ids, "session_params": {"id": name, **params}}
        return stack.post("/generate", body, headers={"Authorization": "Bearer owner"}).json()

    helper = Session(stack)
    for streaming in (True, False):
        name = f"sgl{streaming}"
        opened = {"capacity_of_str_len": 9, "session_id": name, "streaming": streaming}
        assert stack.post("/open_session", opened, headers={"Authorization": "Bearer owner"}).json() == name
        helper.cuts("one", "two", "three")
        first = ask([5, 6])
        second = ask([8], rid=None)
        history = [5, 6, *first["output_ids"]] if streaming else []
        assert helper.sent().input_ids == [*history, 8]
        ask([9], rid=None, drop_previous_output=True)
        assert helper.sent().input_ids == ([*history, 8, 9] if streaming else [9])
        assert second["meta_info"]["session"]["parent"] == (0 if streaming else -1)


def test_the_trajectory_says_how_each_turn_was_sampled(stack: Stack) -> None:
    session = Session(stack, seed=3, sampling_params={"top_p": 0.5}, forced_sampling_params={"temperature": 0.25})
    session.says("one", '{"a": 1}', "three")
    messages: list[Any] = [user("a")]
    for body in (
        {"temperature": 2.0},
        {"response_format": {"type": "json_object"}, "top_p": 1.0},
        {"logit_bias": {"7": 1}},
    ):
        message = session.chat(messages, **body)["message"]
        messages += [{"role": "assistant", "content": message["content"]}, user("b")]
    (branch,) = session.trajectory()["branches"]
    first, second, third = (turn["sampling"] for turn in branch["turns"])
    seeds = [each.pop("sampling_seed") for each in (first, second, third)]
    assert len(set(seeds)) == 3
    assert first == {"temperature": 0.25, "top_p": 0.5}
    assert second.pop("grammar").startswith("blake2b:") and second == {"temperature": 0.25}
    assert third == {"temperature": 0.25, "top_p": 0.5, "logit_bias": {"7": 1.0}}
    assert [turn["overridden"] for turn in branch["turns"]] == [{"temperature": 2.0}, {}, {}]


def test_a_session_may_refuse_other_values_than_those_it_forces(stack: Stack) -> None:
    forced = {"temperature": 0.25, "logit_bias": None, "top_k": -1}
    session = Session(stack, forced_sampling_params=forced, forced_mode="refuse")
    session.says("one", "two")
    session.chat([user("a")])
    session.chat([user("b")], temperature=0.25, logit_bias={}, top_k=-1, top_p=0.5)
    for name, value in (("temperature", 1.0), ("logit_bias", {"7": 1}), ("top_k", 5)):
        body: dict[str, Any] = {"messages": [user("c")], name: value}
        answer = stack.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {session.key}"})
        assert answer.status_code == 400 and f"{name} is fixed in this session" in answer.text
