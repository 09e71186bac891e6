"""1,000 random conversations with released tokenizers: the trajectory has the sampled ids, whatever their text is.

The policy samples ids that the tokenizer would not choose: texts in other pieces, random ids, bytes that are no text.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from outputs import ANTHROPIC_TOOLS, OPENAI_TOOLS, output
from stacked import FamilyStack, StackedSession

CONVERSATIONS = 250
"""For each of the four families."""
PIECES = (
    *(
        "a",
        "word ",
        "Numbers 1234567890 ",
        "\n",
        "\n\n\n",
        "  ",
        "\t",
        "don't ",
        "…",
        "naïve ",
        "e\u0301",
        "東京",
        "नमस्ते",
        "👩‍🚀",
    ),
    *(
        "\u200b",
        "\ufffd",
        '{"a": 1}',
        "<think>",
        "</think>",
        "<tool_call>",
        "<|im_end|>",
        "<|eot_id|>",
        "[INST]",
        "</s>",
    ),
)


class Talk:
    """One conversation, as the client has it, and what the policy samples in it."""

    def __init__(self, stack: FamilyStack, draw: random.Random) -> None:
        self.stack, self.draw = stack, draw
        self.session = StackedSession(stack)
        self.outputs: list[list[int]] = []
        self.messages: list[Any] = []
        self.has_tools = draw.random() < 0.6

    def text(self) -> str:
        return "".join(self.draw.choices(PIECES, k=self.draw.randrange(1, 8))) + "?"

    def sample(self) -> list[int]:
        """Return what the policy samples next: ids that end the turn, or as many as were requested."""
        family, kind = self.stack.family, self.draw.random()
        vocab = len(family.tokenizer)
        if kind < 0.6:
            turn = self.draw.randrange(8) if self.has_tools else 1
            ids = self.stack.other_ids(output(family.name, turn), self.draw)
        elif kind < 0.75:
            ids = [self.draw.randrange(vocab) for _ in range(self.draw.randrange(1, 30))]
        elif kind < 0.85:
            ids = [self.stack.byte_ids[self.draw.randrange(256)] for _ in range(self.draw.randrange(1, 30))]
        else:
            ids = self.stack.other_ids(self.text(), self.draw)
        ids = ids if self.draw.random() < 0.15 else [*ids, self.draw.choice(family.end_ids)]
        end = next((at for at, token in enumerate(ids) if token in family.end_ids), len(ids))
        return ids[: end + 1]

    async def ask(self) -> None:
        self.outputs.append(self.sample())
        self.stack.samples([self.outputs[-1]])


class OpenAITalk(Talk):
    async def turn(self) -> None:
        """Send the conversation, and add the reply and an answer to it."""
        tools = {"tools": OPENAI_TOOLS} if self.has_tools else {}
        await self.ask()
        stream = self.draw.random() < 0.3
        create = self.session.openai.chat.completions.create
        reply = await create(model="policy", messages=self.messages, max_completion_tokens=2000, stream=stream, **tools)
        message = await _collected(reply) if stream else reply.choices[0].message.model_dump(exclude_none=True)
        message = {name: message.get(name) for name in ("role", "content", "tool_calls") if message.get(name)}
        if not stream and self.draw.random() < 0.5:
            message = reply.choices[0].message.model_dump()
        calls = message.get("tool_calls") or []
        self.messages.append({"role": "assistant", "content": None} | message)
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
        if not calls or (self.draw.random() < 0.2 and "istral" not in self.stack.family.name):
            self.messages.append({"role": "user", "content": self.text()})


async def _collected(stream: Any) -> dict[str, Any]:
    """Return the message of a stream, as OpenAI's documentation puts it together."""
    content, calls = "", {}
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index in calls:
                    calls[call.index]["function"]["arguments"] += call.function.arguments
                else:
                    calls[call.index] = call.model_dump(exclude={"index"})
    return {"role": "assistant", "content": content, "tool_calls": list(calls.values())}


class AnthropicTalk(Talk):
    async def turn(self) -> None:
        tools = {"tools": ANTHROPIC_TOOLS} if self.has_tools else {}
        await self.ask()
        create = self.session.anthropic.messages.create
        reply = await create(model="policy", messages=self.messages, max_tokens=2000, **tools)
        self.messages.append({"role": "assistant", "content": reply.content})
        calls = [block.id for block in reply.content if block.type == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": number, "content": self.text()} for number in calls]
        self.messages.append({"role": "user", "content": blocks or self.text()})


def test_a_trajectory_has_the_sampled_ids(stack: FamilyStack) -> None:
    draw = random.Random(11)
    retokenized = turns = 0
    for number in range(CONVERSATIONS):
        talk = draw.choice((OpenAITalk, AnthropicTalk))(stack, draw)
        talk.messages.append({"role": "user", "content": talk.text()})
        stack.forget()

        async def converse(talk: Any = talk, count: int = draw.randrange(2, 7)) -> None:
            for _ in range(count):
                await talk.turn()

        stack.run(converse())
        prompts = [list(request.input_ids) for request in stack.sent()]
        for at, (before, after) in enumerate(itertools.pairwise(prompts)):
            known = before + talk.outputs[at]
            assert after[: len(known)] == known, f"conversation {number}, turn {at + 1}"
        branches = talk.session.trajectory()["branches"]
        assert len(branches) == 1, f"conversation {number}"
        (branch,) = branches
        assert branch["ids"] == prompts[-1] + talk.outputs[-1]
        assert [branch["ids"][t["prompt_end"] : t["end"]] for t in branch["turns"]] == talk.outputs
        assert list(itertools.compress(branch["ids"], branch["loss_mask"])) == list(itertools.chain(*talk.outputs))
        tokenizer = stack.family.tokenizer
        for ids in talk.outputs:
            turns += 1
            retokenized += tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
        talk.session.end()
    assert retokenized > 0.6 * turns, "tokenizing the text again would have changed the ids"
