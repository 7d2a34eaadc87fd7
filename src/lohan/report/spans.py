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

Spans = list[list[float]]


def lanes_of(spans: Iterable[Sequence[Any]], first: float, last: float) -> dict[str, Spans]:
    """(track, label, start, end) in seconds -> the spans of each lane that had any between two moments."""
    found: dict[str, Spans] = {lane: [] for lane in LANES}
    for track, label, start, end, *_ in spans:
        if track not in found or end <= first or start >= last:
            continue
        kind, _, unit = label.partition(" ")
        begin = max(start, first) - first
        found[track].append(
            [
                KINDS.index(kind) if kind in KINDS else _OTHER,
                round(begin * 1e6, 1),
                round((min(end, last) - first - begin) * 1e6, 1),
                int(unit) if unit.isdigit() else -1,
            ]
        )
    return {lane: fewer(sorted(own, key=lambda s: s[1]), (last - first) * 1e6) for lane, own in found.items() if own}


def fewer(spans: Spans, length: float) -> Spans:
    """Few enough: a lane with too many is cut into as many parts, each of the kind that takes most of it."""
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
        if sum(part.values()) < width / 2:
            continue
        kind, unit = max(part, key=lambda key: part[key])
        if made and made[-1][0] == kind and made[-1][3] == unit and made[-1][1] + made[-1][2] > (at - 0.5) * width:
            made[-1][2] = round((at + 1) * width - made[-1][1], 1)
        else:
            made.append([kind, round(at * width, 1), round(width, 1), unit])
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
