"""The gap of log-probabilities by hand, and what the alarm does about it."""

from __future__ import annotations

import contextlib
import logging
import math

import pytest
import torch

from verl_server.logprob_gap import BOUNDS, GapAlarm, GapBounds, LogprobGap, LogprobGapError

BY_HAND = GapBounds(warn_mean=0.01, warn_largest=0.1, stop_mean=1.0)


def gap(mean: float, largest: float | None = None) -> LogprobGap:
    return LogprobGap(tokens=100, mean=mean, largest=mean if largest is None else largest, kl=0.0)


def test_the_gap_by_hand() -> None:
    recorded, recomputed = torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.5, -1.9, -1.0])
    found = LogprobGap.of(recorded, recomputed, torch.tensor([True, True, False]))
    assert found is not None and found.tokens == 2
    assert found.mean == pytest.approx(0.3)
    assert found.largest == pytest.approx(0.5)
    k3 = (math.exp(-0.5) - 1 + 0.5 + math.exp(0.1) - 1 - 0.1) / 2
    assert found.kl == pytest.approx(k3)
    assert LogprobGap.of(recorded, recomputed, torch.zeros(3, dtype=torch.bool)) is None


def test_the_kl_is_estimated() -> None:
    """Over many tokens drawn from p, the mean of k3 is KL(p || q)."""
    torch.manual_seed(0)
    p, q = torch.randn(8).log_softmax(-1), torch.randn(8).log_softmax(-1)
    tokens = torch.multinomial(p.exp(), 200_000, replacement=True)
    found = LogprobGap.of(p[tokens], q[tokens])
    assert found is not None
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=0.02)


def test_ranks_are_added() -> None:
    first, second = LogprobGap(1, 0.5, 0.5, 0.2), LogprobGap(3, 0.1, 0.2, 0.0)
    parts = [LogprobGap.sums(part) for part in (first, second, None)]
    sums = [sum(column) for column in zip(*(sums for sums, _ in parts), strict=True)]
    total = LogprobGap.from_sums(sums, max(largest for _, largest in parts))
    assert total is not None
    assert (total.tokens, total.mean, total.largest, total.kl) == pytest.approx((4, 0.2, 0.5, 0.05))
    assert LogprobGap.from_sums([0.0, 0.0, 0.0], 0.0) is None


def test_small_gaps_are_silent_and_larger_ones_warn(caplog: pytest.LogCaptureFixture) -> None:
    alarm = GapAlarm(torch.float32, bounds=BY_HAND)
    with caplog.at_level(logging.WARNING):
        alarm.check(None, 0)
        alarm.check(gap(0.009), 1)
        assert not caplog.records
        alarm.check(gap(0.02), 2)
        alarm.check(gap(0.001, largest=0.2), 3)
    assert ["Step 2" in r.message for r in caplog.records] == [True, False]
    assert "different dtypes" in caplog.text


@pytest.mark.parametrize("mean", [1.1, math.inf, math.nan])
def test_a_large_gap_stops(mean: float) -> None:
    with pytest.raises(LogprobGapError, match=r"Step 7: .*float32.*different dtypes") as caught:
        GapAlarm(torch.float32, bounds=BY_HAND).check(gap(mean), 7)
    assert caught.value.exit_status == 4
    GapAlarm(torch.float32, bounds=BY_HAND, stops=False).check(gap(mean), 7)


def test_nan_is_a_large_gap() -> None:
    found = LogprobGap.of(torch.tensor([-1.0]), torch.tensor([math.nan]))
    with pytest.raises(LogprobGapError):
        GapAlarm(torch.bfloat16).check(found, 0)


def test_a_gap_that_keeps_growing_stops() -> None:
    alarm = GapAlarm(torch.float32, bounds=BY_HAND)
    for step, mean in enumerate((0.02, 0.015, 0.02, 0.025)):  # a gap that only varies
        alarm.check(gap(mean), step)
    with pytest.raises(LogprobGapError, match="It grew over 4 steps"):
        alarm.check(gap(0.05), 4)


def test_an_alarm_is_reported_with_what_it_does() -> None:
    for stops in (True, False):
        found: list[tuple[int, str, bool]] = []
        alarm = GapAlarm(torch.float32, bounds=BY_HAND, stops=stops)
        alarm.on_alarm = lambda *alarm, found=found: found.append(alarm)  # type: ignore[misc]
        alarm.check(gap(BY_HAND.warn_mean / 2), 6)
        with pytest.raises(LogprobGapError) if stops else contextlib.nullcontext():
            alarm.check(gap(2 * BY_HAND.stop_mean), 7)
        ((step, text, ends),) = found
        assert (step, ends) == (7, stops) and "Step 7: log-probabilities" in text and "Likely causes" in text


def test_growth_below_the_bound_is_no_alarm() -> None:
    alarm = GapAlarm(torch.float32, bounds=BY_HAND)
    for step in range(8):
        alarm.check(gap(1e-3 * (step + 1)), step)


def test_each_dtype_has_bounds() -> None:
    order = [BOUNDS[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    assert [b.stop_mean for b in order] == sorted(b.stop_mean for b in order)
    assert all(b.warn_mean < b.stop_mean and b.warn_mean < b.warn_largest for b in order)
