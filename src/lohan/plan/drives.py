"""What several drives do together, alone and with reads and writes at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.profiles import DriveProfile, MachineProfile


@dataclass(frozen=True, slots=True)
class DriveRates:
    """What all drives together do with records striped over them, bytes per second."""

    read: float
    write: float
    both_read: float
    both_write: float
    """The two, when both are under way."""


def drive_rates(drives: Sequence[DriveProfile], array_bytes_per_second: float | None = None) -> DriveRates:
    """Of a store striped over these drives by weight: the one that is slowest for its share sets the pace."""
    if not drives:
        return DriveRates(0.0, 0.0, 0.0, 0.0)
    weights = [1 / (1 / d.read_bytes_per_second + 1 / d.write_bytes_per_second) for d in drives]
    shares = [weight / sum(weights) for weight in weights]

    def whole(rates: Sequence[float]) -> float:
        return min(rate / share for rate, share in zip(rates, shares, strict=True))

    read = whole([d.read_bytes_per_second for d in drives])
    write = whole([d.write_bytes_per_second for d in drives])
    both = whole([d.mixed_bytes_per_second or (d.read_bytes_per_second + d.write_bytes_per_second) / 2 for d in drives])
    scale = 2 * both / (read + write)
    both_read, both_write = min(read, read / 2 * scale), min(write, write / 2 * scale)
    if array_bytes_per_second is not None:
        read, write = min(read, array_bytes_per_second), min(write, array_bytes_per_second)
        over = max(1.0, (both_read + both_write) / array_bytes_per_second)
        both_read, both_write = both_read / over, both_write / over
    return DriveRates(read, write, both_read, both_write)


def drive_seconds(read: float, write: float, machine: MachineProfile) -> float:
    """These bytes, both streams starting together: side by side until one is done, then the other alone."""
    rates = drive_rates(machine.drives, machine.array_bytes_per_second)
    if not rates.read:
        return 0.0
    if not read or not write:
        return read / rates.read + write / rates.write
    together = min(read / rates.both_read, write / rates.both_write)
    read_left, write_left = read - together * rates.both_read, write - together * rates.both_write
    return together + max(0.0, read_left) / rates.read + max(0.0, write_left) / rates.write
