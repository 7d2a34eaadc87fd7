"""How fast drives are through the store itself: checksums, direct I/O, records of a run's size, several in flight.

The store is a temporary one, in a folder of its own inside each directory, and is removed whatever happens. All its
bytes are written once before anything is timed: first writes to new extents are slower and happen once in a run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from lohan.errors import StoreFull
from lohan.measure.cliff import Cliff, WriteRates
from lohan.measure.timing import durations
from lohan.sizes import format_bytes
from lohan.store import Arena, Files, Handle, RecordSpec, Slab, Store, create_store, open_arena, open_store
from lohan.store.transfer import describe

PREFIX = "lohan-profile-"
RECORD_BYTES = 10 << 20
"""About one request of the store (store/requests.py): a piece's state is several, all under way at once."""

IN_FLIGHT = 8
"""Records under way each way: a piece's requests."""

STORE_BYTES = 512 << 20
"""Per drive. Far more than a drive keeps in RAM of its own for data, and written in a second or two."""

ROUNDS = 3
COMMITS = 5

SUSTAINED_SHARE = 0.5
"""Of the free space, what a long write may use: caches of consumer drives grow with the space that is free, up to a
third of it."""

SUSTAINED_SECONDS = 600.0
WINDOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRate:
    """Bytes per second through a store."""

    read: float
    write: float
    mixed: float
    """Both at once, added."""

    cpu_seconds_per_byte: float
    single_read: float
    """One record at a time."""

    single_write: float
    single_mixed: float
    """One read and one written at a time, both together."""

    commit_seconds: float
    """From the end of a step's writes to their commit."""

    direct: bool

    @property
    def singles(self) -> tuple[float, float, float]:
        """One record at a time: read, written, both together."""
        return self.single_read, self.single_write, self.single_mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class SustainedRate:
    """What a drive does when it has been written to for a long time."""

    writes: WriteRates
    mixed: float
    written_bytes: int
    seconds: float


def measure_store(
    directories: Sequence[Path],
    *,
    seconds: float = 8.0,
    num_bytes: int = STORE_BYTES,
    weights: Sequence[float] | None = None,
    tell: Callable[[float], None] = lambda share: None,
    files: Files | None = None,
) -> StoreRate:
    """Read, write and mixed rates of a store over these directories; `tell` hears the share that is done."""
    found: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}
    total_bytes, total_cpu = 0, 0.0
    with temporary_store(directories, num_bytes=num_bytes * len(directories), weights=weights, files=files) as streams:
        streams.fill()
        slices = [kind for _ in range(ROUNDS) for kind in found]
        for number, kind in enumerate(slices, 1):
            cpu = time.process_time()
            moved, taken = streams.run(kind, seconds / (len(slices) + 1))
            total_cpu += time.process_time() - cpu
            total_bytes += moved
            found[kind].append(moved / taken)
            tell(number / len(slices))
        return StoreRate(
            read=statistics.median(found["read"]),
            write=statistics.median(found["write"]),
            mixed=statistics.median(found["mixed"]),
            cpu_seconds_per_byte=total_cpu / total_bytes,
            single_read=streams.single("read", seconds / (len(slices) + 1)),
            single_write=streams.single("write", seconds / (len(slices) + 1)),
            single_mixed=streams.single_mixed(seconds / (len(slices) + 1)),
            commit_seconds=statistics.median(streams.commit() for _ in range(COMMITS)),
            direct=all(drive.direct for drive in streams.store.drives),
        )


