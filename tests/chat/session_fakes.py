"""Small chat templates with the habits of real ones, a toy tokenizer, and a session that plays turns with them."""

from __future__ import annotations

import itertools
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.chat.parsing import parse_message
from verl_server.chat.history import ASSISTANT, NODE, reasoning_digest, reply_digest
from verl_server.chat.next_turn import PlannedTurn, plan_next_turn
from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import ReplyFacts, SessionView
from verl_server.chat.templates import ChatTemplates
from verl_server.chat.tools import read_tools, template_tools
from verl_server.errors import BadRequestError

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("add", "look")
]

# Tools in the system message; reasoning is removed before the last question, and the last turn gets an empty one.
QWEN = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>...</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>
{{ (m.reasoning_content or '') | trim }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if not loop.first or m.content %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# Tools in the first question, a single call for each turn, content trimmed, other end tokens.
LLAMA = """<|begin_of_text|>
{%- set ns = namespace(tools=tools) %}
{%- if messages[0].role == 'system' %}<|start|>system<|end|>

{{ messages[0].content | trim }}<|eot_id|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|end|>

{% if ns.tools %}<|python_tag|>{{ ns.tools | tojson }}
{% set ns.tools = none %}{% endif %}{{ m.content | trim }}<|eot_id|>
{%- elif m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}
{%- set call = m.tool_calls[0].function %}<|start|>assistant<|end|>

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|end|>

{{ m.content | trim }}<|eot_id|>
{%- elif m.role == 'tool' %}<|start|>ipython<|end|>

{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant<|end|>

{% endif %}"""

# Tools and the system text before the last question, strict alternation, ids of 9 characters, no generation prompt.
MISTRAL = """<s>
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set talk = messages[1:] if system else messages %}
{%- set ns = namespace(index=0, last=-1) %}
{%- for m in talk %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}
{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in talk %}
{%- if m.role == 'user' %}
{%- if loop.index0 == ns.last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]
{%- if loop.index0 == ns.last and system %} {{ system }}
{% endif %} {{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""

# The end token is the tag of the next role.
GLM = """[gMASK]
{%- if tools %}<|system|>
{{ tools | tojson }} <tool_call>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|observation|>
{{ m.content }}
{%- else %}<|{{ m.role }}|>
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

# No end token, and no calls.
PLAIN = """{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"""

TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "glm": GLM, "plain": PLAIN}
END_TOKENS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "llama": ["<|eot_id|>", "<|eom_id|>"],
    "mistral": ["</s>"],
    "glm": ["<|user|>", "<|observation|>", "<|endoftext|>"],
    "plain": ["</s>"],
}


