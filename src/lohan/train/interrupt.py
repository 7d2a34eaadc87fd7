"""Ctrl-C and SIGTERM: the first asks for a stop after this step, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While this is entered, `asked` says whether somebody wants the run to stop.

    Signals are the main thread's affair: entered in another one, nothing is caught.
    """

    def __init__(self, on_ask: Callable[[], None] = lambda: None) -> None:
        """`on_ask` is called in the signal handler, where hardly anything is safe: print() is not."""
        self.asked = False
        self._on_ask = on_ask
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._caught) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._on_ask()
