"""What was measured, as it is kept in the results file, and what follows from it: medians, distances, limits, tables.

A Record is one system at one point (a model and a number of tokens); a Turn is what one round gave. Pure arithmetic: no
torch, no clock.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peers.systems import ALL, SYSTEMS, System
from peers.workloads import num_parameters

MOST_STOLEN = 0.02
"""Of the cores' time, by the host of a virtual machine, before a step is worth doing again."""


@dataclass(kw_only=True, slots=True)
class Turn:
    """A few steps back to back."""

    round: int
    seconds: list[float]
    """Of each counted step."""

    losses: dict[str, float]
    """Of every step since the model was loaded, by its number."""

    peak_rss: int
    read_bytes: float
    """Of the drive, per counted step."""

    write_bytes: float
    more: dict[str, Any] = field(default_factory=dict)
    """What only some systems say of their last step."""

    stolen: float = 0.0
    """Of the cores' time, by the host of a virtual machine: the most in any counted step."""


@dataclass(kw_only=True, slots=True)
class Record:
    """One system at one point."""

    parameters: str
    tokens: int
    system: str
    turns: list[Turn] = field(default_factory=list)
    load: list[dict[str, float]] = field(default_factory=list)
    export: list[dict[str, float]] = field(default_factory=list)
    failed: str | None = None

    @property
    def point(self) -> tuple[str, int]:
        return self.parameters, self.tokens

    @property
    def begun(self) -> bool:
        return bool(self.turns) or self.failed is not None

    @property
    def all_seconds(self) -> list[float]:
        return [second for turn in self.turns for second in turn.seconds]

    @property
    def seconds(self) -> float:
        return statistics.median(self.all_seconds)

    @property
    def spread(self) -> float:
        """From the fastest to the slowest counted step, over the median."""
        return (max(self.all_seconds) - min(self.all_seconds)) / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def peak_rss(self) -> int:
        return max(turn.peak_rss for turn in self.turns)

    @property
    def ssd_bytes(self) -> float:
        return statistics.median(turn.read_bytes + turn.write_bytes for turn in self.turns)

    def more(self, name: str) -> float:
        """The median of what its turns say besides, 0 if they do not."""
        found = [turn.more[name] for turn in self.turns if name in turn.more]
        return statistics.median(found) if found else 0.0


@dataclass(kw_only=True, slots=True)
class Findings:
    """A results file."""

    machine: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def record(self, parameters: str, tokens: int, system: str) -> Record:
        """The one that is there, or a new one."""
        for one in self.records:
            if (one.parameters, one.tokens, one.system) == (parameters, tokens, system):
                return one
        self.records.append(Record(parameters=parameters, tokens=tokens, system=system))
        return self.records[-1]

    def find(self, parameters: str, tokens: int, system: str) -> Record | None:
        """The one that has been measured."""
        for one in self.records:
            if (one.parameters, one.tokens, one.system) == (parameters, tokens, system) and one.turns:
                return one
        return None

    @property
    def points(self) -> list[tuple[str, int]]:
        found = {one.point for one in self.records if one.begun}
        return sorted(found, key=lambda point: (num_parameters(point[0]), point[1]))

    def save(self, path: Path) -> None:
        """Whole or not at all: an interrupted benchmark goes on from here."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        os.replace(partial, path)


def read_findings(path: Path) -> Findings:
    found = json.loads(path.read_text())
    records = [Record(**{**one, "turns": [Turn(**turn) for turn in one["turns"]]}) for one in found.pop("records")]
    return Findings(**found, records=records)


# -- the limit ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step at one point takes of each resource alone, measured in the same run."""

    compute_seconds: float
    update_seconds: float
    checksum_bytes_per_second: float
    drive_bytes_per_second: float
    """Reads and writes together."""

    plain_seconds: float | None
    """Plain PyTorch's step with everything in RAM."""

    def cores_seconds(self, system: System, ssd_bytes: float) -> float:
        """Ours compute, update and checksum; a peer has to do at least what plain PyTorch does."""
        if system.worker == "lohan_worker":
            return self.compute_seconds + self.update_seconds + ssd_bytes / self.checksum_bytes_per_second
        return self.plain_seconds or self.compute_seconds + self.update_seconds

    def drive_seconds(self, ssd_bytes: float) -> float:
        return ssd_bytes / self.drive_bytes_per_second

    def seconds(self, system: System, ssd_bytes: float) -> float:
        """The busiest resource's own time, for the bytes that this system moves."""
        return max(self.cores_seconds(system, ssd_bytes), self.drive_seconds(ssd_bytes))


def limits_at(findings: Findings, point: tuple[str, int]) -> Limits | None:
    cores, drive = findings.find(*point, "cores"), findings.find(*point, "drive")
    if cores is None or drive is None:
        return None
    plain = findings.find(*point, "pytorch")
    return Limits(
        compute_seconds=cores.more("compute_seconds"),
        update_seconds=cores.more("update_seconds"),
        checksum_bytes_per_second=cores.more("checksum_rate"),
        drive_bytes_per_second=drive.more("alone_bytes") / drive.more("alone_seconds"),
        plain_seconds=None if plain is None else plain.seconds,
    )


