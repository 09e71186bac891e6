"""Requests of sessions, from the body to the stored turn and to the next prompt, in all dialects with conversations."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chat.session_fakes import QWEN, TOOLS
from tests.server.fake_scheduler import INFO
from tests.server.sessions.building import Clock, created, floats, ids
from verl_server.chat.session_view import NextTurn, ReplyMessage
from verl_server.errors import BadRequestError, error_for_status
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.server.dialects.anthropic.reading import COUNT_TOKENS, MESSAGES
from verl_server.server.dialects.openai.reading import CHAT, COMPLETION
from verl_server.server.dialects.openai.responses_request import RESPONSES
from verl_server.server.request_state import ReqState
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.reading import session_body
from verl_server.server.sessions.replies import end_token, read_reply
from verl_server.server.sessions.session import OpenTurn
from verl_server.server.sessions.turn import FinishedTurn
from verl_server.server.sessions.turn_ledger import TurnLedger
from verl_server.server.text.chat_prompt import ChatOutput
from verl_server.server.text.session_prompt import prompt_text
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.text_service import TextService
from verl_server.server.text_worker import do_job, make_tools
from verl_server.server_args import ServerArgs

CONTEXT = 2048
JOBS: dict[str, Job[Any]] = {job.name: job for job in (CHAT, COMPLETION, RESPONSES, MESSAGES, COUNT_TOKENS)}


@pytest.fixture(scope="module")
def tools(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    template = tmp_path_factory.mktemp("template") / "qwen.jinja"
    template.write_text(QWEN)
    args = ServerArgs(model_path=str(text_folder), chat_template=str(template))
    text = ModelText(args)
    text.load_tokenizer()
    service = TextService(args, text, INFO | {"context_length": CONTEXT, "max_req_input_len": None})
    return make_tools(text.setup(service.limits, service.bounds))


class Talk:
    """One session, whose requests are read as a text worker reads them."""

    def __init__(self, tools: TextTools) -> None:
        self.tools = tools
        self.end = tools.encode(["<|im_end|>"], add_special_tokens=False)[0][0]
        self.ledger = SessionLedger(clock=Clock())
        self.turns = TurnLedger(self.ledger, end_tokens=lambda: [self.end])
        self.caller = created(self.ledger)

    def read(self, job: str, body: dict[str, Any], previous: str | None = None) -> Any:
        view = self.turns.view(self.caller, previous)
        answer = do_job(self.tools, f"session/{job}", session_body(view, json.dumps(body).encode()))
        if answer.status != 200:
            raise error_for_status(answer.status, bytes(answer.data).decode())
        return msgspec.msgpack.decode(answer.data, type=JOBS[job].result)

    def sample(
        self, next: NextTurn, output: ChatOutput | None, text: str, matched: int | str | None = -1, **options: Any
    ) -> tuple[OpenTurn, ReplyMessage]:
        """Begin a turn, let it answer with `text`, and commit it. `matched` -1: the end token ends it."""
        opened = self.turns.begin(self.caller, next, None, b"b" * 16)
        matched = self.end if matched == -1 else matched
        sampled = self.tools.encode([text], add_special_tokens=False)[0]
        sampled += [self.end] if matched == self.end else []
        state = self.state(opened, sampled, matched)
        reply = asyncio.run(read_reply(state, output, continued=next.continued, **options))
        finished = FinishedTurn(
            next=next,
            output=ids(sampled),
            logprobs=floats([-1.0] * len(sampled)),
            spans=[("v1", 0)],
            finish=("stop", matched),
            reply=reply,
            times=(1.0, 2.0, 3.0),
            dialect="chat",
            rid="rid",
            end_token=end_token(state, [self.end]),
        )
        asyncio.run(self.turns.commit(opened, finished))
        return opened, reply

    def state(self, opened: OpenTurn, sampled: list[int], matched: int | str | None) -> ReqState:
        prompt = list(struct.unpack(f"<{len(opened.prompt) // 4}i", opened.prompt))
        stop = [matched] if isinstance(matched, str) else None
        req = TokenizedGenerateReq(rid="0", input_ids=prompt, sampling=SamplingParams(stop=stop), stop_ids=[self.end])
        state = ReqState("rid", req, self.tools.decoder(False))
        reason = FinishReason(type="length") if matched is None else FinishReason(type="stop", matched=matched)
        state.extend(
            BatchTokenIDOut(
                rids=["0"],
                output_ids=[sampled],
                output_logprobs=[[-1.0] * len(sampled)],
                finish_reasons=[None if isinstance(matched, str) else reason],
                weight_version="v1",
                cached_tokens=[0],
                num_retractions=[0],
            ),
            0,
        )
        return state

    def text(self, turn: OpenTurn) -> str:
        return self.tools.decoder(False)(list(struct.unpack(f"<{len(turn.prompt) // 4}i", turn.prompt)))


CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1.0}}\n</tool_call>'
ASK = {"role": "user", "content": "1 + 1?"}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": TOOLS} | more


def calling(reply: ReplyMessage) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in reply.calls]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.fixture
def talk(tools: TextTools) -> Talk:
    return Talk(tools)


def test_a_conversation_in_three_dialects(talk: Talk) -> None:
    read = talk.read("chat", chat(ASK))
    assert (read.next.began, bytes(read.prompts[0])) == ("root", b"")
    first, reply = talk.sample(read.next, read.output, CALL, call_seed="s/0")
    assert [(name, arguments) for _, name, arguments in reply.calls] == [("add", '{"a": 1.0}')]
    call_id = reply.calls[0][0]
    # Anthropic's shape: the reasoning comes back, and the arguments as an object.
    read = talk.read(
        "messages",
        {
            "model": "m",
            "max_tokens": 8,
            "tools": [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS],
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": 1}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "2"}]},
            ],
        },
    )
    assert (read.next.parent, read.next.began, read.next.matched_messages) == (first.turn, None, 2)
    # OpenAI's shape again, and Responses.
    result = {"role": "tool", "tool_call_id": call_id, "content": "2"}
    read = talk.read("chat", chat(ASK, calling(reply), result))
    assert (read.next.parent, read.next.began) == (first.turn, None)
    second, reply = talk.sample(read.next, read.output, "<think>\nso\n</think>\n\nTwo.")
    assert second.prompt.startswith(first.prompt) and second.shared > len(first.prompt) // 4
    assert talk.text(second).endswith("user<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    read = talk.read("responses", {"input": "and 2 + 2?"}, previous=f"resp_{talk.caller.session_id}_{second.turn}")
    assert (read.next.parent, read.next.kept, read.next.began) == (
        second.turn,
        (len(second.prompt) // 4) + talk.turns.view(talk.caller).decoded().replies[1].output_tokens,
        None,
    )


def test_the_length_of_a_prompt_counts_what_is_stored(talk: Talk) -> None:
    read = talk.read("chat", chat(ASK))
    _, reply = talk.sample(read.next, read.output, "x" * 300)
    body = {"model": "m", "max_tokens": 10_000, "messages": [ASK, {"role": "assistant", "content": reply.text}, ASK]}
    counted = talk.read("count_tokens", {k: v for k, v in body.items() if k != "max_tokens"})
    assert counted.count > 300
    read = talk.read("messages", body)
    assert read.sampling_params["max_new_tokens"] == CONTEXT - counted.count
    with pytest.raises(BadRequestError, match="prompt is too long"):
        talk.read("chat", chat(ASK, {"role": "assistant", "content": reply.text}, ASK | {"content": "y" * 100_000}))


@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_that_was_cut_off_is_known_as_it_was_shown(talk: Talk, streamed: bool) -> None:
    read = talk.read("chat", chat(ASK))
    cut = '<tool_call>\n{"name": "add", "arguments": {"a": 1'
    first, reply = talk.sample(read.next, read.output, cut, None, streamed=streamed)
    assert bool(reply.calls) == streamed
    shown = calling(reply) if streamed else {"role": "assistant", "content": cut}
    read = talk.read("chat", chat(ASK, shown, ASK))
    assert (read.next.parent, read.next.began) == (first.turn, None)


def test_one_call_is_shown(talk: Talk) -> None:
    read = talk.read("chat", chat(ASK, parallel_tool_calls=False))
    two = CALL + '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    first, reply = talk.sample(read.next, read.output, two, one_call=True)
    result = {"role": "tool", "tool_call_id": reply.calls[0][0], "content": "2"}
    read = talk.read("chat", chat(ASK, calling(reply), result))
    assert len(reply.calls) == 1 and (read.next.parent, read.next.began) == (first.turn, None)


def test_an_open_reasoning_is_noted(talk: Talk) -> None:
    read = talk.read("chat", chat(ASK))
    _, reply = talk.sample(read.next, read.output, "<think>\nhm", None)
    assert reply.in_reasoning
    read = talk.read("chat", chat(ASK, {"role": "assistant", "content": ""}, ASK))
    second, _ = talk.sample(read.next, read.output, "x")
    assert "hm</think><|im_end|>\n<|im_start|>user" in talk.text(second)


def test_calls_have_the_same_ids_at_a_replay(talk: Talk) -> None:
    read = talk.read("chat", chat(ASK))
    parsers = [read.output.parser(whole, "session/0") for whole in (True, False)]
    shown = [[*parser.push(CALL), *parser.finish()] for parser in parsers]
    found = [{delta.id for delta in deltas if getattr(delta, "id", None)} for deltas in shown]
    assert found[0] == found[1] and len(found[0]) == 1
    _, reply = talk.sample(read.next, read.output, CALL, call_seed="session/0")
    assert {call_id for call_id, _, _ in reply.calls} == found[0]


def test_a_completion_follows_a_completion(talk: Talk) -> None:
    read = talk.read("completion", {"prompt": "Question: 1 + 1?\n"})
    assert read.next is None and read.prompt_text == prompt_text("Question: 1 + 1?\n")
    planned = NextTurn(-1, 0, bytes(read.prompts[0]), "root", text=read.prompt_text)
    first, reply = talk.sample(planned, None, "Thought: add\nObservation:", "\nObservation:")
    assert (reply.text, reply.hidden) == ("Thought: add", "\nObservation:")
    read = talk.read("completion", {"prompt": "Question: 1 + 1?\nThought: add\nObservation: 2"})
    assert (read.next.parent, read.next.began) == (first.turn, None)
    second, _ = talk.sample(read.next, None, "x", None)
    assert talk.text(second).endswith("Thought: add\nObservation: 2")
    assert talk.text(second).count("Observation:") == 1


@pytest.mark.parametrize(
    ("job", "body"),
    [
        ("chat", chat(ASK, truncate_prompt_tokens=3)),
        ("chat", {"messages": [], "input_ids": [1]}),
        ("completion", {"prompt": "a", "echo": True}),
        ("completion", {"prompt": "a", "truncate_prompt_tokens": 3}),
        ("completion", {"prompt": ["a", "b"]}),
    ],
)
def test_what_would_change_a_stored_prompt_is_refused(talk: Talk, job: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError, match="not available in a session"):
        talk.read(job, body)
