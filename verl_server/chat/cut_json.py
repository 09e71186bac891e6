"""`completed`: the whole members of a JSON object whose text was cut, for wires that need an object."""

from __future__ import annotations

import re

_STEP = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\],]', re.DOTALL)
"""A whole string, the quotation mark of a string without its end, or a character of the structure."""


def completed(text: str) -> str:
    """Return the beginning of a JSON object, cut after its last whole member and closed. Without a member: `{}`.

    What may be incomplete is left out: a member's name without a value, a string without its end, and a number at the
    end of the text.
    """
    open_brackets: list[str] = []
    kept, closing = 0, ""
    for step in _STEP.finditer(text):
        match step.group():
            case "{" | "[" as bracket:
                open_brackets.append("}" if bracket == "{" else "]")
                end = step.end()
            case "}" | "]":
                if not open_brackets:
                    break
                open_brackets.pop()
                end = step.end()
            case ",":
                end = step.start()
            case '"':
                break  # the rest is the text of this string
            case _:
                continue
        kept, closing = end, "".join(reversed(open_brackets))
    return text[:kept] + closing if kept else "{}"
