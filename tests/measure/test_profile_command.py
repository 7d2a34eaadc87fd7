"""lohan profile and profile_machine in small: what is measured, what is taken as given, the file, and the refusals."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from lohan import cli
from lohan.cli_profile import machine_rows, write_machine
from lohan.doctor.mounts import Mount
from lohan.engine.devices import VirtualOptions
from lohan.errors import ConfigError, StoreFull
from lohan.hardware import load_machine, machine_to_dict
from lohan.measure import machine as measured
from lohan.measure.cliff import WriteRates
from lohan.measure.machine import Sizes, after_long_write, array_limit, profile_machine
from lohan.measure.store_rate import RECORD_BYTES, StoreRate, SustainedRate
from lohan.profiles import DriveProfile, MachineProfile
from lohan.store import Files

SMALL = Sizes(store_bytes=2 * RECORD_BYTES, piece_elements=4096, sustained_bytes=4 * RECORD_BYTES)
short = partial(profile_machine, seconds=0.2, sizes=SMALL)
GIVEN = VirtualOptions(flops_per_second=5e9, to_gpu_bytes_per_second=1e9, to_host_bytes_per_second=2e9)


def test_a_machine_without_a_gpu_is_measured(tmp_path: Path):
    told: list[tuple[str, float]] = []
    machine = short([tmp_path], device="cpu", tokens=8, progress=lambda what, share: told.append((what, share)))
    assert not machine.separate_memory
    assert machine.gpu_flops_per_second > 0
    assert machine.update_parameters_per_second > 0
    assert machine.norm_share is not None
    assert machine.checksum_bytes_per_second is not None
    for share in (machine.compute_beside_drives, machine.update_beside_drives, machine.drives_beside_update):
        assert share is not None
        assert 0 < share <= 1
    assert machine.commit_seconds > 0
    assert machine.single_read_bytes_per_second is not None
    assert machine.single_write_bytes_per_second is not None
    assert machine.single_mixed_bytes_per_second is not None
    assert machine.op_seconds > 0
    assert machine.host_memory_bytes > 0
    (drive,) = machine.drives
    assert drive.mixed_bytes_per_second is not None
    assert drive.burst_write_bytes_per_second is None
    assert machine.array_bytes_per_second is None
    assert "8 tokens" in machine.notes
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert not list(tmp_path.iterdir())


def test_what_a_virtual_device_was_told_is_taken_as_given(tmp_path: Path):
    machine = short([tmp_path], device="virtual", virtual=GIVEN, gpu_memory=50 << 20)
    assert machine.separate_memory
    assert machine.gpu_flops_per_second == 5e9
    assert machine.to_gpu_bytes_per_second == 1e9
    assert machine.to_host_bytes_per_second == 2e9
    assert machine.duplex_share == 1.0
    assert machine.gpu_memory_bytes == 50 << 20
    assert machine.weights_seconds_per_parameter == 0.0


def test_what_a_virtual_device_was_not_told_is_measured():
    machine = short([], device="virtual", virtual=VirtualOptions(to_host_bytes_per_second=1e9), gpu_memory=60 << 20)
    assert machine.drives == ()
    assert machine.checksum_bytes_per_second is None
    assert machine.gpu_flops_per_second > 0
    assert machine.to_gpu_bytes_per_second > 0
    assert machine.to_host_bytes_per_second == 1e9


def test_several_drives_are_measured_one_by_one_and_together_and_written_to_for_long(tmp_path: Path):
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    machine = short(places, device="virtual", virtual=GIVEN, sustained=True)
    assert len(machine.drives) == 2
    assert "written" in machine.notes
    assert [list(place.iterdir()) for place in places] == [[], []]
    # Both lie on one filesystem: its free space is there once.
    free = Files().free_bytes(tmp_path)
    assert sum(drive.capacity_bytes or 0 for drive in machine.drives) <= 1.1 * free


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_stays_behind_after_an_interrupt(tmp_path: Path, error: type[BaseException]):
    def progress(what: str, share: float) -> None:
        if what.startswith("drive") and list(tmp_path.iterdir()):
            raise error

    with pytest.raises(error):
        short([tmp_path], device="virtual", virtual=GIVEN, progress=progress)
    assert not list(tmp_path.iterdir())


# -- drives that share something, and drives with a cache ---------------------------------------------------------

DRIVE = DriveProfile(read_bytes_per_second=3e9, write_bytes_per_second=3e9, mixed_bytes_per_second=3e9)


def together(rate: float) -> StoreRate:
    return StoreRate(
        read=rate,
        write=rate,
        mixed=rate,
        cpu_seconds_per_byte=1e-10,
        commit_seconds=0.0,
        direct=True,
        single_read=rate,
        single_write=rate,
        single_mixed=rate,
    )


def test_drives_that_keep_their_rate_together_have_no_common_limit():
    assert array_limit([DRIVE, DRIVE], together(5.9e9)) is None


def test_drives_that_fall_short_together_are_limited_to_what_they_reached():
    assert array_limit([DRIVE, DRIVE], together(3.2e9)) == 3.2e9


def test_a_cliff_gives_a_drive_two_write_rates_and_the_slow_mixed_rate():
    writes = WriteRates(sustained=1e9, burst=5e9, burst_bytes=2 * 10**11, settled=False)
    notes: list[str] = []
    drive = after_long_write(DRIVE, SustainedRate(writes=writes, mixed=1.5e9, written_bytes=10**12, seconds=600), notes)
    assert drive.write_bytes_per_second == 1e9
    assert drive.burst_write_bytes_per_second == 5e9
    assert drive.burst_bytes == 2 * 10**11
    assert drive.mixed_bytes_per_second == 1.5e9
    assert drive.read_bytes_per_second == DRIVE.read_bytes_per_second
    assert "not settled" in notes[0]


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command in this process, with little to measure: its exit code, stdout and stderr."""
    monkeypatch.setattr(measured, "profile_machine", short)

    def lohan(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return lohan


def test_the_command_writes_a_file_that_reads_back_as_the_same_machine(run, tmp_path: Path):
    (tmp_path / "ssd").mkdir()
    out = tmp_path / "machine.yaml"
    code, printed, err = run(
        "profile", "--ssd", tmp_path / "ssd", "--out", out, "--device", "cpu", "--tokens", 8, "--json"
    )
    assert code == 0, err
    machine = load_machine(out)
    assert machine_to_dict(machine) == json.loads(printed)
    write_machine(machine, tmp_path / "again.yaml")
    assert load_machine(tmp_path / "again.yaml") == machine
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.yaml", "machine.yaml", "ssd"]


def test_the_command_prints_a_table_and_takes_several_drives(run, tmp_path: Path):
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    code, printed, err = run("profile", "--ssd", *places, "--device", "virtual", "--tokens", 8)
    assert code == 0, err
    for word in ("a block computes", "updates", "both at once", "--out machine.yaml"):
        assert word in printed


def test_a_directory_that_is_not_there_is_refused(run, tmp_path: Path):
    code, _, err = run("profile", "--ssd", tmp_path / "nowhere")
    assert code == 2
    assert "does not exist" in err
    assert f"mkdir -p {tmp_path / 'nowhere'}" in err


def test_a_file_and_the_same_directory_twice_are_refused(run, tmp_path: Path):
    (tmp_path / "file").touch()
    assert "is not a directory" in run("profile", "--ssd", tmp_path / "file")[2]
    code, _, err = run("profile", "--ssd", tmp_path, "--ssd", f"{tmp_path}/.")
    assert code == 2
    assert "same directory" in err


def test_a_read_only_drive_is_refused(run, tmp_path: Path, monkeypatch):
    mount = Mount(device="8:1", point=str(tmp_path), filesystem="ext4", source="/dev/sda1", read_only=True)
    monkeypatch.setattr(measured, "parse_mountinfo", lambda text: [mount])
    code, _, err = run("profile", "--ssd", tmp_path)
    assert code == 2
    assert "read-only" in err
    assert "remount,rw" in err


def test_a_full_drive_is_refused_before_measuring(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Files, "free_bytes", lambda self, path: 1 << 20)
    told: list[str] = []
    with pytest.raises(StoreFull, match="Free"):
        short([tmp_path], device="virtual", virtual=GIVEN, progress=lambda what, share: told.append(what))
    assert not told
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_is_refused_before_measuring(run, tmp_path: Path):
    code, _, err = run("profile", "--ssd", tmp_path, "--out", tmp_path / "nowhere" / "machine.yaml")
    assert code == 2
    assert "there is no directory" in err
    with pytest.raises(ConfigError, match="cannot be written"):
        write_machine(MACHINE, tmp_path / "gone" / "machine.yaml")


MACHINE = MachineProfile(
    name="other", gpu_flops_per_second=1.5e14, gpu_memory_bytes=24 * 10**9, to_gpu_bytes_per_second=2e10,
    to_host_bytes_per_second=2e10, host_memory_bytes=10**11, update_parameters_per_second=1e9, drives=(DRIVE, DRIVE),
)  # fmt: skip


def test_any_machine_survives_the_file_and_has_a_table(tmp_path: Path):
    write_machine(MACHINE, tmp_path / "machine.yaml")
    assert load_machine(tmp_path / "machine.yaml") == MACHINE
    assert ("a block computes", "150 TFLOP/s") in machine_rows(MACHINE)
