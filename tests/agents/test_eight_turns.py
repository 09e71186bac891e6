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
from outputs import ANTHROPIC_TOOLS, OPENAI_TOOLS, output
from renderers import Llama3RendererConfig, Qwen3RendererConfig
from renderers.llama_3 import Llama3Renderer
from renderers.qwen3 import Qwen3Renderer
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


async def openai_responses(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """The loop of OpenAI's documentation of responses: the items of the output go back as they are."""
    given: list[Any] = [{"role": "user", "content": "Where to?"}]
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in OPENAI_TOOLS]
    for _ in range(8):
        response = await session.openai.responses.create(
            model="policy", instructions=SYSTEM, input=given, tools=tools, max_output_tokens=900
        )
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        given += response.output
        given += [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in calls]
        new = [{"role": "tool", "tool_call_id": call, "content": RESULT} for call in calls]
        if not new:
            new = [{"role": "user", "content": " And then? "}]
            given += new
        turn(new)


async def openai_previous(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """Responses that name the one before: only what is new is sent."""
    given: list[Any] = [{"role": "user", "content": "Where to?"}]
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in OPENAI_TOOLS]
    before: dict[str, Any] = {"instructions": SYSTEM}
    for _ in range(8):
        response = await session.openai.responses.create(
            model="policy", input=given, tools=tools, max_output_tokens=900, **before
        )
        before = {"previous_response_id": response.id, "instructions": SYSTEM}
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        given = [{"type": "function_call_output", "call_id": call, "output": RESULT} for call in calls]
        new = [{"role": "tool", "tool_call_id": call, "content": RESULT} for call in calls]
        if not new:
            given = new = [{"role": "user", "content": " And then? "}]
        turn(new)


async def anthropic_stream(session: StackedSession, turn: Callable[[list[Any]], None]) -> None:
    """The loop of Anthropic's documentation with a stream, whose final message goes back."""
    messages: list[Any] = [{"role": "user", "content": "Where to?"}]
    for _ in range(8):
        async with session.anthropic.messages.stream(
            model="policy", max_tokens=900, system=SYSTEM, messages=messages, tools=ANTHROPIC_TOOLS
        ) as stream:
            async for _event in stream:
                pass
            reply = await stream.get_final_message()
        uses = [block.id for block in reply.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use, "content": RESULT} for use in uses]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results or " And then? "},
        ]
        new = [{"role": "tool", "tool_call_id": use, "content": RESULT} for use in uses]
        turn(new or [{"role": "user", "content": " And then? "}])


LOOPS = (openai_whole, openai_stream, openai_responses, openai_previous, anthropic_whole, anthropic_stream)


@pytest.mark.parametrize("loop", LOOPS)
def test_eight_turns_are_one_branch(stack: FamilyStack, loop: Any) -> None:
    draw = random.Random(7)
    family = stack.family
    end = family.end_ids[0]
    outputs = [[*stack.other_ids(output(family.name, turn), draw), end] for turn in range(8)]
    assert all(
        family.tokenizer.encode(family.tokenizer.decode(ids), add_special_tokens=False) != ids for ids in outputs
    )
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
    """Return what follows a turn, by `renderers`, or by the template for families that `renderers` does not have."""
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
