"""`agree`: runs one function on every tensor-parallel rank.

If the function fails on any rank, all ranks raise the same error.

Used by `WeightUpdater`, whose methods run on all ranks at the same point of the command order, and by `Stager`, whose
threads stage the same requests in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from verl_server.errors import VerlServerError, WeightUpdateError, error_for_status
from verl_server.ipc.tp_group import TpGroup

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Vote(msgspec.Struct, array_like=True):
    error: str = ""
    status: int = 200
    seconds: float = 0.0
    """Duration of the rank's step in seconds."""
    alike: int = 0
    """A number that must be the same on all ranks."""


def agree(
    tp: TpGroup,
    step: Callable[[], T],
    seconds: list[float] | None = None,
    *,
    alike: Callable[[T], int] = lambda _: 0,
    unlike: str = "",
) -> T:
    """Run `step` on this rank and return its result if no rank failed, and if `alike(result)` is equal on all ranks.

    If a rank failed, raise the same error on all ranks: a `VerlServerError` with the status of the refusal, or with 500
    for a fault. If the results of `alike` differ, raise WeightUpdateError with the text `unlike`. Raise RuntimeError if
    a rank is dead. The durations of all ranks' steps are appended to `seconds`.
    """
    mine, result = _Vote(), None
    start = time.perf_counter()
    try:
        result = step()
        mine.alike = alike(result)
    except VerlServerError as error:
        mine = _Vote(str(error), error.status_code)
    except Exception as error:
        logger.exception("A weight or memory operation failed on rank %d.", tp.rank)
        mine = _Vote(f"{type(error).__name__}: {error}", 500)
    mine.seconds = time.perf_counter() - start
    votes = [msgspec.msgpack.decode(vote, type=_Vote) for vote in tp.gather(msgspec.msgpack.encode(mine))]
    if seconds is not None:
        seconds.extend(vote.seconds for vote in votes)
    failed = {rank: vote for rank, vote in enumerate(votes) if vote.status != 200}
    if failed:
        raise _common_error(failed, tp.size)
    if len({vote.alike for vote in votes}) > 1:
        raise WeightUpdateError(unlike)
    return result  # type: ignore[return-value]


def _common_error(failed: dict[int, _Vote], size: int) -> VerlServerError:
    errors = list(dict.fromkeys(vote.error for vote in failed.values()))
    text = errors[0]
    if len(failed) < size or len(errors) > 1:
        text = "; ".join(f"tensor-parallel rank {rank}: {vote.error}" for rank, vote in failed.items())
    status = max(vote.status for vote in failed.values())
    return error_for_status(status, text, WeightUpdateError)
