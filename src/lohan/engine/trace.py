"""What really happened when: spans of every lane and every drive, as a file that Perfetto and Chrome read.

A lane's span begins when an operation's waits are over and ends when its work is finished. Lanes that only issue I/O
(ssd_read, ssd_write) have several operations under way at once; those are drawn on as many tracks as it takes, so on
one track spans never overlap. A drive's spans are its requests, from the moment a thread takes one up.

Only the most recent spans are kept, so memory does not grow with steps. append and observe are safe from any thread.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lohan.plan.schedule import LANES

MAX_SPANS = 200_000
KEPT_FILES = 20
_LANES_PROCESS, _DRIVES_PROCESS = 1, 2
_MAX_TRACKS = 1000


class Span(NamedTuple):
    """One stretch of time on one track of the trace. Times are perf_counter() seconds."""

    track: str
    label: str
    start: float
    end: float
    args: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Step(NamedTuple):
    """When step() was called, and when it returned its result."""

    number: int
    start: float
    end: float


class Trace:
    """The recent spans of a run; with a directory, also one file per step, of which the last ones are kept."""

    def __init__(self, directory: Path | None = None, *, keep: int = KEPT_FILES):
        self.directory, self._keep = directory, keep
        self.spans: deque[tuple[str, str, float, float]] = deque(maxlen=MAX_SPANS)
        """Filled by the lanes."""
        self._requests: deque[Span] = deque(maxlen=MAX_SPANS)
        self._steps: deque[Step] = deque(maxlen=10_000)
        self._written: deque[Path] = deque()
        self.bytes_moved = {"read": 0, "write": 0}
        """All the drives have moved since the run was opened."""
        self._guard = threading.Lock()

    def observe(self, kind: str, drive: int, record: str, num_bytes: int, start: float, end: float) -> None:
        """A request of the store, as its observer is told."""
        self._requests.append(Span(f"drive {drive + 1} {kind}", record, start, end, {"bytes": num_bytes}))
        with self._guard:
            self.bytes_moved[kind] += num_bytes

    def requests(self, since: float) -> list[Span]:
        """The recent requests that ended after this moment."""
        return [span for span in self._requests.copy() if span.end > since]

    def last_step(self, *, back: int = 0) -> tuple[Step, list[Span]] | None:
        """The last step, or one before it, and what was under way between its call and its result."""
        if back >= len(self._steps):
            return None
        step = self._steps[-1 - back]
        return step, [span for span in self._all() if span.end > step.start and span.start < step.end]

    def begin_step(self, now: float) -> None:
        """A step begins: what the one before left to do belongs to it up to here."""
        if self.directory is not None and self._steps:
            self._write_file(now)

    def end_step(self, number: int, start: float, end: float) -> None:
        self._steps.append(Step(number, start, end))

    def close(self, now: float) -> None:
        self.begin_step(now)

    def _write_file(self, until: float) -> None:
        assert self.directory is not None
        path = self.directory / f"step-{self._steps[-1].number:06d}.json"
        if self._written and self._written[-1] == path:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self.write(path, until=until)
        self._written.append(path)
        while len(self._written) > self._keep:
            self._written.popleft().unlink(missing_ok=True)

    def write(self, path: Path, *, steps: int = 1, until: float) -> None:
        """The last steps, from the call of the first to `until`."""
        shown = list(self._steps)[-steps:]
        start = shown[0].start if shown else float("-inf")
        inside = [span for span in self._all() if span.end > start and span.start < until]
        text = json.dumps(to_chrome(inside, shown), separators=(",", ":"))
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text)
        os.replace(partial, path)

    def _all(self) -> Iterable[Span]:
        # Copies: the lanes go on appending, and a deque that changes cannot be walked.
        yield from (Span(*span[:4]) for span in self.spans.copy())
        yield from self._requests.copy()


def to_chrome(spans: Iterable[Span], steps: Sequence[Step] = ()) -> dict[str, Any]:
    """The Chrome trace format: processes `lanes` and `drives`, one named thread per track, times in microseconds."""
    by_track: dict[str, list[Span]] = {}
    for span in spans:
        by_track.setdefault(span.track, []).append(span)
    zero = min((span.start for group in by_track.values() for span in group), default=0.0)
    zero = min([zero, *(step.start for step in steps)])
    lanes = ["step", *LANES]
    drives = sorted(name for name in by_track if name not in lanes)
    by_track["step"] = [Span("step", f"step {step.number}", step.start, step.end) for step in steps]
    events: list[dict[str, Any]] = []
    for process, name, tracks in ((_LANES_PROCESS, "lanes", lanes), (_DRIVES_PROCESS, "drives", drives)):
        events.append(_name("process_name", process, 0, name))
        for position, track in enumerate(tracks):
            for part, group in enumerate(_without_overlap(by_track.get(track, []))):
                thread = (position + 1) * _MAX_TRACKS + part
                events.append(_name("thread_name", process, thread, track if part == 0 else f"{track} ({part + 1})"))
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_sort_index",
                        "pid": process,
                        "tid": thread,
                        "args": {"sort_index": thread},
                    }
                )
                events += [_event(span, process, thread, zero) for span in group]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _without_overlap(spans: list[Span]) -> list[list[Span]]:
    """The spans on as few tracks as have none overlap; at least one, so that an idle lane is seen to be idle."""
    tracks: list[list[Span]] = [[]]
    free: list[int] = [0]
    busy: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(tracks))
            tracks.append([])
        track = heapq.heappop(free)
        tracks[track].append(span)
        heapq.heappush(busy, (span.end, track))
    return tracks


def _event(span: Span, process: int, thread: int, zero: float) -> dict[str, Any]:
    start = round((span.start - zero) * 1e6, 3)
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.label.split()[0] if process == _LANES_PROCESS else span.track.rpartition(" ")[2],
        "pid": process,
        "tid": thread,
        "ts": start,
        # From the rounded start: two spans that touch must not overlap by a rounding.
        "dur": max(round((span.end - zero) * 1e6, 3) - start, 0.0),
        "args": span.args,
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
