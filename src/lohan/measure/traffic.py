"""What the drives' traffic and the cores' work do to each other when both run at once.

Checksums, copies and system calls take cores, and DMA takes memory bandwidth, so an update is slower while records come
and go, and the drives are while cores are busy. How much is not reckoned from parts: it is measured, with the very
streams and the very work that a run has.

    with open_traffic([directory]) as traffic:
        alone = ...                                    # how long the work takes by itself
        with traffic.flowing() as flow:
            beside = ...                               # and while records are read and written
        traffic.shares(alone, beside, flow)
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lohan.measure.store_rate import RECORD_BYTES, STORE_BYTES, Streams, temporary_store
from lohan.store.files import Files

_LEAST_SHARE = 0.05
"""Below this something else has disturbed the measurement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Of its rate when alone, what each keeps when both run."""

    work: float
    drives: float


class Flow:
    """One stretch of traffic; its rate is known when it is over."""

    rate = 0.0


class Trickle:
    """One record at a time: how long each took, alone and beside one the other way."""

    def __init__(self) -> None:
        self.alone: dict[str, list[float]] = {"read": [], "write": []}
        self.together: dict[str, list[float]] = {"read": [], "write": []}

    @property
    def rates(self) -> tuple[float, float, float]:
        """Bytes per second read, written, and both together."""
        read, write = (RECORD_BYTES / statistics.mean(found) for found in self.alone.values())
        return read, write, sum(RECORD_BYTES / statistics.mean(found) for found in self.together.values())


class Traffic:
    """Records read and written at once, as fast as the drives can, whenever asked for."""

    def __init__(self, streams: Streams, seconds: float):
        self._streams = streams
        moved, taken = streams.run("mixed", seconds)
        self.rate = moved / taken
        """Bytes per second, both ways together, with nothing else going on."""

    @contextmanager
    def flowing(self) -> Iterator[Flow]:
        """Traffic from here to the end of the block."""
        flow, over = Flow(), threading.Event()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(self._streams.run_until, "mixed", over.is_set)
            try:
                yield flow
            finally:
                over.set()
                moved, taken = running.result()
                flow.rate = moved / taken

    @contextmanager
    def trickling(self) -> Iterator[Trickle]:
        """One record at a time, read and written in turn and then both at once, from here to the end of the block."""
        trickle, over = Trickle(), threading.Event()

        def run(other: ThreadPoolExecutor) -> None:
            while not (over.is_set() and trickle.together["write"]):
                for kind, seconds in trickle.alone.items():
                    seconds.append(self._streams.one(kind))
                writing = other.submit(self._streams.one, "write")
                trickle.together["read"].append(self._streams.one("read"))
                trickle.together["write"].append(writing.result())

        with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as other:
            running = thread.submit(run, other)
            try:
                yield trickle
            finally:
                over.set()
                running.result()

    def shares(self, alone: float, beside: float, flow: Flow) -> Shares:
        """From the seconds some work took without and with traffic."""
        return Shares(work=_share(alone / beside), drives=_share(flow.rate / self.rate))


def _share(value: float) -> float:
    return min(1.0, max(_LEAST_SHARE, value))


@contextmanager
def open_traffic(
    directories: Sequence[Path], *, seconds: float = 1.0, num_bytes: int = STORE_BYTES, files: Files | None = None
) -> Iterator[Traffic]:
    """A temporary store to stream through, one over all directories; its rate alone is measured for `seconds`."""
    with temporary_store(directories, num_bytes=num_bytes * len(directories), files=files) as streams:
        streams.fill()
        yield Traffic(streams, seconds)
