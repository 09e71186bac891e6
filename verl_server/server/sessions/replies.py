"""The reply of a finished turn in the form that its client received, for the session's message tree.

`SessionTurns` calls `read_reply` when a sample has ended, before the ledger commits the turn. The digest of the reply
must be the digest of the message that the client sends back, so the reply is parsed as the dialect parses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.chat.history import reasoning_digest, reply_digest, text_digest
from verl_server.chat.output import ParsedMessage, joined
from verl_server.chat.session_view import CompletionText, NextTurn, ReplyMessage
from verl_server.server.request_state import ReqState
from verl_server.server.slices import text_pieces
from verl_server.server.text.chat_prompt import ChatOutput


async def read_reply(
    state: ReqState,
    output: ChatOutput | None,
    *,
    one_call: bool = False,
    streamed: bool = False,
    call_seed: str = "",
    continued: str = "",
) -> ReplyMessage:
    """Return the message of a finished sample. `output` is None for a completion, and for a server without a tokenizer.

    With `one_call`, the client received the first call only. With `streamed`, calls were sent before they were
    complete. `call_seed` must be the seed of the dialect's parser. `continued` is the content of the message that the
    turn continues (`NextTurn.continued`).
    """
    if state.decode is None:
        return ReplyMessage(reply_digest("", ()), reasoning_digest(None), [], False, "")
    text = state.text()
    parsed, in_reasoning = ParsedMessage(None, text, []), False
    if output is not None and output.is_parsed:
        parsed, in_reasoning = await _parsed(text, output, streamed, call_seed)
    calls = [(call.id, call.name, call.arguments) for call in parsed.tool_calls[: 1 if one_call else None]]
    return ReplyMessage(
        digest=reply_digest(continued + parsed.content, [(name, arguments) for _, name, arguments in calls]),
        reasoning=reasoning_digest(parsed.reasoning),
        calls=calls,
        in_reasoning=in_reasoning,
        text=text,
        hidden=_hidden(state, text),
        content=parsed.content,
        thoughts=parsed.reasoning or "",
    )


async def _parsed(text: str, output: ChatOutput, streamed: bool, call_seed: str) -> tuple[ParsedMessage, bool]:
    """Return (message, True if the text ends inside the reasoning)."""
    parser = output.parser(not streamed, call_seed)
    deltas = [delta async for piece in text_pieces(text) for delta in parser.push(piece)]
    return joined([*deltas, *parser.finish()]), parser.in_reasoning


def _hidden(state: ReqState, text: str) -> str:
    """Return the sampled text that the client did not receive: stop string and rest of the last token, or ""."""
    reason = state.finish_reason
    if reason is None or not isinstance(reason.matched, str) or state.decode is None:
        return ""
    sampled = state.decode(state.output_ids)
    return sampled[len(text) :] if sampled.startswith(text) else ""


def end_token(state: ReqState, end_tokens: Sequence[int]) -> int:
    """Return the last sampled id if it is one of the model's end tokens, else -1."""
    last = state.output_ids[-1] if state.output_ids else -1
    return last if last in end_tokens else -1


def completion_text(next: NextTurn, reply: ReplyMessage) -> CompletionText | None:
    """Return the data with which a later completion is compared, or None if the turn is no completion of a text."""
    if next.text is None:
        return None
    length, digest = next.text
    return CompletionText(length, digest, len(reply.text), text_digest(reply.text), reply.hidden)
