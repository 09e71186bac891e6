"""Eight turns with thinking and tools, through the SDKs, with released tokenizers and templates: one branch.

The prompt of turn k + 1 begins with that of turn k and what was sampled. What follows is what the package `renderers`
puts there, a second implementation of the same idea; whole renderings are those of transformers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from families import Family
from renderers import Llama3RendererConfig, Qwen3RendererConfig
from renderers.llama_3 import Llama3Renderer
from renderers.qwen3 import Qwen3Renderer
from outputs import ANTHROPIC_TOOLS, OPENAI_TOOLS, output
from stacked import FamilyStack, StackedSession, sampled

SYSTEM = "You plan journeys.  Answer briefly."
RESULT = "12 °C, “windy”\n\n  and 3 %"


async def openai_whole(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """The loop of OpenAI's documentation: the message of the SDK goes back as it is."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where to?"}]
    for _ in range(8):
        completion = await session.openai.chat.completions.create(
            model="policy", messages=messages, tools=OPENAI_TOOLS, max_completion_tokens=900
        )
        message = completion.choices[0].message
        new: list[Any] = [
            {"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls or []
        ]
        new = new or [{"role": "user", "content": " And then? "}]
        messages += [message, *new]
        turn(new)


async def openai_stream(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """The loop for streams: the client puts the calls together, and leaves the reasoning out."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where to?"}]
    for _ in range(8):
        stream = await session.openai.chat.completions.create(
            model="policy", messages=messages, tools=OPENAI_TOOLS, max_completion_tokens=900, stream=True
        )
        content, calls = "", {}
        async for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.index not in calls:
                        calls[call.index] = call
                    else:
                        calls[call.index].function.arguments += call.function.arguments
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if calls:
            message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in calls.values()]
        new: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in calls.values()]
        new = new or [{"role": "user", "content": " And then? "}]
        messages += [message, *new]
        turn(new)


async def anthropic_whole(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """The loop of Anthropic's documentation: the blocks go back as they are."""
    messages: list[Any] = [{"role": "user", "content": "Where to?"}]
    for _ in range(8):
        reply = await session.anthropic.messages.create(
            model="policy", max_tokens=900, system=SYSTEM, messages=messages, tools=ANTHROPIC_TOOLS
        )
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results or " And then? "},
        ]
        new = [{"role": "tool", "tool_call_id": each["tool_use_id"], "content": RESULT} for each in results]
        turn(new or [{"role": "user", "content": " And then? "}])


@pytest.mark.parametrize("loop", [openai_whole, openai_stream, anthropic_whole])
def test_eight_turns_are_one_branch(stack: FamilyStack, loop: Any) -> None:
    draw = random.Random(7)
    family = stack.family
    end = family.end_ids[0]
    outputs = [[*stack.other_ids(output(family.name, turn), draw), end] for turn in range(8)]
    assert all(family.tokenizer.encode(family.tokenizer.decode(ids), add_special_tokens=False) != ids for ids in outputs)
    stack.samples(outputs)
    stack.forget()
    session = StackedSession(stack)
    asked: list[list[Any]] = []
    stack.run(loop(session, asked.append))
    prompts = [list(request.input_ids) for request in stack.sent()]
    assert len(prompts) == len(asked) == 8
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where to?"}]
    whole = family.tokenizer.apply_chat_template(
        first, tools=OPENAI_TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert prompts[0] == whole
    for turn, (before, after) in enumerate(itertools.pairwise(prompts)):
        known = before + outputs[turn]
        assert after[: len(known)] == known, f"the prompt of turn {turn + 1} begins with everything before it"
        assert after == known + added(family, before, outputs[turn], asked[turn]), f"turn {turn + 1}"
    trajectory = session.trajectory()
    (branch,) = trajectory["branches"]
    assert branch["ids"] == prompts[-1] + outputs[-1]
    assert sampled(branch) == list(itertools.chain(*outputs))
    assert [len(turn["calls"]) for turn in branch["turns"]] == [
        output(family.name, turn).count('"days"') for turn in range(8)
    ]
    session.end()


def added(family: Family, prompt: list[int], output: list[int], new: list[Any]) -> list[int]:
    """Return what follows a turn, by `renderers`, or by the template for the families that `renderers` does not have."""
    tokenizer: Any = family.tokenizer
    renderer: Any = None
    if family.name == "qwen3":
        renderer = Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    elif family.name == "llama3":
        renderer = Llama3Renderer(tokenizer, Llama3RendererConfig())
    if renderer is not None:
        found = renderer.bridge_to_next_turn(prompt, output, new, tools=OPENAI_TOOLS)
        assert found is not None
        return list(found.token_ids)[len(prompt) + len(output) :]
    calls = [
        {"id": each["tool_call_id"], "type": "function", "function": {"name": "weather", "arguments": {}}}
        for each in new
        if each["role"] == "tool"
    ]
    reply = {"role": "assistant", "content": "" if calls else "x"} | ({"tool_calls": calls} if calls else {})
    # Without tools: Mistral's template would repeat them before the last question.
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}, reply, *new], tokenize=False)
    ids: list[int] = tokenizer.encode(text.rpartition("</s>")[2], add_special_tokens=False)
    return ids
