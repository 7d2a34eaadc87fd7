"""Spans of a step: which lane and kind they are, how long a lane worked, and that there are never too many."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lohan.report.spans import KINDS, MAX_SPANS, busy_seconds, fewer, lanes_of, measured_lanes


def kinds(spans) -> list[str]:
    return [KINDS[int(span[0])] for span in spans]


def test_spans_are_cut_at_the_step_and_counted_from_its_begin():
    found = lanes_of(
        [("gpu", "forward 3", 0.5, 2.5), ("gpu", "backward 1", 9.0, 10.0), ("step", "step 1", 0, 9)], 1.0, 3.0
    )
    assert found == {"gpu": [[KINDS.index("forward"), 0.0, 1_500_000.0, 3]]}


def test_requests_of_drives_stand_for_the_lanes_that_only_ask():
    spans = [
        ("ssd_read", "read_state 1", 0.0, 9.0),
        ("drive 1 read", "model.layers.0/state/1", 1.0, 2.0, {"bytes": 1}),
        ("drive 2 read", "model.layers.0/weights/0", 2.0, 3.0),
        ("drive 1 write", "model.layers.0/weights/0", 3.0, 4.0),
        ("drive 1 write", "head/gradient", 4.0, 5.0),
        ("drive 1 read", "head/gradient", 5.0, 6.0),
        ("drive 1 write", "4/0", 6.0, 7.0),
        ("drive 1 read", "4/0", 7.0, 8.0),
    ]
    found = lanes_of(spans, 0.0, 10.0, {"model.layers.0": 1, "head": 2})
    assert kinds(found["ssd_read"]) == ["read_state", "read_weights", "read_gradient"]
    assert kinds(found["ssd_write"]) == ["write", "spill"]
    assert (kinds(found["swap_out"]), kinds(found["swap_in"])) == (["act_write"], ["act_read"])
    assert [span[3] for span in found["ssd_read"]] == [1, 1, 2]
    assert found["swap_in"][0][3] == 4
    assert lanes_of(spans, 0.0, 10.0)["ssd_read"] == [[KINDS.index("read_state"), 0.0, 9e6, 1]]


def test_time_that_overlaps_counts_once():
    assert busy_seconds([(0, 2), (1, 3), (5, 9), (6, 7)], 0.5, 8) == 2.5 + 3


def test_drives_work_while_any_of_them_does():
    spans = [("drive 1 read", "a/state/0", 0, 2), ("drive 2 write", "b/state/0", 1, 3), ("gpu", "forward 1", 0, 1)]
    assert measured_lanes(spans, 0, 4) == {"gpu": 1.0, "ssd": 3.0, "drives read": 2.0, "drives write": 2.0}


@pytest.mark.parametrize("gap", [0.0, 0.25, 0.75])
def test_a_hundred_thousand_spans_become_few_that_cover_the_same_time(gap):
    spans = [[at // 50_000, float(at), 1.0 - gap, at // 1000] for at in range(100_000)]
    drawn = fewer(spans, 100_000.0)
    assert len(drawn) <= MAX_SPANS
    assert sum(length for _, _, length, _ in drawn) == pytest.approx((1 - gap) * 100_000, rel=0.01)
    assert {kind for kind, *_ in drawn} == {0, 1}
    assert all(a[1] + a[2] <= b[1] + 0.2 for a, b in pairwise(drawn))
    assert fewer(spans[:10], 10.0) == spans[:10]
