"""Lanes and pools: order, waits, failure, and memory that goes round."""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.engine.lanes import Lanes, Task
from lohan.engine.pools import Pool
from lohan.store import Handle, open_arena


@pytest.fixture
def lanes():
    opened = Lanes(("a", "b"), on_failure=lambda error: None)
    yield opened
    opened.close()


def task(key, lane, waits=(), run=lambda: None):
    return Task(key, lane, str(key), list(waits), run)


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_lane_keeps_its_order_and_nothing_starts_before_what_it_waits_for(seed):
    rng = random.Random(seed)
    opened = Lanes(("a", "b", "c"), on_failure=lambda error: None)
    log, guard, tasks = [], threading.Lock(), []

    def work(number):
        with guard:
            log.append(("start", number))
        if rng.random() < 0.2:
            time.sleep(0.0005)
        with guard:
            log.append(("end", number))

    for number in range(30):
        waits = rng.sample(tasks, min(len(tasks), rng.randrange(3)))
        lane = rng.choice(["a", "b", "c", ""])
        tasks.append(task(number, lane, waits, lambda n=number: work(n)))
    waits_of = {t.key: [w.key for w in t.waits] for t in tasks}
    opened.put(tasks)
    for one in tasks:
        one.wait()
    opened.close()
    place = {entry: index for index, entry in enumerate(log)}
    for one in tasks:
        for other in waits_of[one.key]:
            assert place["end", other] < place["start", one.key]
    for lane in ("a", "b", "c"):
        starts = [place["start", t.key] for t in tasks if t.lane == lane]
        assert starts == sorted(starts)


def test_a_lane_goes_on_while_a_handle_is_open_but_the_task_is_not_done(lanes):
    handle, other_ran = Handle("slow"), threading.Event()
    slow, next_one = task("slow", "a", run=lambda: handle), task("next", "a", run=other_ran.set)
    after = task("after", "b", [slow])
    lanes.put([slow, next_one, after])
    assert other_ran.wait(10)
    assert not slow.done.is_set()
    assert not after.done.is_set()
    handle.finish()
    after.wait()
    assert slow.done.is_set()


def test_the_first_error_reaches_everybody_and_later_tasks_do_not_run(lanes):
    ran = []
    gate = threading.Event()
    first = task("first", "a", run=lambda: gate.wait() and None)

    def fail():
        raise ValueError("the first")

    failing = task("failing", "a", run=fail)
    later = task("later", "b", [failing], lambda: ran.append("later"))
    free = task("free", "", [failing], lambda: ran.append("free"))
    lanes.put([first, failing, later, free])
    gate.set()
    for one in (failing, later, free):
        with pytest.raises(ValueError, match="the first"):
            one.wait()
    lanes.fail(RuntimeError("the second"))
    assert isinstance(lanes.failure, ValueError)
    late = task("late", "b", run=lambda: ran.append("late"))
    lanes.put([late])
    with pytest.raises(ValueError, match="the first"):
        late.wait()
    assert ran == []


def test_an_error_in_a_handle_fails_its_task(lanes):
    handle = Handle("broken")
    broken = task("broken", "a", run=lambda: handle)
    lanes.put([broken])
    handle.finish(error=OSError("the drive"))
    with pytest.raises(OSError, match="the drive"):
        broken.wait()


def test_closing_does_what_is_queued_first():
    ran = []
    opened = Lanes(("a",), on_failure=lambda error: None)
    opened.put([task(number, "a", run=lambda n=number: ran.append(n)) for number in range(50)])
    opened.close()
    assert ran == list(range(50))


@pytest.fixture
def with_caller():
    opened = Lanes(("mine", "b"), on_failure=lambda error: None, callers="mine")
    yield opened
    opened.close()


