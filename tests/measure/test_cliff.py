"""Two write rates and the bytes between them, found in any trace of a long write."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.measure.cliff import FALLEN_SHARE, LASTING_WINDOWS, Cliff


def cliff_of(rates: list[float], seconds: float = 1.0) -> Cliff:
    cliff = Cliff()
    for rate in rates:
        cliff.add(round(rate * seconds), seconds)
    return cliff


rates = st.floats(1e8, 1e10)
lengths = st.integers(6, 60)


@settings(deadline=None)
@given(rates, st.integers(1, 100))
def test_a_steady_drive_has_no_cliff(rate, number):
    cliff = cliff_of([rate] * number)
    assert not cliff.settled
    found = cliff.rates()
    assert found.burst is None
    assert found.sustained == pytest.approx(rate, rel=1e-6)


@settings(deadline=None)
@given(rates, st.floats(0.05, 0.6), lengths, st.integers(2 * LASTING_WINDOWS, 60))
def test_a_fall_is_found_where_it_happens(fast, share, before, after):
    cliff = cliff_of([fast] * before + [fast * share] * after)
    assert cliff.settled
    found = cliff.rates()
    assert found.settled
    assert found.burst == pytest.approx(fast, rel=1e-6)
    assert found.sustained == pytest.approx(fast * share, rel=1e-6)
    assert found.burst_bytes == pytest.approx(fast * before, rel=1e-6)


@settings(deadline=None)
@given(rates, lengths, st.integers(1, LASTING_WINDOWS // 2 - 1))
def test_a_short_dip_is_no_cliff(rate, around, dip):
    found = cliff_of([rate] * around + [rate * 0.2] * dip + [rate] * 2 * LASTING_WINDOWS).rates()
    assert found.burst is None


@settings(deadline=None)
@given(rates, lengths)
def test_a_drive_that_recovers_has_no_cliff(rate, slow):
    found = cliff_of([rate] * 10 + [rate * 0.3] * (slow + LASTING_WINDOWS) + [rate] * 2 * LASTING_WINDOWS).rates()
    assert found.burst is None


@settings(deadline=None)
@given(rates)
def test_a_rate_that_goes_on_falling_has_not_settled(rate):
    cliff = cliff_of([rate] * 10 + [rate * 0.5 * 0.95**number for number in range(30)])
    assert not cliff.settled
    assert not cliff.rates().settled


@settings(deadline=None)
@given(st.lists(rates, min_size=1, max_size=80))
def test_whatever_was_seen_the_sustained_rate_lies_within_it_and_below_the_burst(seen):
    found = cliff_of(seen).rates()
    assert min(seen) * 0.999 <= found.sustained <= max(seen) * 1.001
    if found.burst is not None:
        assert found.sustained < FALLEN_SHARE * found.burst
        assert 0 < found.burst_bytes <= sum(seen)


def test_nothing_written_says_nothing():
    with pytest.raises(ValueError, match="nothing"):
        Cliff().rates()
