"""What every lane did in one step, in numbers few enough to keep beside a run and to draw in a page.

A span is [kind, start, length, unit], times in microseconds from the step's begin, kind an index into KINDS; unit is -1
where it has none. Measured and predicted steps look the same. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lohan.plan.schedule import LANES

KINDS = (
    "forward", "backward", "update", "norm", "clip", "read_weights", "to_gpu", "read_state", "write", "commit",
    "gradient", "spill", "read_gradient", "act_out", "act_write", "act_read", "act_in", "other",
)  # fmt: skip
MAX_SPANS = 1500
"""Of a lane. More than a page is wide; a step of 70B has a hundred times as many."""

_OTHER = len(KINDS) - 1
_ISSUING = ("ssd_read", "ssd_write", "swap_in", "swap_out")

Spans = list[list[float]]


def lanes_of(
    spans: Iterable[Sequence[Any]], first: float, last: float, units: Mapping[str, int] | None = None
) -> dict[str, Spans]:
    """(track, label, start, end) in seconds -> the spans of each lane that had any between two moments.

    With `units` (their numbers by name) the spans of the drives' requests stand for the lanes that only ask for them:
    those also hold the wait for memory to read into.
    """
    found: dict[str, Spans] = {lane: [] for lane in LANES}
    for track, label, start, end, *_ in spans:
        if end <= first or start >= last:
            continue
        if units is not None and track.startswith("drive "):
            lane, kind, unit = _request(track.rpartition(" ")[2], label, units)
        elif track in found and not (units is not None and track in _ISSUING):
            lane, (kind, _, number) = track, label.partition(" ")
            unit = int(number) if number.isdigit() else -1
        else:
            continue
        begin = max(start, first) - first
        long = round((min(end, last) - first - begin) * 1e6, 1)
        if long > 0:
            index = KINDS.index(kind) if kind in KINDS else _OTHER
            found[lane].append([index, round(begin * 1e6, 1), long, unit])
    return {lane: fewer(sorted(own, key=lambda s: s[1]), (last - first) * 1e6) for lane, own in found.items() if own}


def _request(way: str, record: str, units: Mapping[str, int]) -> tuple[str, str, int]:
    """Lane, kind and unit of a drive's request. Records are named by engine/layout.py and engine/swap.py."""
    unit, _, rest = record.partition("/")
    reads = way == "read"
    if unit.isdigit():  # activations: unit/micro-batch
        return ("swap_in", "act_read", int(unit)) if reads else ("swap_out", "act_write", int(unit))
    number = units.get(unit, -1)
    if rest.startswith("gradient"):
        return ("ssd_read", "read_gradient", number) if reads else ("ssd_write", "spill", number)
    if not reads:
        return "ssd_write", "write", number
    return "ssd_read", "read_state" if rest.startswith("state") else "read_weights", number


def fewer(spans: Spans, length: float) -> Spans:
    """Few enough: a lane with too many is cut into equal parts, each filled as far as it was, by its main kind."""
    if len(spans) <= MAX_SPANS:
        return spans
    width = length / MAX_SPANS
    parts: list[dict[tuple[float, float], float]] = [{} for _ in range(MAX_SPANS)]
    for kind, start, long, unit in spans:
        at = min(int(start / width), MAX_SPANS - 1)
        while at < MAX_SPANS and at * width < start + long:
            share = min(start + long, (at + 1) * width) - max(start, at * width)
            parts[at][kind, unit] = parts[at].get((kind, unit), 0.0) + share
            at += 1
    made: Spans = []
    for at, part in enumerate(parts):
        if not part:
            continue
        kind, unit = max(part, key=lambda key: part[key])
        start, long = at * width, min(width, sum(part.values()))
        if made and [made[-1][0], made[-1][3]] == [kind, unit] and made[-1][1] + made[-1][2] > start - width / 100:
            made[-1][2] = round(start + long - made[-1][1], 1)
        else:
            made.append([kind, round(start, 1), round(long, 1), unit])
    return made


def busy_seconds(intervals: Iterable[tuple[float, float]], first: float, last: float) -> float:
    """How long at least one of them was under way between two moments."""
    total, reached = 0.0, first
    for start, end in sorted(intervals):
        until = min(end, last)
        if until > max(start, reached):
            total += until - max(start, reached)
            reached = until
    return total


def measured_lanes(spans: Iterable[Sequence[Any]], first: float, last: float) -> dict[str, float]:
    """Seconds each lane was at work; those of the drives by their requests, `ssd` is any of them."""
    by_track: dict[str, list[tuple[float, float]]] = {}
    for track, _, start, end, *_ in spans:
        name = track
        if track.startswith("drive "):
            name = f"drives {track.rpartition(' ')[2]}"
            by_track.setdefault("ssd", []).append((start, end))
        by_track.setdefault(name, []).append((start, end))
    seconds: Mapping[str, float] = {name: busy_seconds(own, first, last) for name, own in by_track.items()}
    kept = ("gpu", "cpu_update", "to_gpu", "to_host", "ssd", "drives read", "drives write")
    return {name: round(seconds[name], 7) for name in kept if name in seconds}
