"""Lanes: one thread each, doing their tasks in the order they were given, each when its waits are over.

One lane may be the caller's: its tasks are done by whoever waits for something, on that thread, by wait(). Others may
be served by the caller: while it is in wait() it does their tasks too, each as soon as it can run and before the next
one of its own; otherwise their own threads do.

A task belongs to a lane and names the tasks it waits for. Nothing else orders anything: two tasks of different
lanes without a wait between them run at the same time. A task is done when its work is really finished; one
that returns a handle is done when the handle is, and the lane goes on meanwhile, so a lane that only issues
I/O keeps the drive's queue full.

A task without a lane only has waits; it is for letting go of memory.

When a task fails, every task that is not done yet fails with the same error, whoever waits gets it, and the
lanes stand still until they are closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from lohan.store import Handle

Span = tuple[str, str, float, float]
"""Lane, label, first and last perf_counter()."""


class Task:
    """One operation of a schedule, from issue to done."""

    __slots__ = ("_callbacks", "_guard", "done", "error", "key", "label", "lane", "run", "waits")

    def __init__(self, key: Hashable, lane: str, label: str, waits: Sequence[Task], run: Callable[[], Handle | None]):
        self.key, self.lane, self.label, self.waits, self.run = key, lane, label, waits, run
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._guard = threading.Lock()

    def set_done(self) -> None:
        self.waits = ()  # a long chain of finished tasks must not be kept alive by its end
        with self._guard:
            self.done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call when done, on the thread that finishes it; at once if it is."""
        with self._guard:
            if not self.done.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def can_run(self) -> bool:
        """Whether all it waits for is done, well or not."""
        return all(other.done.is_set() for other in self.waits)

    def wait_for_others(self) -> None:
        """Until it can run."""
        for other in self.waits:
            other.done.wait()

    def wait(self) -> None:
        """Until done; raises what failed. Where there is a caller's lane, Lanes.wait() is the one to use."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lanes:
    """The threads of an engine."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        on_failure: Callable[[BaseException], None],
        callers: str = "",
        serves: Sequence[str] = (),
    ):
        """`callers`: the lane that only wait() does; `serves`: those whose tasks wait() does before its own."""
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._guard = threading.Lock()
        self._lanes = {name: _Lane(self, name, is_served=name in serves) for name in names if name != callers}
        self._served = [self._lanes[name] for name in serves]
        self._callers = callers
        self._for_caller: deque[Task] = deque()
        self._caller: int | None = None
        """The thread that is in wait()."""

        self._something_ended = threading.Condition()
        self.spans: deque[Span] = deque(maxlen=200_000)
        for lane in self._lanes.values():
            lane.start()

    def put(self, tasks: Iterable[Task]) -> None:
        """Add tasks; a lane does its own in this order."""
        for task in tasks:
            if not task.lane:
                self._when_ready(task)
            elif task.lane == self._callers:
                self._for_caller.append(task)
            else:
                self._lanes[task.lane].put(task)

    def wait(self, until: Task) -> None:
        """Until a task is done, doing the caller's lane meanwhile, in its order; raises what failed."""
        with self._as_caller():
            while (task := self._next_for_caller(until)) is not None:
                self.run(task)
        until.wait()

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Inside a task of the caller's lane: do what is served until this is so, or something failed.

        For what only a served task can bring about. It is asked again whenever a task has ended.
        """
        while True:
            with self._something_ended:
                while (task := self._served_task()) is None:
                    if is_over() or self.failure is not None:
                        return
                    self._something_ended.wait()
            self.run(task)

    def serve_ready(self) -> None:
        """Inside a task of the caller's lane: do what is served and can run now, and wait for nothing."""
        while (task := self._served_task()) is not None:
            self.run(task)

    @property
    def on_callers_thread(self) -> bool:
        """Whether it is the thread in wait() that asks."""
        return self._caller == threading.get_ident()

    @property
    def is_somebody_waiting(self) -> bool:
        """Whether a thread is in wait()."""
        return self._caller is not None

    @contextmanager
    def _as_caller(self) -> Iterator[None]:
        """From here on the lanes that are served leave their tasks to this thread."""
        if self._caller is not None:  # a task of ours asks for another one, or somebody else is there already
            yield
            return
        self._caller = threading.get_ident()
        try:
            yield
        except BaseException as error:  # Ctrl-C while waiting: nobody may go on waiting for what we should have done
            self.fail(error)
            raise
        finally:
            self._caller = None
            for lane in self._served:
                lane.wake()

    def _next_for_caller(self, until: Task) -> Task | None:
        """What can run now; waits for it. None when there is nothing left to do but to wait for others."""
        with self._something_ended:
            while not until.done.is_set():
                task = self._served_task()
                if task is not None:
                    return task
                if not self._for_caller and not self._served:
                    return None
                if self._for_caller and self._for_caller[0].can_run():
                    return self._for_caller.popleft()
                self._something_ended.wait()
        return None

    def _served_task(self) -> Task | None:
        return next((task for lane in self._served if (task := lane.take()) is not None), None)

    def _when_ready(self, task: Task) -> None:
        """A task without a lane runs by itself, on whatever thread ends its last wait."""
        left, guard = len(task.waits) + 1, threading.Lock()

        def one_done() -> None:
            nonlocal left
            with guard:
                left -= 1
                last = left == 0
            if last:
                self.run(task)

        for other in tuple(task.waits):
            other.then(one_done)
        one_done()

    def run(self, task: Task) -> None:
        """Do a task whose waits are over."""
        started = time.perf_counter()
        if self.failure is not None:
            self._end(task, self.failure)
            return
        try:
            handle = task.run()
        except BaseException as error:
            self.finished(task, started, error)
            return
        if handle is None:
            self.finished(task, started, None)
        else:
            handle.then(lambda h: self.finished(task, started, h.error))

    def fail(self, error: BaseException) -> None:
        """Stop everything: the first error is the one everybody gets."""
        with self._guard:
            if self.failure is not None:
                return
            self.failure = error
        self._on_failure(error)
        for lane in self._lanes.values():
            lane.wake()
        with self._something_ended:
            dropped, self._for_caller = self._for_caller, deque()
            self._something_ended.notify_all()
        for task in dropped:  # whoever was to do them may never come back
            self._end(task, error)

    def finished(self, task: Task, started: float, error: BaseException | None) -> None:
        if task.lane:
            self.spans.append((task.lane, task.label, started, time.perf_counter()))
        if error is not None:
            self.fail(error)
        self._end(task, self.failure if error is not None else None)

    def _end(self, task: Task, error: BaseException | None) -> None:
        """Done, well or not: whoever waits for something to run looks again."""
        task.error = error
        task.set_done()
        if not self._callers:
            return
        with self._something_ended:
            self._something_ended.notify_all()
        if self._caller is None:
            for lane in self._served:
                lane.wake()

    def close(self) -> None:
        """Do what is queued (or drop it after a failure) and end the threads."""
        for lane in self._lanes.values():
            lane.close()


class _Lane(threading.Thread):
    def __init__(self, owner: Lanes, name: str, *, is_served: bool):
        super().__init__(name=f"lohan-{name}", daemon=True)
        self._owner, self._is_served = owner, is_served
        self._tasks: deque[Task] = deque()
        self._current: Task | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def take(self) -> Task | None:
        """The next task, for somebody else to do, if it can run; of a lane that is served."""
        with self._changed:
            return self._pop()

    def _pop(self) -> Task | None:
        """Tasks of a served lane change hands, so none is begun before the last one is over."""
        if not self._tasks:
            return None
        if self._is_served and not (
            self._tasks[0].can_run() and (self._current is None or self._current.done.is_set())
        ):
            return None
        self._current = self._tasks.popleft()
        return self._current

    def wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        while True:
            with self._changed:
                while (task := None if self._is_lent else self._pop()) is None:
                    if self._closed and not self._tasks:
                        return
                    self._changed.wait()
            task.wait_for_others()
            self._owner.run(task)

    @property
    def _is_lent(self) -> bool:
        return self._is_served and self._owner.is_somebody_waiting
