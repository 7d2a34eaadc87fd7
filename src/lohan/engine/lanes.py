"""Lanes: one thread each, doing their tasks in the order they were given, each when its waits are over.

One lane may be the caller's: its tasks are done by whoever waits for something, on that thread, by wait().

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
from collections.abc import Callable, Hashable, Iterable, Sequence

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

    def wait_for_others(self) -> None:
        """Until all it waits for is done, well or not."""
        for other in self.waits:
            other.done.wait()

    def wait(self) -> None:
        """Until done; raises what failed. Where there is a caller's lane, Lanes.wait() is the one to use."""
        self.done.wait()
        if self.error is not None:
            raise self.error


class Lanes:
    """The threads of an engine."""

    def __init__(self, names: Sequence[str], *, on_failure: Callable[[BaseException], None], callers: str = ""):
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._guard = threading.Lock()
        self._lanes = {name: _Lane(self, name) for name in names if name != callers}
        self._callers = callers
        self._for_caller: deque[Task] = deque()
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
        while not until.done.is_set() and (task := self._next_for_caller()) is not None:
            started = time.perf_counter()
            try:
                task.wait_for_others()
            except BaseException as error:  # Ctrl-C: nobody may go on waiting for this task
                self.finished(task, started, error)
                raise
            self.run(task)
        until.wait()

    def ready(self, lane: str) -> Task | None:
        """What a lane is doing or about to do, if nothing it waits for is left to be done."""
        return self._lanes[lane].ready()

    def _next_for_caller(self) -> Task | None:
        try:
            return self._for_caller.popleft()
        except IndexError:
            return None

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
            task.error = self.failure
            task.set_done()
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
        while (task := self._next_for_caller()) is not None:  # whoever was to do them may never come back
            task.error = error
            task.set_done()

    def finished(self, task: Task, started: float, error: BaseException | None) -> None:
        if task.lane:
            self.spans.append((task.lane, task.label, started, time.perf_counter()))
        if error is not None:
            self.fail(error)
            task.error = self.failure
        task.set_done()

    def close(self) -> None:
        """Do what is queued (or drop it after a failure) and end the threads."""
        for lane in self._lanes.values():
            lane.close()


class _Lane(threading.Thread):
    def __init__(self, owner: Lanes, name: str):
        super().__init__(name=f"lohan-{name}", daemon=True)
        self._owner = owner
        self._tasks: deque[Task] = deque()
        self._current: Task | None = None
        self._changed = threading.Condition()
        self._closed = False

    def put(self, task: Task) -> None:
        with self._changed:
            self._tasks.append(task)
            self._changed.notify()

    def ready(self) -> Task | None:
        with self._changed:
            task = self._current
            if task is None or task.done.is_set():
                task = self._tasks[0] if self._tasks else None
        if task is None or task.done.is_set() or not all(other.done.is_set() for other in task.waits):
            return None
        return task

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
                while not self._tasks and not self._closed:
                    self._changed.wait()
                if not self._tasks:
                    return
                task = self._current = self._tasks.popleft()
            self._do(task)

    def _do(self, task: Task) -> None:
        task.wait_for_others()
        self._owner.run(task)
