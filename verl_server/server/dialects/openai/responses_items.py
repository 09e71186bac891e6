"""`OutputItems` builds the output items of a response from deltas, and the typed events that announce each change."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import orjson

from verl_server.chat.output import ContentDelta, Delta, ToolCallDelta
from verl_server.server.dialects.openai.responses_tools import CallShape, custom_input

Event = tuple[str, dict[str, Any]]
"""Type of an event without "response.", and its fields."""


class OutputItems:
    """The items of one response. At most the last item is open."""

    def __init__(self, seed: str = "", calls: Mapping[str, CallShape] | None = None) -> None:
        """`seed` determines the ids of the items. Without it, they are random. `calls`: `OfferedTools.shapes`."""
        self._seed, self._calls = seed, calls or {}
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._texts: list[str] = []
        """Pieces of the text or of the arguments of the open item."""
        self._logprobs: list[bytes] = []
        """Log-probability entries of the open item, encoded with commas between them."""

    def add(self, delta: Delta, logprobs: bytes = b"") -> list[Event]:
        """Add a delta. `logprobs` are the entries of the tokens in a `ContentDelta`."""
        if isinstance(delta, ToolCallDelta):
            return self._add_call(delta)
        kind = "message" if isinstance(delta, ContentDelta) else "reasoning"
        events = [] if self._open and self.items[-1]["type"] == kind else [*self.close("completed"), *self._begin(kind)]
        self._texts.append(delta.text)
        if kind == "reasoning":
            return [*events, ("reasoning_text.delta", self._place() | {"delta": delta.text})]
        if logprobs:
            self._logprobs.append(logprobs)
        fields = {"delta": delta.text, "logprobs": orjson.Fragment(b"[%b]" % logprobs)}
        return [*events, ("output_text.delta", self._place() | fields)]

    def close(self, status: str) -> list[Event]:
        """Complete the open item, if there is one."""
        if not self._open:
            return []
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            done: list[Event] = [
                ("function_call_arguments.done", self._item_place() | {"name": item["name"], "arguments": text})
            ]
        elif item["type"] == "custom_tool_call":
            text = item["input"] = custom_input(text)  # known as a whole only
            done = [
                ("custom_tool_call_input.delta", self._item_place() | {"delta": text}),
                ("custom_tool_call_input.done", self._item_place() | {"input": text}),
            ]
        else:
            part = item["content"][0]
            part["text"] = text
            if item["type"] == "message":
                part["logprobs"] = orjson.Fragment(b"[%b]" % b",".join(self._logprobs))
                done = [("output_text.done", self._place() | {"text": text, "logprobs": part["logprobs"]})]
            else:
                done = [("reasoning_text.done", self._place() | {"text": text})]
            done.append(("content_part.done", self._place() | {"part": part}))
        self._open, self._texts, self._logprobs = False, [], []
        return [*done, ("output_item.done", {"output_index": len(self.items) - 1, "item": item})]

    def _add_call(self, delta: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.id is not None:
            events += self.close("completed")
            events += self._append(self._call_item(delta.id, delta.name or ""))
        if delta.arguments:
            self._texts.append(delta.arguments)
            if self.items[-1]["type"] == "function_call":
                events.append(("function_call_arguments.delta", self._item_place() | {"delta": delta.arguments}))
        return events

    def _call_item(self, call_id: str, offered: str) -> dict[str, Any]:
        shape = self._calls.get(offered) or CallShape(offered)
        kind, prefix, text = (
            ("custom_tool_call", "ctc", "input") if shape.is_custom else ("function_call", "fc", "arguments")
        )
        item = {"type": kind, "id": self._new_id(prefix), "call_id": call_id, "name": shape.name}
        namespace = {} if shape.namespace is None else {"namespace": shape.namespace}
        return item | namespace | {text: "", "status": "in_progress"}

    def _begin(self, kind: str) -> list[Event]:
        if kind == "reasoning":
            item: dict[str, Any] = {
                "type": "reasoning",
                "id": self._new_id("rs"),
                "summary": [],
                "status": "in_progress",
            }
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"type": "message", "id": self._new_id("msg"), "role": "assistant", "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        events = self._append(item | {"content": []})
        self.items[-1]["content"] = [part]
        return [*events, ("content_part.added", self._place() | {"part": dict(part)})]

    def _append(self, item: dict[str, Any]) -> list[Event]:
        self.items.append(item)
        self._open = True
        return [("output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        return self._item_place() | {"content_index": 0}

    def _new_id(self, prefix: str) -> str:
        if not self._seed:
            return f"{prefix}_{secrets.token_hex(16)}"
        digest = blake2b(f"{self._seed}/item/{len(self.items)}".encode(), digest_size=16).hexdigest()
        return f"{prefix}_{digest}"
