"""How a store behaves on good days: order, versions, what is refused."""

import errno
import subprocess
import sys
import threading

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

from lohan.errors import ConfigError, RecordMissing, StoreError, StoreIOError
from lohan.store import RecordSpec, create_store, open_arena, open_store
from lohan.testing.faults import FaultyFiles


def run(call):
    """Start a call that may have to wait, on a thread of its own."""
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# -- order ------------------------------------------------------------------------------------------------


def test_a_read_sees_the_writes_issued_before_it_and_not_those_after(bench):
    with bench.open() as store:
        store.begin(2)
        with bench.files.gate("write", name="lohan.data") as gate:
            before = store.write("weights", content("weights", 2))
            into = bytearray(len(content("weights", 2)))
            seen = store.read("weights", into)
            after = store.write("weights", content("weights", 3))
            gate.wait_until_reached()
            assert not any(handle.done for handle in (before, seen, after))
        after.wait()
        seen.wait()
        assert bytes(into) == content("weights", 2)
        assert read(store, "weights") == content("weights", 3)


def test_a_write_waits_for_an_earlier_read_of_the_same_record_and_not_for_others(bench):
    with bench.open() as store:
        store.begin(2)
        store.write("small", content("small", 2)).wait()
        into = bytearray(100)
        with bench.files.gate("read", name="lohan.data") as gate:
            seen = store.read("small", into)
            gate.wait_until_reached()
            over = store.write("small", content("small", 3))
            store.write("moments.0", content("moments.0", 2)).wait()
            assert not over.done
        over.wait()
        seen.wait()
        assert bytes(into) == content("small", 2)


def test_operations_on_different_parts_of_a_record_do_not_wait_for_each_other(bench):
    with bench.open() as store:
        store.begin(2)
        with bench.files.gate("write", name="lohan.data") as gate:
            store.write("weights", bytes(CHUNK), offset=0)
            gate.wait_until_reached()
            into = bytearray(CHUNK)
            store.read("weights", into, offset=CHUNK, num_bytes=CHUNK).wait(30)
        assert bytes(into) == content("weights", 1)[CHUNK : 2 * CHUNK]


def test_a_read_somebody_waits_for_goes_ahead_of_those_nobody_waits_for():
    files = FaultyFiles(DRIVES[:1])
    records = [RecordSpec(name=f"r{i}", num_bytes=CHUNK) for i in range(6)]
    create_store(PATHS[:1], records, chunk_bytes=CHUNK, files=files)
    with open_store(PATHS[:1], files=files, threads_per_drive=1) as store:
        store.begin(1)
        for record in records:
            store.write(record.name, bytes(CHUNK)).wait()
        with files.gate("read", name="lohan.data") as gate:
            handles = [store.read(record.name, bytearray(CHUNK)) for record in records]
            gate.wait_until_reached()  # r0 is under way, five are queued
            files.calls.clear()
            waiter = run(handles[5].wait)
            while store.drives[0].reads._jobs[0].owner is not handles[5]:
                pass
        waiter.join()
        store.drain()
        order = [offset for call, _, offset in files.calls if call == "read"]
        assert order.index(5 * CHUNK) < order.index(CHUNK)


def test_reads_do_not_stand_behind_queued_writes(bench):
    with bench.open() as store:
        store.begin(2)
        with bench.files.gate("write", name="lohan.data") as gate:
            writes = [store.write("moments.0", content("moments.0", n)) for n in range(20)]
            gate.wait_until_reached()
            assert read(store, "weights") == content("weights", 1)
            assert not any(write.done for write in writes)


def test_a_read_behind_a_failed_write_fails_and_one_behind_its_repetition_does_not(bench):
    with bench.open() as store:
        store.begin(2)
        with bench.files.gate("write", name="lohan.data"):
            bench.files.fail("write", errno.EIO, name="lohan.data")
            failing = store.write("small", content("small", 2))
            lost = store.read("small", bytearray(100))
            again = store.write("small", content("small", 3))
            into = bytearray(100)
            found = store.read("small", into)
        again.wait()
        found.wait()
        assert bytes(into) == content("small", 3)
        for handle in (failing, lost):
            with pytest.raises(StoreIOError):
                handle.wait()


