"""What a path really stands on: its mount, its filesystem and the disks underneath.

Everything comes from the text of /proc/self/mountinfo and from files under /sys, both handed in, so that any
machine can be described in a test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "lustre", "afs", "beegfs", "gpfs", "ocfs2"}
)
COPY_ON_WRITE_FILESYSTEMS = frozenset({"btrfs", "zfs", "bcachefs"})
LAYERED_FILESYSTEMS = frozenset({"overlay", "aufs"})
SMALL_FILE_FILESYSTEMS = frozenset({"vfat", "msdos"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str
    """major:minor as the kernel writes it; 0:N where no block device stands behind the filesystem."""

    point: str
    filesystem: str
    source: str
    read_only: bool


def parse_mountinfo(text: str) -> list[Mount]:
    """All mounts, in the kernel's order: a later one at the same point covers an earlier one."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        options = fields[5].split(",") + (rest[2].split(",") if len(rest) > 2 else [])
        mounts.append(
            Mount(
                device=fields[2],
                point=_unescape(fields[4]),
                filesystem=rest[0],
                source=_unescape(rest[1]),
                read_only="ro" in options,
            )
        )
    return mounts


def _unescape(text: str) -> str:
    """Mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount a path (absolute, links resolved) lies on: the deepest, and of those the one mounted last."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def kind_of(filesystem: str) -> str:
    """How a filesystem behaves towards a store: disk, ram, network, fuse, copy-on-write, layered or small-files."""
    if filesystem in RAM_FILESYSTEMS:
        return "ram"
    if filesystem in NETWORK_FILESYSTEMS:
        return "network"
    if filesystem in COPY_ON_WRITE_FILESYSTEMS:
        return "copy-on-write"
    if filesystem in LAYERED_FILESYSTEMS:
        return "layered"
    if filesystem in SMALL_FILE_FILESYSTEMS:
        return "small-files"
    if filesystem.startswith("fuse"):
        return "fuse"
    return "disk"


def disks_under(mount: Mount, sys: Path = Path("/sys")) -> frozenset[str]:
    """The physical disks below a mount by their kernel names; empty where that cannot be told.

    Looks through partitions, LVM, encryption and md RAID. btrfs and others carry no block device number of their
    own and are followed by the name of their source.
    """
    device = mount.device
    if device.startswith("0:"):
        if not mount.source.startswith("/dev/"):
            return frozenset()
        try:
            number = os.stat(mount.source).st_rdev
        except OSError:
            return frozenset()
        device = f"{os.major(number)}:{os.minor(number)}"
    return _disks(sys / "dev" / "block" / device)


def _disks(entry: Path) -> frozenset[str]:
    try:
        entry = entry.resolve(strict=True)
    except OSError:
        return frozenset()
    if (entry / "partition").exists():
        entry = entry.parent
    try:
        below = sorted((entry / "slaves").iterdir())
    except OSError:
        below = []
    if below:
        return frozenset().union(*(_disks(slave) for slave in below))
    return frozenset({entry.name})


def is_rotational(disk: str, sys: Path = Path("/sys")) -> bool | None:
    """Whether the kernel takes this disk for one with spinning platters; None if it does not know.

    A virtual machine's disk (vda, xvda) calls itself spinning whatever the host has, so it is not believed.
    """
    if disk.startswith(("vd", "xvd")):
        return None
    try:
        return (sys / "block" / disk / "queue" / "rotational").read_text().strip() == "1"
    except OSError:
        return None
