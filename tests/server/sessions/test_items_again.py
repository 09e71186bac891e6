"""Conversations over `/v1/responses` in the shape of codex: streamed, with all items sent again in every request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO
from tests.server.sessions.test_conversations import Session
from verl_server.models.tiny import CHAT_TEMPLATE

TOOLS: list[Any] = [
    {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}},
    {
        "type": "namespace",
        "name": "team",
        "description": "Helpers.",
        "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
    },
    {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}},
    {"type": "web_search", "external_web_access": True},
]
RUN = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'
SPAWN = '<tool_call>\n{"name": "team__spawn", "arguments": {"message": "x"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "+ é\\n"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"</tool_call>'
REPLIES = [
    f"Look.\n{RUN}",
    f"{RUN}\n{SPAWN}",
    BROKEN,
    f"{BROKEN}\nAnd more.",
    f"{RUN}\nThen this.",
    f"One.\n{RUN}\nTwo.\n{PATCH}\nThree.",
    PATCH,
    "<tool_call>\nnonsense\n</tool_call>",
]


def item(role: str, text: str) -> dict[str, Any]:
    return {
        "type": "message", "id": f"msg_{text}", "role": role, "content": [{"type": "input_text", "text": text}]
    }  # fmt: skip


def outputs(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an output for each call, the first one as a list with an image."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    found: list[dict[str, Any]] = []
    for each in made:
        if each["type"] in ("function_call", "custom_tool_call"):
            output = f"output of {each['name']}" if found else [{"type": "input_text", "text": "seen"}, image]
            found.append({"type": f"{each['type']}_output", "call_id": each["call_id"], "output": output, "id": "o"})
    return found


def returned(made: dict[str, Any]) -> dict[str, Any]:
    """Return an item as codex sends it again: without status, reasoning with its encrypted text, which is null."""
    kept = {key: value for key, value in made.items() if key not in ("status", "logprobs")}
    return kept | ({"encrypted_content": None} if made["type"] == "reasoning" else {})


def play(stack: Stack, replies: Sequence[str]) -> tuple[Session, list[str | None]]:
    """Play a conversation. Return its session, and how the branch of each turn began."""
    session = Session(stack)
    session.says(*replies)
    sent = [item("developer", "Rules."), item("developer", "Skills."), item("user", "Place."), item("user", "Task.")]
    began = []
    for turn in range(len(replies)):
        answer = session.post(
            "/v1/responses", input=sent, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True, stream=True,
            reasoning={"summary": "auto"}, store=False, include=["reasoning.encrypted_content"], prompt_cache_key="k",
            client_metadata={"turn": str(turn)},
        )  # fmt: skip
        frames = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert frames[-1]["type"] == "response.completed"
        began.append(frames[-1]["response"]["meta_info"]["session"]["began"])
        made = [frame["item"] for frame in frames if frame["type"] == "response.output_item.done"]
        sent += [*map(returned, made), *outputs(made)]
        if not outputs(made):
            sent.append(item("user", f"Go on {turn}."))
    return session, began


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    saved = dict(INFO)
    INFO.update(context_length=4000, max_req_input_len=3999)
    yield
    INFO.update(saved)


@pytest.fixture(scope="module")
def stack(text_folder: Path, small: None) -> Iterator[Stack]:
    one = Stack(text_folder, api_key="owner")
    yield one
    one.close()


@pytest.fixture(scope="module")
def thinking(text_folder: Path, small: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose template shows the reasoning of earlier messages."""
    template = tmp_path_factory.mktemp("templates") / "thinking.jinja"
    think = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    template.write_text(CHAT_TEMPLATE.replace("{{ message['content'] }}", think + "{{ message['content'] }}"))
    one = Stack(text_folder, api_key="owner", chat_template=str(template))
    yield one
    one.close()


def test_a_conversation_of_calls_is_one_branch(stack: Stack) -> None:
    session, began = play(stack, REPLIES)
    assert began == ["root", *[None] * (len(REPLIES) - 1)]
    (branch,) = session.trajectory()["branches"]
    assert len(branch["turns"]) == len(REPLIES)
    text = stack.text.decoder(False)(branch["ids"])
    assert all(reply in text for reply in REPLIES), "the sampled ids, not a rendering of the items"


def test_reasoning_that_comes_back_is_one_branch(thinking: Stack) -> None:
    replies = [f"<think>\nhm {i}\n</think>\n\n{reply}" for i, reply in enumerate(REPLIES)]
    _, began = play(thinking, replies)
    assert began == ["root", *[None] * (len(replies) - 1)]


def test_a_compaction_and_a_sub_agent_are_branches_of_their_own(stack: Stack) -> None:
    """The request for a summary has no tools, and a sub-agent has others: both are other prompts from the start."""
    session = Session(stack)
    session.says(RUN, "Summary.", "Done.", "Helped.")
    start = [item("developer", "Rules."), item("user", "Task.")]
    first = session.post("/v1/responses", input=start, tools=TOOLS).json()
    made = [*map(returned, first["output"]), *outputs(first["output"])]
    summary = session.post("/v1/responses", input=[*start, *made, item("user", "Summarize.")], tools=[]).json()
    text = summary["output"][0]["content"][0]["text"]
    last = session.post("/v1/responses", input=[*start, item("user", f"So far: {text}")], tools=TOOLS).json()
    helper = session.post("/v1/responses", input=[start[0], item("user", "Help.")], tools=TOOLS[:1]).json()
    began = [each["meta_info"]["session"]["began"] for each in (first, summary, last, helper)]
    assert began == ["root", "head", "edited", "child"]
    assert [len(branch["turns"]) for branch in session.trajectory()["branches"]] == [1, 1, 1, 1]
