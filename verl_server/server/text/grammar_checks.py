"""`GrammarChecks`: checks each new grammar in a text worker, before the scheduler compiles it. Remembers the results.

`TextService` owns it and uses it on the TokenizerManager's event loop. A grammar is a program: it may need any amount
of time and memory. So a process that can be killed compiles it first, and generates with it (`grammar.trial`). Requests
with the same grammar share one check.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.grammar.source import Grammar, translate
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.server.text.text_workers import JobKilledError, Purpose, TextWorkers

_MOST_CACHED = 2**25
"""Most characters of all grammars and translations whose results are remembered."""
_ENTRY_LENGTH = 1024
"""Characters that an entry counts in addition to its texts."""
_KILLED_SECONDS = 60.0
"""Seconds for which a grammar whose check was killed is refused without another check."""

GRAMMARS = Purpose(
    slow="The check of the grammar took longer than {timeout:g} s (grammar_timeout). Use a simpler grammar.",
    died="The process that checked the grammar ended with {exit}: the grammar needs too much memory, or it nests too "
    "deeply. Use a simpler grammar.",
    bound="grammar_timeout",
)
"""The workers that check grammars."""


class CheckedGrammar(msgspec.Struct):
    """A grammar that can be compiled."""

    translation: str
    """The grammar in llguidance's format."""
    compiled_bytes: int
    """Bytes that the compiled grammar takes, roughly."""


def _check_grammar(tools: TextTools, body: bytes) -> CheckedGrammar:
    from verl_server.grammar.trial import try_out

    if tools.grammars is None:
        raise BadRequestError(tools.grammar_refusal)
    try:
        translation = translate(msgspec.msgpack.decode(body, type=Grammar), tools.special_tokens)
    except RecursionError:
        raise BadRequestError("The grammar nests too deeply. Use a simpler grammar.") from None
    return CheckedGrammar(translation, try_out(tools.grammars, translation))


CHECK_GRAMMAR = Job("check_grammar", _check_grammar, CheckedGrammar)
"""Translates and tries out a grammar. The body is a `Grammar` as msgpack."""


@dataclass
class _Result:
    checked: CheckedGrammar | None
    error: str
    """Reason for refusing the grammar, if `checked` is None."""
    expires: float | None
    """Time after which the grammar is checked again; None for never."""
    length: int


class GrammarChecks:
    def __init__(
        self, workers: TextWorkers, refusal: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`refusal` is the reason why this server refuses all grammars, if it does."""
        self.workers = workers
        self._refusal = refusal
        self._clock = clock
        self._results: OrderedDict[Grammar, _Result] = OrderedDict()
        """Results, the least recently used first."""
        self._length = 0
        self._running: dict[Grammar, asyncio.Task[CheckedGrammar]] = {}

    async def check(self, grammar: Grammar) -> CheckedGrammar:
        """Return the checked grammar. Raise BadRequestError if it is refused, or an error of `TextWorkers.run`."""
        if self._refusal is not None:
            raise BadRequestError(f"sampling_params.{grammar.kind}: {self._refusal}")
        known = self._results.get(grammar)
        if known is not None and (known.expires is None or self._clock() < known.expires):
            self._results.move_to_end(grammar)
            if known.checked is None:
                raise BadRequestError(known.error)
            return known.checked
        task = self._running.get(grammar)
        if task is None:
            task = self._running[grammar] = asyncio.ensure_future(self._run(grammar))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its callers may be gone
        try:
            return await asyncio.shield(task)  # the other requests with this grammar wait for it, too
        except VerlServerError as error:
            raise type(error)(*error.args) from None  # one object would collect the tracebacks of all callers

    async def _run(self, grammar: Grammar) -> CheckedGrammar:
        try:
            checked = await self.workers.run(CHECK_GRAMMAR, msgspec.msgpack.encode(grammar))
        except BadRequestError as error:
            expires = self._clock() + _KILLED_SECONDS if isinstance(error, JobKilledError) else None
            self._remember(grammar, None, str(error), expires)
            raise
        else:
            self._remember(grammar, checked, "", None)
            return checked
        finally:
            del self._running[grammar]

    def _remember(self, grammar: Grammar, checked: CheckedGrammar | None, error: str, expires: float | None) -> None:
        length = _ENTRY_LENGTH + len(grammar.text) + len(error) + (len(checked.translation) if checked else 0)
        old = self._results.pop(grammar, None)
        self._results[grammar] = _Result(checked, error, expires, length)
        self._length += length - (old.length if old is not None else 0)
        while self._length > _MOST_CACHED:
            _, oldest = self._results.popitem(last=False)
            self._length -= oldest.length

    async def close(self) -> None:
        """Fail the running checks, and end the workers."""
        await self.workers.close()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
