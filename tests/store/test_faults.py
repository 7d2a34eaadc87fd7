"""Every bad thing a drive can do to a store: a typed error with a way out, and the last commit still there."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from store_bench import (
    CHUNK,
    DRIVES,
    PATHS,
    RECORDS,
    Bench,
    assert_holds,
    commit_step,
    content,
    metadata,
    read,
    write_step,
)

from lohan.errors import (
    ConfigError,
    DriveMismatch,
    RecordMissing,
    StoreCorrupt,
    StoreError,
    StoreExists,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreMissing,
    StoreTorn,
    UnknownFormat,
)
from lohan.store import RecordSpec, create_store, open_store, verify_store
from lohan.store.sealed import FORMAT_VERSION, HEAD, HEAD_BYTES, HEADER, LAYOUT, MAGIC, MANIFEST, checksum, seal, unseal
from lohan.testing.faults import FaultyFiles

MANIFESTS = [PATHS[0] / "lohan.manifest.0", PATHS[0] / "lohan.manifest.1"]
LAYOUTS = [PATHS[0] / "lohan.layout.0", PATHS[0] / "lohan.layout.1"]
HEADERS = [PATHS[0] / "lohan.header.0", PATHS[0] / "lohan.header.1"]
DATA = [path / "lohan.data" for path in PATHS]


# -- a drive that fails requests --------------------------------------------------------------------------


def test_eio_on_read_names_drive_offset_and_record(bench):
    with bench.open() as store:
        bench.files.fail("read", errno.EIO, name="nvme0")
        with pytest.raises(
            StoreIOError, match=r"/nvme0/store: Input/output error at offset \d+ .* weights.*dmesg"
        ) as hit:
            read(store, "weights")
        assert (hit.value.drive, hit.value.errno) == (str(PATHS[0]), errno.EIO)
        assert hit.value.offset is not None
        assert_holds(store, 1)


def test_eio_on_write_makes_the_record_unreadable_until_it_is_written_again(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        bench.files.fail("write", errno.EIO, name="lohan.data")
        with pytest.raises(StoreIOError, match=r"at offset \d+ while writing small.*dmesg"):
            store.write("small", content("small", 2)).wait()
        with pytest.raises(StoreError, match=r"'small' failed .*write it again"):
            read(store, "small")
        with pytest.raises(StoreError, match=r"cannot be committed: a write to record 'small' failed.*Write it again"):
            store.commit(2).wait()
        assert store.committed_step == 1
        store.write("small", content("small", 2)).wait()
        store.commit(2, metadata(2)).wait()
    bench.assert_holds(2)


def test_a_failed_write_that_is_never_repeated_leaves_the_last_commit(bench):
    with bench.open() as store:
        store.begin(2)
        bench.files.fail("write", errno.EIO, name="lohan.data")
        with pytest.raises(StoreIOError):
            store.write("weights", content("weights", 2)).wait()
        store.abandon()
        assert_holds(store, 1)
    bench.assert_holds(1)


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("keep_bytes", [1, 511, 4096, 5000, 12288])
def test_short_transfers_are_continued_from_a_page_and_never_noticed(bench, call, keep_bytes):
    with bench.open() as store:
        bench.files.stop_short(call, keep_bytes, name="lohan.data", times=5)
        commit_step(store, 2)
        assert_holds(store, 2)
    bench.assert_holds(2)


@pytest.mark.parametrize("name", ["manifest", "header", "layout"])
def test_short_reads_and_writes_of_metadata_are_never_noticed(bench, name):
    bench.files.stop_short("read", 5000, name=name, times=4)
    bench.files.stop_short("write", 5000, name=name, times=4)
    with bench.open() as store:
        commit_step(store, 2)
    bench.files.heal()
    bench.assert_holds(2)


def test_a_drive_that_moves_nothing_for_ever_is_called_broken(bench):
    with bench.open() as store:
        store.begin(2)
        bench.files.stop_short("write", 0, name="lohan.data", times=1000)
        with pytest.raises(StoreIOError, match="/nvme"):
            store.write("small", content("small", 2)).wait()
    bench.files.heal()
    bench.assert_holds(1)


def test_a_failed_sync_ends_commits_until_the_store_is_opened_again(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        bench.files.fail("sync", errno.EIO, name="nvme1")
        with pytest.raises(StoreIOError, match=r"/nvme1/store: .* while making a step durable.*dmesg"):
            store.commit(2, metadata(2)).wait()
        for refused in (lambda: store.begin(3), lambda: store.commit(2), lambda: store.write("small", bytes(100))):
            with pytest.raises(StoreError, match="Close the store and open it again"):
                refused()
        assert read(store, "small") == content("small", 2)
    bench.assert_holds(1)


@pytest.mark.parametrize(("call", "skip"), [("write", 0), ("write", 1), ("sync", 0), ("sync", 1)])
def test_a_manifest_that_cannot_be_written_leaves_one_whole_version(bench, call, skip):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        bench.files.fail(call, errno.EIO, name="manifest", skip=skip)
        with pytest.raises(StoreIOError, match=rf"while writing lohan.manifest.{skip}"):
            store.commit(2, metadata(2)).wait()
    with bench.open() as store:
        assert_holds(store, store.committed_step)


def test_eio_while_opening_is_survived_where_a_twin_can_be_read(bench):
    bench.files.fail("read", errno.EIO, name="lohan.manifest.0", times=2)
    with bench.open() as store:
        assert any("lohan.manifest.0 is damaged" in note for note in store.notes)
        assert_holds(store, 1)


# -- space ------------------------------------------------------------------------------------------------


def test_too_little_space_is_found_before_anything_is_written():
    files = FaultyFiles(DRIVES, capacity_bytes=50_000)
    with pytest.raises(StoreFull, match=r"needs .* on the filesystem of /nvme0/store and .* free.*Free .*`ssd`"):
        create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)
    assert {p.name for p in files.listing()} <= {"nvme0", "nvme1", "store", "lohan.lock"}


@pytest.mark.parametrize("call", ["reserve", "write"])
def test_enospc_during_creation_leaves_no_store_behind(call):
    files = FaultyFiles(DRIVES)
    files.fail(call, errno.ENOSPC, skip=1)
    with pytest.raises(StoreFull, match="/nvme"):
        create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)
    assert {p.name for p in files.listing()} <= {"nvme0", "nvme1", "store", "lohan.lock"}
    create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)


def test_enospc_during_a_step_says_so_and_keeps_the_commit(bench):
    with bench.open() as store:
        store.begin(2)
        bench.files.fail("write", errno.ENOSPC, name="lohan.data")
        with pytest.raises(StoreFull, match=r"/nvme./store ran out of space while writing small.*Free some space"):
            store.write("small", content("small", 2)).wait()
    bench.assert_holds(1)


def test_a_full_disk_does_not_keep_a_store_from_opening_and_committing(bench):
    bench.files.capacity_bytes = 0
    with bench.open() as store:
        commit_step(store, 2)
    bench.assert_holds(2)


def test_the_lock_of_a_real_store_needs_no_new_space(tmp_path):
    create_store([tmp_path], [RecordSpec(name="a", num_bytes=1)])
    before = (tmp_path / "lohan.lock").stat()
    with open_store([tmp_path]):
        after = (tmp_path / "lohan.lock").stat()
    assert (before.st_size, before.st_blocks, before.st_ino) == (after.st_size, after.st_blocks, after.st_ino)


# -- drives that are gone, read-only, or somebody else's -----------------------------------------------------


def test_a_drive_directory_that_vanished_is_named(bench):
    bench.files.vanish(PATHS[1])
    with pytest.raises(
        StoreMissing, match=r"/nvme1/store does not exist.*Mount the drive or correct the path in `ssd`"
    ):
        with bench.open():
            pass
    bench.files.come_back(PATHS[1])
    bench.assert_holds(1)


@pytest.mark.parametrize("drive", [0, 1])
def test_a_drive_that_vanishes_while_open_fails_the_commit_and_not_silently(bench, drive):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        bench.files.vanish(PATHS[drive])
        with pytest.raises(StoreIOError, match=rf"/nvme{drive}/store/lohan.data has vanished .*Mount the drive again"):
            store.commit(2).wait()
    bench.files.come_back(PATHS[drive])
    bench.assert_holds(1)


def test_a_data_file_deleted_while_open_fails_the_commit(tmp_path):
    create_store([tmp_path], RECORDS, chunk_bytes=CHUNK)
    with open_store([tmp_path]) as store:
        commit_step(store, 1)
        store.begin(2)
        write_step(store, 2)
        (tmp_path / "lohan.data").rename(tmp_path / "moved")
        with pytest.raises(StoreIOError, match=r"lohan.data has vanished or was replaced"):
            store.commit(2).wait()
    with pytest.raises(StoreMissing, match=r"lohan.data has vanished"):
        with open_store([tmp_path]):
            pass
    (tmp_path / "moved").rename(tmp_path / "lohan.data")
    with open_store([tmp_path]) as store:
        assert_holds(store, 1)


def test_a_read_only_filesystem_is_named_and_can_still_be_read(bench):
    bench.files.read_only.add(DRIVES[1])
    with pytest.raises(StoreIOError, match=r"/nvme1/store: Read-only file system.*remount it for writing"):
        with bench.open():
            pass
    with bench.open(read_only=True) as store:
        assert_holds(store, 1)
        with pytest.raises(StoreError, match="opened for reading only"):
            store.begin(2)


def test_a_read_only_filesystem_cannot_hold_a_new_store():
    files = FaultyFiles(DRIVES)
    files.read_only.add(DRIVES[0])
    with pytest.raises(StoreIOError, match=r"/nvme0/store: Read-only file system.*choose another directory"):
        create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)


def test_a_drive_swapped_with_another_stores_is_refused(bench):
    other = [Path("/nvme0/other"), Path("/nvme1/other")]
    create_store(other, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=bench.files)
    with pytest.raises(DriveMismatch, match=r"/nvme1/other belongs to another store than /nvme0/store.*of one store"):
        with open_store([PATHS[0], other[1]], files=bench.files):
            pass
    bench.assert_holds(1)


def test_a_missing_drive_and_a_drive_given_twice_are_refused(bench, tmp_path):
    with pytest.raises(DriveMismatch, match="2 drives and 1 were given: drive 2 is missing"):
        with open_store(PATHS[:1], files=bench.files):
            pass
    with pytest.raises(StoreError, match="/nvme0/store"):
        with open_store([PATHS[0], PATHS[0]], files=bench.files):
            pass
    for path in [p for p in bench.files.listing() if p.parent == PATHS[1]]:
        bench.files.put(Path("/nvme1") / path.name, bench.files.contents(path))
    with pytest.raises(DriveMismatch, match="both drive 2 of the store: one is a copy"):
        with open_store([*PATHS, Path("/nvme1")], files=bench.files):
            pass
    bench.assert_holds(1)


def test_drives_may_be_given_in_any_order(bench):
    with open_store(PATHS[::-1], files=bench.files) as store:
        assert_holds(store, 1)


def test_directories_without_a_store_say_so(tmp_path):
    with pytest.raises(StoreMissing, match=r"holds no store.*Create the store"):
        with open_store([tmp_path]):
            pass
    with pytest.raises(StoreMissing, match=r"nowhere does not exist"):
        with open_store([tmp_path / "nowhere"]):
            pass
    with pytest.raises(StoreMissing, match=r"nowhere does not exist. Mount the drive"):
        create_store([tmp_path / "nowhere" / "store"], RECORDS)
    with pytest.raises(ConfigError, match="No directory"):
        create_store([], RECORDS)
    with pytest.raises(ConfigError, match="given twice"):
        create_store([tmp_path, tmp_path / "."], RECORDS)


def test_creating_over_a_store_is_refused_and_leaves_it_alone(bench):
    with pytest.raises(StoreExists, match=r"/nvme0/store already holds a store.*remove its lohan"):
        create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=bench.files)
    bench.assert_holds(1)


# -- decay ------------------------------------------------------------------------------------------------


def data_places(bench, name):
    """Drive and file offset of every committed chunk of a record."""
    with bench.open() as store:
        index = store.layout.record(name)
        chunks = slice(*store.layout.first_chunk[index : index + 2].tolist())
        offsets = store.layout.file_offsets(chunks, store._versions.committed[chunks])
        return list(zip(store.layout.chunk_drive[chunks].tolist(), offsets.tolist(), strict=True))


def test_a_flipped_bit_in_data_names_record_drive_and_offset(bench):
    drive, offset = data_places(bench, "weights")[3]
    bench.files.flip(DATA[drive], offset + 17, bit=5)
    with bench.open() as store:
        with pytest.raises(
            StoreCorrupt, match=rf"'weights' is damaged on {PATHS[drive]}: .* from its byte 12288 "
        ) as hit:
            read(store, "weights")
        assert (hit.value.record, hit.value.drive, hit.value.offset) == ("weights", str(PATHS[drive]), offset)
        problems = verify_store(store)
        assert [(p.record, p.drive, p.offset) for p in problems] == [("weights", str(PATHS[drive]), offset)]
        assert read(store, "small") == content("small", 1)
    bench.files.flip(DATA[drive], offset + 17, bit=5)
    bench.assert_holds(1)


def test_any_flipped_bit_of_a_metadata_twin_is_noticed_and_mended(bench):
    rng = np.random.default_rng(0)
    for path in [*MANIFESTS, *LAYOUTS, *HEADERS]:
        sealed = bench.files.contents(path)
        payload_bytes = int.from_bytes(sealed[24:32], "little")
        for offset in [0, 8, 12, 16, 24, 32, 40, *rng.integers(0, HEAD_BYTES + payload_bytes, 10).tolist()]:
            bench.files.flip(path, offset, bit=int(rng.integers(8)))
            with bench.open() as store:
                assert any(f"{path} is damaged" in note and "mended" in note for note in store.notes)
                assert_holds(store, 1)
            with bench.open() as store:
                assert store.notes == ()


@pytest.mark.parametrize("paths", [MANIFESTS, LAYOUTS, HEADERS], ids=["manifest", "layout", "header"])
def test_damage_to_both_twins_stops_instead_of_guessing(bench, paths):
    before = [bench.files.contents(path) for path in paths]
    places = 2 if paths is MANIFESTS else 1
    for path in paths:
        for place in range(places):
            bench.files.flip(path, place * len(before[0]) // places + 60)
    with pytest.raises(
        StoreCorrupt, match=r"in /nvme0/store is damaged in both copies .*Restore .*create the store again"
    ):
        with bench.open():
            pass
    for path, data in zip(paths, before, strict=True):
        bench.files.put(path, data)
    bench.assert_holds(1)


@pytest.mark.parametrize("length", [0, 1, 47, 48, 100, 5000])
@pytest.mark.parametrize("path", [MANIFESTS[0], MANIFESTS[1], LAYOUTS[0], HEADERS[1]], ids=lambda p: p.name)
def test_a_truncated_twin_is_mended_to_its_full_length(bench, path, length):
    whole = len(bench.files.contents(path))
    bench.files.truncate(path, length)
    with bench.open() as store:
        assert_holds(store, 1)
    assert len(bench.files.contents(path)) == whole or path not in MANIFESTS
    with bench.open() as store:
        assert store.notes == ()
        commit_step(store, 2)
    bench.assert_holds(2)


@pytest.mark.parametrize("path", [*MANIFESTS, *LAYOUTS, *HEADERS], ids=lambda p: p.name)
def test_a_missing_twin_is_made_again(bench, path):
    bench.files.remove(path)
    with bench.open() as store:
        assert any(f"{path} is damaged (the file is missing)" in note for note in store.notes)
    with bench.open() as store:
        assert store.notes == ()
        assert_holds(store, 1)


def test_a_twin_missing_before_the_first_commit_does_not_weaken_that_commit():
    """Mended too short, its empty place looked damaged, and a commit cut off in the other twin lost the store."""
    for path in MANIFESTS:
        files = FaultyFiles(DRIVES)
        create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)
        files.remove(path)
        with open_store(PATHS, files=files):
            pass
        with open_store(PATHS, files=files) as store:
            store.begin(1)
            write_step(store, 1)
            files.fail("write", errno.EIO, name="manifest.0")
            with pytest.raises(StoreIOError):
                store.commit(1).wait()
        with open_store(PATHS, files=files) as store:
            assert store.committed_step is None


@pytest.mark.parametrize("drive", [0, 1])
def test_a_truncated_data_file_is_found_on_opening(bench, drive):
    data = bench.files.contents(DATA[drive])
    bench.files.truncate(DATA[drive], len(data) - 1)
    with pytest.raises(
        StoreCorrupt, match=rf"{DATA[drive]} is cut short: {len(data) - 1} of {len(data)} bytes. Restore"
    ):
        with bench.open():
            pass
    bench.files.put(DATA[drive], data)
    bench.assert_holds(1)


def test_a_data_file_truncated_while_open_names_the_record(bench):
    with bench.open() as store:
        data = bench.files.contents(DATA[0])
        bench.files.truncate(DATA[0], 0)
        with pytest.raises(StoreCorrupt, match=r"/nvme0/store/lohan.data ends inside record weights .*Restore"):
            read(store, "weights")
        bench.files._file(DATA[0]).seen[:] = data
        assert_holds(store, 1)


def test_a_torn_manifest_leaves_the_commit_before_it(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        changes = bench.files.changes
        bench.files.crash_after(2)  # both data files are synced, and the first manifest is torn
        with pytest.raises(StoreIOError):
            store.commit(2, metadata(2)).wait()
        assert bench.files.changes == changes + 3
    bench.files.crash()
    bench.assert_holds(1)


def test_every_crash_point_of_a_commit_leaves_the_old_version_or_the_new_one():
    for num_changes in range(8):
        for kind in ("process", "power"):
            for seed in range(5):
                bench = Bench()
                with bench.open() as store:
                    store.begin(2)
                    write_step(store, 2)
                    bench.files.crash_after(num_changes)
                    commit = store.commit(2, metadata(2))
                    try:
                        commit.wait()
                    except StoreError:
                        pass
                    bench.files.freeze()
                bench.files.crash() if kind == "process" else bench.files.power_loss(random.Random(seed))
                with bench.open() as store:
                    assert store.committed_step in ((1, 2) if commit.error else (2,))
                    assert_holds(store, store.committed_step)


def test_power_loss_at_any_point_of_mending_what_a_killed_process_left_loses_nothing(monkeypatch):
    """The twin that a mend copies from may be in the page cache only: then losing power would tear both."""
    monkeypatch.setattr("lohan.store.manifest.METADATA_BYTES", 4096)
    for in_commit in (2, 3, 4, 5):
        for in_opening in range(14):
            for seed in range(4):
                bench = Bench()
                with bench.open() as store:
                    store.begin(2)
                    write_step(store, 2)
                    bench.files.crash_after(in_commit)
                    with pytest.raises(StoreError):
                        store.commit(2, metadata(2)).wait()
                bench.files.crash()
                bench.files.crash_after(in_opening)
                try:
                    with bench.open():
                        bench.files.freeze()
                except StoreError:
                    pass
                bench.files.power_loss(random.Random(seed))
                with bench.open() as store:
                    assert_holds(store, store.committed_step)


def test_decay_of_one_twin_and_a_commit_cut_off_in_the_other_lose_nothing(bench):
    """The reason why a manifest has two places: the page before the newest stays whole in both twins."""
    with bench.open() as store:
        twin = bench.files.contents(MANIFESTS[1])
        places = {place: unseal(MANIFEST, twin[place : place + len(twin) // 2]) for place in (0, len(twin) // 2)}
        newest = max(places, key=lambda place: places[place].sequence if places[place] else -1)
        bench.files.flip(MANIFESTS[1], newest + HEAD_BYTES + 5)
        store.begin(2)
        write_step(store, 2)
        bench.files.fail("write", errno.EIO, name="lohan.manifest.0")
        with pytest.raises(StoreIOError):
            store.commit(2, metadata(2)).wait()
    bench.assert_holds(1)


def test_every_crash_point_of_a_creation_leaves_no_store_or_a_whole_one():
    num_changes, complete = 0, False
    while not complete:
        files = FaultyFiles(DRIVES)
        files.crash_after(num_changes)
        try:
            create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files)
            complete = True
        except StoreError:
            pass
        files.power_loss(random.Random(num_changes))
        whole = True
        try:
            with open_store(PATHS, files=files) as store:
                assert store.committed_step is None
                commit_step(store, 1)
                assert_holds(store, 1)
        except (StoreMissing, StoreCorrupt):
            whole = False
        assert whole or not complete
        num_changes += 1
    assert num_changes > 20


# -- forgery ----------------------------------------------------------------------------------------------


def forge(bench, kind, paths, change):
    """Rewrite a piece of metadata with valid checksums."""
    for path in paths:
        sealed = bench.files.contents(path)
        places = 2 if kind == MANIFEST else 1
        size = len(sealed) // places
        forged = b""
        for place in range(places):
            page = unseal(kind, sealed[place * size : (place + 1) * size])
            forged += (seal(kind, page.sequence, change(page.payload)) if page else b"").ljust(size, b"\0")
        bench.files.put(path, forged)


def change_header(**values):
    return lambda payload: json.dumps({**json.loads(payload), **values}).encode()


@pytest.mark.parametrize(
    "change",
    [
        change_header(drive=2),
        change_header(drive=-1),
        change_header(num_drives=10**18, drive=0),
        change_header(store=["list"]),
        change_header(data_bytes=4096),
        change_header(data_bytes=1 << 60),
        change_header(layout_place_bytes=0),
        change_header(manifest_place_bytes=4096),
        change_header(manifest_place_bytes=0),
        change_header(data="/etc/passwd"),
        lambda payload: b"[]",
        lambda payload: b"[" * 4000,
        lambda payload: b"\xff\xfe",
    ],
)
def test_a_forged_header_is_refused(bench, change):
    before = [bench.files.contents(path) for path in HEADERS]
    forge(bench, HEADER, HEADERS, change)
    with pytest.raises((StoreCorrupt, DriveMismatch), match="/nvme0/store"):
        with bench.open():
            pass
    for path, data in zip(HEADERS, before, strict=True):
        bench.files.put(path, data)
    bench.assert_holds(1)


def change_layout(change):
    def apply(payload):
        size = int.from_bytes(payload[:8], "little")
        table = json.loads(payload[8 : 8 + size])
        num_chunks = (len(payload) - 8 - size) // 9
        drives = bytearray(payload[8 + size : 8 + size + num_chunks])
        offsets = np.frombuffer(payload[8 + size + num_chunks :], "<u8").copy()
        change(table, drives, offsets)
        text = json.dumps(table, separators=(",", ":")).encode()
        return len(text).to_bytes(8, "little") + text + bytes(drives) + offsets.tobytes()

    return apply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, d, o: d.__setitem__(0, 7), "chunk on drive 7 of 2"),
        (lambda t, d, o: o.__setitem__(0, 1 << 40), "outside its drive's data file"),
        (lambda t, d, o: o.__setitem__(0, (1 << 64) - CHUNK), "outside its drive's data file"),
        (lambda t, d, o: o.__setitem__(2, o[0]), "two chunks on the same bytes"),
        (lambda t, d, o: o.__setitem__(0, 100), "outside its drive's data file"),
        (lambda t, d, o: t.__setitem__("versions", 1), "data"),
        (lambda t, d, o: t["records"][0].__setitem__(1, 99 * CHUNK), "chunks"),
        (lambda t, d, o: t["records"][0].__setitem__(1, -5), "-5 bytes"),
        (lambda t, d, o: t.__setitem__("region_bytes", [CHUNK, CHUNK]), "outside its drive's data file"),
        (lambda t, d, o: t.__setitem__("chunk_bytes", 2 * CHUNK), "chunks"),
        (lambda t, d, o: t.__setitem__("num_drives", 1), "drives"),
    ],
)
def test_a_forged_layout_is_refused(bench, change, reason):
    before = [bench.files.contents(path) for path in LAYOUTS]
    forge(bench, LAYOUT, LAYOUTS, change_layout(change))
    with pytest.raises(StoreCorrupt, match=rf"/nvme0/store.*{reason}.*Create the store again"):
        with bench.open():
            pass
    for path, data in zip(LAYOUTS, before, strict=True):
        bench.files.put(path, data)
    bench.assert_holds(1)


def change_manifest(text=None, body=None):
    def apply(payload):
        size = int.from_bytes(payload[:8], "little")
        words = payload[8 : 8 + size] if text is None else text
        rest = payload[8 + size :] if body is None else body(bytearray(payload[8 + size :]))
        return len(words).to_bytes(8, "little") + words + bytes(rest)

    return apply


def set_slot(body):
    body[0] = 2
    return body


@pytest.mark.parametrize(
    "change",
    [
        change_manifest(body=set_slot),
        change_manifest(body=lambda b: b[:-9]),
        change_manifest(body=lambda b: b + bytes(9)),
        change_manifest(text=b'{"step":-4,"dirty":false,"metadata":{}}'),
        change_manifest(text=b'{"step":"1","dirty":false,"metadata":{}}'),
        change_manifest(text=b'{"step":1,"dirty":false}'),
        change_manifest(text=b'{"step":1,"dirty":false,"metadata":7}'),
        change_manifest(text=b"[]"),
        change_manifest(text=b"[" * 100_000),
        lambda payload: b"\xff" * 8,
        lambda payload: b"",
    ],
)
def test_a_forged_manifest_is_refused(bench, change):
    before = [bench.files.contents(path) for path in MANIFESTS]
    forge(bench, MANIFEST, MANIFESTS, change)
    with pytest.raises(StoreCorrupt, match=r"manifest in /nvme0/store does not fit its store.*Create the store again"):
        with bench.open():
            pass
    for path, data in zip(MANIFESTS, before, strict=True):
        bench.files.put(path, data)
    bench.assert_holds(1)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [(HEADER, HEADERS), (LAYOUT, LAYOUTS), (MANIFEST, MANIFESTS)],
    ids=["header", "layout", "manifest"],
)
def test_an_unknown_format_version_is_told_apart_from_damage(bench, kind, paths):
    before = [bench.files.contents(path) for path in paths]
    for path in paths:
        head = HEAD.pack(MAGIC, FORMAT_VERSION + 1, kind, 0, 0, checksum(b""))
        bench.files.put(path, (head + checksum(head).to_bytes(8, "little")).ljust(len(before[0]), b"\0"))
    with pytest.raises(UnknownFormat, match=rf"{paths[0]}: .*format version 2; this program knows version 1.*newer"):
        with bench.open():
            pass
    for path, data in zip(paths, before, strict=True):
        bench.files.put(path, data)
    bench.assert_holds(1)


def test_record_names_are_never_paths(tmp_path):
    names = ["../outside", "/etc/passwd", "a/../../b", "\0", "lohan.data"]
    records = [RecordSpec(name=name, num_bytes=10) for name in names]
    create_store([tmp_path / "store"], records)
    with open_store([tmp_path / "store"]) as store:
        store.begin(1)
        for number, name in enumerate(names):
            store.write(name, bytes([number]) * 10).wait()
        store.commit(1).wait()
    with open_store([tmp_path / "store"]) as store:
        assert [read(store, name) for name in names] == [bytes([n]) * 10 for n in range(len(names))]
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert {p.name.split(".")[0] for p in (tmp_path / "store").iterdir()} == {"lohan"}


@pytest.mark.parametrize("name", ["lohan.data", "lohan.manifest.0", "lohan.layout.1", "lohan.header.0", "lohan.lock"])
def test_a_link_in_place_of_a_file_is_refused_and_its_target_left_alone(tmp_path, name):
    store, outside = tmp_path / "store", tmp_path / "outside"
    create_store([store], RECORDS, chunk_bytes=CHUNK)
    with open_store([store]) as opened:
        commit_step(opened, 1)
    (store / name).rename(outside)
    before = outside.read_bytes()
    (store / name).symlink_to(outside)
    with pytest.raises(StoreIOError, match=rf"{store}: .*remove the link"):
        with open_store([store]):
            pass
    assert outside.read_bytes() == before
    (store / name).unlink()
    outside.rename(store / name)
    with open_store([store]) as opened:
        assert_holds(opened, 1)


@pytest.mark.parametrize("name", ["lohan.data", "lohan.manifest.0", "lohan.header.0"])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, name):
    create_store([tmp_path], RECORDS, chunk_bytes=CHUNK)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(StoreError, match=str(tmp_path)):
        with open_store([tmp_path]):
            pass
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(StoreError, match=str(tmp_path)):
        with open_store([tmp_path]):
            pass


# -- two at once, and the dead ----------------------------------------------------------------------------

HOLD = """
import sys
from lohan.store import open_store
with open_store(sys.argv[1:]):
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def real_store(tmp_path):
    create_store([tmp_path], RECORDS, chunk_bytes=CHUNK)
    with open_store([tmp_path]) as store:
        commit_step(store, 1)
    return tmp_path