def share_of_drive(done: dict[str, float], drive: Record) -> float:
    """Of the drive's sequential rates: the time they need for the bytes that were moved, over the time it took."""
    ideal = done["read_bytes"] / drive.more("read_rate") + done["write_bytes"] / drive.more("write_rate")
    return ideal / done["seconds"]


# -- comparing ----------------------------------------------------------------------------------------


def loss_distance(record: Record, plain: Record) -> float | None:
    """The largest difference of a step's loss from plain PyTorch's, over the steps both have taken."""
    ours = {step: loss for turn in record.turns for step, loss in turn.losses.items()}
    theirs = {step: loss for turn in plain.turns for step, loss in turn.losses.items()}
    both = ours.keys() & theirs.keys()
    return max((abs(ours[step] - theirs[step]) for step in both), default=None)


def json_rows(findings: Findings) -> list[dict[str, Any]]:
    """The last line of the benchmark."""
    rows = []
    for one in findings.records:
        if one.system not in SYSTEMS or not one.turns:
            continue
        limits = limits_at(findings, one.point)
        over = None if limits is None else one.seconds / limits.seconds(ALL[one.system], one.ssd_bytes)
        rows.append(
            {
                "system": one.system,
                "parameters": num_parameters(one.parameters),
                "tokens": one.tokens,
                "tokens_per_second": round(one.tokens_per_second, 2),
                "peak_rss_bytes": one.peak_rss,
                "ssd_bytes_per_step": round(one.ssd_bytes),
                "seconds_over_limit": None if over is None else round(over, 3),
            }
        )
    return rows


def _order(findings: Findings, point: tuple[str, int]) -> Iterable[Record]:
    found = {one.system: one for one in findings.records if one.point == point and one.begun}
    return (found[name] for name in SYSTEMS if name in found)


HEADINGS = (
    "system", "tokens/s", "step s", "spread", "of pytorch", "peak RSS GB", "SSD GB/step", "over limit", "loss off by",
)  # fmt: skip


def point_rows(findings: Findings, point: tuple[str, int]) -> list[list[str]]:
    """The table of one point."""
    plain, limits = findings.find(*point, "pytorch"), limits_at(findings, point)
    rows = []
    for one in _order(findings, point):
        if not one.turns:
            rows.append([one.system, f"did not run: {one.failed}"] + [""] * (len(HEADINGS) - 2))
            continue
        distance = None if plain is None else loss_distance(one, plain)
        over = None if limits is None else one.seconds / limits.seconds(ALL[one.system], one.ssd_bytes)
        rows.append(
            [
                one.system,
                f"{one.tokens_per_second:.1f}",
                f"{one.seconds:.2f}",
                f"{one.spread:.0%}",
                "" if plain is None else f"{plain.seconds / one.seconds:.2f}",
                f"{one.peak_rss / 1e9:.2f}",
                f"{one.ssd_bytes / 1e9:.2f}",
                "" if over is None else f"{over:.2f}",
                "" if distance is None else f"{distance:.1g}",
            ]
        )
    return rows


FOLDER_HEADINGS = ("system", "load s", "load RSS GB", "of drive", "export s", "export RSS GB", "of drive")


def folder_rows(findings: Findings, point: tuple[str, int]) -> list[list[str]]:
    """Loading and exporting at one point; shares of the drive's sequential rate where it was measured."""
    drive = findings.find(*point, "drive")
    rows = []
    for one in _order(findings, point):
        if not one.load:
            continue
        row = [one.system]
        for done in (one.load, one.export):
            if not done:
                row += ["", "", ""]
                continue
            middle = sorted(done, key=lambda each: each["seconds"])[(len(done) - 1) // 2]
            share = "" if drive is None else f"{share_of_drive(middle, drive):.0%}"
            row += [f"{middle['seconds']:.1f}", f"{max(each['peak_rss'] for each in done) / 1e9:.2f}", share]
        rows.append(row)
    return rows


def limit_line(findings: Findings, point: tuple[str, int]) -> str:
    """What the resources do alone, and whose steps the host of a virtual machine disturbed."""
    limits = limits_at(findings, point)
    here = [one for one in findings.records if one.point == point]
    noisy = [(one.system, max((turn.stolen for turn in one.turns), default=0.0)) for one in here]
    said = ", ".join(f"{name} ({share:.0%})" for name, share in noisy if share > MOST_STOLEN)
    noise = f" The host took more than {MOST_STOLEN:.0%} of the cores in a step of {said}." if said else ""
    if limits is None:
        return f"The limit was not measured.{noise}"
    return (
        f"Alone: computing {limits.compute_seconds:.2f} s, updating {limits.update_seconds:.2f} s, checksums "
        f"{limits.checksum_bytes_per_second / 1e9:.1f} GB/s, drive "
        f"{limits.drive_bytes_per_second / 1e9:.2f} GB/s both ways together.{noise}"
    )


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned for a terminal."""
    widths = [max(len(row[i]) for row in (headings, *rows) if i == 0 or row[2:3] != [""]) for i in range(len(headings))]
    lines = []
    for row in (headings, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
