"""The order is a permutation for every seed, and packing loses nothing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.train.data.order import mix, shuffled
from lohan.train.data.packing import one_each, pack


@given(num=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
@settings(deadline=None)
def test_an_order_has_every_row_once(num, seed):
    assert sorted(shuffled(np.arange(num), num, seed).tolist()) == list(range(num))


@given(num=st.integers(1, 10**12), seed=st.integers(0, 2**32), data=st.data())
@settings(deadline=None)
def test_a_place_in_the_order_does_not_depend_on_what_else_is_asked(num, seed, data):
    places = data.draw(st.lists(st.integers(0, num - 1), min_size=1, max_size=5))
    together = shuffled(np.array(places), num, seed).tolist()
    assert together == [int(shuffled(np.array([place]), num, seed)[0]) for place in places]
    assert all(0 <= row < num for row in together)


def test_an_order_is_the_same_for_ever():
    """A run that was begun with another version must go on in its order: these numbers may never change."""
    assert shuffled(np.arange(10), 10, 42).tolist() == [9, 7, 3, 6, 0, 1, 8, 4, 2, 5]
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of the published splitmix64
    assert mix(1, 2) == 0xBCD9DBB49673066B


def test_orders_look_random():
    """Of 4 rows each of the 24 orders comes about as often, and neighbours do not stay neighbours."""
    found = Counter(tuple(shuffled(np.arange(4), 4, mix(7, epoch)).tolist()) for epoch in range(4800))
    assert len(found) == 24
    assert max(found.values()) < 2 * min(found.values())
    order = shuffled(np.arange(10_000), 10_000, 5)
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.002
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_places_outside_are_refused():
    with pytest.raises(ValueError):
        shuffled(np.array([3]), 3, 0)


@given(lengths=st.lists(st.integers(1, 64), max_size=200), room=st.integers(64, 100))
def test_packing_puts_every_example_whole_into_one_row(lengths, room):
    rows = pack(np.array(lengths, dtype=np.int64), room)
    packed = [rows[row].tolist() for row in range(len(rows))]
    assert sorted(example for row in packed for example in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[example] for example in row) <= room for row in packed)


@given(lengths=st.lists(st.integers(1, 50), min_size=2, max_size=100))
def test_no_two_rows_could_be_one(lengths):
    rows = pack(np.array(lengths), 50)
    used = sorted(sum(lengths[example] for example in rows[row]) for row in range(len(rows)))
    assert len(used) < 2 or used[0] + used[1] > 50


def test_typical_lengths_fill_rows_well():
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, 5000).astype(np.int64).clip(1, 2048)
    assert lengths.sum() / (len(pack(lengths, 2048)) * 2048) > 0.99


def test_without_packing_every_example_is_a_row():
    assert [one_each(3)[row].tolist() for row in range(3)] == [[0], [1], [2]]


def test_an_example_longer_than_a_row_is_our_mistake():
    with pytest.raises(ValueError):
        pack(np.array([5]), 4)
