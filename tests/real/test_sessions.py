"""Conversations of 8 turns in sessions, with the model's own template: one branch each, exact to the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from reference import TOLERANCE, Reference

QUESTIONS = [
    "Tell me about a dog.",
    "What is its name?",
    "  And   its color?\n",
    "Why?",
    "Where does it live — in a house?",
    "How old is it: 3 or 4.5 years?",
    "Does it like 🦴?",
    "Say goodbye.",
]
NEW_TOKENS = 12


def openai_turn(post: Callable[..., Any], client: httpx.Client, headers: dict[str, str], messages: list[Any]) -> Any:
    body = {"messages": messages, "max_tokens": NEW_TOKENS}
    return post(client, "/v1/chat/completions", body, **headers)["choices"][0]["message"]["content"]


def anthropic_turn(post: Callable[..., Any], client: httpx.Client, headers: dict[str, str], messages: list[Any]) -> Any:
    """Return the blocks of the reply, which go back as they are."""
    body = {"model": "policy", "messages": messages, "max_tokens": NEW_TOKENS}
    return post(client, "/v1/messages", body, **headers)["content"]


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "".join(block["text"] for block in content)


@pytest.mark.parametrize("turn", [openai_turn, anthropic_turn])
def test_eight_turns(
    client: httpx.Client, post: Callable[..., Any], reference: Reference, tokenizer: Any, turn: Any
) -> None:
    session = post(client, "/sessions", {"seed": 7, "metadata": {}})
    headers = {"Authorization": f"Bearer {session['key']}"}
    messages: list[dict[str, Any]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": turn(post, client, headers, messages)})
    post(client, f"/sessions/{session['id']}/reward", {"reward": 0.5})
    post(client, f"/sessions/{session['id']}/finish", {})
    trajectory = client.get(f"/sessions/{session['id']}/trajectory").json()
    (branch,) = trajectory["branches"]
    assert trajectory["reward"] == 0.5 and len(branch["turns"]) == 8
    ids, turns = branch["ids"], branch["turns"]
    first = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert ids[: turns[0]["prompt_end"]] == first
    # The whole branch is the conversation as the template renders it, except for the end of the last reply.
    plain = [{"role": each["role"], "content": text_of(each["content"])} for each in messages]
    rendered = tokenizer.apply_chat_template(plain, tokenize=False)
    assert rendered.removesuffix("\n").removesuffix("<|im_end|>") == tokenizer.decode(ids).removesuffix("<|im_end|>")
    finishes = {each["finish_reason"] for each in turns}
    assert finishes <= {"stop", "length"}
    own, _ = reference.chosen(ids)
    sampled = [at for each in turns for at in range(each["prompt_end"], each["end"])]
    assert [at for at, mask in enumerate(branch["loss_mask"]) if mask] == sampled
    assert len(sampled) > 8 * 5
    found = torch.tensor([branch["logprobs"][at] for at in sampled])
    assert float((own[torch.tensor(sampled) - 1] - found).abs().max()) < TOLERANCE
    assert client.delete(f"/sessions/{session['id']}").status_code == 200
