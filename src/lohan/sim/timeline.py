"""What a simulated run did when: spans of every lane, and the steady state of its steps.

The first step of a run is not like the others (nothing was left for it to do), so a step's time is the distance of the
last two steps' ends. The trace is the engine's own format, so both open in the same viewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lohan.engine.trace import Span, Step, to_chrome
from lohan.plan.schedule import LANES
from lohan.sim.op import AnyOp
from lohan.sim.rates import READ, SERVER_OF_LANE, WRITE


class Timeline:
    """Every operation with the moment its waits were over, the moment it was served, and its end, in seconds."""

    def __init__(
        self,
        ops: Sequence[AnyOp],
        lanes: Sequence[int],
        start: Sequence[float],
        service: Sequence[float],
        end: Sequence[float],
        put_sizes: Sequence[int],
        released: Sequence[float],
        barrier: bool,
    ):
        self.ops, self.start, self.service, self.end = ops, start, service, end
        self._lanes = lanes
        self.seconds = max(end, default=0.0)
        """Until the last operation is done."""
        self.step_ends = self._step_ends(put_sizes, released, barrier)
        self._puts = put_sizes

    def _step_ends(self, put_sizes: Sequence[int], released: Sequence[float], barrier: bool) -> list[float]:
        if barrier:
            return [*released[1:], self.seconds]
        return [self.end[number] for number, op in enumerate(self.ops) if op.key.kind == "clip"]

    @property
    def window(self) -> tuple[float, float]:
        """The last whole step."""
        if len(self.step_ends) < 2:
            return 0.0, self.seconds
        return self.step_ends[-2], self.step_ends[-1]

    @property
    def seconds_per_step(self) -> float:
        """In the steady state."""
        first, last = self.window
        return last - first

    def busy_seconds(self) -> dict[str, float]:
        """Of the last whole step, how long each lane worked: copied, computed, or had the drives at work for it."""
        first, last = self.window
        busy = [0.0] * len(LANES)
        for lane, begin, end in zip(self._lanes, self.service, self.end, strict=True):
            if lane >= 0 and end > first and begin < last:
                busy[lane] += min(end, last) - max(begin, first)
        return dict(zip(LANES, busy, strict=True))

    def bytes_per_step(self) -> dict[str, int]:
        """What one step in the steady state moves over each lane that moves bytes."""
        last = max((op.key.step for op in self.ops if op.key.kind == "clip"), default=-1)
        size = 0
        moved = dict.fromkeys((lane for lane in LANES if lane not in ("gpu", "cpu_update")), 0)
        for put in self._puts:
            ops = self.ops[size : size + put]
            size += put
            # The put with a step's clip is the step; what settles it afterwards moves next to nothing.
            if any(op.key.kind == "clip" and op.key.step == last for op in ops):
                for op in ops:
                    if op.lane in moved:
                        moved[op.lane] += op.num_bytes
        return moved

    def drive_seconds(self) -> float:
        """Of the last whole step, how long the drives had anything to do, reading or writing."""
        first, last = self.window
        total, reached = 0.0, first
        drives = [number for number, lane in enumerate(LANES) if SERVER_OF_LANE[lane] in (READ, WRITE)]
        served = zip(self._lanes, self.service, self.end, strict=True)
        for begin, end in sorted((begin, end) for lane, begin, end in served if lane in drives):
            until = min(end, last)
            if until > max(begin, reached):
                total += until - max(begin, reached)
                reached = until
        return total

    @property
    def bottleneck(self) -> str:
        """What works most of the last whole step: a lane, or `ssd` for the drives, which all of their lanes share."""
        busy = {
            lane: seconds for lane, seconds in self.busy_seconds().items() if SERVER_OF_LANE[lane] not in (READ, WRITE)
        }
        busy["ssd"] = self.drive_seconds()
        return max(busy, key=lambda name: busy[name])

    def spans(self) -> Iterator[Span]:
        """As the engine's lanes record them: from the end of the waits to the end of the work."""
        for op, lane, start, end in zip(self.ops, self._lanes, self.start, self.end, strict=True):
            if lane >= 0:
                key = op.key
                yield Span(LANES[lane], f"{key.kind} {key.unit}" if key.unit >= 0 else key.kind, start, end)

    def to_chrome(self, *, last_step_only: bool = False) -> dict[str, Any]:
        """The trace as engine/trace.py writes it."""
        bounds = [0.0, *self.step_ends]
        steps = [Step(number, bounds[number - 1], bounds[number]) for number in range(1, len(bounds))]
        spans = self.spans()
        if last_step_only:
            first, last = self.window
            steps = steps[-1:]
            return to_chrome((span for span in spans if span.end > first and span.start < last), steps)
        return to_chrome(spans, steps)