class ToyTokens:
    """One id for each special token and for each character, except that some pairs are one token."""

    SPECIAL = (
        *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start|>", "<|end|>"),
        *("<|eot_id|>", "<|eom_id|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[INST]"),
        *("[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    )
    PAIRS = ("\n\n", " a", "the", "ing", '"}', ".\n", ": ")

    def __init__(self) -> None:
        self._texts = (*self.SPECIAL, *self.PAIRS)

    def encode(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            known = next((i for i, each in enumerate(self._texts) if text.startswith(each, at)), None)
            ids.append(1000 + ord(text[at]) if known is None else known)
            at += 1 if known is None else len(self._texts[known])
        return ids

    def characters(self, text: str) -> list[int]:
        """Return ids that the tokenizer would not choose: one for each character, except for special tokens."""
        ids = self.encode(text)
        return list(itertools.chain(*([i] if i < len(self.SPECIAL) else map(_character, self.text([i])) for i in ids)))

    def id(self, text: str) -> int:
        return self._texts.index(text)

    def text(self, ids: list[int]) -> str:
        return "".join(self._texts[i] if i < 1000 else chr(i - 1000) for i in ids)


def _character(char: str) -> int:
    return 1000 + ord(char)


@dataclass
class Turn:
    """A turn of `PlayedSession`."""

    number: int
    parent: int
    shared: int
    prompt: list[int]
    began: str | None
    planned: PlannedTurn
    output: list[int] = field(default_factory=list)
    facts: ReplyFacts | None = None

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.output


class PlayedSession:
    """A session in which a test chooses what is sampled. It puts prompts together as the ledger does."""

    def __init__(self, template: str = "qwen", history: str = "stored", tokens: ToyTokens | None = None) -> None:
        self.tokens = tokens or ToyTokens()
        self.source = TEMPLATES.get(template, template)
        self.templates = ChatTemplates(self.source, [], {})
        self.format = OutputFormat.of(self.source)
        ends = END_TOKENS.get(template, ["</s>"])
        self.end_tokens = [self.tokens.id(text) for text in ends]
        self.history: Any = history
        self.turns: list[Turn] = []
        self.nodes = bytearray()
        self.rendered: list[list[dict[str, Any]]] = []
        """Messages of all renderings."""

    def view(self, previous: int | None = None) -> SessionView:
        replies = [turn.facts for turn in self.turns if turn.facts is not None]
        return SessionView(self.history, bytes(self.nodes), replies, self.end_tokens, previous)

    def plan(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        previous: int | None = None,
        **options: Any,
    ) -> PlannedTurn:
        declared = read_tools(tools)
        if declared:
            options["tools"] = template_tools(declared)
        return plan_next_turn(
            self.view(previous),
            messages,
            {"add_generation_prompt": not options.get("continue_final_message"), **options},
            declared,
            self._render,
            self.tokens.encode,
            self.format,
            lambda token: self.tokens.text([token]),
        )

    def ask(self, messages: list[dict[str, Any]], tools: Any = None, previous: Any = None, **options: Any) -> Turn:
        """Plan a turn, and put its prompt together."""
        planned = self.plan(messages, tools, previous, **options)
        next = planned.next
        added, began = array("i", next.added).tolist(), next.began
        parent, kept = next.parent, next.kept
        stored = self.turns[parent].sequence if parent >= 0 else []
        if kept < 0:
            kept = _common(stored, added)
            prompt = added
            began = None if kept == len(stored) else began
        else:
            prompt = stored[:kept] + added
        while parent >= 0 and kept <= len(self.turns[parent].prompt):
            kept, parent = min(kept, self.turns[parent].shared), self.turns[parent].parent
        turn = Turn(len(self.turns), parent, kept, prompt, began, planned)
        self.turns.append(turn)
        return turn

    def answer(
        self, turn: Turn, text: str, end: str | None = "", *, exact: bool = False, delivered: bool = True
    ) -> dict[str, Any]:
        """Sample `text`, one character a token, and the end token `end` ("": the usual one). Return the message.

        With `exact`, the ids are those that the tokenizer gives for the text.
        """
        usual = self.tokens.text(self.end_tokens[:1])
        ids = self.tokens.encode(text) if exact else self.tokens.characters(text)
        turn.output = ids + ([] if end is None else self.tokens.encode(end or usual))
        thinking = self.format.thinking_open(turn.planned.ending)
        shown = parse_message(self.format.after(turn.planned.ending), text, tools=True, thinking_open=thinking)
        reasoning, open = shown.reasoning, self.format.reasoning_format
        last = turn.output[-1] if turn.output else -1
        turn.facts = ReplyFacts(
            turn=turn.number,
            parent=turn.parent,
            prompt_tokens=len(turn.prompt),
            output_tokens=len(turn.output),
            generation_prompt=turn.planned.next.generation_prompt,
            end_token=last if last in self.end_tokens else -1,
            in_reasoning=open is not None and (thinking or open.open in text) and open.close not in text,
            delivered=delivered,
            calls=[(call.id, call.name) for call in shown.tool_calls],
            options=turn.planned.next.options,
        )
        content = turn.planned.next.continued + shown.content
        digest = reply_digest(content, [(call.name, call.arguments) for call in shown.tool_calls])
        at = turn.planned.next.after_node
        for record in NODE.iter_unpack(turn.planned.next.new_nodes):
            self.nodes += NODE.pack(at, *record[1:])
            at = len(self.nodes) // NODE.size - 1
        self.nodes += NODE.pack(at, turn.number, ASSISTANT, b"", digest, reasoning_digest(reasoning), 0, 0)
        message: dict[str, Any] = {"role": "assistant", "content": content or None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if shown.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in shown.tool_calls
            ]
        return message

    def whole(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> list[int]:
        """Return the ids of a whole render."""
        if tools:
            options["tools"] = template_tools(read_tools(tools))
        return self.tokens.encode(self._render(messages, {"add_generation_prompt": True, **options}))

    def _render(self, messages: Any, options: Any) -> str:
        self.rendered.append(list(messages))
        return self.templates.render(messages, options)[0]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def result(call: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def call_text(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def copied(message: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a deep copy with changes. None removes a key."""
    kept = msgspec.json.decode(msgspec.json.encode(message)) | changes
    return {key: value for key, value in kept.items() if value is not None or key == "content"}


def _common(first: list[int], second: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in pairs)


__all__ = ["BadRequestError", "PlayedSession", "ToyTokens", "Turn"]
