"""An environment of one turn that prefers digits. `verl-server env serve` loads it from this file."""

from __future__ import annotations

from typing import Any

QUESTIONS = (
    "In which year did the Second World War end?",
    "How high is Mount Everest?",
    "How many people live in Paris?",
)


class Digits:
    """The reward is the share of digits in the reply."""

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        return {"text": QUESTIONS[(seed or 0) % len(QUESTIONS)]}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        text = action["text"]
        return {"text": ""}, sum(map(str.isdigit, text)) / max(1, len(text)), True
