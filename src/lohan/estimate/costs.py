"""What a run costs beside time: drives' endurance, energy, money. Pure; what is not known stays None."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.profiles import MachineProfile

LIFETIME_SECONDS = 3 * 365 * 86400.0
"""Over which a machine is paid off, working day and night. An assumption, as is the price of energy."""

PRICE_PER_KWH = 0.15

REFERENCE_ENDURANCE_BYTES = 1.2e15
"""What a 2 TB consumer drive is rated for: hardware/drives.yaml, for example the Samsung 990 PRO."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Of a run of some steps."""

    hours: float
    endurance_share: float | None
    """Of what the most written drive may be written in its life."""

    energy_kwh: float | None
    per_billion_tokens: float | None
    """The machine's share of its lifetime, energy and worn drives, in the currency of its prices."""


def costs_of(
    machine: MachineProfile, *, seconds_per_step: float, tokens_per_step: int, written_bytes: float, steps: int
) -> Costs:
    """Of this many steps."""
    seconds = seconds_per_step * steps
    energy = None if machine.power_watts is None else machine.power_watts * seconds / 3.6e6
    endurance = _endurance(machine, written_bytes * steps)
    money = None
    if machine.price is not None and energy is not None:
        drives = sum(drive.price or 0.0 for drive in machine.drives)
        # A drive is used up by its writing or by its years, whichever is more.
        worn = drives * max(endurance or 0.0, seconds / LIFETIME_SECONDS)
        total = machine.price * seconds / LIFETIME_SECONDS + energy * PRICE_PER_KWH + worn
        money = total / (tokens_per_step * steps) * 1e9
    return Costs(hours=seconds / 3600, endurance_share=endurance, energy_kwh=energy, per_billion_tokens=money)


def _endurance(machine: MachineProfile, written: float) -> float | None:
    if not machine.drives or any(drive.endurance_bytes is None for drive in machine.drives):
        return None if written else 0.0
    # Striped by weight, as plan/drives.py.
    weights = [1 / (1 / d.read_bytes_per_second + 1 / d.write_bytes_per_second) for d in machine.drives]
    return max(
        written * weight / sum(weights) / (drive.endurance_bytes or 1.0)
        for drive, weight in zip(machine.drives, weights, strict=True)
    )
