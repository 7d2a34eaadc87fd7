"""The doctor: every verdict on machines and mounts that are described here, not met."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lohan import cli
from lohan.doctor import Finding, Verdict, drives, examine, machine, worst
from lohan.doctor.drives import DriveFacts, MeasuredRate, find_facts, judge_place, judge_rate, judge_sharing
from lohan.doctor.machine import CgroupMemory, Gpu, Torch
from lohan.doctor.mounts import Mount, disks_under, is_rotational, kind_of, mount_of, parse_mountinfo
from lohan.errors import StoreFull

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
28 27 259:3 / /home rw,relatime shared:2 - xfs /dev/nvme0n1p3 rw
29 27 259:5 / /mnt/fast rw,noatime shared:3 master:4 - ext4 /dev/nvme1n1p1 rw
30 27 0:50 / /mnt/with\040space rw - tmpfs tmpfs rw,size=1g
31 27 0:51 / /mnt/nas rw,relatime - nfs4 server:/export rw,vers=4.2
32 27 8:17 / /mnt/old ro,relatime - ext4 /dev/sdb1 ro
33 27 253:0 / /mnt/secret rw,relatime - ext4 /dev/mapper/secret rw
34 29 259:6 / /mnt/fast/over rw - ext4 /dev/nvme2n1 rw
35 34 0:52 / /mnt/fast/over rw - tmpfs none rw
a line that makes no sense
"""
MOUNTS = parse_mountinfo(MOUNTINFO)


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """A small /sys: two NVMe drives with partitions, a spinning disk, and encryption over the second NVMe drive."""
    sys_root = tmp_path / "sys"
    numbers = {"nvme0n1": "259:1", "nvme1n1": "259:4", "sdb": "8:16", "nvme2n1": "259:6", "vda": "254:0"}
    for name in numbers:
        disk = sys_root / "block" / name
        (disk / "queue").mkdir(parents=True)
        (disk / "slaves").mkdir()
        (disk / "queue" / "rotational").write_text("1\n" if name in ("sdb", "vda") else "0\n")
    (sys_root / "dev" / "block").mkdir(parents=True)
    for name, number in numbers.items():
        (sys_root / "dev/block" / number).symlink_to(sys_root / "block" / name)
    parts = {"nvme0n1p2": "259:2", "nvme0n1p3": "259:3", "nvme1n1p1": "259:5", "sdb1": "8:17"}
    for part, number in parts.items():
        disk = next(name for name in numbers if part.startswith(name))
        entry = sys_root / "block" / disk / part
        entry.mkdir()
        (entry / "partition").write_text("1\n")
        (sys_root / "dev/block" / number).symlink_to(entry)
    secret = sys_root / "block" / "dm-0"
    (secret / "slaves").mkdir(parents=True)
    (secret / "slaves" / "nvme1n1p1").symlink_to(sys_root / "block/nvme1n1/nvme1n1p1")
    (sys_root / "dev/block" / "253:0").symlink_to(secret)
    return sys_root


def at(point: str) -> Mount:
    mount = mount_of(point, MOUNTS)
    assert mount is not None
    return mount


def named(findings: list[Finding], name: str) -> Finding:
    [finding] = [finding for finding in findings if finding.name == name]
    return finding


def place(point: str, **changes: object) -> list[Finding]:
    """The findings for a healthy path on this mount, apart from what is changed."""
    facts = {"path": point, "mount": at(point), "disks": frozenset({"nvme1n1"}), "free_bytes": 10**12, **changes}
    return judge_place(DriveFacts(**facts))  # type: ignore[arg-type]


# -- mounts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "point", "filesystem"),
    [
        ("/", "/", "ext4"),
        ("/srv/data", "/", "ext4"),
        ("/home", "/home", "xfs"),
        ("/homework", "/", "ext4"),
        ("/mnt/fast/run/a", "/mnt/fast", "ext4"),
        ("/mnt/with space/x", "/mnt/with space", "tmpfs"),
        ("/mnt/fast/over/x", "/mnt/fast/over", "tmpfs"),
    ],
)
def test_a_path_lies_on_the_deepest_mount_and_the_latest_there(path, point, filesystem):
    mount = mount_of(path, MOUNTS)
    assert mount is not None
    assert (mount.point, mount.filesystem) == (point, filesystem)


def test_a_line_that_makes_no_sense_is_passed_over():
    assert len(MOUNTS) == 10
    assert parse_mountinfo("") == []
    assert mount_of("/x", []) is None


def test_read_only_is_seen_in_either_list_of_options():
    assert at("/mnt/old").read_only
    assert not at("/mnt/fast").read_only
    assert parse_mountinfo("1 0 8:1 / / rw - ext4 /dev/sda1 ro,errors=panic")[0].read_only


