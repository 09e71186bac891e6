"""The reserve follows retractions, and counts no more tokens than a reply may have."""

from __future__ import annotations

import pytest

from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.reserve import Reserve
from verl_server.scheduler.schedule_batch import Req


def waiting(tokens: int, max_new_tokens: int) -> Req:
    """Return a request that has no pages."""
    message = TokenizedGenerateReq(rid="a", input_ids=list(range(tokens)), sampling=SamplingParams())
    return Req(message, arrival=0, max_new_tokens=max_new_tokens, seed=0)


def test_half_of_the_reply_is_reserved_at_first() -> None:
    reserve = Reserve(page_size=4)
    assert reserve.expected_pages([waiting(10, 16)]) == 3 + 2
    assert reserve.expected_pages([waiting(10, 16), waiting(4, 0)]) == 5 + 1


def test_pages_that_a_request_has_are_not_counted() -> None:
    reserve, req = Reserve(page_size=4), waiting(10, 16)
    req.pages = [1, 2, 3, 4]
    assert reserve.expected_pages([req]) == 1
    req.pages = list(range(9))
    assert reserve.expected_pages([req]) == 0


def test_a_huge_reply_counts_as_4096_tokens() -> None:
    assert Reserve(page_size=1).expected_pages([waiting(1, 100_000)]) == 1 + 4096 // 2


@pytest.mark.parametrize(("retracted", "sampled"), [(True, 100), (False, 10)], ids=["retractions", "none"])
def test_it_goes_to_its_bounds(retracted: bool, sampled: int) -> None:
    reserve = Reserve(page_size=1)
    for _ in range(1000):
        reserve.step_planned(retracted)
    assert reserve.expected_pages([waiting(1, 100)]) == 1 + sampled


def test_one_retraction_raises_it() -> None:
    reserve = Reserve(page_size=1)
    reserve.step_planned(retracted=True)
    assert reserve.expected_pages([waiting(1, 100)]) == 1 + 70
