"""Observations are tokenized once, and a chat conversation equals what the chat template would produce."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from verl_server.errors import BadRequestError
from verl_server.rollout.renderer import ChatRenderer, TextRenderer


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
