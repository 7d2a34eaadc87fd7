import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import ArenaError
from lohan.store import PAGE_BYTES, Arena, open_arena


@pytest.fixture
def arena():
    with open_arena(8 * PAGE_BYTES) as arena:
        yield arena


def wait_for_waiters(arena, count):
    """Until this many leases stand in line: a condition to wait for, not a time."""
    while True:
        with arena._changed:
            if len(arena._waiting) == count:
                return


def lease_in_background(arena, num_bytes, granted, name):
    def run():
        try:
            granted.append((name, arena.lease(num_bytes)))
        except ArenaError as error:
            granted.append((name, error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def address(view):
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def test_slabs_are_page_aligned_and_as_long_as_asked(arena):
    for num_bytes in (1, 4095, 4096, 4097):
        slab = arena.lease(num_bytes)
        assert address(slab.padded) % PAGE_BYTES == 0
        assert (len(slab.view), len(slab.padded) % PAGE_BYTES) == (num_bytes, 0)
        slab.release()
    assert arena.leased_bytes == 0


def test_a_lease_that_can_never_fit_says_by_how_much_to_raise_the_budget(arena):
    with pytest.raises(ArenaError, match=r"can never fit .* Raise host_memory by at least 4\.1 kB"):
        arena.lease(9 * PAGE_BYTES)
    with pytest.raises(ArenaError, match="makes no sense"):
        arena.lease(0)


def test_an_arena_smaller_than_a_page_or_larger_than_the_machine_is_refused():
    with pytest.raises(ArenaError, match="at least 4096"):
        Arena(100)
    with pytest.raises(ArenaError, match="Lower host_memory"):
        Arena(1 << 62)


def test_free_neighbours_are_merged_whatever_the_order_of_release(arena):
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
        slabs = [arena.lease(2 * PAGE_BYTES) for _ in range(4)]
        for index in order:
            slabs[index].release()
        arena.lease(8 * PAGE_BYTES).release()


def test_releasing_twice_is_harmless(arena):
    slab = arena.lease(PAGE_BYTES)
    slab.release()
    slab.release()
    assert arena.free_bytes == arena.num_bytes


def test_waiting_leases_are_granted_in_the_order_they_were_asked_for(arena):
    everything, granted = arena.lease(8 * PAGE_BYTES), []
    threads = []
    for number, pages in enumerate((6, 1, 8)):
        threads.append(lease_in_background(arena, pages * PAGE_BYTES, granted, number))
        wait_for_waiters(arena, number + 1)
    everything.release()
    threads[0].join()
    threads[1].join()
    assert [name for name, _ in granted] == [0, 1]
    for _, slab in list(granted):
        slab.release()
    threads[2].join()
    assert granted[2][0] == 2


def test_a_small_lease_does_not_overtake_a_large_one_that_waits(arena):
    most, granted = arena.lease(7 * PAGE_BYTES), []
    large = lease_in_background(arena, 8 * PAGE_BYTES, granted, "large")
    wait_for_waiters(arena, 1)
    assert arena.try_lease(PAGE_BYTES) is None
    most.release()
    large.join()
    assert granted[0][1].num_bytes == 8 * PAGE_BYTES


def test_a_lease_with_a_timeout_gives_up_and_says_what_is_leased(arena):
    with arena.lease(8 * PAGE_BYTES):
        with pytest.raises(TimeoutError, match=r"32\.8 kB of 32\.8 kB are leased"):
            arena.lease(PAGE_BYTES, timeout_seconds=0)
    arena.lease(8 * PAGE_BYTES, timeout_seconds=0).release()  # the one that gave up left the line


def test_closing_wakes_whoever_waits():
    arena, granted = Arena(PAGE_BYTES), []
    slab = arena.lease(PAGE_BYTES)
    waiter = lease_in_background(arena, PAGE_BYTES, granted, "waiter")
    wait_for_waiters(arena, 1)
    arena.close()
    waiter.join()
    assert isinstance(granted[0][1], ArenaError)
    slab.view[:1] = b"x"  # memory that is still leased stays valid
    slab.release()
    with pytest.raises(ArenaError):
        arena.lease(1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE_BYTES)), max_size=60))
def test_leases_never_overlap_and_everything_comes_back(moves):
    with open_arena(16 * PAGE_BYTES) as arena:
        held = []
        for take, number in moves:
            if take:
                slab = arena.try_lease(number)
                if slab is not None:
                    held.append(slab)
            elif held:
                held.pop(number % len(held)).release()
            spans = sorted((s.offset, s.offset + len(s.padded)) for s in held)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert arena.leased_bytes == sum(end - start for start, end in spans) <= arena.peak_bytes
        for slab in held:
            slab.release()
        arena.lease(arena.num_bytes).release()