def test_whoever_waits_does_the_callers_lane_in_its_order_on_its_own_thread(with_caller):
    log = []

    def run(number):
        log.append((number, threading.current_thread()))

    first = task("first", "mine", run=lambda: run(1))
    other = task("other", "b", [first], run=lambda: run(2))
    last = task("last", "mine", [other], run=lambda: run(3))
    later = task("later", "mine", run=lambda: run(4))
    with_caller.put([first, other, last, later])
    with_caller.wait(last)
    here = threading.current_thread()
    assert [number for number, _ in log] == [1, 2, 3]
    assert [thread is here for _, thread in log] == [True, False, True]
    with_caller.wait(later)
    assert log[-1] == (4, here)


def test_a_failure_elsewhere_ends_the_callers_tasks_too(with_caller):
    def fail():
        raise ValueError("the drive")

    ran = []
    failing = task("failing", "b", run=fail)
    mine = task("mine", "mine", [failing], run=lambda: ran.append(1))
    never_reached = task("never", "mine", run=lambda: ran.append(2))
    with_caller.put([failing, mine, never_reached])
    for one in (mine, never_reached):
        with pytest.raises(ValueError, match="the drive"):
            with_caller.wait(one)
    assert not ran


def test_ctrl_c_while_the_caller_waits_leaves_nobody_waiting(with_caller, monkeypatch):
    gate = threading.Event()
    slow = task("slow", "b", run=lambda: gate.wait() and None)
    mine = task("mine", "mine", [slow])
    next_one = task("next", "mine")
    behind = task("behind", "b", [mine, next_one])
    with_caller.put([slow, mine, next_one, behind])

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(with_caller._something_ended, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        with_caller.wait(mine)
    gate.set()
    for one in (mine, next_one, behind):
        with pytest.raises(KeyboardInterrupt):
            one.wait()


@pytest.fixture
def with_service():
    opened = Lanes(("mine", "served", "b"), on_failure=lambda error: None, callers="mine", serves=("served",))
    yield opened
    opened.close()


def test_what_is_served_is_done_by_whoever_waits_and_before_its_own(with_service):
    log, here = [], threading.current_thread()

    def note(name):
        log.append((name, threading.current_thread() is here, with_service.on_callers_thread))

    gate = threading.Event()
    other = task("other", "b", run=lambda: gate.wait(5) and None)

    def lets_the_other_end():
        note("first")
        gate.set()
        other.wait()

    first = task("first", "mine", run=lets_the_other_end)
    served = [task(f"served {n}", "served", [other], lambda n=n: note(f"served {n}")) for n in (1, 2)]
    second = task("second", "mine", run=lambda: note("second"))
    with_service.put([other, first, *served, second])
    with_service.wait(second)
    assert log == [(name, True, True) for name in ("first", "served 1", "served 2", "second")]
    assert not with_service.on_callers_thread


def test_what_is_served_is_done_by_its_own_thread_while_nobody_waits(with_service):
    log = []
    gate = threading.Event()
    other = task("other", "b", run=lambda: gate.wait(5) and None)
    served = task("served", "served", [other], lambda: log.append(threading.current_thread().name))
    with_service.put([other, served])
    gate.set()
    assert served.done.wait(5)
    assert log == ["lohan-served"]


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_served_or_not_a_lane_does_one_task_at_a_time_in_order_after_what_it_waits_for(seed):
    rng = random.Random(seed)
    lanes = ("mine", "served", "b")
    opened = Lanes(lanes, on_failure=lambda error: None, callers="mine", serves=("served",))
    log, guard, tasks = [], threading.Lock(), []

    def work(number, pause):
        with guard:
            log.append(("start", number))
        if pause:
            time.sleep(0.0005)
        with guard:
            log.append(("end", number))

    for number in range(40):
        waits = rng.sample(tasks, min(len(tasks), rng.randrange(3)))
        pause = rng.random() < 0.2
        tasks.append(task(number, rng.choice([*lanes, ""]), waits, lambda n=number, p=pause: work(n, p)))
    waits_of = {t.key: [w.key for w in t.waits] for t in tasks}
    opened.put(tasks)
    for one in rng.sample(tasks, 5):  # now and then there is somebody who waits
        opened.wait(one)
        time.sleep(rng.random() * 0.001)
    for one in tasks:
        opened.wait(one)
    opened.close()
    place = {entry: index for index, entry in enumerate(log)}
    for one in tasks:
        assert all(place["end", other] < place["start", one.key] for other in waits_of[one.key])
    for lane in lanes:
        own = [t.key for t in tasks if t.lane == lane]
        assert [entry for entry in log if entry[1] in own] == [(what, n) for n in own for what in ("start", "end")]


def test_inside_its_own_task_the_caller_serves_until_what_it_needs_is_there(with_service):
    free = []
    first = task("first", "mine")
    served = task("served", "served", [first], lambda: free.append(1))
    needs = task("needs", "mine", [first], lambda: with_service.serve(lambda: bool(free)))
    with_service.put([first, needs, served])
    with_service.wait(needs)
    assert free


def test_inside_its_own_task_the_caller_does_what_can_run_and_waits_for_nothing(with_service):
    log, here = [], threading.current_thread()
    gates = threading.Event(), threading.Event()
    soon, late = (
        task(name, "b", run=lambda g=g: g.wait(5) and None) for name, g in zip(("soon", "late"), gates, strict=True)
    )
    ready = [task(n, "served", [soon], lambda n=n: log.append((n, threading.current_thread()))) for n in (1, 2)]
    behind = task("behind", "served", [late], lambda: log.append(("behind", here)))

    def lets_in():
        gates[0].set()
        soon.wait()
        with_service.serve_ready()
        log.append(("mine", here))
        gates[1].set()

    mine = task("mine", "mine", run=lets_in)
    with_service.put([soon, late, *ready, behind, mine])
    with_service.wait(behind)
    assert log == [(1, here), (2, here), ("mine", here), ("behind", here)]


def test_a_failure_ends_the_service(with_service):
    def fail():
        raise ValueError("the drive")

    first = task("first", "mine")
    failing = task("failing", "b", [first], fail)
    needs = task("needs", "mine", [first], lambda: with_service.serve(lambda: False))
    served = task("served", "served", [failing])
    with_service.put([first, needs, failing, served])
    for one in (failing, served):
        with pytest.raises(ValueError, match="the drive"):
            with_service.wait(one)


def test_a_pool_hands_out_its_slabs_and_waits_for_one_to_come_back():
    with open_arena(1 << 20) as arena:
        pool = Pool(arena, 4096, 2)
        one, two = pool.lease(), pool.lease()
        assert one.tensor.data_ptr() != two.tensor.data_ptr()
        third = []
        waiting = threading.Thread(target=lambda: third.append(pool.lease()))
        waiting.start()
        two.release()
        waiting.join(10)
        assert third[0].tensor.data_ptr() == two.tensor.data_ptr()


def test_a_failure_wakes_whoever_waits_for_a_slab():
    with open_arena(1 << 20) as arena:
        pool, caught = Pool(arena, 4096, 1), []
        pool.lease()

        def wait():
            try:
                pool.lease()
            except ValueError as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        pool.fail(ValueError("stop"))
        waiting.join(10)
        assert len(caught) == 1


def test_a_pool_is_exhausted_when_all_its_slabs_are_out_and_never_when_it_has_none():
    with open_arena(1 << 20) as arena:
        pool = Pool(arena, 4096, 1)
        assert not pool.is_exhausted()
        slab = pool.lease()
        assert pool.is_exhausted()
        slab.release()
        assert not pool.is_exhausted()
        assert not Pool(arena, 0, 3).is_exhausted()


def test_free_slabs_are_poisoned_when_asked_for():
    with open_arena(1 << 20) as arena:
        pool = Pool(arena, 4096, 1, poison=True)
        slab = pool.lease()
        assert bool((slab.tensor == 0xFF).all())
        slab.tensor.fill_(1)
        slab.release()
        assert bool((pool.lease().tensor == 0xFF).all())
