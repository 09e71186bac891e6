"""Random conversations whose history the client edits, repeats or forks: every sampled id is exported exactly once."""

from __future__ import annotations

import itertools
import random
from typing import Any

from stacked import FamilyStack
from test_random_conversations import OpenAITalk

CONVERSATIONS = 40
"""For each of the four families."""


class EditingTalk(OpenAITalk):
    def edit(self) -> None:
        """Change the history as agents do."""
        kind = self.draw.choice(("go on", "repeat", "other reply", "back", "compact", "other head"))
        replies = [at for at, message in enumerate(self.messages) if message["role"] == "assistant"]
        last = self.messages[replies[-1]]
        # Mistral's template refuses an empty message, so this client asks again.
        if kind == "repeat" or not (last.get("content") or last.get("tool_calls")):
            self.messages = self.messages[: replies[-1]]
        elif kind == "other reply" and not last.get("tool_calls"):
            self.messages[replies[-1]] = {"role": "assistant", "content": f"Edited: {self.text()}"}
        elif kind == "back":
            questions = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
            self.messages = [*self.messages[: self.draw.choice(questions)], {"role": "user", "content": self.text()}]
        elif kind == "compact":
            self.messages = [{"role": "user", "content": f"Before: {self.text()}"}]
        elif kind == "other head":
            rest = self.messages[1:] if self.messages[0]["role"] == "system" else self.messages
            self.messages = [{"role": "system", "content": self.text()}, *rest]


def test_every_sampled_id_is_exported_once(stack: FamilyStack) -> None:
    draw = random.Random(12)
    branched = 0
    for number in range(CONVERSATIONS):
        talk = EditingTalk(stack, draw)
        talk.messages.append({"role": "user", "content": talk.text()})
        stack.forget()

        async def converse(talk: Any = talk, count: int = draw.randrange(3, 8)) -> None:
            for _ in range(count):
                await talk.turn()
                talk.edit()

        stack.run(converse())
        prompts = [list(request.input_ids) for request in stack.sent()]
        branches = talk.session.trajectory("?retries=true")["branches"]
        branched += len(branches) > 1
        for turn, (prompt, output) in enumerate(zip(prompts, talk.outputs, strict=True)):
            path = prompt + output
            assert any(branch["ids"][: len(path)] == path for branch in branches), f"conversation {number}, turn {turn}"
        sampled = sum(sum(branch["loss_mask"]) for branch in branches)
        assert sampled == sum(map(len, talk.outputs)), f"conversation {number}"
        for branch in branches:
            outputs = [branch["ids"][turn["prompt_end"] : turn["end"]] for turn in branch["turns"]]
            whole = [turn["finish_reason"] != "cut" for turn in branch["turns"]]
            assert all(output in talk.outputs for output in itertools.compress(outputs, whole))
        talk.session.end()
    assert branched > CONVERSATIONS / 2
