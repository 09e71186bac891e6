"""`OutputFormat` and `OutputParser`: split a policy's text into reasoning, content and tool calls.

Dialects make an `OutputFormat` for each chat template and an `OutputParser` for each sample. The parser takes text in
pieces and returns deltas. The joined deltas do not depend on the division into pieces. The parser visits each character
a bounded number of times. It holds back only the beginning of a possible tag, the white space before it, and the text
of a call that is not yet certain. No text raises an error: a text that is not exactly a tool call is content.
"""

from __future__ import annotations

import itertools
import secrets
import string
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec

from verl_server.chat.call_readers import (
    CallArguments,
    CallBegin,
    CallEnd,
    CallReader,
    Event,
    ParameterTypes,
    skip_spaces,
)
from verl_server.chat.formats import (
    NONE,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    detect_reasoning_format,
    detect_tool_format,
    reasoning_format_name,
    tool_format_name,
)
from verl_server.chat.json_scanner import WHITE_SPACE
from verl_server.chat.tags import find_tag


class ReasoningDelta(msgspec.Struct, frozen=True, tag="reasoning"):
    """The next part of the reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, tag="content"):
    """The next part of the content."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, tag="tool_call"):
    """The next part of a tool call. The first delta of a call has `id` and `name`. In later deltas they are None."""

    index: int
    """Number of the call in this message, from 0."""
    id: str | None
    name: str | None
    arguments: str
    """The next part of the arguments' JSON text. It may be empty."""


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


class ToolCall(msgspec.Struct, frozen=True):
    """A complete tool call."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, as the model wrote it."""


class ParsedMessage(msgspec.Struct, frozen=True):
    """A whole message."""

    reasoning: str | None
    """The reasoning, or None if there is none."""
    content: str
    tool_calls: list[ToolCall]


