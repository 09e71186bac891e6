"""`TextService` parses and tokenizes requests: short requests on the event loop, longer requests in text workers.

The TokenizerManager owns it and uses it on its event loop. Requests with much text have separate workers of lower
priority. So a short chat does not wait for a long chat, and long texts do not take CPU time from the model. Grammars
are checked in separate workers (`GrammarChecks`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from verl_server.chat.output import OutputFormat
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import PROMPT_HEADER, PROMPT_JSON_BYTES
from verl_server.messages.results import SchedulerInfo
from verl_server.server.generate_request import GenerateReqInput, ReadRequest, read_prompts
from verl_server.server.limits import Limits
from verl_server.server.packed_prompts import read_packed
from verl_server.server.text.grammar_checks import GRAMMARS, GrammarChecks
from verl_server.server.text.text_tools import ENCODE, Job, ModelBounds, NeedsWorkerError, TextTools
from verl_server.server.text.text_workers import TextWorkers
from verl_server.server.text.tokenizer import ModelText
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)
R = TypeVar("R")

_MOST_BODY_ON_LOOP = PROMPT_JSON_BYTES
"""Bytes of the largest JSON body that is parsed on the loop, which takes at most 5 ms."""
_MOST_TEXT_ON_LOOP = 8 * 1024
"""Characters of the longest text that is tokenized on the loop, which takes at most 5 ms."""
_LONG_BODY = 128 * 1024
"""Bytes of the largest body that the workers for short requests process."""
_NICENESS_OF_LONG = 10
_MOST_WARNINGS = 100
"""The most names of unused template variables that are remembered. Callers may send any number of names."""
_LONGEST_NAME = 100
"""The most characters of such a name that are remembered."""


class TextService:
    def __init__(self, server_args: ServerArgs, model_text: ModelText, scheduler_info: SchedulerInfo) -> None:
        """Workers are started when they are needed."""
        self.bounds = msgspec.convert(scheduler_info, ModelBounds)
        self.limits = Limits.of(server_args, self.bounds.context_length)
        self._setup = model_text.setup(self.limits, self.bounds)
        self.format = _default_format(server_args, self._setup.templates)
        """The formats of the output for the default chat template."""
        self._on_loop = TextTools(
            model_text, self.limits, self.bounds, default_format=self.format, most_text=_MOST_TEXT_ON_LOOP
        )
        count, timeout = server_args.text_workers, server_args.text_timeout
        self._short = TextWorkers(lambda: self._setup, count, timeout, niceness=0)
        self._long = TextWorkers(lambda: self._setup, count, timeout, niceness=_NICENESS_OF_LONG)
        self._grammar_setup = msgspec.structs.replace(self._setup, checks_grammars=True)
        bound = server_args.grammar_timeout
        workers = TextWorkers(lambda: self._grammar_setup, count, bound, _NICENESS_OF_LONG, GRAMMARS)
        refusal = _grammar_refusal(server_args, model_text)
        self.constrains_outputs = refusal is None
        self.grammars = GrammarChecks(workers, refusal)
        self._warned: set[tuple[str, str]] = set()

    def on_loop(self, job: Job[R], body: bytes) -> R | None:
        """Return the result of `job` on a request's body, or None if `in_worker` must do it. Raise the job's error."""
        if len(body) > _MOST_BODY_ON_LOOP:
            return None
        try:
            return job.run(self._on_loop, body)
        except NeedsWorkerError:
            return None

    async def in_worker(self, job: Job[R], body: bytes) -> R:
        """Return the result of `job` on a request's body. Raise the job's error, or an error of `TextWorkers.run`."""
        return await (self._long if len(body) > _LONG_BODY else self._short).run(job, body)

    async def read_packed(self, ids: memoryview, body: bytes) -> ReadRequest:
        """Read a request whose prompts are int32 in front of the JSON `body`. The ids of a prompt take microseconds."""
        if len(body) > PROMPT_JSON_BYTES:
            raise BadRequestError(
                f"With {PROMPT_HEADER}, the JSON may have {PROMPT_JSON_BYTES} bytes, not {len(body)}: send the whole "
                "request as JSON."
            )
        try:
            return await read_packed(self._on_loop, ids, body)
        except NeedsWorkerError:
            raise BadRequestError(
                f"These stop_regex patterns are too long for a request with {PROMPT_HEADER}: send the whole request as "
                "JSON."
            ) from None

    async def read(self, request: GenerateReqInput) -> ReadRequest:
        """Tokenize the prompts of a request that was created in this process."""
        try:
            return read_prompts(self._on_loop, request)
        except NeedsWorkerError:
            given = request.prompts()
            body = {"texts": given, "kept": request.kept_tokens(len(given), self.bounds)}
            encoded = await self.in_worker(ENCODE, msgspec.msgpack.encode(body))
        return ReadRequest(
            request=msgspec.structs.replace(request, text=None, input_ids=None),
            prompts=encoded.prompts,
            is_single=request.is_single,
        )

    def warn_of_unused(self, names: Iterable[str]) -> None:
        """Log a warning, once for each name, that clients set variables that the chat template does not use.

        The names after the first ones are not logged.
        """
        self._warn_once("Clients set the chat template variable `%s`, which the template does not use.", names)

    def warn_of_left_out(self, tools: Iterable[str]) -> None:
        """Log a warning, once for each type, that clients declare tools that the policy is not offered."""
        self._warn_once("Clients declare the tool `%s`, which runs at its vendor. The policy is not offered it.", tools)

    def _warn_once(self, message: str, names: Iterable[str]) -> None:
        for name in {name[:_LONGEST_NAME] for name in names}:
            if (message, name) in self._warned or len(self._warned) >= _MOST_WARNINGS:
                continue
            self._warned.add((message, name))
            logger.warning(message, name)

    @property
    def worker_pids(self) -> list[int]:
        return [*self._short.pids, *self._long.pids, *self.grammars.workers.pids]

    async def close(self) -> None:
        await asyncio.gather(self._short.close(), self._long.close(), self.grammars.close())


def _default_format(server_args: ServerArgs, templates: str | dict[str, str] | None) -> OutputFormat:
    """Return the formats of the output for the default chat template."""
    source = templates.get("default") if isinstance(templates, dict) else templates
    return OutputFormat.of(source, server_args.tool_call_parser, server_args.reasoning_parser)


def _grammar_refusal(server_args: ServerArgs, model_text: ModelText) -> str | None:
    """Return the reason why this server cannot constrain outputs, or None if it can."""
    if server_args.grammar_backend == "none":
        return "this server runs with grammar_backend=none. Start it with grammar_backend=llguidance."
    if server_args.skip_tokenizer_init:
        return "this server runs with skip_tokenizer_init=True. Constrained decoding needs the tokenizer."
    if model_text.tokenizer_json is None:
        return "this model has a tokenizer of Python code. Constrained decoding needs one of the `tokenizers` library."
    return None
