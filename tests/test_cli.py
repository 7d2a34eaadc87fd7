"""The command line: exit codes, messages and what `store info` and `store verify` say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lohan import __version__, cli
from lohan.errors import StoreFull
from lohan.store import RecordSpec, create_store, open_store

RECORDS = [
    RecordSpec(name="weights", num_bytes=300_001, group="block"),
    RecordSpec(name="bias", num_bytes=77, group="block"),
    RecordSpec(name="table", num_bytes=65_536),
    RecordSpec(name="never", num_bytes=10),
    RecordSpec(name="passing", num_bytes=5_000, scratch=True),
]


def lohan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object):
    """Run a command in this process: its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["lohan", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    return end.value.code or 0, out, err


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *arguments: lohan(capsys, monkeypatch, *arguments)


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    """A small store over two directories with step 7 committed."""
    paths = [tmp_path / "a", tmp_path / "b"]
    create_store(paths, RECORDS, weights=[1, 1], chunk_bytes=65_536)
    with open_store(paths) as store:
        store.begin(7)
        for record in RECORDS[:3]:
            store.write(record.name, bytes([record.num_bytes % 251]) * record.num_bytes).wait()
        store.commit(7, {"loss": 1.5, "seed": 1}).wait()
    return paths


def flip_a_bit(drive: Path, offset: int) -> None:
    with open(drive / "lohan.data", "r+b") as data:
        data.seek(offset)
        byte = data.read(1)[0]
        data.seek(offset)
        data.write(bytes([byte ^ 1]))


def test_version(run):
    assert run("--version") == (0, f"lohan {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["store", "nonsense"], ["doctor", "--nonsense"], ["store", "info"]]
)
def test_bad_usage_is_exit_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2
    assert "Usage" in err
    assert not out


def test_a_mistake_of_the_user_is_one_message_and_no_traceback(run, tmp_path):
    code, out, err = run("store", "info", tmp_path / "gone")
    assert (code, out) == (2, "")
    assert err.startswith(f"lohan: {tmp_path / 'gone'} does not exist")
    assert err.count("\n") == 1


def test_any_of_our_errors_from_any_command_is_said_and_not_raised(run, monkeypatch):
    def full(*_: object) -> None:
        raise StoreFull("The disk is full. Free 3 GB.")

    monkeypatch.setattr("lohan.doctor.examine", full)
    assert run("doctor", "--json") == (2, "", "lohan: The disk is full. Free 3 GB.\n")


def test_ctrl_c_ends_with_one_line_and_130(run, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lohan.doctor.examine", interrupted)
    assert run("doctor", "--json") == (130, "", "lohan: interrupted\n")


def test_a_real_ctrl_c_reaches_the_user_the_same_way(tmp_path):
    code = """
import sys, time
import lohan.doctor
def slow(*_):
    print("started", flush=True)
    time.sleep(60)
lohan.doctor.examine = slow
sys.argv = ["lohan", "doctor", "--json"]
from lohan.cli import main
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "lohan: interrupted\n")


def test_info_describes_the_store_whatever_the_order_of_its_drives(run, drives):
    code, out, _ = run("store", "info", drives[1], drives[0], "--json")
    info = json.loads(out)
    assert code == 0
    assert (info["committed_step"], info["metadata"], info["state"]) == (7, ["loss", "seed"], "clean")
    assert (info["num_records"], info["num_groups"], info["num_written"]) == (5, 4, 3)
    assert (info["versions"], info["chunk_bytes"], info["format_version"]) == (2, 65_536, 1)
    assert info["record_bytes"] == sum(record.num_bytes for record in RECORDS)
    assert [d["directory"] for d in info["drives"]] == [str(d) for d in drives]
    assert info["data_bytes"] == sum((d / "lohan.data").stat().st_size for d in drives)


def test_info_for_people_says_the_same(run, drives):
    code, out, _ = run("store", "info", *drives)
    assert code == 0
    for words in ("committed step  7", "loss, seed", "5 in 4 groups, 3 written", "closed"):
        assert words in out


def test_info_before_the_first_commit(run, tmp_path):
    create_store([tmp_path / "a"], RECORDS)
    assert "none yet" in run("store", "info", tmp_path / "a")[1]
    assert json.loads(run("store", "info", tmp_path / "a", "--json")[1])["committed_step"] is None


def test_info_changes_nothing_and_works_while_the_store_is_in_use(run, drives):
    with open_store(drives) as store:
        store.begin(8)
        before = {path: path.read_bytes() for drive in drives for path in drive.iterdir() if path.name != "lohan.lock"}
        info = json.loads(run("store", "info", *drives, "--json")[1])
        assert (info["state"], info["committed_step"]) == ("open", 7)
        assert {path: path.read_bytes() for path in before} == before
        store.write("bias", bytes(77)).wait()
        store.commit(8).wait()
    assert json.loads(run("store", "info", *drives, "--json")[1])["committed_step"] == 8


def test_info_sees_that_another_process_has_the_store_open(run, drives):
    code = "import sys; from lohan.store import open_store\nwith open_store(sys.argv[1:]): print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, drives)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        info = json.loads(run("store", "info", *drives, "--json")[1])
        verify = run("store", "verify", *drives)
        other.communicate(timeout=30)
    assert info["state"] == "open"
    assert verify[0] == 2
    assert f"in use by process {other.pid}" in verify[2]


def test_info_names_the_missing_drive(run, drives):
    code, _, err = run("store", "info", drives[0])
    assert code == 2
    assert "drive 2 is missing" in err


def test_info_tells_of_damage_that_the_other_copy_makes_good(run, drives):
    (drives[0] / "lohan.manifest.0").unlink()
    info = json.loads(run("store", "info", *drives, "--json")[1])
    assert info["committed_step"] == 7
    assert any("lohan.manifest.0" in note for note in info["notes"])
    assert not (drives[0] / "lohan.manifest.0").exists()


def test_verify_finds_a_good_store_good(run, drives):
    code, out, err = run("store", "verify", *drives)
    assert (code, err) == (0, "")
    assert "All is well" in out
    report = json.loads(run("store", "verify", *drives, "--json")[1])
    assert (report["problems"], report["num_records"]) == ([], 3)
    assert report["verified_bytes"] == sum(record.num_bytes for record in RECORDS[:3])


def test_verify_lists_every_damaged_place_and_exits_1(run, drives):
    for drive in drives:
        flip_a_bit(drive, 5)
    code, out, _ = run("store", "verify", *drives, "--json")
    problems = json.loads(out)["problems"]
    assert code == 1
    assert {(p["drive"], p["offset"]) for p in problems} == {(str(drive), 0) for drive in drives}
    assert all(p["record"] == "weights" for p in problems)
    code, out, _ = run("store", "verify", *drives)
    assert code == 1
    assert out.count("damaged  ") == 2
    assert "2 problems" in out


def test_verify_reads_what_there_is_of_a_record_written_in_part(run, tmp_path):
    paths = [tmp_path / "a"]
    create_store(paths, [RecordSpec(name="long", num_bytes=50_000)], chunk_bytes=4096)
    with open_store(paths) as store:
        store.begin(1)
        for offset, size in ((4096, 8192), (49_152, 848)):
            store.write("long", bytes(range(256)) * (size // 256) + bytes(size % 256), offset=offset).wait()
        store.commit(1).wait()
        assert store.written_parts("long") == [(4096, 8192), (49_152, 848)]
    assert json.loads(run("store", "verify", *paths, "--json")[1])["verified_bytes"] == 9040
    flip_a_bit(paths[0], 8192 + 5)
    code, out, _ = run("store", "verify", *paths, "--json")
    assert (code, [p["offset"] for p in json.loads(out)["problems"]]) == (1, [8192])


def test_verify_leaves_the_store_usable(run, drives):
    assert run("store", "verify", *drives)[0] == 0
    with open_store(drives) as store:
        assert store.committed_step == 7


def test_a_store_cut_off_in_place_is_called_torn(run, tmp_path):
    paths = [tmp_path / "a"]
    create_store(paths, RECORDS, versions=1)
    with open_store(paths) as store:
        store.begin(1)
    assert json.loads(run("store", "info", *paths, "--json")[1])["state"] == "torn"
    code, out, _ = run("store", "verify", *paths, "--json")
    assert code == 1
    assert "cut off" in json.loads(out)["problems"][0]["message"]
