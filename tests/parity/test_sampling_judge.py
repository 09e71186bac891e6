"""The judge of samples where rounding decides: which tokens top-k keeps at its edge."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity.mixed_requests import MixedRequest
from tests.parity.sampling_judge import Found, SamplingJudge


@pytest.mark.parametrize(
    ("logits", "kept"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], [[0, 1, 2]]),
        ([5.0, 4.0, 3.0, 3.0 - 1e-5, 1.0], [[0, 1, 2], [0, 1, 3], [0, 1, 2, 3]]),
        ([5.0, 3.0 + 1e-5, 3.0, 3.0 - 1e-5, 1.0], [[0, 1, 2], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]]),
    ],
    ids=["clear", "two at the edge", "three at the edge"],
)
def test_any_token_at_the_edge_of_top_k_may_be_left_out(logits: list[float], kept: list[list[int]]) -> None:
    request = MixedRequest([1], {"max_new_tokens": 1, "top_k": 3, "sampling_seed": 7})
    judge = SamplingJudge(request, Found())
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in judge._filtered(np.array(logits))] == kept