def test_a_write_that_fails_and_is_repeated_before_the_commit_does_not_stop_it(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with bench.files.gate("write", name="lohan.data"):
            bench.files.fail("write", errno.EIO, name="lohan.data")
            failing = store.write("small", b"x" * 100)
            store.write("small", content("small", 2))
            commit = store.commit(2, metadata(2))
        commit.wait()
        assert isinstance(failing.error, StoreIOError)
    bench.assert_holds(2)


def test_a_slow_drive_makes_its_producer_wait_instead_of_filling_memory(bench, monkeypatch):
    monkeypatch.setattr("lohan.store.store.QUEUE_DEPTH", 2)
    with bench.open() as store:
        store.begin(2)
        issued = []

        def produce():
            for number in range(20):
                issued.append(store.write("small", content("small", number)))

        with bench.files.gate("write", name="lohan.data") as gate:
            producer = run(produce)
            gate.wait_until_reached()
            store.read("weights", bytearray(10 * CHUNK + 7)).wait()  # reads have room of their own
            assert len(issued) <= 5
        producer.join()
        store.drain()
        assert read(store, "small") == content("small", 19)


# -- buffers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slab", "padded", "bytes", "unaligned", "numpy"])
def test_any_memory_of_the_right_size_will_do(bench, kind):
    data = content("weights", 9)
    with open_arena(1 << 20) as arena, arena.lease(len(data)) as slab, bench.open() as store:
        buffers = {
            "slab": slab.view,
            "padded": slab.padded,
            "bytes": bytearray(len(data)),
            "unaligned": memoryview(bytearray(len(data) + 3))[3:],
            "numpy": np.zeros(len(data), np.int8),
        }
        buffer = buffers[kind]
        memoryview(buffer).cast("B")[: len(data)] = data
        store.begin(2)
        store.write("weights", buffer).wait()
        memoryview(buffer).cast("B")[:] = bytes(memoryview(buffer).nbytes)
        store.read("weights", buffer).wait()
        assert bytes(memoryview(buffer).cast("B")[: len(data)]) == data


def test_wrong_sizes_and_parts_are_refused_with_the_numbers(bench):
    with bench.open() as store:
        store.begin(2)
        with pytest.raises(
            ConfigError, match=r"'small' needs 100 bytes of memory \(or 4096, whole pages\) and was given 99"
        ):
            store.read("small", bytearray(99))
        with pytest.raises(ConfigError, match=r"'small' needs 100 .* was given 5000"):
            store.write("small", bytes(5000))
        with pytest.raises(ConfigError, match=r"must end at a multiple of 4096 or at its end \(40967\), not at 5000"):
            store.write("weights", bytes(5000))
        for offset in (-CHUNK, 1, CHUNK - 1, 11 * CHUNK):
            with pytest.raises(ConfigError, match=f"a part from {offset}"):
                store.read("weights", bytearray(CHUNK), offset=offset, num_bytes=CHUNK)
        with pytest.raises(ValueError, match="read-only"):
            store.read("small", bytes(100))
        with pytest.raises(RecordMissing, match="'nothing'"):
            store.read("nothing", bytearray(1))
        assert_holds(store, 1)


def test_parts_can_be_written_and_read_on_their_own(bench):
    with bench.open() as store:
        store.begin(2)
        store.write("weights", b"x" * (2 * CHUNK), offset=3 * CHUNK).wait()
        store.write("weights", b"y" * (CHUNK + 7), offset=9 * CHUNK).wait()
        expected = bytearray(content("weights", 1))
        expected[3 * CHUNK : 5 * CHUNK] = b"x" * (2 * CHUNK)
        expected[9 * CHUNK :] = b"y" * (CHUNK + 7)
        assert read(store, "weights") == bytes(expected)


def test_a_group_moves_as_one_and_its_records_can_be_used_singly(bench):
    with bench.open() as store:
        offsets = store.layout.group_offsets("moments")
        buffer = bytearray(store.layout.group_bytes("moments"))
        store.read_group("moments", buffer).wait()
        for name, offset in offsets.items():
            assert bytes(buffer[offset : offset + len(content(name, 1))]) == content(name, 1)
            buffer[offset : offset + len(content(name, 2))] = content(name, 2)
        store.begin(2)
        store.write_group("moments", buffer).wait()
        assert read(store, "moments.1") == content("moments.1", 2)


def test_neighbouring_records_are_one_request_per_drive(bench):
    with bench.open() as store:
        bench.files.calls.clear()
        store.read_group("moments", bytearray(store.layout.group_bytes("moments"))).wait()
        assert len([call for call in bench.files.calls if call[0] == "read"]) == 2


# -- versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versions", [2, 3])
def test_a_step_that_was_not_committed_does_not_exist_after_reopening(versions):
    bench = Bench(versions=versions)
    for step in (2, 3):
        with bench.open() as store:
            store.begin(step)
            write_step(store, step)
            assert read(store, "weights") == content("weights", step)
    bench.assert_holds(1)


def test_between_commits_the_working_version_is_rewritten_and_the_committed_one_stays_whole(bench):
    with bench.open() as store:
        for step in range(2, 6):
            store.begin(step)
            write_step(store, step)
        store.begin(6)
        store.write("small", content("small", 6)).wait()
        store.commit(6).wait()
    with bench.open() as store:
        assert read(store, "small") == content("small", 6)
        assert read(store, "weights") == content("weights", 5)


def test_abandoning_returns_to_the_last_commit(bench):
    with bench.open() as store:
        for step in (2, 3):
            store.begin(step)
            write_step(store, step)
        store.abandon()
        assert_holds(store, 1)
        commit_step(store, 2)
    bench.assert_holds(2)


def test_an_undoable_step_can_be_rolled_back_after_a_commit(bench):
    with bench.open() as store:
        store.begin(2, undoable=True)
        write_step(store, 2)
        store.rollback()
        assert read(store, "weights") == content("weights", 1)
        write_step(store, 5)
        store.commit(2, metadata(5)).wait()
    with bench.open() as store:
        assert read(store, "weights") == content("weights", 5)


def test_undoing_a_step_whose_predecessor_was_not_committed_needs_three_versions(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with pytest.raises(StoreError, match=r"keeps 2 versions .*versions: 3, or commit every step"):
            store.begin(3, undoable=True)
    three = Bench(versions=3)
    with three.open() as store:
        for step in (2, 3, 4):
            store.begin(step, undoable=True)
            write_step(store, step)
        store.rollback()
        assert read(store, "weights") == content("weights", 3)
        store.rollback()
        assert read(store, "weights") == content("weights", 3)
    three.assert_holds(1)


def test_rolling_back_needs_an_undoable_step(bench):
    with bench.open() as store:
        with pytest.raises(StoreError, match="undoable=True"):
            store.rollback()
        store.begin(2)
        with pytest.raises(StoreError, match="undoable=True"):
            store.rollback()


def test_the_next_step_may_begin_and_write_new_places_while_a_commit_is_under_way():
    bench = Bench(versions=3)
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with bench.files.gate("sync", name="lohan.data") as gate:
            commit = store.commit(2, metadata(2))
            gate.wait_until_reached()
            store.begin(3)
            write_step(store, 3)
            assert read(store, "weights") == content("weights", 3)
            assert not commit.done
        commit.wait()
    bench.assert_holds(2)


def test_with_two_versions_the_next_steps_writes_wait_for_the_commit(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with bench.files.gate("sync", name="lohan.data") as gate:
            commit = store.commit(2, metadata(2))
            gate.wait_until_reached()
            store.begin(3)
            writer = run(lambda: write_step(store, 3))
            assert read(store, "weights") == content("weights", 2)
            assert not [call for call in bench.files.calls if call[0] == "write"][-1][1].startswith("lohan.manifest")
        writer.join()
        commit.wait()
        assert read(store, "weights") == content("weights", 3)
    bench.assert_holds(2)


def test_a_commit_waits_for_the_writes_issued_before_it(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with bench.files.gate("write", name="lohan.data") as gate:
            store.write("weights", content("weights", 2))
            gate.wait_until_reached()
            bench.files.calls.clear()
            commit = store.commit(2, metadata(2))
            with pytest.raises(TimeoutError):
                commit.wait(0.1)
        commit.wait()
        order = [(call, name) for call, name, _ in bench.files.calls if call != "read"]
        assert order.index(("sync", "lohan.data")) > max(i for i, c in enumerate(order) if c == ("write", "lohan.data"))
    bench.assert_holds(2)


def test_a_commit_makes_data_durable_before_the_manifest_and_one_twin_before_the_other(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        bench.files.calls.clear()
        store.commit(2, metadata(2)).wait()
    assert [(call, name) for call, name, _ in bench.files.calls if call != "read"] == [
        ("sync", "lohan.data"),
        ("sync", "lohan.data"),
        ("write", "lohan.manifest.0"),
        ("sync", "lohan.manifest.0"),
        ("write", "lohan.manifest.1"),
        ("sync", "lohan.manifest.1"),
    ]


def test_a_commit_that_fails_for_a_broken_record_leaves_the_step_begun_meanwhile_open():
    bench = Bench(versions=3)
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with bench.files.gate("write", name="lohan.data"):
            bench.files.fail("write", errno.EIO, name="lohan.data")
            store.write("small", content("small", 2))
            commit = store.commit(2)
            store.begin(3)
        with pytest.raises(StoreError, match="Write it again, then commit"):
            commit.wait()
        write_step(store, 3)
        store.commit(3, metadata(3)).wait()
    bench.assert_holds(3)


def test_steps_only_go_forward_and_one_at_a_time(bench):
    with bench.open() as store:
        for step in (-1, 0, 1):
            with pytest.raises(StoreError, match=f"Step {step} cannot begin: step 1 is already here"):
                store.begin(step)
        with pytest.raises(StoreError, match=r"'small' cannot be written outside a step: call begin"):
            store.write("small", bytes(100))
        with pytest.raises(StoreError, match=r"no step is open; call begin"):
            store.commit(2)
        store.begin(2)
        with pytest.raises(StoreError, match="already begun"):
            store.begin(2)
        with pytest.raises(StoreError, match=r"Step 3 cannot be committed: step 2 is open"):
            store.commit(3)


def test_what_was_never_written_cannot_be_read_and_says_so(tmp_path):
    create_store([tmp_path], RECORDS, chunk_bytes=CHUNK)
    with open_store([tmp_path]) as store:
        assert store.committed_step is None
        assert not store.is_written("weights")
        store.begin(1)
        store.write("weights", bytes(CHUNK)).wait()
        assert not store.is_written("weights")
        with pytest.raises(RecordMissing, match=r"'weights' was never written \(byte 4096\)"):
            read(store, "weights")


# -- one version, in place -----------------------------------------------------------------------------------


def test_two_versions_are_kept_unless_one_is_asked_for():
    files = FaultyFiles(DRIVES)
    assert create_store(PATHS, RECORDS, weights=[1, 1], chunk_bytes=CHUNK, files=files).versions == 2


def test_an_in_place_store_takes_half_the_space_and_keeps_every_commit():
    one, two = Bench(versions=1), Bench()
    sizes = [len(bench.files.contents(PATHS[0] / "lohan.data")) for bench in (one, two)]
    assert sizes[0] < sizes[1]
    with one.open() as store:
        commit_step(store, 2)
        commit_step(store, 3)
    one.assert_holds(3)


def test_an_in_place_store_cannot_undo():
    with Bench(versions=1).open() as store:
        with pytest.raises(StoreError, match=r"versions: 1 cannot undo.*versions: 2"):
            store.begin(2, undoable=True)
        store.begin(2)
        with pytest.raises(StoreError, match="cannot return to its last commit"):
            store.abandon()


def test_an_in_place_store_says_that_it_is_being_written_before_the_first_byte_changes():
    bench = Bench(versions=1)
    with bench.open() as store:
        bench.files.calls.clear()
        store.begin(2)
        store.write("small", content("small", 2)).wait()
        order = [(call, name) for call, name, _ in bench.files.calls]
        assert order.index(("sync", "lohan.manifest.1")) < order.index(("write", "lohan.data"))


# -- scratch and metadata ------------------------------------------------------------------------------------


def test_scratch_needs_no_step_survives_commits_and_rollbacks_and_not_reopening(bench):
    with bench.open() as store:
        store.write("scratch", content("scratch", 0)).wait()
        store.begin(2, undoable=True)
        store.write("scratch", content("scratch", 1)).wait()
        store.rollback()
        assert read(store, "scratch") == content("scratch", 1)
        write_step(store, 2)
        store.commit(2, metadata(2)).wait()
        store.begin(3)
        store.abandon()
        assert read(store, "scratch") == content("scratch", 1)
    with bench.open() as store:
        with pytest.raises(RecordMissing, match="'scratch' was never written"):
            read(store, "scratch")
    bench.assert_holds(2)


def test_metadata_comes_back_as_it_was_when_handed_over(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        handed_over = {"step": 2, "loss": [1.5, None, "ü"]}
        with bench.files.gate("sync", name="lohan.data"):
            commit = store.commit(2, handed_over)
            handed_over["loss"].append("changed too late")
        commit.wait()
        assert store.metadata == {"step": 2, "loss": [1.5, None, "ü"]}
    with bench.open() as store:
        assert store.metadata == {"step": 2, "loss": [1.5, None, "ü"]}


def test_metadata_that_is_too_large_or_not_json_is_refused_and_the_step_stays_open(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        with pytest.raises(ConfigError, match=r"takes 1\.\d+ MB; 1\.05 MB are reserved. Put large data into a record"):
            store.commit(2, {"text": "x" * (1 << 20)})
        with pytest.raises(ConfigError, match="plain JSON values"):
            store.commit(2, {"array": np.zeros(3)})
        store.commit(2, metadata(2)).wait()
    bench.assert_holds(2)


def test_the_largest_metadata_fits_beside_its_neighbour(bench):
    big = {"text": "x" * ((1 << 20) - 60)}
    with bench.open() as store:
        for step in (2, 3):
            store.begin(step)
            write_step(store, step)
            store.commit(step, big).wait()
    with bench.open() as store:
        assert (store.committed_step, store.metadata, store.notes) == (3, big, ())


# -- the end -------------------------------------------------------------------------------------------------


def test_closing_finishes_what_is_under_way_and_commits_nothing(bench):
    with bench.open() as store:
        store.begin(2)
        write = store.write("weights", content("weights", 2))
    assert write.done
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read("weights", bytearray(10 * CHUNK + 7))
    with pytest.raises(StoreError, match="closed"):
        store.begin(3)
    bench.assert_holds(1)


def test_closing_lets_a_commit_under_way_finish(bench):
    with bench.open() as store:
        store.begin(2)
        write_step(store, 2)
        store.commit(2, metadata(2))
    bench.assert_holds(2)


def test_closing_ends_every_thread_of_the_store(bench):
    before = threading.active_count()
    with bench.open() as store:
        commit_step(store, 2)
    assert threading.active_count() == before
    assert not bench.files._open


def test_an_observer_hears_of_every_request_and_its_failure_reaches_the_caller(bench):
    heard = []
    with bench.open(observer=lambda *event: heard.append(event)) as store:
        commit_step(store, 2)
        read(store, "small")
    assert {event[0] for event in heard} == {"read", "write"}
    assert sum(event[3] for event in heard if event[2] == "weights") == len(content("weights", 2))

    def complain(*event):
        raise RuntimeError("observer")

    with bench.open(observer=complain) as store:
        with pytest.raises(RuntimeError, match="observer"):
            store.read("small", bytearray(100)).wait(30)


def test_importing_the_store_does_not_import_torch():
    code = "import sys, lohan.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_several_threads_may_read_and_write_at_once(bench):
    with bench.open() as store:
        store.begin(2)
        errors = []

        def work(name):
            try:
                for step in range(30):
                    store.write(name, content(name, step)).wait()
                    if read(store, name) != content(name, step):
                        errors.append((name, step))
            except Exception as error:
                errors.append(error)

        threads = [run(lambda name=name: work(name)) for name in ("weights", "small", "moments.0", "moments.1")]
        for thread in threads:
            thread.join()
        assert errors == []
