"""Structural tags, SGLang's and xgrammar's JSON for text with constrained parts, translated into Lark for llguidance.

Both forms are accepted: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, and {"type": "structural_tag",
"format": {...}}. A part that llguidance cannot express is refused by name.

Free text is a lazy terminal: it ends where the first trigger, or the string that must follow, is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.grammar.gbnf import is_gbnf, lark_of_gbnf
from verl_server.grammar.json_schema import enforceable_schema, with_layout

_MOST_DEPTH = 32
"""Largest number of formats inside each other."""
_TEXT = r"/(.|\n)*/"
_WHERE = "sampling_params.structural_tag"


def lark_of_structural_tag(tag: dict[str, Any], special_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return llguidance's list of grammars, the main grammar first.

    Raise BadRequestError for parts that it cannot express.

    `special_tokens` maps the text of the tokenizer's special tokens to their ids.
    """
    return _Translation(special_tokens).grammars(_format_of(tag))


def _format_of(tag: dict[str, Any]) -> dict[str, Any]:
    """Return the `format` of a structural tag. The form with `structures` becomes a format `triggered_tags`."""
    form: Any = tag.get("format")
    if isinstance(form, dict):
        return form
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise BadRequestError(f"{_WHERE} needs `format`, or the lists `structures` and `triggers`.")
    tags = []
    for structure in structures:
        if not isinstance(structure, dict):
            raise BadRequestError(f"{_WHERE}.structures must be a list of objects with begin, schema and end.")
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Translation:
    """Collects the rules and the inner grammars of one structural tag."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules: list[str] = []
        self._inner: list[dict[str, Any]] = []

    def grammars(self, form: dict[str, Any]) -> list[dict[str, Any]]:
        start = self._format(form, end=None, depth=0)
        main = "\n".join([f"start: {start}", *self._rules])
        return [{"name": "structural_tag", "lark_grammar": main}, *self._inner]

    def _rule(self, body: str, *, terminal: bool = False, lazy: bool = False) -> str:
        name = f"{'TEXT' if terminal else 'part'}_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _format(self, form: Any, end: str | None, depth: int) -> str:
        """Return an expression in Lark for `form`, followed by the string `end`.

        None stands for the end of the output: then `form` is the last part.
        """
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise BadRequestError(f"{_WHERE}: a format must be an object with a `type`, not {form!r:.60}.")
        if depth > _MOST_DEPTH:
            raise BadRequestError(f"{_WHERE} has more than {_MOST_DEPTH} formats inside each other.")
        closing = "" if end is None else self._literal(end)
        match form["type"]:
            case "const_string":
                return f"{self._literal(_string(form, 'value'))} {closing}"
            case "json_schema":
                return f"%json {json.dumps(_schema(form))} {closing}"
            case "regex":
                return f"{lark_of_regex(_string(form, 'pattern'))} {closing}"
            case "grammar":
                return f"{self._grammar(_string(form, 'grammar'))} {closing}"
            case "any_text":
                return self._any_text(form, end)
            case "sequence":
                return self._sequence(_items(form, "elements"), end, depth + 1)
            case "or":
                parts = [self._format(part, end, depth + 1) for part in _items(form, "elements")]
                return self._rule(" | ".join(parts))
            case "tag":
                return f"{self._tag(form, depth + 1)} {closing}"
            case "triggered_tags":
                return self._triggered_tags(form, end, depth + 1)
            case "tags_with_separator":
                return f"{self._tags_with_separator(form, depth + 1)} {closing}"
            case other:
                raise BadRequestError(f"{_WHERE}: the format {other!r:.60} is not supported.")

    def _any_text(self, form: dict[str, Any], end: str | None) -> str:
        _refuse(form, "excludes")
        if end is None:
            return self._rule(_TEXT, terminal=True)
        return self._text_until(end)

    def _text_until(self, end: str) -> str:
        """Return free text up to and including the first `end`. It contains no special tokens."""
        parts = self._split(end)
        if parts and parts[0] in self._special_tokens:
            return f"{self._rule(_TEXT, terminal=True)} {self._literal(end)}"
        if len(parts) > 1:
            raise BadRequestError(f"{_WHERE}: {end!r:.60} ends free text, so a special token must be its beginning.")
        return self._rule(f"{_TEXT} {json.dumps(end)}", lazy=True)

    def _split(self, text: str) -> list[str]:
        """Return the special tokens in a text, and the parts between them."""
        return [part for part in self._special.split(text) if part] if self._special else [text]

    def _literal(self, text: str) -> str:
        """Return Lark for exactly this text."""
        parts = self._split(text)
        tokens = self._special_tokens
        return " ".join(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts) or '""'

    def _sequence(self, elements: list[Any], end: str | None, depth: int) -> str:
        """Return the elements one after the other. A constant string may end the free text before it."""
        parts, i = [], 0
        while i < len(elements):
            following = elements[i + 1] if i + 1 < len(elements) else None
            if following is None:
                parts.append(self._format(elements[i], end, depth))
            elif _kind(elements[i]) in ("any_text", "triggered_tags"):
                if _kind(following) != "const_string":
                    raise BadRequestError(
                        f"{_WHERE}: {_kind(elements[i])} in a sequence must be the last element, or be followed by a "
                        "const_string, with which it ends."
                    )
                last = i + 2 == len(elements)
                parts.append(self._format(elements[i], _string(following, "value"), depth))
                if last and end is not None:
                    parts.append(self._literal(end))
                i += 1
            else:
                parts.append(self._format(elements[i], "", depth))
            i += 1
        return " ".join(parts)

    def _tag(self, form: Any, depth: int, begin: str | None = None) -> str:
        """Return begin, content and end of a tag.

        `begin` replaces the tag's own begin, a part of which was read already.
        """
        begin = _string(form, "begin") if begin is None else begin
        ends = form.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise BadRequestError(f"{_WHERE}: `end` of a tag must be a string or a list of strings.")
        contents = [self._format(form.get("content"), end, depth) for end in ends]
        return self._rule(f"{self._literal(begin)} ({' | '.join(contents)})")

    def _triggered_tags(self, form: dict[str, Any], end: str | None, depth: int) -> str:
        """Return free text in which each trigger begins one of the tags.

        With `at_least_one` the output begins with a tag. With `stop_after_first` it ends with the first tag.
        """
        _refuse(form, "excludes")
        triggers, tags = _items(form, "triggers"), _items(form, "tags")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise BadRequestError(f"{_WHERE}: `triggers` must be strings that are not empty.")
        begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole = []
        for tag in tags:
            begin = _string(tag, "begin")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise BadRequestError(f"{_WHERE}: the tag that begins with {begin!r:.60} begins with no trigger.")
            begun[trigger].append(self._tag(tag, depth, begin[len(trigger) :]))
            whole.append(f"{self._literal(trigger)} {begun[trigger][-1]}")
        after_text = []
        for trigger, rests in begun.items():
            if rests:
                after_text.append(f"{self._text_until(trigger)} ({' | '.join(rests)})")
        triggered = self._rule(" | ".join(after_text))
        rest = self._any_text({}, end)
        stops = bool(form.get("stop_after_first"))
        closing = "" if end is None else self._literal(end)
        if form.get("at_least_one"):
            first = f"({' | '.join(whole)})"
            return f"{first} {closing}" if stops else f"{first} {triggered}* {rest}"
        return f"({triggered} {closing} | {rest})" if stops else f"{triggered}* {rest}"

    def _tags_with_separator(self, form: dict[str, Any], depth: int) -> str:
        tag = f"({' | '.join(self._tag(tag, depth) for tag in _items(form, 'tags'))})"
        separator = self._literal(_string(form, "separator"))
        tags = tag if form.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return f"({tags})" if form.get("at_least_one") else f"({tags})?"

    def _grammar(self, text: str) -> str:
        name = f"inner_{len(self._inner)}"
        self._inner.append({"name": name, "lark_grammar": lark_of_gbnf(text) if is_gbnf(text) else text})
        return f"@{name}"


def _kind(form: Any) -> Any:
    return form.get("type") if isinstance(form, dict) else None


def lark_of_regex(pattern: str) -> str:
    """Convert a regular expression into a terminal of a Lark grammar."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern)}/"


def _string(form: Any, name: str) -> str:
    value = form.get(name) if isinstance(form, dict) else None
    if not isinstance(value, str):
        raise BadRequestError(f"{_WHERE}: `{name}` must be a string, not {value!r:.60}.")
    return value


def _items(form: dict[str, Any], name: str) -> list[Any]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequestError(f"{_WHERE}: `{name}` must be a list that is not empty.")
    return value


def _schema(form: dict[str, Any]) -> Any:
    schema = form.get("json_schema")
    if not isinstance(schema, (dict, bool)):
        raise BadRequestError(f"{_WHERE}: a JSON schema must be an object or a boolean, not {schema!r:.60}.")
    return with_layout(enforceable_schema(schema))


def _refuse(form: dict[str, Any], name: str) -> None:
    if form.get(name):
        raise BadRequestError(f"{_WHERE}: `{name}` is not supported.")
