"""Observations are tokenized once, and a chat conversation equals what the chat template would produce."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.rollout.fakes import env_server
from verl_server.errors import BadRequestError
from verl_server.rollout.environment import EnvError, environment_schema
from verl_server.rollout.renderer import ActionError, ActionReader, ChatRenderer, TextRenderer

_MOVE = {
    "type": "object",
    "properties": {"row": {"type": "integer"}, "column": {"type": "integer"}},
    "required": ["row", "column"],
}


def test_chat_turns_add_up_to_the_template(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    renderer = ChatRenderer(tokenizer, system="be brief")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    said = [*tokenizer.encode("left", add_special_tokens=False), end]

    tokens = renderer.observation_tokens({"text": "where?"}, None)
    tokens += said
    tokens += renderer.observation_tokens({"text": "and now?"}, said[-1])

    conversation = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "left"},
        {"role": "user", "content": "and now?"},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokens) == text
    assert renderer.action(said) == {"text": "left"}


def test_an_answer_without_its_closing_token_is_closed(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    renderer = ChatRenderer(tokenizer)
    said = tokenizer.encode("left", add_special_tokens=False)
    following = renderer.observation_tokens({"text": "and now?"}, said[-1])
    assert tokenizer.decode(following).startswith("<|im_end|>\n<|im_start|>user\nand now?")


def test_plain_text_begins_with_bos_once(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    renderer = TextRenderer(tokenizer, observation_key="prompt", action_key="answer")
    first = renderer.observation_tokens({"prompt": "hi"}, None)
    assert first[0] == tokenizer.bos_token_id
    assert renderer.observation_tokens({"prompt": "hi"}, 7) == first[1:]
    assert renderer.action(first) == {"answer": "hi"}


def test_observations_without_text_say_what_to_set(tiny_llama: Path) -> None:
    renderer = TextRenderer(AutoTokenizer.from_pretrained(tiny_llama))
    with pytest.raises(BadRequestError, match=r"no text under 'text'; its keys: \['board'\]"):
        renderer.observation_tokens({"board": [1]}, None)


@pytest.mark.parametrize(
    "text", ['{"row": 1, "column": 2}', ' {"row":1,"column":2}\n', '```json\n{"row": 1, "column": 2}\n```']
)
def test_an_action_of_several_keys_is_written_as_json(text: str) -> None:
    assert ActionReader("json", "text", "text", _MOVE).read(text) == {"row": 1, "column": 2}
    assert ActionReader("json", "text", "text", None).read(text) == {"row": 1, "column": 2}
    assert ActionReader("text", "move", "text", None).read(text) == {"move": text}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("row 1", "The action is not JSON: "),
        ("", "The action is not JSON: "),
        ("[" * 5000, "The action is not JSON: "),
        ("[1, 2]", "The action must be a JSON object, not list. Answer with one JSON object with the keys row, column"),
        ('{"row": 1}', "'column' is a required property"),
        ('{"row": "a", "column": 2}', "at `action.row`: 'a' is not of type 'integer'"),
    ],
)
def test_a_wrong_json_action_is_an_observation_that_says_why(text: str, says: str) -> None:
    with pytest.raises(ActionError) as caught:
        ActionReader("json", "text", "board", _MOVE).read(text)
    assert says in str(caught.value)
    assert caught.value.observation == {"board": str(caught.value)}


def test_renderers_read_json_actions(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    said = tokenizer.encode('{"row": 1, "column": 2}', add_special_tokens=False)
    for renderer in (
        TextRenderer(tokenizer, action_format="json", action_schema=_MOVE),
        ChatRenderer(tokenizer, action_format="json", action_schema=_MOVE),
    ):
        assert renderer.action(said) == {"row": 1, "column": 2}


def test_a_schema_that_does_not_fit_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadRequestError, match=r"need the keys \['row', 'column'\].*--action-format json"):
        ActionReader("text", "text", "text", _MOVE)
    with pytest.raises(BadRequestError, match="action_format must be 'text' or 'json', not 'yaml'"):
        ActionReader("yaml", "text", "text", None)  # type: ignore[arg-type]
    elsewhere = {"properties": {"row": {"$ref": "http://127.0.0.1:9/schema"}}}
    with pytest.raises(EnvError, match="schema of the environment's actions cannot be used"):
        ActionReader("json", "text", "text", elsewhere).read('{"row": 1}')


def test_the_schema_is_read_from_the_environment() -> None:
    class Board:
        action_schema: Any = _MOVE

        def reset(self) -> str:
            return ""

        def step(self, action: dict[str, Any]) -> tuple[str, float, bool]:
            return "", 0.0, True

    async def main() -> None:
        async with env_server(Board) as url:
            assert await asyncio.to_thread(environment_schema, url, 5.0) == _MOVE
            assert await asyncio.to_thread(environment_schema, f"{url}/metadata", 5.0) is None
        assert await asyncio.to_thread(environment_schema, url, 5.0) is None  # the server is gone

    asyncio.run(asyncio.wait_for(main(), 20))
