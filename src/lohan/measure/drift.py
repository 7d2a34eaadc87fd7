"""Whether a run still goes as fast as its machine was measured: observed rates against the profile. Pure.

    watch = DriftWatch(machine)
    ...
    for drift in watch.see(observed_step(...)):      # after every step; almost always nothing
        display.say(drift.sentence)

Drives are judged only while they are kept busy: a drive that is asked for little moves little, and that is no drift.
Cores and drives slow each other down; anything between a rate alone and what was measured beside the other is as said.
A drift is lasting when LASTING of the last WINDOW steps that say something are off by more than TOLERANCE, all to the
same side; the first WARM_UP steps do not count. Each rate is reported once, until rebase() gives another profile.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lohan.plan.activations import base_work, recompute_flops
from lohan.plan.drives import drive_rates
from lohan.plan.plan import ModelSize, Plan
from lohan.profiles import MachineProfile
from lohan.sim.run import NORM_SHARE
from lohan.sizes import format_bytes

TOLERANCE = 0.2
WINDOW = 10
LASTING = 8
WARM_UP = 2
"""Steps that plan, fault memory in and fill caches."""

BUSY_REQUESTS = 4
"""Requests under way per drive from which on the rate is the drive's and not its caller's: with fewer it waits between
them. Picked by feel; a store has 8 threads per drive each way."""

LEAST_SECONDS = 0.05
"""Of busy drives in a step, below which nothing is concluded."""

RATES = ("compute", "update", "read", "write", "mixed")
_WORDS = {
    "compute": "Computing runs at",
    "update": "Updating runs at",
    "read": "The drives read",
    "write": "The drives write",
    "mixed": "The drives read and write together",
}


class Request(NamedTuple):
    """One request of the store, as its observer is told."""

    kind: str
    """read or write."""

    num_bytes: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one step computes."""

    flops: float
    """As the schedule counts them."""

    parameters: int
    """That are updated."""

    installed: int
    """Parameters put on the device, forward and backward counted each."""


def step_work(model: ModelSize, plan: Plan, micro_batches: int) -> StepWork:
    """A step of this plan."""
    forward, backward = base_work(model, plan)
    again = sum(
        recompute_flops(unit.operators, plan.keeps(number)) * micro_batches if unit.operators else unit.forward_flops
        for number, unit in enumerate(model.units)
        if unit.kind == "block"
    )
    return StepWork(
        flops=forward.flops + backward.flops + again,
        parameters=sum(unit.num_parameters for unit in model.units if unit.trained_pieces),
        installed=2 * sum(unit.num_parameters for unit in model.units),
    )


def expected_rates(machine: MachineProfile) -> dict[str, float]:
    """What a profile promises, by the names of RATES; drives that are not there promise nothing."""
    drives = drive_rates(machine.drives, machine.array_bytes_per_second)
    rates = {
        "compute": machine.gpu_flops_per_second,
        "update": machine.update_parameters_per_second,
        "read": drives.read,
        "write": drives.write,
        "mixed": drives.both_read + drives.both_write,
    }
    return {name: rate for name, rate in rates.items() if rate}


def least_rates(machine: MachineProfile) -> dict[str, float]:
    """What is left of each promise while everything else is busy too, as far as that was measured."""
    compute = None if machine.separate_memory else machine.compute_beside_drives
    moving = [machine.drives_beside_update, None if machine.separate_memory else machine.drives_beside_compute]
    drives = min((share for share in moving if share is not None), default=1.0)
    kept = {"compute": compute or 1.0, "update": machine.update_beside_drives or 1.0}
    return {name: rate * kept.get(name, drives) for name, rate in expected_rates(machine).items()}


def observed_step(
    machine: MachineProfile, work: StepWork, busy_seconds: Mapping[str, float], requests: Iterable[Request] = ()
) -> dict[str, float]:
    """A step's rates over the time each resource was busy; what it says nothing about is left out.

    `busy_seconds` is the step's share of Run.busy_seconds, `requests` what the drives were asked meanwhile.
    """
    norm = NORM_SHARE if machine.norm_share is None else machine.norm_share
    seconds = {
        "compute": busy_seconds.get("compute", 0.0) - work.installed * machine.weights_seconds_per_parameter,
        "update": busy_seconds.get("update", 0.0) / (1 + norm),
    }
    amounts = {"compute": work.flops, "update": float(work.parameters)}
    found = {name: amounts[name] / taken for name, taken in seconds.items() if taken > 0 and amounts[name] > 0}
    return found | busy_drive_rates(requests, num_drives=max(1, len(machine.drives)))


