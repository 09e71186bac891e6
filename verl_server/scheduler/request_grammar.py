"""`RequestGrammar`: the grammar that the output of one request follows. `Grammars` creates it, and `Req` owns it."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass

from verl_server.errors import VerlServerError
from verl_server.grammar.failure import GrammarFailedError, GrammarLibraryError
from verl_server.grammar.mask_memory import Words
from verl_server.grammar.mask_progress import MaskProgress
from verl_server.grammar.matcher_client import RemoteMatcher
from verl_server.messages.io_struct import FinishReason

logger = logging.getLogger(__name__)


@dataclass
class LateMask:
    """The mask of a row that a step left out. The request's matcher must not be used until the row is done."""

    run: MaskProgress
    row: int
    """Row of the run."""
    words: Words
    """int32 [words], valid when the row is done."""


class RequestGrammar:
    """The grammar of one request, and the matcher of its output."""

    def __init__(self, source: str, start: Future[RemoteMatcher], stop_ids: list[int], ignore_eos: bool) -> None:
        self.source = source
        """The translated grammar."""
        self.start = start
        """The matcher, which belongs to this request alone."""
        self.stop_ids = stop_ids
        """Tokens that end the request. They are allowed where EOS is allowed."""
        self.ignore_eos = ignore_eos
        """Allow EOS only where no other token is allowed."""
        self.error: BaseException | None = None
        """Why the last mask, or the last token, could not be processed."""
        self.late: LateMask | None = None
        """The mask that is still being computed, or that no step has used yet."""
        self.place: tuple[MaskProgress, int] | None = None
        """The latest mask that was started: a row of a step."""
        self._matcher: RemoteMatcher | None = None

    def compile_failure(self) -> FinishReason | None:
        """Return the finish reason if the compilation failed, else None. The compilation must have ended."""
        error = self.start.exception(timeout=0)
        return None if error is None else failed(error)

    def open(self) -> RemoteMatcher:
        """Return the matcher. The compilation must have ended."""
        if self._matcher is None:
            self._matcher = self.start.result(timeout=0)
        return self._matcher

    def is_busy(self) -> bool:
        """Return True while a mask is being computed, so that the matcher must not be used."""
        if self.place is None:
            return False
        run, row = self.place
        run.check()
        return not run.is_done(row)

    def take_back(self) -> RemoteMatcher | None:
        """Reset the matcher of an ended request and return it. Return None if it cannot be used again."""
        if not self.start.done() or self.start.exception() is not None:
            return None
        matcher = self.open()
        if self.error is not None or self._mask_failed() or matcher.lost is not None:
            return None
        matcher.reset()
        return matcher

    def _mask_failed(self) -> bool:
        """Return True if the latest mask could not be computed, although no step may have used it."""
        return self.place is not None and self.place[1] in self.place[0].failed_rows()


def failed(error: BaseException) -> FinishReason:
    """Return the finish reason of a request whose grammar failed with `error`."""
    if isinstance(error, VerlServerError):
        return FinishReason(type="abort", message=str(error), status_code=error.status_code)
    if isinstance(error, GrammarFailedError):
        message = f"The grammar cannot be followed any further: {error}. Use a simpler grammar."
        return FinishReason(type="abort", message=message, status_code=400)
    logger.error("A grammar failed.", exc_info=error)
    cause = str(error) if isinstance(error, GrammarLibraryError) else f"{type(error).__name__}: {error}"
    return FinishReason(type="abort", message=f"The grammar failed: {cause}", status_code=500)
