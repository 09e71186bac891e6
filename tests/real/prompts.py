"""50 prompts: 25 texts to continue and 25 conversations. Three texts are longer than a chunk of a prefill."""

from __future__ import annotations

from typing import Any

_STORY = (
    "The ferry left the harbour at a quarter past six, while the fog still lay on the water. Anna counted the lamps of "
    "the pier until none was left. The captain, who had crossed the sound more than four thousand times, looked at "
    "neither map nor compass. He listened. Somewhere ahead a bell rang, twice, then once, and he turned the wheel a "
    "hand's breadth to the left. Nobody spoke. A child asked how long it would take, and its mother said that it "
    "took as long as it took. When the sun came out, the island was so close that they saw the goats on its slope. "
)
_CODE = '''def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
'''

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of the forest, there lived",
    "Water boils at 100 degrees Celsius, and freezes at",
    "1, 2, 3, 4, 5, 6,",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "The three primary colors are red,",
    "import numpy as np\n\nx = np.",
    _CODE,
    '{"name": "Ada Lovelace", "born": 1815, "profession": "',
    "<html>\n  <head>\n    <title>",
    "| city | country |\n|---|---|\n| Paris | France |\n| Rome |",
    "# Contents\n\n1. Introduction\n2. Methods\n3.",
    "Q: Who wrote Romeo and Juliet?\nA:",
    "To be, or not to be, that is the",
    "La capitale de l'Italie est",
    "Die Hauptstadt von Deutschland ist",
    "東京は日本の",
    "Ça coûte 12,50 € — naïve façade, “quoted” …",
    "Emoji: 🙂🚀 and more:",
    "   four spaces,\ttabs\t\tand\n\n\nempty lines",
    "A",
    "SELECT name, age FROM users WHERE",
    _STORY + "On the island",
    _STORY * 2 + _CODE,
    "Numbers: " + ", ".join(str(number**2) for number in range(40)),
]

_QUESTIONS = [
    "What is the capital of France?",
    "Explain gravity in one sentence.",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "Translate 'good morning' into Spanish.",
    "Name three animals that live in the desert.",
    "Give me a short poem about winter.",
    "Who was Marie Curie?",
    "How do I boil an egg?",
    "What is the difference between a list and a tuple in Python?",
    "Write a function that reverses a string.",
    "Is the Earth flat?",
    "When did the Second World War end?",
    "Summarize: " + _STORY,
    "Warum ist der Himmel blau?",
    "¿Cuál es el río más largo del mundo?",
    "List the planets.\n\nOne per line.",
    "Say hello.",
]

CONVERSATIONS: list[list[dict[str, Any]]] = [
    *([{"role": "user", "content": question}] for question in _QUESTIONS),
    [{"role": "system", "content": "You answer with one word."}, {"role": "user", "content": "Is ice cold?"}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Where is my hat?"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "An empty system message."}],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada! How can I help?"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Times 3?"},
        {"role": "assistant", "content": "12"},
        {"role": "user", "content": "Minus 5?"},
    ],
    [{"role": "user", "content": "  white space around, <|not a token|>, and\n\ttabs  "}],
    [
        {"role": "user", "content": "🙂"},
        {"role": "assistant", "content": "🙂!"},
        {"role": "user", "content": "Why 🙂?"},
    ],
]
assert len(TEXTS) == len(CONVERSATIONS) == 25
