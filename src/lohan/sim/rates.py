"""How fast each part of a machine works while certain others do: rates for every set of busy parts.

Parts share things. Both links share a bus (`duplex_share`). Reads and writes share the drives: each gets half of the
time, unless the machine says what both reach together; nothing passes `array_bytes_per_second`. Checksums are computed
by the cores, so on every byte the drives move the update loses a little of them, and so does compute where it runs on
the same cores. A machine that was measured says what cores and drives leave each other.
"""

from __future__ import annotations

from typing import NamedTuple

from lohan.plan.drives import drive_rates
from lohan.profiles import MachineProfile

NUM_SERVERS = 6
GPU, TO_GPU, TO_HOST, READ, WRITE, CPU = range(NUM_SERVERS)
SERVER_OF_LANE = {
    "gpu": GPU, "to_gpu": TO_GPU, "to_host": TO_HOST, "ssd_read": READ, "ssd_write": WRITE, "cpu_update": CPU,
    "swap_in": READ, "swap_out": WRITE,
}  # fmt: skip
"""What does the work of a lane. The drives do that of four: reads of all lanes queue together, and so do writes."""

_LEAST_CORES = 0.05
"""Of the cores, left to compute however fast the drives are: picked by feel, only keeps a rate from being zero."""


def server_rates(machine: MachineProfile) -> list[tuple[float, ...]]:
    """For every set of busy servers (bit i: server i) the rate of each: seconds or bytes of work done per second."""
    drives = drive_rates(machine.drives, machine.array_bytes_per_second)
    table: list[tuple[float, ...]] = []
    for busy in range(1 << NUM_SERVERS):
        both_ways = busy >> TO_GPU & 1 and busy >> TO_HOST & 1
        duplex = machine.duplex_share if both_ways else 1.0
        reads, writes = bool(busy >> READ & 1), bool(busy >> WRITE & 1)
        read = (drives.both_read if writes else drives.read) if reads else 0.0
        write = (drives.both_write if reads else drives.write) if writes else 0.0
        left = _measured(machine, busy) or _reckoned(machine, read + write)
        gpu = 1.0 if machine.separate_memory else left.compute
        read, write = read * left.drives, write * left.drives
        to_gpu, to_host = machine.to_gpu_bytes_per_second * duplex, machine.to_host_bytes_per_second * duplex
        table.append((gpu, to_gpu, to_host, read, write, left.update))
    return table


class _Left(NamedTuple):
    """Of each one's own rate, what the others leave it."""

    compute: float
    update: float
    drives: float


def _measured(machine: MachineProfile, busy: int) -> _Left | None:
    """As found by running both at once; None for a machine that was not measured so."""
    update, drives = machine.update_beside_drives, machine.drives_beside_update
    if update is None or drives is None:
        return None
    moving = busy >> READ & 1 or busy >> WRITE & 1
    kept = drives if busy >> CPU & 1 else 1.0
    if busy >> GPU & 1 and not machine.separate_memory and machine.drives_beside_compute is not None:
        kept = min(kept, machine.drives_beside_compute)
    compute = update if machine.compute_beside_drives is None else machine.compute_beside_drives
    return _Left(compute, update, kept) if moving else _Left(1.0, 1.0, 1.0)


def _reckoned(machine: MachineProfile, moved: float) -> _Left:
    """From what the cores could serve if they did nothing else."""
    hashed = machine.checksum_bytes_per_second
    if hashed is None:
        return _Left(1.0, 1.0, 1.0)
    kept = min(1.0, hashed / moved) if moved else 1.0
    cores = max(_LEAST_CORES, 1.0 - moved * kept / hashed)
    return _Left(cores, cores, kept)
