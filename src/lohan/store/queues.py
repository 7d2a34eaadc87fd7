"""The I/O threads of one drive: some that only read, some that only write.

Reads and writes have threads of their own, so a read never stands behind queued writes, and a drive that can
do both at once is asked to. Within reads, those that somebody already waits for go first. The queues
themselves are not bounded: the store admits only so much work (`Admission`), and work that was admitted but
had to wait for an earlier operation must never block the thread that hands it on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from lohan.store.handle import Handle


class Job:
    """One request to a drive, on behalf of a handle."""

    __slots__ = ("owner", "run")

    def __init__(self, owner: Handle, run: Callable[[Worker], None]):
        self.owner = owner
        self.run = run


class Worker(threading.Thread):
    """One I/O thread. `bounce` is its private page-aligned memory, made when first needed."""

    def __init__(self, queue: Queue, name: str):
        super().__init__(name=name, daemon=True)
        self.queue = queue
        self.bounce: memoryview | None = None

    def run(self) -> None:
        while (job := self.queue.take()) is not None:
            job.run(self)


class Queue:
    """A drive's reads, or its writes, and the threads that do them."""

    def __init__(self, name: str, num_threads: int):
        self._ready = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._closed = False
        self._workers = [Worker(self, f"{name}-{i}") for i in range(num_threads)]
        for worker in self._workers:
            worker.start()

    def put(self, job: Job) -> None:
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()

    def take(self) -> Job | None:
        with self._ready:
            while not self._jobs:
                if self._closed:
                    return None
                self._ready.wait()
            return self._jobs.popleft()

    def promote(self, owner: Handle) -> None:
        """Somebody waits for this handle: its requests go first."""
        with self._ready:
            urgent = [job for job in self._jobs if job.owner is owner]
            if urgent and len(urgent) < len(self._jobs):
                rest = [job for job in self._jobs if job.owner is not owner]
                self._jobs = deque(urgent + rest)

    def close(self) -> None:
        """Finish what is queued, then end the threads."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for worker in self._workers:
            worker.join()


class Admission:
    """How many requests may be queued or under way before a caller has to wait: a slow drive slows its producer."""

    def __init__(self, limit: int):
        self._limit = limit
        self._changed = threading.Condition()
        self._outstanding = 0

    def enter(self, num_requests: int) -> None:
        """Wait for room. One operation is always let in when nothing else is, however large it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._outstanding == 0 or self._outstanding + num_requests <= self._limit)
            self._outstanding += num_requests

    def leave(self, num_requests: int = 1) -> None:
        with self._changed:
            self._outstanding -= num_requests
            self._changed.notify_all()