@pytest.fixture
def holder(real_store):
    """Another process that has the store open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(real_store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"open\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_told_who_has_the_store(real_store, holder):
    with pytest.raises(StoreLocked, match=rf"{real_store} is in use by process {holder.pid}. Wait for its end"):
        with open_store([real_store]):
            pass
    with pytest.raises(StoreError):
        create_store([real_store], RECORDS)
    with open_store([real_store], read_only=True) as store:
        assert_holds(store, 1)


def test_the_lock_of_a_killed_process_is_gone_with_it(real_store, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with open_store([real_store]) as store:
        assert store.notes == ()
        assert_holds(store, 1)


def test_the_same_process_cannot_open_a_store_twice_and_keeps_it_after_trying(real_store):
    with open_store([real_store]) as store:
        with pytest.raises(StoreLocked, match=r"already open in this process. Close that store first"):
            with open_store([real_store / ".." / real_store.name]):
                pass
        refused = subprocess.run(
            [sys.executable, "-c", HOLD, str(real_store)], input=b"", capture_output=True, timeout=60, check=False
        )
        assert b"StoreLocked" in refused.stderr
        assert_holds(store, 1)
    with open_store([real_store]) as store:
        assert_holds(store, 1)


def test_an_opening_that_fails_lets_go_of_the_lock(bench):
    bench.files.fail("read", errno.EIO, name="lohan.data")
    with pytest.raises(StoreIOError, match="opening data"):
        with bench.open():
            pass
    bench.assert_holds(1)
    assert not bench.files._open


# -- slow paths, said once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_filesystem_without_direct_io_is_used_and_said_once_per_drive(bench, where):
    bench.files.refuse_direct = where
    with bench.open() as store:
        assert [note.split(":")[0] for note in store.notes] == [str(path) for path in PATHS]
        assert all("refuses direct I/O" in note and "Use ext4 or XFS" in note for note in store.notes)
        assert [drive.direct for drive in store.drives] == [False, False]
        commit_step(store, 2)
        assert len(store.notes) == 2
    bench.assert_holds(2)
    assert not bench.files._open


def test_closing_frees_everything_even_when_a_drive_fails_to_close(bench, monkeypatch):
    class CloseFails(OSError):
        pass

    close = FaultyFiles.close

    def fail(self, descriptor):
        name = self._open[descriptor].path.name
        close(self, descriptor)
        if name == "lohan.data":
            raise CloseFails

    with monkeypatch.context() as patch:
        with pytest.raises(CloseFails):
            with bench.open():
                patch.setattr(FaultyFiles, "close", fail)
    bench.assert_holds(1)
    assert not bench.files._open


# -- in place -----------------------------------------------------------------------------------------------


def test_an_in_place_store_that_was_cut_off_says_that_it_holds_a_mixture():
    bench = Bench(versions=1)
    with bench.open() as store:
        store.begin(2)
        store.write("small", content("small", 2)).wait()
        bench.files.freeze()
    bench.files.crash()
    with pytest.raises(StoreTorn, match=r"/nvme0/store keeps one version.*cut off after step 1.*Create it again"):
        with bench.open():
            pass
    with bench.open(read_only=True) as store:
        with pytest.raises((StoreCorrupt, RecordMissing)):
            read(store, "small")
