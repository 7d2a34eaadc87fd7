"""The store: named records on several drives, in versions, moved asynchronously.

    with open_store(["/nvme0/run", "/nvme1/run"]) as store:
        read = store.read("unit.3.weights", into=slab.padded)    # starts now
        store.begin(step=7)
        write = store.write("unit.3.weights", slab.padded)       # beside the committed version
        ...
        write.wait()                                             # raises here what failed in the I/O thread
        store.commit(7, {"loss": 1.5}).wait()                    # durable from here on

Promises:
- What commit() made durable is what a reopened store finds, to the bit, whatever happens afterwards.
- Operations on the same bytes take effect in the order they were issued; others run in any order, at once.
- A failed write makes its records unreadable and commit() impossible until they are written again.
- Memory handed to read() or write() belongs to the store until its handle is done.

All methods are safe from any thread, but begin(), rollback() and commit() are meant for one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lohan.errors import ConfigError, RecordMissing, StoreCorrupt, StoreError, StoreTorn
from lohan.store.arena import round_up
from lohan.store.drive import Drive, DriveLock, Header, has_store, order_drives, read_header
from lohan.store.files import Files
from lohan.store.handle import Handle
from lohan.store.layout import Layout
from lohan.store.manifest import NEVER, Manifest, manifest_payload_bytes
from lohan.store.queues import Admission, Job, Queue, Worker
from lohan.store.requests import REQUEST_BYTES, Memory, Request, plan_requests, read_request, write_request
from lohan.store.sealed import LAYOUT, MANIFEST, UNUSABLE, place_bytes
from lohan.store.twins import Twins
from lohan.store.versions import BROKEN, Slots, Versions

Observer = Callable[[str, int, str, int, float, float], None]
"""Told of every request: "read" or "write", drive, record, bytes, and its first and last perf_counter()."""

# Requests per drive, each way, that may be queued before a caller waits. Enough to hide a caller's hiccup of
# 0.1 s on a 7 GB/s drive; picked by arithmetic, not measured.
QUEUE_DEPTH = 256

# I/O threads per drive, each way. A thread that computes checksums keeps no request on the drive, so there are more
# than the drive needs: 4 are slower, 12 hardly faster (benchmarks/results/2026-11-16_store_io.md).
THREADS_PER_DRIVE = 8


class _Operation:
    """One read or write of consecutive chunks, from issue to done."""

    __slots__ = ("chunks", "error", "handle", "label", "requests", "slots", "unfinished", "waits_for", "write")

    def __init__(self, handle: Handle, chunks: slice, slots: Slots, label: str, write: bool, requests: list[Request]):
        self.handle, self.chunks, self.label, self.write, self.requests = handle, chunks, label, write, requests
        self.slots = slots
        self.unfinished = len(requests)
        self.waits_for = 0
        self.error: BaseException | None = None

    def conflicts(self, other: _Operation) -> bool:
        overlap = self.chunks.start < other.chunks.stop and other.chunks.start < self.chunks.stop
        return overlap and (self.write or other.write)

    def hidden_by_one_of(self, others: Sequence[_Operation], chunks: slice) -> bool:
        """Whether a later write covers all that a reader of `chunks` would see of this operation."""
        first, last = max(self.chunks.start, chunks.start), min(self.chunks.stop, chunks.stop)
        later = others[others.index(self) + 1 :]
        return any(op.write and op.chunks.start <= first and last <= op.chunks.stop for op in later)


class Store:
    """An open store. Made by open_store()."""

    def __init__(
        self,
        *,
        layout: Layout,
        manifest: Manifest,
        sequence: int,
        manifests: Twins,
        drives: Sequence[Drive],
        locks: Sequence[DriveLock],
        read_only: bool,
        verify: bool,
        notes: Sequence[str],
        observer: Observer | None,
    ):
        self.layout = layout
        self.drives = tuple(drives)
        self.notes = tuple(notes)
        """What the user should know: damage made good, slow paths taken."""
        self.read_only = read_only
        self._manifests = manifests
        self._manifest = manifest
        self._sequence = sequence
        self._locks = locks
        self._verify = verify
        self._observer = observer
        self._versions = Versions(layout, manifest)
        self._state = threading.Condition()  # guards everything below and the tables in _versions
        self._active: list[_Operation] = []
        self._admission = {False: Admission(QUEUE_DEPTH * len(drives)), True: Admission(QUEUE_DEPTH * len(drives))}
        self._commits = Queue("lohan-commit", 1)
        self._step: int | None = None
        self._last_begun = -1 if manifest.step is None else manifest.step
        self._failed: BaseException | None = None
        self._closed = False

    # -- what is here ---------------------------------------------------------------------------------

    @property
    def committed_step(self) -> int | None:
        """The last committed step; None if nothing was committed yet."""
        return self._manifest.step

    @property
    def metadata(self) -> dict[str, Any]:
        """What was handed to the last commit."""
        return self._manifest.metadata

    @property
    def name(self) -> str:
        """The store's random name, the same on all its drives."""
        return self.drives[0].header.store

    @property
    def torn(self) -> bool:
        """Whether a step is half written over the committed one: only with versions: 1, seen by a reader."""
        return self._manifest.dirty

    def is_written(self, name: str) -> bool:
        """Whether every byte of a record has a value."""
        return bool(np.all(self._slots_of(name) < BROKEN))

    def written_parts(self, name: str) -> list[tuple[int, int]]:
        """The stretches of a record that have a value, as (offset, size) in the way read() takes them."""
        written = np.concatenate(([False], self._slots_of(name) < BROKEN, [False]))
        edges = np.flatnonzero(written[1:] != written[:-1]).tolist()
        total, step = self.layout.records[self.layout.record(name)].num_bytes, self.layout.chunk_bytes
        return [
            (first * step, min(last * step, total) - first * step)
            for first, last in zip(edges[::2], edges[1::2], strict=True)
        ]

    def _slots_of(self, name: str) -> Slots:
        index = self.layout.record(name)
        chunks = slice(int(self.layout.first_chunk[index]), int(self.layout.first_chunk[index + 1]))
        with self._state:
            return self._versions.working[chunks].copy()

    # -- reading and writing --------------------------------------------------------------------------

    def read(self, name: str, into: object, *, offset: int = 0, num_bytes: int | None = None) -> Handle:
        """Start reading a record, or the part of it from `offset` on, into writable memory.

        `into` is as long as the part, or as the part rounded up to a page; page-aligned and rounded is fastest.
        A part starts at a multiple of layout.chunk_bytes and ends at another, or with the record.
        """
        chunks, size = self._part(name, offset, num_bytes)
        return self._issue(name, chunks, _fitting(into, size, name, writable=True), write=False)

    def write(self, name: str, data: object, *, offset: int = 0) -> Handle:
        """Start writing a record, or the part of it from `offset` on, into the working version.

        Waits here while too much is queued, or while a commit under way still needs the place.
        """
        view = memoryview(data)  # type: ignore[arg-type]
        record = self.layout.records[self.layout.record(name)]
        size = min(view.nbytes, record.num_bytes - offset)
        chunks, size = self._part(name, offset, size)
        return self._issue(name, chunks, _fitting(data, size, name, writable=False), write=True)

    def read_group(self, name: str, into: object) -> Handle:
        """Start reading all records of a group; layout.group_offsets() says where each one lands."""
        chunks, size = self._group(name)
        return self._issue(name, chunks, _fitting(into, size, name, writable=True), write=False)

    def write_group(self, name: str, data: object) -> Handle:
        """Start writing all records of a group from one buffer laid out by layout.group_offsets()."""
        chunks, size = self._group(name)
        return self._issue(name, chunks, _fitting(data, size, name, writable=False), write=True)

    def _part(self, name: str, offset: int, num_bytes: int | None) -> tuple[slice, int]:
        index = self.layout.record(name)
        total, step = self.layout.records[index].num_bytes, self.layout.chunk_bytes
        size = total - offset if num_bytes is None else num_bytes
        if offset % step or not 0 <= offset < total or size <= 0 or offset + size > total:
            raise ConfigError(
                f"Record {name!r} has {total} bytes in chunks of {step}; a part from {offset} of {size} bytes is not "
                "made of whole chunks inside it."
            )
        if size % step and offset + size != total:
            raise ConfigError(
                f"A part of record {name!r} must end at a multiple of {step} or at its end ({total}), not at "
                f"{offset + size}."
            )
        first = int(self.layout.first_chunk[index]) + offset // step
        return slice(first, first + -(-size // step)), size

    def _group(self, name: str) -> tuple[slice, int]:
        records = self.layout.group(name)
        first, last = self.layout.first_chunk[[records.start, records.stop]].tolist()
        return slice(first, last), self.layout.group_bytes(name)

    def _issue(self, label: str, chunks: slice, memory: Memory, *, write: bool) -> Handle:
        handle = Handle(f"{'Writing' if write else 'Reading'} {label}", None if write else self._promote)
        scratch = bool(self.layout.chunk_scratch[chunks.start])
        # A guess at the number of requests is enough to bound the queue; which slots they go to is not known yet.
        admission = self._admission[write]
        num_requests = 1 + memory.view.nbytes // REQUEST_BYTES
        admission.enter(num_requests)
        try:
            with self._state:
                if write:
                    slots = self._writable(label, chunks, scratch)
                else:
                    self._check_open()
                    slots = self._versions.working[chunks].copy()
                    self._check_readable(chunks.start, slots)
                requests = plan_requests(self.layout, chunks, slots)
                operation = _Operation(handle, chunks, slots, label, write, requests)
                if write:
                    self._versions.working[chunks] = slots
                earlier = [other for other in self._active if operation.conflicts(other)]
                decisive = [] if write else [op for op in earlier if not op.hidden_by_one_of(earlier, chunks)]
                operation.waits_for = len(earlier) + 1
                self._active.append(operation)
        except BaseException:
            admission.leave(num_requests)
            raise
        handle.then(lambda _: admission.leave(num_requests))
        for other in earlier:
            other.handle.then(partial(self._earlier_done, operation, memory, other in decisive))
        self._earlier_done(operation, memory, False, None)
        return handle

    def _writable(self, label: str, chunks: slice, scratch: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The slots to write to; waits for a commit that still needs them."""
        while True:
            self._check_open()
            self._check_writer()
            if self._step is None and not scratch:
                raise StoreError(f"Record {label!r} cannot be written outside a step: call begin(step) first.")
            slots = self._versions.targets(chunks)
            if slots is not None:
                return slots
            if self._versions.committing is None:
                raise StoreError(
                    f"An undoable step needs a third version while step {self._last_begun - 1} is not committed. "
                    "Create the store with versions: 3, or commit every step."
                )
            self._state.wait()

    def _check_readable(self, first: int, slots: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if np.all(slots < BROKEN):
            return
        bad = int(np.flatnonzero(slots >= BROKEN)[0])
        record, start = self.layout.record_of_chunk(first + bad)
        if slots[bad] == NEVER:
            raise RecordMissing(f"Record {record.name!r} was never written (byte {start}).")
        raise StoreError(f"The last write to record {record.name!r} failed (byte {start}); write it again.")

    def _earlier_done(self, operation: _Operation, memory: Memory, decisive: bool, done: Handle | None) -> None:
        """One of the operations this one stands behind is done; start when it was the last.

        A read fails with a write before it if that write is `decisive`: nothing later covers what it failed to write.
        """
        with self._state:
            if decisive and done is not None:
                operation.error = operation.error or done.error
            operation.waits_for -= 1
            if operation.waits_for:
                return
            blocked = operation.error is not None
            if blocked:
                operation.unfinished = 1
        if blocked:
            self._request_done(operation)
            return
        for request in operation.requests:
            drive = self.drives[request.drive]
            queue = drive.writes if operation.write else drive.reads
            queue.put(Job(operation.handle, partial(self._run, operation, request, memory)))

    def _run(self, operation: _Operation, request: Request, memory: Memory, worker: Worker) -> None:
        """On an I/O thread: move one request. Whatever happens, the handle hears of it."""
        drive = self.drives[request.drive]
        started = time.perf_counter()
        try:
            if operation.write:
                write_request(self.layout, self._versions, drive, request, memory, worker)
            else:
                read_request(self.layout, self._versions, drive, request, memory, worker, self._verify)
        except BaseException as error:
            operation.error = operation.error or error
            if operation.write:
                with self._state:
                    lost = ~self._written_again(operation, request)
                    self._versions.failed(request.chunks[lost], request.slots[lost])
        try:
            if self._observer is not None:
                kind = "write" if operation.write else "read"
                moved = sum(request.lengths)
                self._observer(kind, request.drive, operation.label, moved, started, time.perf_counter())
        except BaseException as error:
            operation.error = operation.error or error
        self._request_done(operation)

    def _written_again(self, operation: _Operation, request: Request) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which chunks of a request have a later write on its way to the same place: that one decides their fate."""
        again = np.zeros(len(request.chunks), bool)
        for later in self._active[self._active.index(operation) + 1 :]:
            if later.write:
                inside = (request.chunks >= later.chunks.start) & (request.chunks < later.chunks.stop)
                again[inside] |= later.slots[request.chunks[inside] - later.chunks.start] == request.slots[inside]
        return again

    def _request_done(self, operation: _Operation) -> None:
        with self._state:
            operation.unfinished -= 1
            if operation.unfinished:
                return
            self._active.remove(operation)
            self._state.notify_all()
        operation.handle.finish(error=operation.error)

    def _promote(self, handle: Handle) -> None:
        for drive in self.drives:
            drive.reads.promote(handle)

    # -- versions -------------------------------------------------------------------------------------

    def begin(self, step: int, *, undoable: bool = False) -> None:
        """Open the working version for `step`. Writes since the last commit stay and are built upon.

        With `undoable`, rollback() can return to this moment until the next begin() or commit().
        """
        with self._state:
            self._check_open()
            self._check_writer()
            if self._step is not None and step == self._step:
                raise StoreError(f"Step {step} has already begun.")
            if step <= self._last_begun:
                raise StoreError(f"Step {step} cannot begin: step {self._last_begun} is already here.")
            if undoable and self.layout.versions < 3 and self._has_uncommitted_writes():
                raise StoreError(
                    f"Step {step} cannot be undoable: the store keeps {self.layout.versions} versions and the step "
                    "before is not committed. Create the store with versions: 3, or commit every step."
                )
            if self.layout.versions == 1:
                if undoable:
                    raise StoreError("A store with versions: 1 cannot undo a step. Create it with versions: 2.")
                self._mark_dirty()
            self._versions.base = self._versions.working.copy() if undoable else None
            self._step = self._last_begun = step

    def rollback(self) -> None:
        """Forget what was written since begin(step, undoable=True). The step is still open."""
        with self._state:
            self._check_open()
            if self._step is None or self._versions.base is None:
                raise StoreError("There is no undoable step to roll back: call begin(step, undoable=True) first.")
            self._state.wait_for(lambda: not self._writes())
            kept = ~self.layout.chunk_scratch
            self._versions.working[kept] = self._versions.base[kept]

    def abandon(self) -> None:
        """Forget everything written since the last commit."""
        with self._state:
            self._check_open()
            self._check_writer()
            if self.layout.versions == 1 and self._manifest.dirty:
                raise StoreError("A store with versions: 1 cannot return to its last commit: it was written over.")
            self._state.wait_for(lambda: not self._writes() and self._versions.committing is None)
            scratch = self.layout.chunk_scratch
            self._versions.working[~scratch] = self._versions.committed[~scratch]
            self._versions.base = None
            self._step = None
            self._last_begun = -1 if self._manifest.step is None else self._manifest.step

    def commit(self, step: int, metadata: dict[str, Any] | None = None) -> Handle:
        """Make the working version of `step` the one a reopened store finds. Returns at once.

        Order: all writes issued so far finish, data becomes durable on every drive, then the manifest. The next
        step may begin meanwhile; its writes wait where they would touch what this commit still needs.
        """
        with self._state:
            self._check_open()
            self._check_writer()
            self._state.wait_for(lambda: self._versions.committing is None)
            self._check_writer()  # the commit waited for may have failed
            if self._step != step:
                raise StoreError(
                    f"Step {step} cannot be committed: "
                    + (
                        f"step {self._step} is open."
                        if self._step is not None
                        else "no step is open; call begin(step)."
                    )
                )
            # Checked now, so that bad metadata is the caller's error and not the commit thread's, and copied, so that
            # what the caller changes afterwards is not in it.
            Manifest(step, metadata or {}, False, np.zeros(0, np.uint8), np.zeros(0, np.uint64)).to_bytes()
            metadata = json.loads(json.dumps(metadata or {}))
            self._versions.committing = self._versions.working.copy()
            self._versions.base = None
            self._step = None
            writes = [operation.handle for operation in self._writes()]
        handle = Handle(f"Committing step {step}")
        self._commits.put(Job(handle, lambda _: self._commit(handle, step, metadata, writes)))
        return handle

    def _commit(self, handle: Handle, step: int, metadata: dict[str, Any], writes: list[Handle]) -> None:
        """On the commit thread."""
        error: BaseException | None = None
        durable = False
        try:
            for write in writes:
                write._done.wait()
            with self._state:
                committing = self._versions.committing
                assert committing is not None
                slots, sums = self._versions.snapshot(committing)
            if np.any(slots == BROKEN):
                record, start = self.layout.record_of_chunk(int(np.flatnonzero(slots == BROKEN)[0]))
                raise StoreError(
                    f"Step {step} cannot be committed: a write to record {record.name!r} failed (byte {start}). "
                    "Write it again, then commit."
                )
            durable = True  # from here on a failure leaves what is on the drives unknown until reopening
            self._sync_drives()
            manifest = Manifest(step, metadata, False, slots, sums)
            self._manifests.write(self._sequence + 1, manifest.to_bytes())
        except BaseException as caught:
            error = caught
        with self._state:
            if error is None:
                self._versions.committed = slots
                self._manifest, self._sequence = manifest, self._sequence + 1
            elif durable:
                self._failed = error
            else:
                # Nothing was touched: the caller may mend and commit again, now or with the step begun meanwhile.
                self._step = step if self._step is None else self._step
            self._versions.committing = None
            self._state.notify_all()
        handle.finish(error=error)

    def _sync_drives(self) -> None:
        """Flush all drives at once; raise the first error after all have answered."""
        errors: list[BaseException] = []

        def sync(drive: Drive) -> None:
            try:
                drive.check_still_there()
                drive.sync()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=sync, args=(drive,)) for drive in self.drives[1:]]
        for thread in threads:
            thread.start()
        sync(self.drives[0])
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _mark_dirty(self) -> None:
        """In place there is no old version to return to: say so on disk before the first byte changes."""
        self._state.wait_for(lambda: self._versions.committing is None)
        self._check_writer()  # the commit waited for may have failed
        if self._manifest.dirty:
            return
        m = self._manifest
        dirty = Manifest(m.step, m.metadata, True, m.slots, m.sums)
        self._manifests.write(self._sequence + 1, dirty.to_bytes())
        self._manifest, self._sequence = dirty, self._sequence + 1

    # -- the end --------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Wait until nothing is queued or under way. Errors stay with their handles."""
        with self._state:
            self._state.wait_for(lambda: not self._active and self._versions.committing is None)

    def close(self) -> None:
        """Finish what is under way and let go of everything. May be called twice; never commits by itself."""
        with self._state:
            if self._closed:
                return
            self._state.wait_for(lambda: not self._active and self._versions.committing is None)
            self._closed = True
            self._state.notify_all()
        with ExitStack() as owned:  # closes what it was given last first, and all of it whatever fails
            for lock in self._locks:
                owned.callback(lock.release)
            for drive in self.drives:
                owned.callback(drive.close)
            owned.callback(self._commits.close)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _has_uncommitted_writes(self) -> bool:
        """Whether the working version is neither committed nor about to be."""
        kept = ~self.layout.chunk_scratch
        newest = self._versions.committed if self._versions.committing is None else self._versions.committing
        return not np.array_equal(self._versions.working[kept], newest[kept])

    def _writes(self) -> list[_Operation]:
        return [op for op in self._active if op.write and not self.layout.chunk_scratch[op.chunks.start]]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("The store is closed.")

    def _check_writer(self) -> None:
        if self.read_only:
            raise StoreError("The store was opened for reading only.")
        if self._failed is not None:
            raise StoreError(
                f"An earlier commit failed on the drives ({self._failed}). Close the store and open it again: it will "
                "find the last version that is durable."
            ) from self._failed


def _fitting(buffer: object, num_bytes: int, name: str, *, writable: bool) -> Memory:
    memory = Memory(buffer, writable=writable)
    if memory.view.nbytes not in (num_bytes, round_up(num_bytes)):
        raise ConfigError(
            f"{name!r} needs {num_bytes} bytes of memory (or {round_up(num_bytes)}, whole pages) and was given "
            f"{memory.view.nbytes}."
        )
    return memory


@contextmanager
def open_store(
    directories: Sequence[str | Path],
    *,
    read_only: bool = False,
    verify: bool = True,
    threads_per_drive: int = THREADS_PER_DRIVE,
    observer: Observer | None = None,
    files: Files | None = None,
) -> Iterator[Store]:
    """Open an existing store; its directories may be given in any order. Closed on the way out.

    Only one process may have it open, except with `read_only`, which takes no lock and sees the last commit.
    """
    files = files or Files()
    store = _open(files, [Path(d) for d in directories], read_only, verify, threads_per_drive, observer)
    try:
        yield store
    finally:
        store.close()


def _open(
    files: Files, paths: list[Path], read_only: bool, verify: bool, num_threads: int, observer: Observer | None
) -> Store:
    if not paths:
        raise ConfigError("No directory was given for the store. Name at least one in `ssd`.")
    undo: list[Callable[[], None]] = []
    try:
        locks: list[DriveLock] = []
        for path in paths:  # before the headers are read: opening may mend them
            if not read_only and has_store(path, files):  # a folder of somebody else's gets no lock file
                locks.append(DriveLock(files, path))
                undo.append(locks[-1].release)
        found = [read_header(files, path, repair=not read_only) for path in paths]
        notes = [note for _, own in found for note in own]
        ordered = order_drives(paths, [header for header, _ in found])
        layout, manifests = _read_layout(files, *ordered[0], repair=not read_only, notes=notes)
        _check_sizes(layout, ordered)
        page = manifests.read(repair=not read_only)
        notes += manifests.notes
        try:
            manifest = Manifest.from_bytes(page.payload, layout)
        except UNUSABLE as error:
            raise StoreCorrupt(
                f"The manifest in {ordered[0][0]} does not fit its store: {error}. Create the store again.",
                drive=str(ordered[0][0]),
            ) from error
        if manifest.dirty and not read_only:
            raise StoreTorn(
                f"The store in {ordered[0][0]} keeps one version (versions: 1) and was cut off after step "
                f"{manifest.step}: it holds a mixture. Create it again from the model or its last export."
            )
        drives: list[Drive] = []
        for path, header in ordered:
            drives.append(Drive(files, path, header, write=not read_only, num_threads=num_threads))
            undo.append(drives[-1].close)
            notes += drives[-1].notes
        return Store(
            layout=layout, manifest=manifest, sequence=page.sequence, manifests=manifests, drives=drives, locks=locks,
            read_only=read_only, verify=verify, notes=notes, observer=observer,
        )  # fmt: skip
    except BaseException:
        for action in reversed(undo):
            action()
        raise


def _read_layout(files: Files, path: Path, header: Header, *, repair: bool, notes: list[str]) -> tuple[Layout, Twins]:
    layouts = Twins(files, path, LAYOUT, place_bytes=header.layout_place_bytes)
    page = layouts.read(repair=repair)
    notes += layouts.notes
    try:
        layout = Layout.from_bytes(page.payload)
    except UNUSABLE as error:
        raise StoreCorrupt(
            f"The layout in {path} cannot be used: {error}. Create the store again.", drive=str(path)
        ) from error
    if header.manifest_place_bytes != place_bytes(manifest_payload_bytes(layout)):
        raise StoreCorrupt(
            f"The header in {path} gives a manifest {header.manifest_place_bytes} bytes and the layout "
            f"{place_bytes(manifest_payload_bytes(layout))}. Create the store again.",
            drive=str(path),
        )
    return layout, Twins(files, path, MANIFEST, place_bytes=header.manifest_place_bytes, places=2)


def _check_sizes(layout: Layout, ordered: list[tuple[Path, Header]]) -> None:
    if layout.num_drives != len(ordered):
        raise StoreCorrupt(
            f"The layout in {ordered[0][0]} speaks of {layout.num_drives} drives and the header of {len(ordered)}. "
            "Create the store again.",
            drive=str(ordered[0][0]),
        )
    for index, (path, header) in enumerate(ordered):
        if header.data_bytes != layout.data_bytes(index):
            raise StoreCorrupt(
                f"The header in {path} speaks of {header.data_bytes} bytes of data and the layout of "
                f"{layout.data_bytes(index)}. Create the store again.",
                drive=str(path),
            )
