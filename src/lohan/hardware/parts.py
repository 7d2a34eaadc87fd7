"""A machine put together from parts of the catalogue, for an estimate of one that nobody has measured yet.

What a data sheet cannot say is assumed, and stands here: how much of the maker's FLOP/s a block reaches while
everything moves, and how fast the CPU updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from lohan.errors import ConfigError
from lohan.hardware.catalogue import load_drives, load_gpus, load_links
from lohan.profiles import MachineProfile

_Part = TypeVar("_Part")

BLOCK_SHARE = 0.72
"""Of the maker's dense rate: 118 of 165 TFLOPS for an RTX 4090 (benchmarks/results/2026-11-16_published.md);
for other cards picked by feel."""

UPDATE_PARAMETERS_PER_SECOND = 1e9
"""A desktop CPU with two channels of DDR5 streams about 60 GB/s, and an update moves 28 bytes per parameter in pieces
that do not all stay in cache. Not measured; the published two-socket server comes to 2e9."""


def machine_from_parts(
    gpu: str,
    drives: Mapping[str, int],
    *,
    host_memory_bytes: int,
    gpus: int = 1,
    update_parameters_per_second: float = UPDATE_PARAMETERS_PER_SECOND,
) -> MachineProfile:
    """A machine with this GPU and so many of each drive; the price is that of the GPUs where it is known."""
    card = _find(load_gpus(), gpu, "GPU")
    link = load_links()[card.link]
    chosen = [(_find(load_drives(), name, "drive"), count) for name, count in drives.items()]
    return MachineProfile(
        name=f"{gpu} with {', '.join(f'{count} x {name}' for name, count in drives.items()) or 'no drive'}",
        gpu_name=gpu,
        gpus=gpus,
        gpu_flops_per_second=card.flops_per_second * BLOCK_SHARE,
        gpu_memory_bytes=card.memory_bytes,
        to_gpu_bytes_per_second=link.copied_bytes_per_second,
        to_host_bytes_per_second=link.copied_bytes_per_second,
        host_memory_bytes=host_memory_bytes,
        drives=tuple(drive.profile() for drive, count in chosen for _ in range(count)),
        update_parameters_per_second=update_parameters_per_second,
        power_watts=None,
        price=None if card.price is None else card.price * gpus,
        notes="put together from data sheets; nothing of it was measured",
    )


def _find(parts: Mapping[str, _Part], name: str, what: str) -> _Part:
    if name not in parts:
        raise ConfigError(f"There is no {what} {name!r} in the catalogue. Known are: {', '.join(parts)}.")
    return parts[name]
