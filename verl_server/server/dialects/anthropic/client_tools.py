"""The parameters of Anthropic's tools that the client executes, for example `bash_20250124`.

A request names such a tool by its type, and Anthropic's models know its parameters. Our policy does not, so
`conversation` offers the tool as a function with the parameters below. Source: "Bash tool", "Text editor tool" and
"Memory tool" in Anthropic's documentation of tool use.
"""

from __future__ import annotations

from typing import Any


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return (description, JSON schema of the parameters) of the tool of a type, or None for an unknown type."""
    family, _, date = kind.rpartition("_")
    return _TOOLS.get(family) if date.isdigit() else None


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _commands(description: str, *names: str, **parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a tool with several commands. `parameters` are those of any of them."""
    command = {"type": "string", "enum": [*names]}
    return description, {
        "type": "object",
        "properties": {"command": command, **parameters},
        "required": ["command"],
    }


_LINES = {"type": "array", "items": {"type": "integer"}, "description": "view: first and last line; -1 is the end."}
_FILE = {
    "path": _text("Absolute path of a file or a folder."),
    "file_text": _text("create: the whole text of the file."),
    "old_str": _text("str_replace: the text to replace, which must stand in the file exactly once."),
    "new_str": _text("str_replace, insert: the new text."),
    "insert_line": {
        "type": "integer",
        "description": "insert: the line behind which the text is inserted; 0: the top.",
    },
    "insert_text": _text("insert: the text to insert."),
    "view_range": _LINES,
}
_PATHS = {"old_path": _text("rename: the path so far."), "new_path": _text("rename: the new path.")}
_BASH = {
    "command": _text("The command to run."),
    "restart": {"type": "boolean", "description": "Start the shell anew instead of running a command."},
}
_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": ("Run a command in a shell that stays open.", {"type": "object", "properties": _BASH}),
    "text_editor": _commands("View and edit files.", "view", "create", "str_replace", "insert", "undo_edit", **_FILE),
    "memory": _commands(
        "Keep notes in files below /memories.",
        "view", "create", "str_replace", "insert", "delete", "rename",
        **_FILE, **_PATHS,
    ),
}  # fmt: skip
"""Family of types, without the date -> (description, JSON schema of the parameters)."""
