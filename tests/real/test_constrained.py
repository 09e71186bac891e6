"""JSON schemas and tool calls with the text of a real model: valid, sensible, and with the exact log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import numpy as np
import torch
from conftest import TEMPLATE
from llguidance import LLMatcher, LLTokenizer
from reference import TOLERANCE, Reference

from verl_server import HttpServerEngineAdapter
from verl_server.grammar.source import Grammar, translate

CITY = {
    "type": "object",
    "properties": {
        "capital": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe"]},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1, "maxItems": 2},
        "is_big": {"type": "boolean"},
    },
    "required": ["capital", "continent", "languages", "is_big"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]
WITH_TOOLS: dict[str, Any] = {"tools": TOOLS, "chat_template_kwargs": {"chat_template": TEMPLATE.read_text()}}


def allowed(tokenizer: Any, grammar: str, output: list[int]) -> torch.Tensor:
    """Return which tokens a grammar allowed in the place of each output token, bool [len(output), vocabulary]."""
    size = len(tokenizer)
    tokens = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=tokenizer.eos_token_id)
    matcher = LLMatcher(tokens, grammar, log_level=0)
    masks = []
    for token in output:
        masks.append(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size])
        assert matcher.consume_token(token), f"the grammar does not allow {token}: {matcher.get_error()}"
    return torch.from_numpy(np.stack(masks)).bool()


def test_json_schema_and_its_log_probabilities(
    engine: HttpServerEngineAdapter, reference: Reference, tokenizer: Any
) -> None:
    """Greedy and sampled outputs satisfy the schema; log-probabilities are those over the allowed tokens."""
    text = json.dumps(CITY)
    grammar = translate(Grammar("json_schema", text), {})
    for country, temperature in (("France", 0), ("Japan", 1.0)):
        messages = [{"role": "user", "content": f"Which city is the capital of {country}? Answer as JSON."}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        params = {"temperature": temperature, "max_new_tokens": 80, "json_schema": text, "sampling_seed": 5}
        result: Any = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, timeout=120)
        output = result["output_ids"]
        answer = json.loads(result["text"])
        jsonschema.validate(answer, CITY)
        if country == "France":
            assert (answer["capital"], answer["continent"]) == ("Paris", "Europe")
        logprobs = reference.logprobs([*prompt, *output])[len(prompt) - 1 : -1].clone()
        logprobs[~allowed(tokenizer, grammar, output)] = -torch.inf
        logprobs = logprobs.log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(output)[:, None])[:, 0]
        if temperature == 0:
            assert float((logprobs.max(-1).values - own).max()) < TOLERANCE
        found = torch.tensor([found for found, _, _ in result["meta_info"]["output_token_logprobs"]])
        assert float((own - found).abs().max()) < TOLERANCE


def test_a_forced_call(client: httpx.Client, post: Callable[..., Any]) -> None:
    """The arguments of the call are those that the question names."""
    question = [{"role": "user", "content": "What is the weather in Berlin, in celsius?"}]
    body = {"messages": question, "temperature": 0, "max_tokens": 60, "parallel_tool_calls": False}
    answer = post(client, "/v1/chat/completions", body | WITH_TOOLS | {"tool_choice": "required"})
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Berlin", "unit": "celsius"}
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]


def test_a_named_call_and_its_result(client: httpx.Client, post: Callable[..., Any]) -> None:
    """A call of a named function streams in pieces, and the answer follows the result of the call."""
    question = {"role": "user", "content": "Add 17 and 25."}
    body = {"messages": [question], "temperature": 0, "max_tokens": 60} | WITH_TOOLS
    choice = {"type": "function", "function": {"name": "add"}}
    whole = post(client, "/v1/chat/completions", body | {"tool_choice": choice})["choices"][0]["message"]
    (call,) = whole["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments == {"a": 17, "b": 25}
    streamed = ""
    with client.stream("POST", "/v1/chat/completions", json=body | {"tool_choice": choice, "stream": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: {"):
                for delta in json.loads(line[6:])["choices"]:
                    for part in delta["delta"].get("tool_calls") or []:
                        streamed += part["function"].get("arguments") or ""
    assert json.loads(streamed) == arguments
    messages = [question, whole, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
    answer = post(client, "/v1/chat/completions", body | {"messages": messages, "tool_choice": "none"})
    assert "42" in answer["choices"][0]["message"]["content"]