def busy_drive_rates(requests: Iterable[Request], *, num_drives: int) -> dict[str, float]:
    """Bytes per second of all drives while enough requests were under way: only reads, only writes, or both (mixed).

    A request's bytes are spread evenly over its time.
    """
    events: list[tuple[float, int, bool, float]] = []
    for kind, num_bytes, start, end in requests:
        if end > start:
            rate = num_bytes / (end - start)
            events += [(start, 1, kind == "read", rate), (end, -1, kind == "read", -rate)]
    events.sort()
    seconds: dict[str, float] = {}
    moved: dict[str, float] = {}
    count, rate_sum = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    before = 0.0
    for now, change, reads, rate in events:
        if sum(count.values()) >= BUSY_REQUESTS * num_drives and now > before:
            kind = "mixed" if count[True] and count[False] else "read" if count[True] else "write"
            seconds[kind] = seconds.get(kind, 0.0) + now - before
            moved[kind] = moved.get(kind, 0.0) + (now - before) * sum(rate_sum.values())
        count[reads] += change
        # Sums of many floats keep a rest of what has long ended.
        rate_sum[reads] = rate_sum[reads] + rate if count[reads] else 0.0
        before = now
    return {kind: moved[kind] / taken for kind, taken in seconds.items() if taken >= LEAST_SECONDS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """One rate that is not what the profile says, for good."""

    name: str
    observed: float
    """Median of the steps looked at."""

    expected: float

    @property
    def share(self) -> float:
        """Observed over expected."""
        return self.observed / self.expected

    @property
    def sentence(self) -> str:
        off = f"{abs(self.share - 1):.0%} {'faster' if self.share > 1 else 'slower'}"
        return (
            f"{_WORDS[self.name]} {_rate(self.name, self.observed)} over the last {WINDOW} steps, {off} than the "
            f"{_rate(self.name, self.expected)} this machine was measured at."
        )


class DriftWatch:
    """The recent steps of a run, beside what its machine's profile promises."""

    def __init__(self, machine: MachineProfile):
        self._steps = 0
        self.rebase(machine)

    def rebase(self, machine: MachineProfile) -> None:
        """Compare with another profile from now on: what was reported may be reported again."""
        self._most, self._least = expected_rates(machine), least_rates(machine)
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in RATES}
        self._reported: set[str] = set()

    def see(self, observed: Mapping[str, float]) -> list[Drift]:
        """One more step's rates. Returns the drifts that have become lasting with it."""
        self._steps += 1
        if self._steps <= WARM_UP:
            return []
        found = []
        for name in RATES:
            if name not in observed or name not in self._most:
                continue
            recent = self._recent[name]
            recent.append(observed[name])
            if name not in self._reported and is_lasting([rate / self._promised(name, rate) for rate in recent]):
                self._reported.add(name)
                rate = statistics.median(recent)
                found.append(Drift(name=name, observed=rate, expected=self._promised(name, rate)))
        return found

    def _promised(self, name: str, rate: float) -> float:
        """What was promised, as near as it comes to this rate."""
        return min(self._most[name], max(self._least[name], rate))


def is_lasting(shares: Sequence[float]) -> bool:
    """Whether recent steps, each as a share of what was expected, show a drift that has come to stay."""
    slower = sum(share < 1 - TOLERANCE for share in shares)
    faster = sum(share > 1 + TOLERANCE for share in shares)
    return len(shares) >= WINDOW and max(slower, faster) >= LASTING


def corrected(machine: MachineProfile, drifts: Iterable[Drift]) -> MachineProfile:
    """The profile with what was observed put in its place, to plan again with."""
    share = {drift.name: drift.share for drift in drifts}
    drives = tuple(
        replace(
            drive,
            read_bytes_per_second=drive.read_bytes_per_second * share.get("read", 1.0),
            write_bytes_per_second=drive.write_bytes_per_second * share.get("write", 1.0),
            mixed_bytes_per_second=None
            if drive.mixed_bytes_per_second is None
            else drive.mixed_bytes_per_second * share.get("mixed", 1.0),
        )
        for drive in machine.drives
    )
    array = machine.array_bytes_per_second
    moving = [share[name] for name in ("read", "write", "mixed") if name in share]
    return replace(
        machine,
        gpu_flops_per_second=machine.gpu_flops_per_second * share.get("compute", 1.0),
        update_parameters_per_second=machine.update_parameters_per_second * share.get("update", 1.0),
        drives=drives,
        array_bytes_per_second=None if array is None else array * max(moving, default=1.0),
    )


def _rate(name: str, rate: float) -> str:
    if name == "compute":
        return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    if name == "update":
        return f"{rate / 1e6:.3g} million parameters/s"
    return f"{format_bytes(rate)}/s"
