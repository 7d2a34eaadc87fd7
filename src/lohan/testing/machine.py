"""Random operation sequences on a store whose drives crash, lose power and fail, against a model of dicts.

The model knows one thing per chunk: its bytes. A version is such a dict; the store has a committed one, a working
one and sometimes a base to roll back to. After every reopening the store must hold exactly one version that the
model allows: the last whose commit finished, or the one whose commit was under way. Needs hypothesis.

The in-memory drives are `lohan.testing.faults`; chunks are single pages, so small records already have several
chunks, several drives and torn pages.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lohan.errors import RecordMissing, StoreError, StoreTorn
from lohan.store import Handle, RecordSpec, Store, create_store, open_store
from lohan.store.arena import PAGE_BYTES, map_memory, round_up
from lohan.testing.faults import FaultyFiles

CHUNK = PAGE_BYTES
RECORDS = (
    RecordSpec(name="a", num_bytes=100, group="g"),
    RecordSpec(name="b", num_bytes=4096, group="g"),
    RecordSpec(name="c", num_bytes=9000, group="g"),
    RecordSpec(name="d", num_bytes=20480),
    RecordSpec(name="s", num_bytes=5000, scratch=True),
)
SIZES = {r.name: r.num_bytes for r in RECORDS}
KEPT = tuple(r.name for r in RECORDS if not r.scratch)

Version = dict[tuple[str, int], bytes | None]
"""Bytes per (record, chunk); None where the last write failed. Absent: never written."""


def num_chunks(name: str) -> int:
    return -(-SIZES[name] // CHUNK)


def chunk_bytes(name: str, chunk: int) -> int:
    return min(CHUNK, SIZES[name] - chunk * CHUNK)


def number(step: int | None) -> int:
    return -1 if step is None else step


def metadata(step: int) -> dict[str, object]:
    """Long enough for a manifest of several sectors, so that losing power can tear it."""
    return {"step": step, "noise": random.Random(step).randbytes(1000).hex()}


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> str:
    """The message of the StoreError that this call must raise."""
    try:
        call(*arguments, **options)
    except StoreError as error:
        return str(error)
    raise AssertionError("this should have been refused")


seeds = st.integers(0, 2**32 - 1)
# (record, first chunk, chunks): reduced to what the record has.
parts = st.tuples(st.sampled_from([r.name for r in RECORDS]), st.integers(0, 4), st.integers(1, 5))
kinds = st.sampled_from(["process", "power"])
# Opening makes every piece of metadata durable before it trusts it, so mending starts only after a dozen changes.
deaths_while_opening = st.lists(st.tuples(st.integers(0, 16), kinds), max_size=2)


class StoreMachine(RuleBasedStateMachine):
    """One store, its drives, and what it should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.owned = ExitStack()
        # The store reserves a megabyte for metadata in each of four places; moving it would take all the time.
        self.owned.enter_context(mock.patch("lohan.store.manifest.METADATA_BYTES", 4096))
        self.store: Store | None = None
        self.opened = ExitStack()
        self.pending: list[tuple[Handle, memoryview | None, bytes | None]] = []
        self.commit: tuple[Handle, int, Version] | None = None

    # -- setting up -----------------------------------------------------------------------------------

    @initialize(
        versions=st.sampled_from([1, 2, 2, 2, 3, 3]),
        weights=st.sampled_from([[1.0], [1.0, 1.0], [3.0, 1.0], [1.0, 2.0, 1.0]]),
        direct=st.sampled_from(["", "", "", "open", "read"]),
        seed=seeds,
    )
    def create(self, versions: int, weights: list[float], direct: str, seed: int) -> None:
        self.versions, self.weights, self.seed = versions, weights, seed
        self.folders = [Path(f"/drive{i}") for i in range(len(weights))]
        self.files = FaultyFiles(self.folders, seed=seed)
        self.files.refuse_direct = direct
        self.fresh()

    def fresh(self) -> None:
        paths = [folder / "store" for folder in self.folders]
        for path in [p for p in self.files.listing() if p.parent.name == "store"]:
            self.files.remove(path)
        create_store(paths, RECORDS, versions=self.versions, weights=self.weights, chunk_bytes=CHUNK, files=self.files)
        self.candidates: list[tuple[int | None, Version]] = [(None, {})]
        self.last_begun = self.last_tried = -1
        self.reopen_from_drives()

    def reopen_from_drives(self) -> None:
        """Open and find exactly one of the allowed versions, whole."""
        paths = [folder / "store" for folder in reversed(self.folders)]
        try:
            store = self.opened.enter_context(open_store(paths, threads_per_drive=1, files=self.files))
        except StoreTorn:
            assert self.versions == 1, "only a store with one version can be torn"
            assert self.last_tried > number(self.candidates[0][0]), "nothing was written over the last commit"
            self.fresh()
            return
        allowed = dict(self.candidates)
        step = store.committed_step
        assert step in allowed, f"found step {step}, expected one of {list(allowed)}"
        if self.versions == 1:
            assert self.last_begun <= number(step), "a step written over was not noticed"
        if step is not None:
            assert store.metadata == metadata(step)
        self.store = store
        self.committed = (step, allowed[step])
        self.working: Version = dict(allowed[step])
        self.base: Version | None = None
        self.step: int | None = None
        self.last_begun = self.last_tried = number(step)
        self.scratch: Version = {}
        self.candidates = [self.committed]
        self.commit = None
        self.pending = []
        self.check_everything()

    # -- the model ------------------------------------------------------------------------------------

    def version_of(self, name: str) -> Version:
        return self.working if name in KEPT else self.scratch

    def keys(self, name: str, first: int, count: int) -> list[tuple[str, int]]:
        first %= num_chunks(name)
        return [(name, c) for c in range(first, min(num_chunks(name), first + count))]

    def contents(self, keys: list[tuple[str, int]], seed: int) -> list[bytes]:
        return [random.Random(f"{seed} {key}").randbytes(chunk_bytes(*key)) for key in keys]

    def settle(self) -> None:
        """Wait for everything that was issued; nothing may have failed."""
        assert self.store is not None
        for handle, buffer, expected in self.pending:
            handle.wait(60)
            if buffer is not None:
                assert bytes(buffer[: len(expected or b"")]) == expected
        self.pending = []
        if self.commit is not None:
            handle, step, version = self.commit
            handle.wait(60)
            self.commit = None
            self.committed = (step, version)
            self.candidates = [self.committed]
            assert self.store.committed_step == step

    def check_everything(self) -> None:
        self.settle()
        for name in SIZES:
            self.issue_read(name, 0, num_chunks(name), "aligned")
        self.settle()

    def memory(self, num_bytes: int, shape: str) -> memoryview:
        if shape == "aligned":
            return memoryview(map_memory(round_up(num_bytes), touch=False))
        if shape == "exact":
            return memoryview(map_memory(round_up(num_bytes), touch=False))[:num_bytes]
        return memoryview(bytearray(num_bytes + 64))[8 : 8 + num_bytes]

    def issue_read(self, name: str, first: int, count: int, shape: str) -> None:
        assert self.store is not None
        keys = self.keys(name, first, count)
        size = sum(chunk_bytes(*key) for key in keys)
        into = self.memory(size, shape)
        found = [self.version_of(name).get(key, b"") for key in keys]
        if any(data is None or data == b"" for data in found):
            try:
                self.store.read(name, into, offset=keys[0][1] * CHUNK, num_bytes=size).wait(60)
            except RecordMissing:
                assert b"" in found
            except StoreError:
                assert None in found
            else:
                raise AssertionError("a record without a value was read")
            return
        handle = self.store.read(name, into, offset=keys[0][1] * CHUNK, num_bytes=size)
        self.pending.append((handle, into, b"".join(d for d in found if d)))

    def start_write(self, name: str, keys: list[tuple[str, int]], data: list[bytes], shape: str) -> Handle:
        assert self.store is not None
        joined = b"".join(data)
        buffer = self.memory(len(joined), shape)
        buffer[: len(joined)] = joined
        return self.store.write(name, buffer, offset=keys[0][1] * CHUNK)

    def next_step(self, gap: int = 1, *, undoable: bool = False) -> int:
        """Begin a step, in the store and in the model."""
        assert self.store is not None
        step = self.last_begun + gap
        self.last_tried = step
        self.store.begin(step, undoable=undoable)
        self.step = self.last_begun = step
        self.base = dict(self.working) if undoable else None
        return step

    def issue_commit(self) -> None:
        assert self.store is not None
        assert self.step is not None
        version = dict(self.working)
        step, self.step, self.base = self.step, None, None
        if self.commit is not None:
            self.settle()
        self.candidates = [self.committed, (step, version)]
        self.commit = (self.store.commit(step, metadata(step)), step, version)

    # -- ordinary life --------------------------------------------------------------------------------

    @rule(gap=st.integers(1, 3), undoable=st.booleans())
    def begin(self, gap: int, undoable: bool) -> None:
        assert self.store is not None
        newest = self.committed[1] if self.commit is None else self.commit[2]
        if undoable and (self.versions == 1 or (self.versions == 2 and self.working != newest)):
            self.settle()
            refusal(self.store.begin, self.last_begun + gap, undoable=True)
            return
        try:
            self.next_step(gap, undoable=undoable)
        except StoreError:
            # Writing the same bytes again is a difference to the store, and none to the model.
            assert undoable
            assert self.versions < 3
            self.last_tried = self.last_begun

    @rule(part=parts, seed=seeds, shape=st.sampled_from(["aligned", "exact", "unaligned"]))
    def write(self, part: tuple[str, int, int], seed: int, shape: str) -> None:
        assert self.store is not None
        name, first, count = part
        keys = self.keys(name, first, count)
        data = self.contents(keys, seed)
        if name in KEPT and self.step is None:
            assert "call begin(step) first" in refusal(self.start_write, name, keys, data, shape)
            return
        self.pending.append((self.start_write(name, keys, data, shape), None, None))
        self.version_of(name).update(zip(keys, data, strict=True))

    @precondition(lambda self: self.step is not None)
    @rule(seed=seeds, shape=st.sampled_from(["aligned", "unaligned"]))
    def write_group(self, seed: int, shape: str) -> None:
        assert self.store is not None
        buffer = self.memory(self.store.layout.group_bytes("g"), shape)
        for name, offset in self.store.layout.group_offsets("g").items():
            keys = self.keys(name, 0, num_chunks(name))
            data = self.contents(keys, seed)
            buffer[offset : offset + SIZES[name]] = b"".join(data)
            self.working.update(zip(keys, data, strict=True))
        self.pending.append((self.store.write_group("g", buffer), None, None))

    @rule(part=parts, shape=st.sampled_from(["aligned", "exact", "unaligned"]))
    def read(self, part: tuple[str, int, int], shape: str) -> None:
        self.issue_read(*part, shape)

    @rule()
    def read_group(self) -> None:
        assert self.store is not None
        names = ("a", "b", "c")
        if any(not self.working.get((n, c)) for n in names for c in range(num_chunks(n))):
            return
        into = self.memory(self.store.layout.group_bytes("g"), "aligned")
        handle = self.store.read_group("g", into)
        for name, offset in self.store.layout.group_offsets("g").items():
            expected = b"".join(self.working[name, c] or b"" for c in range(num_chunks(name)))
            self.pending.append((handle, into[offset : offset + SIZES[name]], expected))

    @precondition(lambda self: self.step is not None and None not in self.working.values())
    @rule(wait=st.booleans())
    def commit_step(self, wait: bool) -> None:
        self.issue_commit()
        if wait:
            self.settle()

    @precondition(lambda self: self.step is not None and None in self.working.values())
    @rule()
    def commit_of_a_broken_version_is_refused(self) -> None:
        assert self.store is not None
        assert self.step is not None
        self.settle()
        assert "Write it again" in refusal(self.store.commit(self.step, {}).wait, 60)
        self.base = None

    @rule()
    def rollback(self) -> None:
        assert self.store is not None
        self.settle()
        if self.base is None:
            refusal(self.store.rollback)
            return
        self.store.rollback()
        self.working = dict(self.base)

    @precondition(lambda self: self.versions == 3)
    @rule(parts=st.lists(parts, min_size=1, max_size=3), seed=seeds)
    def a_step_is_undone(self, parts: list[tuple[str, int, int]], seed: int) -> None:
        """Also on top of steps that were never committed, and while a commit is under way."""
        assert self.store is not None
        self.next_step(undoable=True)
        before = dict(self.working)
        for number, (name, first, count) in enumerate(parts):
            keys = self.keys(name, first, count)
            data = self.contents(keys, seed + number)
            self.pending.append((self.start_write(name, keys, data, "unaligned"), None, None))
            self.version_of(name).update(zip(keys, data, strict=True))
        self.store.rollback()
        self.working = before
        self.check_everything()

    @rule()
    def abandon(self) -> None:
        assert self.store is not None
        self.settle()
        if self.versions == 1 and self.last_begun > number(self.committed[0]):
            return
        self.store.abandon()
        self.working, self.base, self.step = dict(self.committed[1]), None, None
        self.last_begun = self.last_tried = number(self.committed[0])

    @rule()
    def everything_reads_back(self) -> None:
        self.check_everything()

    # -- bad days -------------------------------------------------------------------------------------

    @precondition(lambda self: self.step is not None)
    @rule(part=parts, seed=seeds, drive=st.integers(0, 2), code=st.sampled_from([errno.EIO, errno.ENOSPC]))
    def write_fails(self, part: tuple[str, int, int], seed: int, drive: int, code: int) -> None:
        """Its chunks either have the new bytes or are known to be broken, and writing again mends them."""
        assert self.store is not None
        self.settle()
        name, first, count = part
        keys = self.keys(name, first, count)
        data = self.contents(keys, seed)
        # One drive, so that chance has no part in which request it is, and a failure can be repeated.
        self.files.heal()
        self.files.fail("write", code, name=str(self.folders[drive % len(self.folders)]))
        handle = self.start_write(name, keys, data, "aligned")
        try:
            handle.wait(60)
        except StoreError:
            failed = True
        else:
            failed = False
        self.files.heal()
        broken = 0
        for key, content in zip(keys, data, strict=True):
            into = self.memory(len(content), "exact")
            try:
                self.store.read(name, into, offset=key[1] * CHUNK, num_bytes=len(content)).wait(60)
                assert bytes(into) == content
                self.version_of(name)[key] = content
            except StoreError:
                broken += 1
                self.version_of(name)[key] = None
        assert (broken > 0) == failed

    @precondition(lambda self: self.step is not None)
    @rule(part=parts, seed=seeds)
    def write_fails_and_is_repeated_before_anyone_waits(self, part: tuple[str, int, int], seed: int) -> None:
        assert self.store is not None
        self.settle()
        name, first, count = part
        keys = self.keys(name, first, count)
        data = self.contents(keys, seed)
        self.files.heal()
        self.files.fail("write", errno.EIO, name="lohan.data")
        first_try = self.start_write(name, keys, self.contents(keys, seed + 1), "unaligned")
        second_try = self.start_write(name, keys, data, "aligned")
        self.version_of(name).update(zip(keys, data, strict=True))
        self.issue_read(name, first, count, "unaligned")
        second_try.wait(60)
        assert isinstance(first_try.error, StoreError)
        self.settle()
        self.files.heal()

    @rule(call=st.sampled_from(["read", "write"]), keep=st.integers(1, 9000), times=st.integers(1, 3))
    def transfers_stop_short(self, call: str, keep: int, times: int) -> None:
        """Takes effect on whatever comes next, and must not be noticed."""
        self.files.heal()  # a drive that stops short too often in a row is called broken, and rightly
        self.files.stop_short(call, keep, name="lohan.data", times=times)

    @precondition(lambda self: self.step is not None and None not in self.working.values())
    @rule(
        fault=st.sampled_from(
            [("sync", "data", 0), ("write", "manifest", 0), ("write", "manifest", 1), ("sync", "manifest", 0),
             ("sync", "manifest", 1)]
        ),
        then=st.sampled_from(["close", "process", "power"]),
        seed=seeds,
    )  # fmt: skip
    def commit_fails(self, fault: tuple[str, str, int], then: str, seed: int) -> None:
        """The store refuses to go on, and after reopening has the old version or the new one."""
        assert self.store is not None
        self.settle()
        call, name, skip = fault
        self.files.fail(call, errno.EIO, name=name, skip=skip)
        self.issue_commit()
        assert self.commit is not None
        refusal(self.commit[0].wait, 60)
        self.files.heal()
        assert "open it again" in refusal(self.store.begin, self.last_begun + 1)
        assert "open it again" in refusal(self.store.write, "b", bytes(4096))
        self.die(then, seed)

    @rule(kind=kinds, seed=seeds, deaths=deaths_while_opening)
    def crash(self, kind: str, seed: int, deaths: list[tuple[int, str]]) -> None:
        """With whatever happens to be under way."""
        self.files.freeze()
        self.die(kind, seed, deaths)

    @rule(
        num_changes=st.integers(0, 12),
        num_steps=st.integers(1, 3),
        part=parts,
        kind=kinds,
        seed=seeds,
        deaths=deaths_while_opening,
    )
    def crash_at_work(
        self,
        num_changes: int,
        num_steps: int,
        part: tuple[str, int, int],
        kind: str,
        seed: int,
        deaths: list[tuple[int, str]],
    ) -> None:
        """The process dies inside one chosen change, somewhere in the next few steps."""
        assert self.store is not None
        if None in self.working.values():
            return
        self.settle()
        self.files.crash_after(num_changes)
        try:
            for i in range(num_steps):
                if self.step is None:
                    self.next_step()
                name, first, count = part
                if name not in KEPT:
                    name = "d"
                keys = self.keys(name, first, count)
                data = self.contents(keys, seed + i)
                self.pending.append((self.start_write(name, keys, data, "aligned"), None, None))
                self.working.update(zip(keys, data, strict=True))
                self.issue_commit()
            self.settle()
        except StoreError:
            assert self.files.frozen, "an error without a cause"
        self.files.freeze()
        self.die(kind, seed, deaths)

    @rule()
    def close_and_open(self) -> None:
        self.settle()
        self.die("close", 0)

    def die(self, kind: str, seed: int, deaths: list[tuple[int, str]] | None = None) -> None:
        """End this process in some way, perhaps several more while they open the store, then look."""
        self.opened.close()
        if self.commit is not None and self.commit[0].error is None:
            self.candidates = [self.commit[1:]]
        self.store = None
        self.bury(kind, seed)
        for num_changes, next_kind in deaths or []:
            self.files.crash_after(num_changes)
            try:
                paths = [folder / "store" for folder in self.folders]
                with open_store(paths, threads_per_drive=1, files=self.files):
                    pass
            except StoreTorn:
                pass
            except StoreError:
                assert self.files.frozen, "an error without a cause"
            self.bury(next_kind, seed + num_changes)
        self.files.heal()
        self.reopen_from_drives()

    def bury(self, kind: str, seed: int) -> None:
        if kind == "process":
            self.files.crash()
        elif kind == "power":
            self.files.power_loss(random.Random(seed))

    def teardown(self) -> None:
        try:
            if self.store is not None:
                self.check_everything()
        finally:
            if hasattr(self, "files"):
                self.files.freeze()
            self.opened.close()
            self.owned.close()


def run(num_examples: int, *, num_steps: int = 30, **options: Any) -> None:
    """Drive this many random sequences; raises with the shortest failing one."""
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            **options,
        ),
    )
