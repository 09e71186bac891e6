"""The process of a text worker. It runs one `Job` after the other, until its parent closes the socket or kills it.

`text_workers.py` starts the process. The first message is a `TextSetup`. Then each job is two messages, the job's name
and a body, and the process answers with one `Answer`. The process never imports torch. It imports transformers only for
a tokenizer that the `tokenizers` library cannot run.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from verl_server.chat.templates import ChatTemplates
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.ipc.blocking_messages import BlockingMessages
from verl_server.ipc.child_process import child_main
from verl_server.server.dialects.anthropic.reading import COUNT_TOKENS, MESSAGES
from verl_server.server.dialects.openai.reading import CHAT, COMPLETION
from verl_server.server.dialects.openai.responses_request import RESPONSES
from verl_server.server.dialects.openai.tokenizing import DETOKENIZE, TOKENIZE
from verl_server.server.dialects.vllm.reading import INFERENCE
from verl_server.server.generate_request import GENERATE
from verl_server.server.sessions.reading import in_session
from verl_server.server.text.grammar_checks import CHECK_GRAMMAR
from verl_server.server.text.text_tools import ENCODE, Answer, Job, TextSetup, TextTools
from verl_server.server.text.tokenizer import FastTokens, ModelText
from verl_server.server_args import ServerArgs
from verl_server.web.json_body import MalformedBodyError

_ALONE: tuple[Job[Any], ...] = (GENERATE, ENCODE, CHECK_GRAMMAR, TOKENIZE, DETOKENIZE, INFERENCE)
_ALSO_IN_SESSIONS: tuple[Job[Any], ...] = (COMPLETION, CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)
_JOBS: dict[str, Job[Any]] = {
    job.name: job for job in (*_ALONE, *_ALSO_IN_SESSIONS, *(in_session(job) for job in _ALSO_IN_SESSIONS))
}
_MOST_MESSAGE_LENGTH = 4096
"""Largest length of an error message in characters. A message may quote the caller's text, which may be long."""


def make_tools(setup: TextSetup) -> TextTools:
    """Return the `TextTools` of this process."""
    args = ServerArgs.from_json(setup.server_args)
    if setup.tokenizer is not None:
        tokens: FastTokens | ModelText = FastTokens.from_json(setup.tokenizer)
    else:
        tokens = ModelText(args)
        tokens.load_tokenizer()
    templates = ChatTemplates(setup.templates, setup.allowed_templates, setup.special_tokens)
    parsers = (args.tool_call_parser, args.reasoning_parser)
    tools = TextTools(tokens, setup.limits, setup.bounds, templates, parsers, in_worker=True)
    if setup.checks_grammars and setup.tokenizer is not None:
        from verl_server.grammar.compiler import GrammarCompiler

        assert isinstance(tokens, FastTokens)
        tools.special_tokens = tokens.special_tokens()
        try:
            tools.grammars = GrammarCompiler(setup.tokenizer, setup.eos_token_ids, setup.bounds.vocab_size)
        except BadRequestError as error:
            tools.grammar_refusal = str(error)
    return tools


def do_job(tools: TextTools, name: str, body: bytes) -> Answer:
    """Return the result of a job, or the error that it raised."""
    try:
        return Answer(200, memoryview(msgspec.msgpack.encode(_JOBS[name].run(tools, body))))
    except VerlServerError as error:
        message = str(error)[:_MOST_MESSAGE_LENGTH].encode(errors="replace")
        return Answer(error.status_code, memoryview(message), isinstance(error, MalformedBodyError), error.code)
    except MemoryError:
        return Answer(400, memoryview(b"There is too little memory for the text of this request."))


def _work(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    requests = BlockingMessages(socket.socket(fileno=argument["socket"]))
    with contextlib.suppress(OSError):
        os.nice(argument["niceness"])
    setup = requests.receive()
    if setup is None:
        return
    tools = make_tools(msgspec.msgpack.decode(setup, type=TextSetup))
    ready({})
    while (name := requests.receive()) is not None and (body := requests.receive()) is not None:
        requests.send(msgspec.msgpack.encode(do_job(tools, name.decode(), body)))


if __name__ == "__main__":
    child_main(_work)
