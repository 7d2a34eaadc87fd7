"""Each SSD path: is it there, what does it stand on, how much fits, how fast is it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.doctor.findings import Finding, Verdict
from lohan.doctor.mounts import Mount, disks_under, is_rotational, kind_of, mount_of, parse_mountinfo
from lohan.errors import StoreError
from lohan.sizes import format_bytes

# Master weights, moments and compute weights, in two versions (DESIGN: 12 + 2 bytes per parameter, twice).
BYTES_PER_PARAMETER = 28
# What the measurement writes, and a little more.
_MEASURE_BYTES = 256 << 20
# A SATA SSD gives about 500 MB/s, a plain NVMe drive 2 GB/s and more.
_SLOW_BYTES_PER_SECOND = 500e6
_SATA_BYTES_PER_SECOND = 1.5e9


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveFacts:
    """What is known of one path before anything is measured."""

    path: str
    problem: str = ""
    """Why the path cannot hold a store at all."""

    advice: str = ""
    mount: Mount | None = None
    disks: frozenset[str] = frozenset()
    rotational: bool | None = None
    on_root_mount: bool = False
    shares_root_disk: bool = False
    free_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRate:
    read: float
    write: float
    direct: bool


def examine_drives(paths: Sequence[str], say: Callable[[str], None]) -> list[Finding]:
    mounts = parse_mountinfo(_mountinfo())
    findings: list[Finding] = []
    all_facts = [find_facts(path, mounts) for path in paths]
    for facts in all_facts:
        findings += judge_place(facts)
        if not facts.problem:
            findings += _measure(facts, say)
    return findings + judge_sharing(all_facts)


def _mountinfo() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def find_facts(path: str, mounts: Sequence[Mount], sys: Path = Path("/sys")) -> DriveFacts:
    """Look at a path without writing to it."""
    if not os.path.lexists(path):
        return DriveFacts(path=path, problem="does not exist", advice=f"Mount the drive, or make it: mkdir -p {path}")
    if not os.path.isdir(path):
        return DriveFacts(path=path, problem="is not a directory", advice="Give a directory on the drive.")
    real = os.path.realpath(path)
    mount, root = mount_of(real, mounts), mount_of("/", mounts)
    disks = disks_under(mount, sys) if mount else frozenset()
    root_disks = disks_under(root, sys) if root else frozenset()
    usage = os.statvfs(real)
    problem, advice = "", ""
    if mount is not None and mount.read_only:
        problem, advice = "is mounted read-only", f"Mount it for writing: mount -o remount,rw {mount.point}"
    elif not os.access(real, os.W_OK | os.X_OK):
        problem, advice = "is not writable for you", f"Take it over: sudo chown $USER {path}"
    spinning = [is_rotational(disk, sys) for disk in sorted(disks)]
    return DriveFacts(
        path=path,
        problem=problem,
        advice=advice,
        mount=mount,
        disks=disks,
        rotational=any(spinning) if any(answer is not None for answer in spinning) else None,
        on_root_mount=mount is not None and mount == root,
        shares_root_disk=bool(disks & root_disks),
        free_bytes=usage.f_bavail * usage.f_frsize,
    )


def judge_place(facts: DriveFacts) -> list[Finding]:
    """Everything that can be said of a path without measuring."""
    if facts.problem:
        directory = Finding(
            name="directory", path=facts.path, value=facts.problem, verdict=Verdict.PROBLEM, advice=facts.advice
        )
    else:
        directory = Finding(name="directory", path=facts.path, value="exists and is writable")
    findings = [directory]
    if facts.mount is not None:
        findings.append(_filesystem(facts, facts.mount))
        if kind_of(facts.mount.filesystem) != "ram":
            findings.append(_disk(facts, facts.mount))
        findings.append(_space(facts))
    return findings


def _filesystem(facts: DriveFacts, mount: Mount) -> Finding:
    kind = kind_of(mount.filesystem)
    verdict, advice = {
        "disk": (Verdict.OK, ""),
        "ram": (
            Verdict.PROBLEM,
            "This is a RAM disk: what lies here takes RAM and is gone after a restart. Give a directory on an SSD.",
        ),
        "network": (
            Verdict.WARNING,
            "This is a network filesystem: the network sets the speed. Give a directory on a local SSD.",
        ),
        "fuse": (
            Verdict.WARNING,
            "A user-space filesystem copies every byte once more. Use ext4 or XFS on a local SSD.",
        ),
        "copy-on-write": (
            Verdict.NOTE,
            "It writes to new places each time, so reserved space is no guarantee: keep twice the store's size free. "
            "Directories with copy-on-write off (chattr +C), ext4 or XFS do better.",
        ),
        "layered": (
            Verdict.WARNING,
            "This is a container's own layer, gone with the container. Mount a directory of the host's SSD into it.",
        ),
        "small-files": (Verdict.PROBLEM, "Its files end at 4 GiB. Format the drive with ext4 or XFS."),
    }[kind]
    return Finding(
        name="filesystem",
        path=facts.path,
        value=f"{mount.filesystem} mounted at {mount.point}",
        verdict=verdict,
        advice=advice,
        data={
            "filesystem": mount.filesystem,
            "kind": kind,
            "mount_point": mount.point,
            "source": mount.source,
            "read_only": mount.read_only,
        },
    )


def _disk(facts: DriveFacts, mount: Mount) -> Finding:
    names = ", ".join(sorted(facts.disks)) or mount.source
    verdict, advice, value = Verdict.OK, "", names
    if facts.rotational:
        verdict, value = Verdict.WARNING, f"{names}, a spinning disk"
        advice = "A spinning disk is 10 to 50 times slower than an SSD: give a directory on an SSD."
    if facts.on_root_mount:
        verdict, value = Verdict.WARNING, f"{value}: the system's own disk"
        advice = (
            "Did you forget to mount your drive? This path is a plain folder on the root filesystem; `lsblk` lists "
            f"the drives there are. If it is meant, nothing is wrong. {advice}"
        ).strip()
    elif facts.shares_root_disk:
        verdict = max(verdict, Verdict.NOTE, key=list(Verdict).index)
        value = f"{value}: shared with the system"
        advice = f"Another partition of the disk the system runs from; both share its speed. {advice}".strip()
    return Finding(
        name="disk",
        path=facts.path,
        value=value,
        verdict=verdict,
        advice=advice,
        data={
            "disks": sorted(facts.disks),
            "rotational": facts.rotational,
            "root_filesystem": facts.on_root_mount,
            "shares_root_disk": facts.shares_root_disk,
        },
    )


def _space(facts: DriveFacts) -> Finding:
    parameters = facts.free_bytes / BYTES_PER_PARAMETER
    verdict, advice = Verdict.OK, ""
    if facts.free_bytes < 2 * _MEASURE_BYTES:
        verdict, advice = Verdict.PROBLEM, "Free some space: there is not even enough to measure the drive's speed."
    elif parameters < 1e9:
        verdict = Verdict.WARNING
        advice = f"Free some space: training takes {BYTES_PER_PARAMETER} bytes per parameter, 28 GB per billion."
    return Finding(
        name="space",
        path=facts.path,
        value=f"{format_bytes(facts.free_bytes)} free, room for {_count(parameters)} parameters",
        verdict=verdict,
        advice=advice,
        data={"free_bytes": facts.free_bytes, "parameters": int(parameters)},
    )


def _count(number: float) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"


def _measure(facts: DriveFacts, say: Callable[[str], None]) -> list[Finding]:
    if facts.free_bytes < 2 * _MEASURE_BYTES:
        return []
    from lohan.store import Files, measure_drive

    say(f"Measuring {facts.path}")
    try:
        rate = measure_drive(Files(), Path(facts.path), num_bytes=_MEASURE_BYTES)
    except StoreError as error:
        return [
            Finding(name="rate", path=facts.path, value="cannot be used", verdict=Verdict.PROBLEM, advice=str(error))
        ]
    return judge_rate(facts.path, MeasuredRate(read=rate.read, write=rate.write, direct=rate.direct))


def judge_rate(path: str, rate: MeasuredRate) -> list[Finding]:
    """Direct I/O and speed. One optimizer step reads 16 and writes 14 bytes per parameter."""
    direct = Finding(
        name="direct I/O",
        path=path,
        value="works" if rate.direct else "refused by the filesystem",
        verdict=Verdict.OK if rate.direct else Verdict.WARNING,
        advice=""
        if rate.direct
        else "Reads and writes pass through the page cache. Use ext4 or XFS on the drive itself.",
        data={"direct": rate.direct},
    )
    slower = min(rate.read, rate.write)
    verdict, advice = Verdict.OK, ""
    seconds = 7e9 * (16 / rate.read + 14 / rate.write)
    share = f"A step of a 7-billion-parameter model moves 210 GB: {seconds:.0f} s on this drive alone."
    if slower < _SLOW_BYTES_PER_SECOND:
        verdict, advice = Verdict.WARNING, f"Slower than a SATA SSD. {share} Use an NVMe drive, or stripe over several."
    elif slower < _SATA_BYTES_PER_SECOND:
        verdict, advice = Verdict.NOTE, f"Less than an NVMe drive should give. {share}"
    return [
        direct,
        Finding(
            name="rate",
            path=path,
            value=f"reads {format_bytes(rate.read)}/s, writes {format_bytes(rate.write)}/s",
            verdict=verdict,
            advice=advice,
            data={"read_bytes_per_second": round(rate.read), "write_bytes_per_second": round(rate.write)},
        ),
    ]


def judge_sharing(all_facts: Sequence[DriveFacts]) -> list[Finding]:
    """Striping over one disk gains nothing; say which paths do it."""
    findings = []
    for index, facts in enumerate(all_facts):
        for other in all_facts[:index]:
            if facts.mount is None or other.mount is None:
                continue
            common = sorted(facts.disks & other.disks)
            if common or facts.mount == other.mount:
                name = ", ".join(common) or facts.mount.source
                findings.append(
                    Finding(
                        name="sharing",
                        path=facts.path,
                        value=f"on the same disk ({name}) as {other.path}",
                        verdict=Verdict.WARNING,
                        advice="Striping over one disk gains nothing. Give one directory per disk.",
                        data={"with": other.path, "disks": common},
                    )
                )
                break
    return findings
