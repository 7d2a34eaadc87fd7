"""The answer to an asynchronous call: a result or an error, delivered to whoever waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Handle:
    """One asynchronous operation under way.

    Whoever took it waits on it: wait() returns the result or raises what failed in the I/O thread. Waiting
    also tells the store that somebody stands still for this operation, so it goes ahead of the queue.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_promote", "_result", "what")

    def __init__(self, what: str, promote: Callable[[Handle], None] | None = None):
        self.what = what
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._error: BaseException | None = None
        self._result: Any = None
        self._promote = promote

    def wait(self, timeout_seconds: float | None = None) -> Any:
        """The result, or the error raised here. TimeoutError if it is not done in time."""
        if not self._done.is_set():
            if self._promote is not None:
                self._promote(self)
            if not self._done.wait(timeout_seconds):
                raise TimeoutError(f"{self.what} is not done after {timeout_seconds} s.")
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """What failed, once done; None while under way and when it succeeded."""
        return self._error

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Called once, by the side that did the work."""
        with self._lock:
            self._result, self._error = result, error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def then(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(handle)` when done: at once if it is, else on the thread that finishes it."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)
