"""Chat templates: the templates that a request may choose, the variables that it may set, and the rendering.

The text workers (`server/text_worker.py`) call `ChatTemplates.render`. This module uses no process and no tokenizer. A
template is a Jinja program. Jinja's sandbox limits neither time nor memory, so only the templates of the model folder
and the templates that the operator lists are run.
"""

from __future__ import annotations

import json
import re
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

_RESERVED = frozenset({"messages"})
"""Template variables that a request sets by other fields than `chat_template_kwargs`."""
_LISTS = ("tools", "documents")
"""Variables that every template has, None if the request does not set them."""
_ACCEPTED_ANYWHERE = frozenset({"enable_thinking", "thinking", "reasoning_effort", "verbosity"})
"""Variables that clients send to every model, even if the model's template does not use them."""
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys that clients use for the reasoning in a message. Templates read one of the first two."""
_TESTS_FOR_NULL = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none")
"""Text in the source of templates that recognize a message with tool calls by its null content."""
_CONTINUE_MARK = "\u2063continue\u2063here\u2063 "
"""Mark that is appended to the message that the policy continues, to find the message's end in the rendered text.

The mark ends with a space: if a template strips white space from a message, it also strips this space.
"""


class ChatTemplate:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Compile `source`. Raise BadRequestError, which names the line, if `source` is not valid Jinja."""
        self.source = source
        environment = _environment()
        try:
            unset = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadRequestError(f"The chat template is not valid Jinja, line {error.lineno}: {error}.") from None
        except (
            RecursionError,
            MemoryError,
            SyntaxError,
            ValueError,
        ) as error:  # of Python, which compiles the template
            raise BadRequestError(
                f"The chat template cannot be compiled: {type(error).__name__}: {error}. Shorten its numbers, and nest "
                "its blocks and expressions less deeply."
            ) from None
        self._expects_null = _TESTS_FOR_NULL.search(source) is not None
        self.variables = frozenset(unset - environment.globals.keys() - _RESERVED)
        """Names of the variables that the template reads but does not set."""

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation. Raise BadRequestError for any error of the template.

        The arguments of tool calls are objects. A few templates expect JSON text: if a template raises an error, it is
        rendered again with JSON text.
        """
        if self._expects_null:
            messages = [_with_null_content(message) for message in messages]
        try:
            return self._render(messages, variables)
        except BadRequestError:
            with_text = [_with_text_arguments(message) for message in messages]
            if with_text == messages:
                raise
            return self._render(with_text, variables)

    def _render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render({"tools": None, "documents": None, **variables, "messages": messages})
        except (MemoryError, RecursionError) as error:
            raise BadRequestError(f"The chat template needs too much memory for these messages: {error!r}.") from None
        except Exception as error:  # a template may raise anything
            raise BadRequestError(f"The chat template refused the messages: {error}") from error


class ChatTemplates:
    """The chat templates of one server."""

    def __init__(
        self, default: str | dict[str, str] | None, allowed: Sequence[str], special: Mapping[str, Any]
    ) -> None:
        """`default` is the source of the tokenizer's template, or maps names to the sources of several templates.

        Then the template named "default" is used or, for a request with tools, the template named "tool_use" if it
        exists. `allowed` are the sources of other templates that a request may send in `chat_template`. `special` maps
        names to special tokens (`bos_token`, ...), which are variables of every template.
        """
        named = default if isinstance(default, dict) else {"default": default} if default is not None else {}
        self._default = named.get("default")
        self._with_tools = named.get("tool_use", self._default)
        self._allowed = frozenset((*named.values(), *allowed))
        self._special = dict(special)
        self._compiled = lru_cache(maxsize=None)(ChatTemplate)  # only allowed sources are compiled, so it stays small

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Return (text, names of options that the template does not use).

        `options` is the request's `chat_template_kwargs`: variables of the template, and `chat_template`,
        `add_generation_prompt` and `continue_final_message`. The variables `tools` and `documents` are lists. An
        unused option raises BadRequestError unless it is accepted for every template. Also raises BadRequestError for
        wrong options and errors of the template.
        """
        variables = dict(options)
        template = self.choose(options)
        variables.pop("chat_template", None)
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

    def choose(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template that `render` uses for these options. Raise BadRequestError if there is none."""
        source = options.get("chat_template")
        if source is not None and not (isinstance(source, str) and source in self._allowed):
            raise BadRequestError(
                "The server does not allow the chat template of this request. Leave chat_template out, or add a file "
                "with exactly this template to allowed_chat_templates (--allowed-chat-templates)."
            )
        default = self._with_tools if options.get("tools") else self._default
        chosen = source if source is not None else default
        if chosen is None:
            raise BadRequestError(
                "The tokenizer has no chat template: pass --chat-template, or use /v1/completions or /generate."
            )
        return self._compiled(chosen)


def _check_names(variables: Mapping[str, Any], template: ChatTemplate) -> list[str]:
    """Return the names in `variables` that the template does not read.

    Raise BadRequestError if such a name is not accepted for every template.
    """
    for name in _LISTS:
        if variables.get(name) and name not in template.variables:
            raise BadRequestError(
                f"{name}: the chat template does not use `{name}`. Put the {name} in the messages, or start the "
                f"server with a template that reads `{name}` (--chat-template)."
            )
    unread = [name for name in variables if name not in template.variables and name not in _LISTS]
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
    """Return the message without nulls, and with the reasoning under each key that templates read.

    Many templates would render a null as text.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning} | plain | {"reasoning_content": reasoning}
    return plain


def _with_null_content(message: Message) -> Message:
    """Return the message with null for the empty content of a message that calls tools, as in OpenAI's API."""
    return message | {"content": None} if message.get("tool_calls") and not message.get("content") else message


def _with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_text_argument(call) for call in calls]}


def _with_text_argument(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _render_open(template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any]) -> str:
    """Return the text up to the end of the last message's content, which the policy continues."""
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content:
        raise BadRequestError("continue_final_message needs a last message with text to continue.")
    marked = [*messages[:-1], messages[-1] | {"content": content + _CONTINUE_MARK}]
    text = template.render(marked, variables)
    end = text.rfind(_CONTINUE_MARK.rstrip())
    if end < 0:
        raise BadRequestError(
            "continue_final_message: the chat template changes the last message, so the end of the message cannot be "
            "found. Leave continue_final_message out."
        )
    return text[:end] if text.startswith(_CONTINUE_MARK, end) else text[:end].rstrip()


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox with the functions that chat templates expect.

    Source: "Writing a chat template" in the documentation of transformers.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals |= {"dict": _new_dict, "namespace": _Namespace}
    return environment


class _Namespace(jinja2.utils.Namespace):
    """A template's `namespace()`. It refuses names with a leading underscore, which Python and Jinja use themselves."""

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
        raise jinja2.TemplateError(f"A namespace cannot have the name {name!r}: a name must begin with a letter.")


class _GenerationBlocks(jinja2.ext.Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, which marks the policy's text for training."""

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
    """Return plain JSON. jinja2's own filter escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    """Return `dict(...)`. A function replaces the type, so that a template cannot reach the type's attributes."""
    return dict(*pairs, **items)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