@pytest.mark.parametrize(
    ("filesystem", "kind"),
    [
        ("ext4", "disk"),
        ("xfs", "disk"),
        ("tmpfs", "ram"),
        ("ramfs", "ram"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("9p", "network"),
        ("fuse.sshfs", "fuse"),
        ("fuseblk", "fuse"),
        ("btrfs", "copy-on-write"),
        ("zfs", "copy-on-write"),
        ("overlay", "layered"),
        ("vfat", "small-files"),
    ],
)
def test_kinds_of_filesystems(filesystem, kind):
    assert kind_of(filesystem) == kind


def test_disks_are_found_through_partitions_and_encryption(sys_tree):
    assert disks_under(at("/home"), sys_tree) == {"nvme0n1"}
    assert disks_under(at("/mnt/secret"), sys_tree) == {"nvme1n1"}
    assert disks_under(at("/mnt/nas"), sys_tree) == frozenset()
    assert disks_under(Mount("99:9", "/x", "ext4", "/dev/gone", False), sys_tree) == frozenset()
    assert disks_under(Mount("0:77", "/x", "btrfs", "/dev/not-there", False), sys_tree) == frozenset()


def test_spinning_disks_are_told_from_ssds_and_virtual_ones_are_not_believed(sys_tree):
    assert is_rotational("sdb", sys_tree) is True
    assert is_rotational("nvme0n1", sys_tree) is False
    assert is_rotational("vda", sys_tree) is None
    assert is_rotational("gone", sys_tree) is None


# -- a path ---------------------------------------------------------------------------------------------


def test_a_good_drive_is_ok_throughout():
    assert worst(place("/mnt/fast")) is Verdict.OK


def test_a_path_that_is_not_there_a_file_or_not_ours(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for path, words in ((tmp_path / "gone", "does not exist"), (file, "not a directory")):
        directory = named(judge_place(find_facts(str(path), MOUNTS)), "directory")
        assert (directory.verdict, words in directory.value) == (Verdict.PROBLEM, True)
        assert directory.advice
    monkeypatch.setattr(drives.os, "access", lambda *_: False)
    directory = named(judge_place(find_facts(str(tmp_path), MOUNTS)), "directory")
    assert (directory.verdict, directory.value) == (Verdict.PROBLEM, "is not writable for you")


def test_a_read_only_mount_is_a_problem_with_its_cure(tmp_path):
    mounts = [*MOUNTS, Mount("8:17", str(tmp_path), "ext4", "/dev/sdb1", True)]
    directory = named(judge_place(find_facts(str(tmp_path), mounts)), "directory")
    assert directory.verdict is Verdict.PROBLEM
    assert f"remount,rw {tmp_path}" in directory.advice


def test_facts_of_a_path_are_gathered_from_its_mount(tmp_path, sys_tree):
    drive = tmp_path / "drive"
    drive.mkdir()
    mounts = [*MOUNTS, Mount("8:17", str(drive), "ext4", "/dev/sdb1", False)]
    link = tmp_path / "link"
    link.symlink_to(drive)
    facts = find_facts(str(link), mounts, sys_tree)
    assert (facts.mount, facts.disks, facts.rotational) == (mounts[-1], {"sdb"}, True)
    assert (facts.on_root_mount, facts.shares_root_disk, facts.problem) == (False, False, "")
    on_root = find_facts(str(tmp_path), MOUNTS, sys_tree)
    assert (on_root.on_root_mount, on_root.shares_root_disk, on_root.disks) == (True, True, {"nvme0n1"})


@pytest.mark.parametrize(
    ("filesystem", "verdict", "words"),
    [
        ("tmpfs", Verdict.PROBLEM, "RAM disk"),
        ("vfat", Verdict.PROBLEM, "4 GiB"),
        ("nfs", Verdict.WARNING, "network"),
        ("fuse.sshfs", Verdict.WARNING, "user-space"),
        ("overlay", Verdict.WARNING, "container"),
        ("btrfs", Verdict.NOTE, "no guarantee"),
        ("zfs", Verdict.NOTE, "no guarantee"),
        ("xfs", Verdict.OK, ""),
    ],
)
def test_each_kind_of_filesystem_gets_its_verdict(filesystem, verdict, words):
    finding = named(place("/mnt/fast", mount=Mount("0:9", "/mnt/fast", filesystem, "x", False)), "filesystem")
    assert finding.verdict is verdict
    assert words in finding.advice
    assert finding.data["kind"] == kind_of(filesystem)


def test_a_folder_on_the_root_filesystem_asks_whether_the_drive_was_mounted():
    disk = named(place("/", on_root_mount=True, shares_root_disk=True), "disk")
    assert disk.verdict is Verdict.WARNING
    assert "forget to mount" in disk.advice


def test_another_partition_of_the_system_disk_is_only_a_note():
    assert named(place("/home", shares_root_disk=True), "disk").verdict is Verdict.NOTE
    assert named(place("/home", shares_root_disk=True, rotational=True), "disk").verdict is Verdict.WARNING


def test_a_spinning_disk_is_a_warning():
    disk = named(place("/mnt/old", rotational=True, disks=frozenset({"sdb"})), "disk")
    assert (disk.verdict, "spinning" in disk.value) == (Verdict.WARNING, True)


@pytest.mark.parametrize(
    ("free_bytes", "verdict", "words"),
    [
        (28 * 7 * 10**9, Verdict.OK, "7 billion"),
        (14 * 10**9, Verdict.WARNING, "500 million"),
        (10**8, Verdict.PROBLEM, ""),
    ],
)
def test_free_space_is_said_in_parameters(free_bytes, verdict, words):
    space = named(place("/mnt/fast", free_bytes=free_bytes), "space")
    assert (space.verdict, words in space.value) == (verdict, True)


@pytest.mark.parametrize(
    ("read", "write", "verdict"),
    [(7e9, 5e9, Verdict.OK), (3e9, 1e9, Verdict.NOTE), (550e6, 400e6, Verdict.WARNING)],
)
def test_the_slower_direction_decides_about_the_rate(read, write, verdict):
    findings = judge_rate("/x", MeasuredRate(read=read, write=write, direct=True))
    assert named(findings, "rate").verdict is verdict
    assert named(findings, "rate").data == {"read_bytes_per_second": read, "write_bytes_per_second": write}
    assert named(findings, "direct I/O").verdict is Verdict.OK


def test_refused_direct_io_is_a_warning():
    findings = judge_rate("/x", MeasuredRate(read=7e9, write=5e9, direct=False))
    assert named(findings, "direct I/O").verdict is Verdict.WARNING


def test_two_paths_on_one_disk_are_noticed_through_any_partition():
    a = DriveFacts(path="/a", mount=at("/home"), disks=frozenset({"nvme0n1"}))
    b = DriveFacts(path="/b", mount=at("/"), disks=frozenset({"nvme0n1"}))
    c = DriveFacts(path="/c", mount=at("/mnt/fast"), disks=frozenset({"nvme1n1"}))
    [finding] = judge_sharing([a, c, b])
    assert (finding.path, finding.data["with"], finding.verdict) == ("/b", "/a", Verdict.WARNING)
    assert judge_sharing([a, c]) == []


def test_two_paths_on_one_mount_are_noticed_even_where_its_disk_is_unknown():
    a, b = (DriveFacts(path=path, mount=at("/mnt/nas")) for path in ("/a", "/b"))
    assert len(judge_sharing([a, b])) == 1
    assert judge_sharing([a, DriveFacts(path="/gone", problem="does not exist")]) == []


# -- the machine ----------------------------------------------------------------------------------------


def test_an_old_python_is_a_problem():
    assert machine.judge_python((3, 10), "3.10.2").verdict is Verdict.PROBLEM
    assert machine.judge_python((3, 11), "3.11.0").verdict is Verdict.OK


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [
        (None, Verdict.PROBLEM),
        (Torch("", None, error="ImportError: libcudart.so"), Verdict.PROBLEM),
        (Torch("2.5.1", "12.4"), Verdict.PROBLEM),
        (Torch("2.6.0+cpu", None), Verdict.OK),
        (Torch("2.13.0", "13.0"), Verdict.OK),
        (Torch("3.0.0a0+git1", None), Verdict.OK),
    ],
)
def test_torch_must_be_there_whole_and_new_enough(torch, verdict):
    finding = machine.judge_torch(torch)
    assert finding.verdict is verdict
    assert bool(finding.advice) == (verdict is not Verdict.OK)


def test_a_machine_without_a_gpu_is_noted_and_not_failed():
    [without_cuda] = machine.judge_device(Torch("2.13.0+cpu", None))
    [without_card] = machine.judge_device(Torch("2.13.0", "13.0"))
    assert (without_cuda.verdict, without_card.verdict) == (Verdict.NOTE, Verdict.NOTE)
    assert "built without CUDA" in without_cuda.advice
    assert "nvidia-smi" in without_card.advice
    assert machine.judge_device(None) == []


def test_each_gpu_is_named_with_its_memory():
    gpus = (Gpu("NVIDIA GeForce RTX 4090", 24 * 10**9), Gpu("NVIDIA GeForce RTX 3090", 24 * 10**9))
    findings = machine.judge_device(Torch("2.13.0", "13.0", gpus))
    assert [finding.value for finding in findings] == [f"{gpu.name}, 24 GB" for gpu in gpus]


def test_updates_by_torch_operators_are_noted_with_the_reason():
    [native] = machine.judge_update("native")
    [slow] = machine.judge_update("torch: no C compiler (cc, gcc, clang) on the PATH")
    assert (native.verdict, slow.verdict) == (Verdict.OK, Verdict.NOTE)
    assert "no C compiler" in slow.value
    assert slow.data == {"native": False, "reason": "no C compiler (cc, gcc, clang) on the PATH"}
    assert machine.judge_update(machine.find_update_path(None)) == []


def test_memory_is_what_the_control_group_leaves():
    [memory, limit] = machine.judge_memory(64 * 10**9, 60 * 10**9, CgroupMemory(16 * 10**9, 4 * 10**9))
    assert memory.data == {"total_bytes": 64 * 10**9, "free_bytes": 12 * 10**9}
    assert (limit.name, limit.verdict) == ("memory limit", Verdict.NOTE)
    assert len(machine.judge_memory(64 * 10**9, 60 * 10**9, CgroupMemory(2**63 - 4096, 0))) == 1
    assert machine.judge_memory(8 * 10**9, 3 * 10**9, None)[0].verdict is Verdict.WARNING


def test_the_tightest_limit_on_the_way_up_counts(tmp_path):
    slices = tmp_path / "sys/fs/cgroup/user.slice/job"
    slices.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user.slice/job\n")
    (slices / "memory.max").write_text("max\n")
    (slices.parent / "memory.max").write_text("5000\n")
    (slices.parent / "memory.current").write_text("1000\n")
    assert machine.find_cgroup_memory(tmp_path) == CgroupMemory(5000, 1000)


def test_the_older_control_groups_are_read_too_and_a_path_of_the_host_does_no_harm(tmp_path):
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/docker/0123\n")
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("7000")
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").write_text("10")
    assert machine.find_cgroup_memory(tmp_path) == CgroupMemory(7000, 10)
    assert machine.find_cgroup_memory(tmp_path / "nothing") is None


# -- all together ---------------------------------------------------------------------------------------


@pytest.fixture
def small_measurement(monkeypatch):
    """The real measurement, with little data."""
    monkeypatch.setattr(drives, "_MEASURE_BYTES", 4 << 20)


def doctor(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["lohan", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    code = end.value.code
    assert isinstance(code, int | None)
    return code or 0, capsys.readouterr().out


def test_the_command_measures_a_real_directory_and_leaves_nothing_there(
    tmp_path, monkeypatch, capsys, small_measurement
):
    _, out = doctor(monkeypatch, capsys, tmp_path, "--json")
    report = json.loads(out)
    assert set(report) == {"lohan", "verdict", "findings"}
    assert all(set(f) == {"name", "path", "value", "verdict", "advice", "data"} for f in report["findings"])
    rate = next(f for f in report["findings"] if f["name"] == "rate")
    assert rate["path"] == str(tmp_path)
    assert rate["data"]["read_bytes_per_second"] > 0
    assert {f["name"] for f in report["findings"]} >= {"python", "torch", "cpu", "memory", "directory", "direct I/O"}
    assert list(tmp_path.iterdir()) == []


def test_a_problem_makes_the_command_fail_and_is_shown_with_its_cure(tmp_path, monkeypatch, capsys):
    code, out = doctor(monkeypatch, capsys, tmp_path / "gone")
    assert code == 1
    assert "does not exist" in out
    assert "mkdir -p" in out
    assert "1 problem" in out


def test_without_paths_it_looks_at_the_machine_alone(monkeypatch, capsys):
    code, out = doctor(monkeypatch, capsys)
    assert code == 0
    assert "Name your SSD directories" in out


def test_a_drive_that_fails_its_measurement_is_a_finding_and_not_a_crash(tmp_path, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise StoreFull("It ran out of space. Free some.")

    monkeypatch.setattr("lohan.store.measure_drive", fail)
    finding = named([f for f in examine([str(tmp_path)]) if f.path], "rate")
    assert (finding.verdict, finding.advice) == (Verdict.PROBLEM, "It ran out of space. Free some.")


def test_the_docs_name_every_finding_and_key():
    text = (Path(__file__).parents[1] / "docs" / "doctor.md").read_text()
    findings = [
        machine.judge_python((3, 11), "3.11"),
        machine.judge_torch(Torch("2.6", None)),
        *machine.judge_device(Torch("2.6", "12", (Gpu("x", 1),))),
        machine.judge_cpu(2),
        *machine.judge_update("native"),
        *machine.judge_memory(2, 1, CgroupMemory(1, 0)),
        *place("/mnt/fast"),
        *judge_rate("/x", MeasuredRate(read=1, write=1, direct=True)),
        *judge_sharing([DriveFacts(path=path, mount=at("/mnt/nas")) for path in "ab"]),
    ]
    missing = [word for f in findings for word in (f.name, *f.data) if f"`{word}`" not in text]
    assert missing == []