def measure_sustained(
    directory: Path,
    *,
    num_bytes: int | None = None,
    seconds: float = SUSTAINED_SECONDS,
    window_seconds: float = WINDOW_SECONDS,
    tell: Callable[[float], None] = lambda share: None,
) -> SustainedRate:
    """Write until the rate has fallen and settled, `num_bytes` are written or the time is over; then both ways at once.

    `num_bytes` is half of the free space unless said otherwise.
    """
    size = int(Files().free_bytes(directory) * SUSTAINED_SHARE) if num_bytes is None else num_bytes
    cliff = Cliff()
    with temporary_store([directory], num_bytes=size) as streams:
        started = before = time.perf_counter()
        written = counted = 0
        with closing(streams.writing()) as writing:
            for written in writing:
                now = time.perf_counter()
                if now - before >= window_seconds:
                    cliff.add(written - counted, now - before)
                    before, counted = now, written
                    tell(max((now - started) / max(seconds, 1e-9), written / size))
                    if cliff.settled or now - started >= seconds:
                        break
        if written > counted and not counted:  # less than a whole window
            cliff.add(written, time.perf_counter() - before)
        taken = time.perf_counter() - started
        mixed, mixed_seconds = streams.run("mixed", min(5.0, taken))
        tell(1.0)
        return SustainedRate(
            writes=cliff.rates(), mixed=mixed / mixed_seconds, written_bytes=written + mixed // 2, seconds=taken
        )


class Streams:
    """Endless reading and writing of a store's records, several under way at once."""

    def __init__(self, store: Store, incoming: Sequence[Slab], outgoing: Sequence[Slab]):
        self.store = store
        self._incoming, self._outgoing = incoming, outgoing
        self._names = [record.name for record in store.layout.records]
        self._written = 0
        self._turns = cycle(self._names)
        self._step = 1
        """The one that is open."""

    def fill(self) -> None:
        """Write every record once."""
        for _ in self.writing():
            pass
        self._sync()

    def writing(self) -> Generator[int, None, None]:
        """Write every record once; says after each how many bytes are done."""
        pending: deque[tuple[Handle, Slab]] = deque()
        slabs = deque(self._outgoing)
        try:
            for name in self._names:
                if not slabs:
                    yield self._finish(pending, slabs)
                slab = slabs.popleft()
                pending.append((self.store.write(name, slab.padded), slab))
            while pending:
                yield self._finish(pending, slabs)
        finally:
            while pending:
                self._finish(pending, slabs)

    def _finish(self, pending: deque[tuple[Handle, Slab]], slabs: deque[Slab]) -> int:
        handle, slab = pending.popleft()
        slabs.append(slab)
        handle.wait()
        self._written += 1
        return self._written * RECORD_BYTES

    def run(self, kind: str, seconds: float) -> tuple[int, float]:
        """Read, write or both for so long: bytes moved, and the seconds until the last of them was durable."""
        until = time.perf_counter() + seconds
        return self.run_until(kind, lambda: time.perf_counter() >= until)

    def run_until(self, kind: str, over: Callable[[], bool]) -> tuple[int, float]:
        """The same until it is over."""
        names = self._names[: max(2, self._written)]
        # A write waits for a read of the same record, so when both run each has a half for itself.
        half = len(names) // 2
        works: list[Callable[[], int]] = []
        started = time.perf_counter()
        if kind in ("read", "mixed"):
            mine = names[:half] if kind == "mixed" else names
            works.append(lambda: self._stream(mine, self._incoming, self.store.read, over))
        if kind in ("write", "mixed"):
            yours = names[half:] if kind == "mixed" else names
            works.append(lambda: self._stream(yours, self._outgoing, self.store.write, over))
        with ThreadPoolExecutor(len(works)) as threads:
            moved = sum(future.result() for future in [threads.submit(work) for work in works])
        if kind != "read":
            self._sync()
        return moved, time.perf_counter() - started

    def single(self, kind: str, seconds: float) -> float:
        """Bytes per second with one record under way."""
        return RECORD_BYTES / statistics.median(durations(lambda: self.one(kind), seconds))

    def single_mixed(self, seconds: float) -> float:
        """Bytes per second with one record to read and one to write under way."""
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(durations, lambda: self.one("write"), seconds)
            reading = durations(lambda: self.one("read"), seconds)
            return sum(RECORD_BYTES / statistics.median(found) for found in (reading, writing.result()))

    def one(self, kind: str) -> float:
        """Read or write one record; its seconds."""
        start = self.store.read if kind == "read" else self.store.write
        slab = self._incoming[0] if kind == "read" else self._outgoing[0]
        started = time.perf_counter()
        start(next(self._turns), slab.padded).wait()
        return time.perf_counter() - started

    def commit(self) -> float:
        """Write some records and commit them; the seconds from the end of the writes on."""
        store = self.store
        handles = [store.write(name, s.padded) for name, s in zip(self._names, self._outgoing, strict=False)]
        for handle in handles:
            handle.wait()
        started = time.perf_counter()
        store.commit(self._step).wait()
        taken = time.perf_counter() - started
        self._step += 1
        store.begin(self._step)
        return taken

    def _stream(
        self,
        names: Sequence[str],
        slabs: Sequence[Slab],
        start: Callable[[str, memoryview], Handle],
        over: Callable[[], bool],
    ) -> int:
        pending: deque[tuple[Handle, Slab]] = deque()
        records = cycle(names)
        for name, slab in zip(islice(records, len(slabs)), slabs, strict=True):
            pending.append((start(name, slab.padded), slab))
        moved = len(pending)
        for name in records:
            handle, slab = pending.popleft()
            handle.wait()
            if over():
                break
            pending.append((start(name, slab.padded), slab))
            moved += 1
        for handle, _ in pending:
            handle.wait()
        return moved * RECORD_BYTES

    def _sync(self) -> None:
        for drive in self.store.drives:
            drive.sync()


