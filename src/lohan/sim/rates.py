"""How fast each part of a machine works while certain others do: rates for every set of busy parts.

Parts share things. Both links share a bus (`duplex_share`). Reads and writes share the drives: each gets half of the
time, unless the machine says what both reach together; nothing passes `array_bytes_per_second`. Checksums are computed
by the cores, so on every byte the drives move the update loses a little of them, and so does compute where it runs on
the same cores.
"""

from __future__ import annotations

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
    hashed = machine.checksum_bytes_per_second
    table: list[tuple[float, ...]] = []
    for busy in range(1 << NUM_SERVERS):
        both_ways = busy >> TO_GPU & 1 and busy >> TO_HOST & 1
        duplex = machine.duplex_share if both_ways else 1.0
        reads, writes = bool(busy >> READ & 1), bool(busy >> WRITE & 1)
        read = (drives.both_read if writes else drives.read) if reads else 0.0
        write = (drives.both_write if reads else drives.write) if writes else 0.0
        cores = 1.0
        if hashed is not None:
            over = max(1.0, (read + write) / hashed)
            read, write = read / over, write / over
            cores = max(_LEAST_CORES, 1.0 - (read + write) / hashed)
        gpu = 1.0 if machine.separate_memory else cores
        to_gpu, to_host = machine.to_gpu_bytes_per_second * duplex, machine.to_host_bytes_per_second * duplex
        table.append((gpu, to_gpu, to_host, read, write, cores))
    return table
