"""Conversations in the shape in which Claude Code sends them, with texts of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import INFO
from verl_server.messages.io_struct import TokenizedGenerateReq

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<eos>
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
STRICT_TEMPLATE = """{%- for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('A system message must be the first one.') }}{% endif %}[{{ m.role }}]{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
CACHE = {"cache_control": {"type": "ephemeral"}}
FLAG = {"type": "boolean", "default": False}
TOOLS = [
    {"name": "Bash", "description": "Run.", "input_schema": {"type": "object", "properties": {"command": {}}}},
    {"name": "Edit", "description": "Edit.", "input_schema": {"type": "object", "properties": {"all": FLAG}}},
]


@pytest.fixture(scope="module")
def stack(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    small = {name: INFO[name] for name in ("context_length", "max_req_input_len")}
    INFO.update(context_length=4000, max_req_input_len=3999)
    one = Stack(text_folder, api_key="owner", chat_template=str(path), served_model_name="policy")
    yield one
    one.close()
    INFO.update(small)


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content} | more


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Program:
    """Keeps a conversation as Claude Code does, and sends it in a session."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        made = stack.post("/sessions", {}, headers={"Authorization": "Bearer owner"}).json()
        self.id, self._key = made["id"], made["key"]
        self.system = [text("You are an agent.", **CACHE), text("Work in /w.", **CACHE)]
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [text("<reminder>The date.</reminder>"), text("Make a.py.")]},
            {"role": "system", "content": "These agents exist: none."},
        ]

    def turn(self, sampled: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Let the policy sample a text. Return (blocks of the streamed reply, `meta_info.session`)."""
        encode, eos = self._stack.text.encode, self._stack.text.eos_token_ids[0]
        self._stack.scheduler.script = lambda req: [*encode(sampled), eos]
        body = {
            "model": "claude-opus-4-8",
            "max_tokens": 64000,
            "stream": True,
            "system": self.system,
            "messages": self._with_cache_mark(),
            "tools": TOOLS,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        }
        headers = {"x-api-key": self._key, "anthropic-version": "2023-06-01", "anthropic-beta": "a-2025-01-01,b"}
        answer = self._stack.post(f"/s/{self._key}/v1/messages?beta=true", body, headers=headers)
        assert answer.status_code == 200, answer.text
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                key = "json" if delta["type"] == "input_json_delta" else "text"
                blocks[-1][key] += delta["partial_json" if key == "json" else "text"]
        session: dict[str, Any] = events[-2]["meta_info"]["session"]
        return blocks, session

    def _with_cache_mark(self) -> list[dict[str, Any]]:
        """Return the messages with the mark on the last block, which moves on with each request."""
        *before, last = self.messages
        if isinstance(last["content"], str):
            return self.messages
        *blocks, end = last["content"]
        return [*before, last | {"content": [*blocks, end | CACHE]}]

    def answers(self, *results: tuple[dict[str, Any], Any]) -> None:
        """Add the results of (call, content)."""
        content = [{"type": "tool_result", "tool_use_id": each["id"], "content": text} for each, text in results]
        self.messages.append({"role": "user", "content": content})

    def keeps(self, blocks: list[dict[str, Any]], *inputs: Any) -> list[dict[str, Any]]:
        """Add a reply, with these inputs in the place of those of its calls. Return its calls."""
        calls = [block for block in blocks if block["type"] == "tool_use"]
        texts = [text(block["text"].strip(), citations=None) for block in blocks if block["type"] == "text"]
        shown = [
            {"type": "tool_use", "id": each["id"], "name": each["name"], "input": given}
            for each, given in zip(calls, inputs, strict=True)
        ]
        self.messages.append({"role": "assistant", "content": [*texts, *shown]})
        return calls

    def branches(self) -> list[dict[str, Any]]:
        answer = self._stack.get(f"/sessions/{self.id}/trajectory", headers={"Authorization": "Bearer owner"})
        found: list[dict[str, Any]] = answer.json()["branches"]
        return found

    def prompt(self) -> str:
        sent = [each for each in self._stack.scheduler.received if isinstance(each, TokenizedGenerateReq)][-1]
        return self._stack.text.decoder(False)(sent.input_ids)


def test_an_episode_is_one_branch_whatever_the_program_makes_of_the_calls(stack: Stack) -> None:
    """It adds defaults of schemas, strips white space, moves texts before the calls, sorts results by the time at which
    the tools ended, and wraps arguments that are no JSON."""
    program = Program(stack)
    blocks, session = program.turn("I will.\n" + call("Edit", '{"new": "b  \\n"}'))
    assert session["began"] == "root" and json.loads(blocks[1]["json"]) == {"new": "b  \n"}
    (made,) = program.keeps(blocks, {"all": False, "new": "b\n"})
    program.answers((made, "Edited."))

    blocks, session = program.turn("Now. " + call("Bash", '{"command": "cd /w && ls"}') + "\nAnd " + call("Bash", "{}"))
    assert session["began"] is None
    first, second = program.keeps(blocks, {"command": "ls"}, {})
    program.answers((second, "2"), (first, [text("1")]))

    blocks, session = program.turn('<tool_call>\n{"name": "Bash", "arguments": {"command": "ls"\n</tool_call>')
    assert session["began"] is None and "[tool]1<eos>\n[tool]2<eos>" in program.prompt()
    raw = blocks[0]["json"]
    assert blocks[0]["type"] == "tool_use" and not raw.rstrip().endswith("}")
    (broken,) = program.keeps(blocks, {"__unparsed": {"raw": raw, "len": len(raw)}})
    program.answers((broken, "The input is no JSON."))
    program.messages.append({"role": "system", "content": "Do not forget your tasks."})

    blocks, session = program.turn("Done.")
    assert session["began"] is None and blocks[0]["text"] == "Done."
    assert '"new": "b  \\n"' in program.prompt() and "cd /w && ls" in program.prompt(), "what the policy sampled"
    (branch,) = program.branches()
    assert [len(branch["turns"]), branch["kind"]] == [4, "main"]


def test_a_reply_with_other_calls_is_another_message(stack: Stack) -> None:
    program = Program(stack)
    blocks, _ = program.turn(call("Bash", '{"command": "a"}'))
    (made,) = program.keeps(blocks, {"command": "b"})
    program.messages[-1]["content"][0]["id"] = "call_of_somebody_else"
    program.answers((made | {"id": "call_of_somebody_else"}, "1"))
    _, session = program.turn("Done.")
    assert session["began"] == "edited" and len(program.branches()) == 2


def test_a_system_message_in_the_middle_is_refused_with_the_words_that_the_program_knows(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    """Claude Code then sends such texts in user's messages, to the end of its run."""
    path = tmp_path / "strict.jinja"
    path.write_text(STRICT_TEMPLATE)
    stack = make_stack(chat_template=str(path))
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "S"}
    for messages, status in (([user, system], 400), ([user], 200), ([system, user], 200)):
        stack.scheduler.script = lambda req: [stack.text.eos_token_ids[0]]
        answer = stack.post("/v1/messages", {"messages": messages, "max_tokens": 5})
        assert answer.status_code == status
        if status == 400:
            message = answer.json()["error"]["message"]
            assert re.search(r"role .{0,2}system", message) and "not supported" in message
            assert "A system message must be the first one." in message