@contextmanager
def temporary_store(
    directories: Sequence[Path],
    *,
    num_bytes: int,
    weights: Sequence[float] | None = None,
    files: Files | None = None,
) -> Iterator[Streams]:
    """A store over a new folder in each directory, gone again on the way out, also after an error or Ctrl-C."""
    num_records = max(2, num_bytes // RECORD_BYTES)
    records = [RecordSpec(name=f"record.{number}", num_bytes=RECORD_BYTES) for number in range(num_records)]
    shares = weights or [1.0] * len(directories)
    check_space(directories, num_records * RECORD_BYTES)
    with ExitStack() as owned:
        folders = [owned.enter_context(_own_folder(directory)) for directory in directories]
        # In place: nothing here has to survive anything, and it takes half the space.
        create_store(folders, records, versions=1, weights=shares, files=files)
        arena = owned.enter_context(open_arena(2 * IN_FLIGHT * RECORD_BYTES))
        store = owned.enter_context(open_store(folders, files=files))  # closes before the memory it works on
        store.begin(1)
        _fill(arena)
        slabs = [arena.lease(RECORD_BYTES) for _ in range(2 * IN_FLIGHT)]
        yield Streams(store, slabs[:IN_FLIGHT], slabs[IN_FLIGHT:])


def check_space(directories: Sequence[Path], num_bytes: int) -> None:
    """Refuse before anything is written; directories of one filesystem share its space."""
    files = Files()
    needed: dict[int, int] = {}
    for directory in directories:
        place = files.filesystem(directory)
        needed[place] = needed.get(place, 0) + num_bytes // len(directories) + (16 << 20)
    for directory in directories:
        need, free = needed[files.filesystem(directory)], files.free_bytes(directory)
        if free < need:
            raise StoreFull(
                f"Measuring {directory} takes {format_bytes(need)} of space for a moment and {format_bytes(free)} are "
                f"free. Free {format_bytes(need - free)}, or name another directory."
            )


@contextmanager
def _own_folder(directory: Path) -> Iterator[Path]:
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
    except OSError as error:
        raise describe(error, "making a folder to measure in", directory) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(arena: Arena) -> None:
    # Not zeros: some drives and filesystems store those for free.
    noise = os.urandom(1 << 20)
    for start in range(0, arena.num_bytes, len(noise)):
        arena.memory[start : start + len(noise)] = noise[: arena.num_bytes - start]
