"""Chat templates: which ones a request may choose, which variables it may set, and how they are rendered.

The text workers (`server/text_worker.py`) call `ChatTemplates.render`; nothing here knows of processes or tokenizers. A
template is a program in Jinja's language. It runs in Jinja's sandbox, which bounds neither time nor memory, so the only
templates that run are those of the model folder and those that the operator lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl_server.errors import BadRequestError

Message = dict[str, Any]

_SET_BY_US = frozenset({"messages"})
"""Variables of every template that a request sets through fields of its own."""
_ACCEPTED_ANYWHERE = frozenset({"enable_thinking"})
"""Variables that clients send to every model, also to those whose template does not use them."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read one of the first two."""
_CONTINUE_MARK = "\u2063continue\u2063here\u2063 "
"""Appended to the message that the policy shall continue, to find its end in the rendered text. A template that cuts
off the white space at a message's end cuts off the mark's last character, too."""


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str) -> None:
        """Raises BadRequestError with the line if `source` is no valid Jinja."""
        self.source = source
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadRequestError(f"The chat template is not valid Jinja, line {error.lineno}: {error}.") from None
        unset = jinja2.meta.find_undeclared_variables(tree)
        self.variables = frozenset(unset - environment.globals.keys() - _SET_BY_US)
        """Names that the template reads and does not set itself."""

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation. Whatever the template raises is a BadRequestError with its message."""
        try:
            return self._template.render({"tools": None, "documents": None, **variables, "messages": messages})
        except (MemoryError, RecursionError) as error:
            raise BadRequestError(f"The chat template needs too much memory for these messages: {error!r}.") from None
        except Exception as error:  # a template may raise anything
            raise BadRequestError(f"The chat template refused the messages: {error}") from error


class ChatTemplates:
    """The templates of one server, the variables that it sets in all of them, and what a request may ask for."""

    def __init__(
        self, default: str | dict[str, str] | None, allowed: Sequence[str], special: Mapping[str, Any]
    ) -> None:
        """
        `default`: the template of the tokenizer, or several by name, of which "default" is the default.
        `allowed`: sources that a request may send in `chat_template` as well.
        `special`: the special tokens by name (`bos_token`, ...).
        """
        named = default if isinstance(default, dict) else {"default": default} if default is not None else {}
        self._default = named.get("default")
        self._allowed = frozenset((*named.values(), *allowed))
        self._special = dict(special)
        self._compiled = lru_cache(maxsize=None)(ChatTemplate)  # no more than there are allowed sources

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[str, list[str]]:
        """(text, names of options that the template does not use and that are accepted all the same).

        `options` is the request's `chat_template_kwargs`: variables of the template, and `chat_template`,
        `add_generation_prompt` and `continue_final_message`. Raises BadRequestError.
        """
        variables = dict(options)
        template = self._choose(variables.pop("chat_template", None))
        resume = _flag("continue_final_message", variables.pop("continue_final_message", False))
        opens_answer = _flag("add_generation_prompt", variables.pop("add_generation_prompt", not resume))
        unused = _check_names(variables, template)
        if resume and opens_answer:
            raise BadRequestError("continue_final_message and add_generation_prompt exclude each other: set one.")
        variables = self._special | variables | {"add_generation_prompt": opens_answer}
        plain = [_with_reasoning_names(message) for message in messages]
        if resume:
            return _render_open(template, plain, variables), unused
        return template.render(plain, variables), unused

    def _choose(self, source: Any) -> ChatTemplate:
        if source is not None and not (isinstance(source, str) and source in self._allowed):
            raise BadRequestError(
                "The chat template of this request is not among those that the server allows. Leave chat_template out, "
                "or add a file with exactly this template to allowed_chat_templates (--allowed-chat-templates)."
            )
        chosen = source if source is not None else self._default
        if chosen is None:
            raise BadRequestError(
                "The tokenizer has no chat template: pass --chat-template, or use /v1/completions or /generate."
            )
        return self._compiled(chosen)


def _check_names(variables: Mapping[str, Any], template: ChatTemplate) -> list[str]:
    """The names in `variables` that the template does not read and that are accepted anywhere."""
    unread = [name for name in variables if name not in template.variables]
    unknown = [name for name in unread if name not in _ACCEPTED_ANYWHERE]
    if unknown:
        known = sorted({*template.variables, *_ACCEPTED_ANYWHERE, "add_generation_prompt", "continue_final_message"})
        shown = ", ".join(f"`{name[:64]}`" for name in unknown[:8])
        raise BadRequestError(
            f"chat_template_kwargs: the chat template does not use {shown}; it uses {', '.join(known)}."
        )
    return unread


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} must be true or false, not {value!r:.64}.")
    return value


def _with_reasoning_names(message: Message) -> Message:
    """Without nulls, which many templates take for text, and with the reasoning under each name that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
    return plain


def _render_open(template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content, which the policy continues."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content:
        raise BadRequestError("continue_final_message needs a last message with text to continue.")
    marked = [*messages[:-1], messages[-1] | {"content": content + _CONTINUE_MARK}]
    text = template.render(marked, variables)
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise BadRequestError("continue_final_message: the chat template does not show the last message as it is.")
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja with what chat templates expect: source: "Writing a chat template" in transformers' documentation."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _new_dict, "namespace": _Namespace}
    return environment


class _Namespace(jinja2.utils.Namespace):
    """A template's `namespace()`, without names that Python or Jinja would read on the object itself."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *rest = args
        jinja2.utils.Namespace.__init__(self, *rest, **attributes)
        for name in dict(*rest, **attributes):
            _check_attribute(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise jinja2.TemplateError(f"A namespace cannot hold {name!r}: names begin with a letter.")


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks what the policy wrote, for training. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    """`dict(...)`, not the type itself, whose attributes a template has no use for."""
    return dict(*pairs, **items)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
