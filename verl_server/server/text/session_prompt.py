"""The prompt of a request in a session: the plan of the session's next turn, with the texts of one text worker.

`chat_prompt` and the jobs that read completions call it instead of rendering or encoding a whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.chat.history import text_digest
from verl_server.chat.next_turn import PlannedTurn, plan_next_turn, plan_text
from verl_server.chat.output import OutputFormat
from verl_server.chat.session_view import NextTurn, SessionView
from verl_server.chat.templates import Message
from verl_server.chat.tools import Tool
from verl_server.errors import BadRequestError
from verl_server.server.text.text_tools import TextTools


def plan_prompt(
    text: TextTools,
    view: SessionView,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    tools: Sequence[Tool],
    format: OutputFormat,
) -> tuple[PlannedTurn, list[str]]:
    """Return (plan of the next turn, names of the options that the template does not use).

    `tools` are the tools that the template gets; `options` contains them, too. Raise BadRequestError for anything that
    the template refuses.
    """
    # The new messages are rendered without tools, which must not choose another one of several templates.
    options = {**options, "chat_template": text.template(options).source}
    unused: list[str] = []

    def render(messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        rendered, unused[:] = text.render_text(messages, options)
        return rendered

    decode = text.decoder(False)
    planned = plan_next_turn(
        view,
        messages,
        options,
        tools,
        render,
        lambda each: text.encode([each], add_special_tokens=False)[0],
        format,
        lambda token: decode([token]),
    )
    text.bounds.check_length(prompt_length(planned.next))
    return planned, unused


def plan_completion(text: TextTools, view: SessionView, prompt: str) -> NextTurn | None:
    """Return the plan of a completion whose prompt follows a stored completion. None: plan the prompt by its ids."""
    decode = text.decoder(False)
    planned = plan_text(
        view, prompt, lambda each: text.encode([each], add_special_tokens=False)[0], lambda token: decode([token])
    )
    if planned is not None:
        text.bounds.check_length(prompt_length(planned))
    return planned


def prompt_text(prompt: str) -> tuple[int, bytes]:
    """Return `NextTurn.text` of a completion's prompt."""
    return len(prompt), text_digest(prompt)


def prompt_length(next: NextTurn) -> int:
    """Return the number of tokens of a planned prompt."""
    return max(next.kept, 0) + len(next.added) // 4


def refuse_in_session(text: TextTools, **given: Any) -> None:
    """Raise BadRequestError if a request in a session sets one of these fields, which would change a stored prompt."""
    names = [name for name, value in given.items() if value]
    if text.session is not None and names:
        raise BadRequestError(
            f"{', '.join(names)}: not available in a session, whose prompts are built from stored tokens. Send the "
            "request without a session."
        )
