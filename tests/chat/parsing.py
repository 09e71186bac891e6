"""Parsing of whole texts in tests."""

from __future__ import annotations

from verl_server.chat.call_readers import ParameterTypes
from verl_server.chat.output import OutputFormat, ParsedMessage, joined


def parse_message(
    format: OutputFormat, text: str, *, tools: bool, thinking_open: bool, types: ParameterTypes | None = None
) -> ParsedMessage:
    """Parse a whole text. The arguments are those of `OutputFormat.parser`; a call with broken arguments is content."""
    parser = format.parser(tools, thinking_open, whole_calls=True, types=types)
    return joined([*parser.push(text), *parser.finish()])