class OutputFormat(msgspec.Struct, frozen=True):
    """The formats of tool calls and reasoning that apply to the output of one chat template."""

    tools: str
    """Name in `formats.TOOL_FORMATS`, or "none"."""
    reasoning: str
    """Name in `formats.REASONING_FORMATS`, or "none"."""

    @classmethod
    def of(
        cls, template: str | None, tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> OutputFormat:
        """Choose the formats by the source of a chat template; each setting, if not None, overrides the choice.

        Raise BadRequestError for an unknown name in a setting.
        """
        source = template or ""
        return cls(
            detect_tool_format(source) if tool_call_parser is None else tool_format_name(tool_call_parser),
            detect_reasoning_format(source) if reasoning_parser is None else reasoning_format_name(reasoning_parser),
        )

    @property
    def tool_format(self) -> ToolFormat | None:
        return TOOL_FORMATS[self.tools] if self.tools != NONE else None

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        return REASONING_FORMATS[self.reasoning] if self.reasoning != NONE else None

    def tags(self, tools: bool) -> tuple[str, ...]:
        """Return the tags that the parser looks for, with those of tool calls if `tools`.

        In some tokenizers these tags are special tokens. If one of them is, the text must be decoded with
        `skip_special_tokens=False`. Otherwise the text lacks the tag.
        """
        tags: list[str] = []
        if tools and self.tool_format is not None:
            tags += [self.tool_format.open, self.tool_format.close, *self.tool_format.inner]
        if self.reasoning_format is not None:
            tags += [self.reasoning_format.open, self.reasoning_format.close]
        return tuple(tag for tag in tags if tag)

    @property
    def needs_types(self) -> bool:
        """True if the parser needs the types of the tools' parameters."""
        return self.tool_format is not None and self.tool_format.needs_types

    def after(self, prompt: str) -> OutputFormat:
        """Return the output's format after `prompt`: without reasoning if `prompt` ends with reasoning's end tag."""
        reasoning = self.reasoning_format
        if reasoning is None or not prompt.rstrip().endswith(reasoning.close):
            return self
        return OutputFormat(self.tools, NONE)

    def thinking_open(self, prompt: str) -> bool:
        """Return True if the text of a prompt ends inside the reasoning, with the opening tag."""
        reasoning = self.reasoning_format
        return reasoning is not None and prompt.rstrip().endswith(reasoning.open)

    def parser(
        self,
        tools: bool,
        thinking_open: bool,
        *,
        whole_calls: bool = False,
        types: ParameterTypes | None = None,
        new_id: Callable[[], str] | None = None,
        calls_first: bool = False,
        constrained: bool = False,
        only_call: str | None = None,
    ) -> OutputParser:
        """Return a parser for one sample. With `tools`, it looks for tool calls.

        `tools`: look for tool calls, because the request has tools that the policy may call.
        `thinking_open`: the prompt ends inside the reasoning (see `thinking_open`).
        `whole_calls`: return a call only when it is complete, so that a call with broken arguments is content. Without
        it, a call begins as soon as its name and the beginning of its arguments are known, which no later text can
        take back: its arguments then end where the text stops to be JSON, and the rest is content.
        `types`: types of the tools' parameters, for the format qwen3_coder.
        `new_id`: makes the id of a call; default: random ids.
        `calls_first`: a content that does not begin with a call has none, so that a tag inside an answer of JSON is
        text.
        `constrained`: a grammar permits nothing but calls where a call stands, so that the beginning of a call is
        certain. If the text ends inside a call, the message has this call, with the arguments so far, and no text.
        `only_call`: with `constrained`, the only function that may be called: a text that ends before its name is a
        call without arguments. Without it, such a text is no call and no content.
        """
        return OutputParser(
            self.tool_format if tools else None,
            self.reasoning_format,
            thinking_open,
            whole_calls=whole_calls,
            types=types,
            new_id=new_id,
            calls_first=calls_first,
            constrained=constrained,
            only_call=only_call,
        )


class OutputParser:
    """Parses the output of one sample. Call `push` for each piece of text, and `finish` at the end."""

    def __init__(
        self,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        thinking_open: bool,
        *,
        whole_calls: bool = False,
        types: ParameterTypes | None = None,
        new_id: Callable[[], str] | None = None,
        calls_first: bool = False,
        constrained: bool = False,
        only_call: str | None = None,
    ) -> None:
        """See `OutputFormat.parser`."""
        self._tools = tools
        self._reasoning = reasoning
        self._whole_calls = whole_calls
        self._calls_first = calls_first
        self._constrained, self._only_call = constrained, only_call
        self._types = types or {}
        self._new_id = new_id or (_short_id if tools is not None and tools.short_ids else _call_id)
        self.in_reasoning = reasoning is not None and (thinking_open or reasoning.starts_open)
        """True if the text so far ends inside the reasoning."""
        self.is_cut = False
        """True after `finish` if the last call of the message is incomplete."""
        self._deltas: list[Delta] = []
        self._text, self._at = "", 0  # the text, and the index of the first character that was not read
        self._spaces: list[str] = []  # white space that is dropped if a tag follows
        self._after_tag = thinking_open  # white space that follows a tag is dropped
        self._step = self._at_start if reasoning is not None else self._at_content_start
        # The calls that are being read: their reader, and text and deltas since the last certain one.
        self._reader: CallReader | None = None
        self._raw: list[str] = []
        self._uncertain: list[Delta] = []
        self._has_tag = False  # the calls that are being read began with the tag
        self._calls = 0  # number of calls that ended
        self._call_begun = False

    def push(self, text: str) -> list[Delta]:
        """Parse the next piece of the text."""
        self._text += text
        while self._at < len(self._text) and self._step():
            pass
        self._text, self._at = self._text[self._at :], 0
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """End the text. Return what was held back."""
        self.is_cut = self._call_begun and (self._constrained or not self._whole_calls)
        rest, self._text = self._text, ""
        if self._ends_in_calls:
            self._end_calls(rest)
        else:
            if self._reader is not None:
                self._give_up()
            self._add(ReasoningDelta if self.in_reasoning else ContentDelta, rest, more=False)
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def _ends_in_calls(self) -> bool:
        """True if the end of the text belongs to a call, to the tags around it, or to what stands between calls."""
        if not self._constrained or self._tools is None or self.in_reasoning:
            return False
        # With `calls_first`, what begins without the tag may be an answer.
        return not self._calls_first or self._call_begun or self._calls > 0 or self._has_tag

    def _end_calls(self, rest: str) -> None:
        """End a text of calls, of which the last one may be cut. `rest`: the text that was not read."""
        if self._call_begun:
            self._deltas += self._uncertain
        elif self._only_call is not None and not self._calls and (self._reader is not None or self._is_tag(rest)):
            self._deltas.append(ToolCallDelta(0, self._new_id(), self._only_call, ""))
            self.is_cut = True
        self._reader, self._uncertain, self._raw = None, [], []
        self._spaces.clear()

    def _is_tag(self, rest: str) -> bool:
        """Return True if `rest` is the beginning of the tag of calls, and cannot be one of a reasoning that follows."""
        assert self._tools is not None
        may_reason = self._reasoning is not None and self._step == self._at_start
        thought = self._reasoning.open if may_reason and self._reasoning is not None else ""
        return bool(rest) and self._tools.open.startswith(rest) and not thought.startswith(rest)

    # -- the steps: each reads a part of the text, and returns False if it needs more text ---------------------

    def _at_start(self) -> bool:
        """Look for the tag that opens the reasoning."""
        assert self._reasoning is not None
        found = self._tag_follows(self._reasoning.open)
        if found is None:
            return False
        if found:
            self.in_reasoning = True
        self._step = self._in_reasoning if self.in_reasoning else self._at_content_start
        return True

    def _in_reasoning(self) -> bool:
        assert self._reasoning is not None
        end, tag = find_tag(self._text, self._at, (self._reasoning.close,))
        self._add(ReasoningDelta, self._text[self._at : end], more=True)
        self._at = end
        if tag is None:
            return False
        self._skip_tag(tag)
        self.in_reasoning = False
        self._step = self._at_content_start
        return True

    def _at_content_start(self) -> bool:
        """Look for calls that begin without a tag and, with `calls_first`, decide if there are calls at all."""
        self._step = self._in_content
        if self._tools is None or not (self._tools.bare or self._calls_first):
            return True
        self._step = self._at_content_start
        self._read_spaces()
        if self._at == len(self._text):
            return False
        if self._calls_first and self._tools.open.startswith(self._text[self._at : self._at + len(self._tools.open)]):
            if not self._text.startswith(self._tools.open, self._at):
                return False  # the beginning of the tag
        elif self._text[self._at] == self._tools.bare:
            self._begin_calls(self._tools, "")
            return True
        elif self._calls_first:
            self._tools = None
        self._step = self._in_content
        return True

    def _in_content(self) -> bool:
        if self._tools is None:
            self._add(ContentDelta, self._text[self._at :], more=False)
            self._at = len(self._text)
            return False
        end, tag = find_tag(self._text, self._at, (self._tools.open,))
        self._add(ContentDelta, self._text[self._at : end], more=True)
        self._at = end
        if tag is None:
            return False
        self._at += len(tag)
        self._begin_calls(self._tools, tag)
        return True

    def _in_calls(self) -> bool:
        assert self._reader is not None and self._tools is not None
        end = self._reader.feed(self._text, self._at)
        self._raw.append(self._text[self._at : end])
        self._at = end
        for event in self._reader.take_events():
            self._on_event(event)
        if self._reader.broken:
            is_sent = self._call_begun and not self._whole_calls  # then the tag that closes the call is no text
            self._give_up()
            self._step = self._at_close if is_sent and self._tools.close else self._in_content
            if self._calls_first and not self._calls:
                self._tools = None
        elif self._reader.done:
            self._reader = None
            self._step = self._at_close if self._tools.close else self._in_content
        return True

    def _at_close(self) -> bool:
        """Look for the tag that closes the calls. Models sometimes omit this tag."""
        assert self._tools is not None
        if self._tag_follows(self._tools.close) is None:
            return False
        self._step = self._in_content
        return True

    # -- parts of the steps ------------------------------------------------------------------------------------

    def _tag_follows(self, tag: str) -> bool | None:
        """Skip white space and then `tag`. Return False if other text follows, None if that is not yet known."""
        self._read_spaces()
        if self._text.startswith(tag, self._at):
            self._skip_tag(tag)
            return True
        return None if tag.startswith(self._text[self._at : self._at + len(tag)]) else False

    def _read_spaces(self) -> None:
        end = skip_spaces(self._text, self._at)
        if end > self._at and not self._after_tag:
            self._spaces.append(self._text[self._at : end])
        self._at = end

    def _skip_tag(self, tag: str) -> None:
        self._at += len(tag)
        self._spaces.clear()
        self._after_tag = True

    def _add(self, kind: type[ReasoningDelta] | type[ContentDelta], text: str, more: bool) -> None:
        """Add text to the deltas, without white space next to a tag.

        If `more` is True, more text may follow: hold back trailing white space.
        """
        if self._after_tag:
            text = text.lstrip(WHITE_SPACE)
            if not text:
                return
            self._after_tag = False
        end = len(text.rstrip(WHITE_SPACE)) if more else len(text)
        if end or not more:
            shown = "".join((*self._spaces, text[:end]))
            self._spaces.clear()
            if shown:
                self._deltas.append(kind(shown))
        if end < len(text):
            self._spaces.append(text[end:])

    def _begin_calls(self, tools: ToolFormat, tag: str) -> None:
        self._has_tag = bool(tag)
        self._reader = tools.reader(self._types)
        self._raw = [*self._spaces, tag]
        self._spaces.clear()
        self._step = self._in_calls

    def _on_event(self, event: Event) -> None:
        """Convert an event into a delta. With `whole_calls`, the delta is held back until the end of the call."""
        if isinstance(event, CallBegin):
            self._call_begun = True
            self._uncertain.append(ToolCallDelta(self._calls, event.id or self._new_id(), event.name, ""))
        elif isinstance(event, CallArguments):
            self._uncertain.append(ToolCallDelta(self._calls, None, None, event.text))
        else:
            self._calls, self._call_begun = self._calls + 1, False
        if isinstance(event, CallEnd) or not self._whole_calls:
            self._deltas += self._uncertain
            self._uncertain, self._raw, self._after_tag = [], [], True

    def _give_up(self) -> None:
        """Add text that turned out not to be a call to the content."""
        raw, self._raw = "".join(self._raw), []
        if self._call_begun and not self._whole_calls:
            self._calls += 1
        self._reader, self._uncertain, self._call_begun = None, [], False
        self._add(ContentDelta, raw, more=True)


def joined(deltas: Iterable[Delta]) -> ParsedMessage:
    """Return the message that deltas add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    heads: list[tuple[str, str]] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, ContentDelta):
            content.append(delta.text)
        else:
            if delta.id is not None and delta.name is not None:
                heads.append((delta.id, delta.name))
                arguments.append([])
            arguments[delta.index].append(delta.arguments)
    return ParsedMessage(
        reasoning="".join(reasoning) or None,
        content="".join(content),
        tool_calls=[
            ToolCall(call_id, name, "".join(parts)) for (call_id, name), parts in zip(heads, arguments, strict=True)
        ],
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def derived_ids(seed: str, short: bool) -> Callable[[], str]:
    """Return a function that returns the ids of calls, one after the other. Equal seeds have equal sequences of ids.

    With `short`, an id has 9 letters and digits.
    """
    numbers = itertools.count()

    def new_id() -> str:
        digest = blake2b(f"{seed}/{next(numbers)}".encode(), digest_size=12).hexdigest()
        return digest[:9] if short else f"call_{digest}"

    return new_id


def _short_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
