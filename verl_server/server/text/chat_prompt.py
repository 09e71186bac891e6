"""`read_chat_prompt`: makes the prompt of a chat request, and decides how its output is parsed.

The chat dialects call it in text workers, inside their jobs, because the time for rendering and for the grammar of
forced calls grows with the size of the body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from verl_server.chat.call_readers import ParameterTypes
from verl_server.chat.formats import NONE
from verl_server.chat.output import OutputFormat, OutputParser, derived_ids
from verl_server.chat.session_view import NextTurn
from verl_server.chat.templates import Message
from verl_server.chat.tool_grammar import output_grammar
from verl_server.chat.tools import Tool, ToolChoice, parameter_types, template_messages, template_tools
from verl_server.server.text.session_prompt import plan_prompt, prompt_length, refuse_in_session
from verl_server.server.text.text_tools import Ids, TextTools

_PROMPT_END = 64
"""Number of tokens at the end of a prompt of token ids in which the tag of an open reasoning is searched."""


class ChatOutput(msgspec.Struct, frozen=True):
    """The settings for parsing the output of one chat request."""

    format: OutputFormat
    tools: bool = False
    """True if the output may have tool calls."""
    thinking_open: bool = False
    """True if the prompt ends inside the reasoning."""
    keeps_special_tokens: bool = False
    """True if a tag is a special token, so that the output needs `skip_special_tokens=False`."""
    types: ParameterTypes = {}
    """See `OutputFormat.parser`."""
    grammar: str | None = None
    """Grammar for `SamplingParams.ebnf` if a tool call is required, or if the answer has a schema."""
    calls_first: bool = False
    """True if the output is either calls or an answer of a schema. See `OutputFormat.parser`."""
    constrained: bool = False
    """True if the grammar determines where calls stand. See `OutputFormat.parser`."""
    only_call: str | None = None
    """The function that a forced call must name, if there is only one. See `OutputFormat.parser`."""

    @property
    def is_parsed(self) -> bool:
        """True if the output may have reasoning or tool calls, so that it needs a parser."""
        return self.format.reasoning_format is not None or (self.tools and self.format.tool_format is not None)

    @property
    def begins_in_reasoning(self) -> bool:
        """True if the output begins inside the reasoning, without an opening tag."""
        reasoning = self.format.reasoning_format
        return reasoning is not None and (self.thinking_open or reasoning.starts_open)

    def without_reasoning(self) -> ChatOutput:
        """Return the plan that leaves the reasoning in the content."""
        format = msgspec.structs.replace(self.format, reasoning=NONE)
        return msgspec.structs.replace(self, format=format, thinking_open=False, calls_first=False, only_call=None)

    def parser(self, whole_calls: bool, call_seed: str = "") -> OutputParser:
        """Return a parser for one sample. See `OutputFormat.parser`. With `call_seed`, it determines the calls' ids."""
        tools = self.format.tool_format
        return self.format.parser(
            self.tools,
            self.thinking_open,
            whole_calls=whole_calls,
            types=self.types,
            new_id=derived_ids(call_seed, tools is not None and tools.short_ids) if call_seed else None,
            calls_first=self.calls_first,
            constrained=self.constrained,
            only_call=self.only_call,
        )


class ChatPrompt(msgspec.Struct, frozen=True):
    """A rendered and tokenized conversation."""

    ids: list[int]
    """Token ids of the prompt. Empty in a session, where `next` is the plan of the prompt."""
    unused_options: list[str]
    """Names of the options that the template does not use. Such an option is no error."""
    output: ChatOutput
    next: NextTurn | None = None
    """In a session: the plan of the prompt."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.ids) if self.next is None else prompt_length(self.next)

    def checked(self, text: TextTools, keep: int | None = None) -> Ids:
        """Return the last `keep` ids, checked against the model; no ids in a session."""
        return b"" if self.next is not None else text.prompt(self.ids, keep)


class ReadConversation(msgspec.Struct, kw_only=True):
    """The result of a job that reads a request with a conversation. Each dialect adds the request in its own shape."""

    prompts: list[Ids]
    """Always one prompt. In a session the prompt is empty, and `next` is its plan."""
    is_single: bool = True
    output: ChatOutput
    unknown_fields: list[str]
    unused_options: list[str]
    """Names of the template variables that the template does not use. Such a variable is no error."""
    next: NextTurn | None = None


def read_chat_prompt(
    text: TextTools,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    choice: ToolChoice,
    parallel: bool,
    schema: Mapping[str, Any] | Literal[True] | None,
    constraint: str | None = None,
    input_ids: list[int] | None = None,
) -> ChatPrompt:
    """Render a conversation in OpenAI's shape, with contents that are strings.

    `options` are those of `ChatTemplates.render`. With `choice` none, calls stay in the content, and only a template
    that reads tools gets them: clients such as TRL's parse the calls themselves, and earlier calls may be in the
    conversation. With `parallel`, a forced output may have several calls. With `schema`, the answer is JSON of this
    schema. `constraint` is the name of the sampling parameter with another constraint of the request; `output_grammar`
    decides which constraints may be combined. If `input_ids` is given, it replaces the messages, and no template is
    rendered. In a session (`text.session`), the prompt is the prompt of the session's next turn. Raise BadRequestError
    for anything that the template or the tool format refuses.
    """
    refuse_in_session(text, input_ids=input_ids)
    offered = [] if choice.mode == "none" else list(tools)
    if offered or (tools and "tools" in text.template(options).variables):
        options = {**options, "tools": template_tools(tools)}
    format = text.output_format(options)
    next = None
    if text.session is not None:
        given = tools if "tools" in options else []
        planned, unused = plan_prompt(text, text.session, messages, options, given, format)
        rendered, next, input_ids = planned.ending, planned.next, []
    elif input_ids is None:
        rendered, unused = text.render_text(template_messages(messages), options)
        input_ids = text.encode([rendered], add_special_tokens=False)[0]
    else:
        text.bounds.check_ids("input_ids", input_ids)
        rendered, unused = text.decoder(False)(input_ids[-_PROMPT_END:]), []
    format = format.after(rendered)
    thinking_open = format.thinking_open(rendered)
    tag_ids = text.tag_ids(format.tags(tools=bool(offered)))
    grammar = output_grammar(
        tools,
        choice,
        format,
        schema=schema,
        constraint=constraint,
        parallel=parallel,
        thinking_open=thinking_open,
        special_tokens=tag_ids,
    )
    output = ChatOutput(
        format=format,
        tools=bool(offered),
        thinking_open=thinking_open,
        keeps_special_tokens=any(map(text.tokens.is_special, tag_ids.values())),
        types=parameter_types(offered) if format.needs_types else {},
        grammar=grammar,
        calls_first=schema is not None and bool(offered) and not choice.is_forced,
        constrained=grammar is not None and bool(offered),
        only_call=_only_call(choice, tools),
    )
    return ChatPrompt(input_ids, unused, output, next)


def _only_call(choice: ToolChoice, tools: Sequence[Tool]) -> str | None:
    """Return the name of the only function that a forced call may name, or None."""
    if not choice.is_forced:
        return None
    return choice.name or (tools[0].name if len(tools) == 1 else None)
