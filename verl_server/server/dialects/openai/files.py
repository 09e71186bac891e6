"""`file_text`: the text of a file that a chat or a response contains as a data URL."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadRequestError

FILE_PARTS = ("file", "input_file")
"""Types of the parts with a file, in chats and in responses."""
_TEXT_TYPES = ("application/json", "application/xml", "application/yaml", "application/x-yaml")
"""Media types of text besides `text/...`."""


def file_text(place: str, part: Mapping[str, Any]) -> str:
    """Return name and text of the file in a part. Raise BadRequestError, with `place`, unless it is text in the body.

    OpenAI's service also reads files that it stores or fetches, and PDF files.
    """
    file = part.get("file") if part.get("type") == "file" else part
    data = file.get("file_data") if isinstance(file, dict) else None
    if not isinstance(file, dict) or not isinstance(data, str):
        raise BadRequestError(
            f"{place} has a file without `file_data`: the server stores and fetches no files. Send the text in a text "
            "part, or as a data URL of the type text/plain."
        )
    head, comma, content = data.partition(",")
    media_type, *options = head.removeprefix("data:").split(";")
    is_text = media_type.startswith("text/") or media_type in _TEXT_TYPES
    if not (head.startswith("data:") and comma and options[-1:] == ["base64"] and is_text):
        raise BadRequestError(
            f"{place} has a file that is not text; only text is served. `file_data` must be a data URL in base64, such "
            "as data:text/plain;base64,SGVsbG8="
        )
    try:
        text = base64.b64decode(content, validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(f"{place} has a file that is not UTF-8 text in base64: {error}.") from None
    name = file.get("filename")
    return f"{name}\n{text}" if isinstance(name, str) and name else text
