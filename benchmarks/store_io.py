"""Does the store move large records as fast as the drive goes, with checksums on?

    python benchmarks/store_io.py --directory DIR

Times the store against the best plain O_DIRECT loop (threads that call preadv and pwritev; the best of nine
shapes is found first). Store and loop take turns and who goes first alternates; both move the same bytes between the
same extents, written before, and the same memory, and both end a write with fdatasync. Prints the median and spread
of at least 5 rounds: read, write, and both at once; 1 and 3 directories; the given record size and larger ones; the
cost of checksums; and what one slow drive does to the rest. The last line of output is JSON: its ratios, store /
plain loop, are medians of each round's own ratio, for the given record size in 1 directory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import xxhash

from lohan.store import Arena, Files, Handle, RecordSpec, Slab, Store, create_store, measure_drive, open_arena
from lohan.store import open_store as open_any_store
from lohan.store.sealed import checksum
from lohan.testing.paced_files import PacedFiles

MIB, GIB = 1 << 20, 1 << 30
BLOCK = os.urandom(MIB)  # not zeros: some drives and filesystems store those for free
KINDS = ("read", "write", "mixed")
PLAIN_SHAPES = [(threads, mib * MIB) for threads in (1, 2, 4) for mib in (1, 4, 8)]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run."""

    num_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        return self.cpu_seconds / self.num_bytes * 1e9


def timed(num_bytes: int, work: Callable[[], None]) -> Run:
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return Run(num_bytes, time.perf_counter() - started, time.process_time() - cpu)


def together(*works: Callable[[], None]) -> None:
    """Run all at once, each on a thread; raise what one of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- the plain loop -----------------------------------------------------------------------------------------------


class PlainLoop:
    """Threads that do what a store does, without the store: the same extents, the same memory, the same bytes.

    Where a file lies on the drive can make 10 % of difference (benchmarks/results/2026-11-16_store_io.md), so the loop
    uses the store's own files and arenas. The store stays whole: all of it is one block repeated, so writing it again
    from the same arena changes nothing.

    `hot` is for comparison: each thread uses one small buffer over and over. No reader of records can work so, but on
    a virtual disk it was the fastest loop of all.
    """

    def __init__(self, loop: StoreLoop):
        self.loop = loop
        self.descriptors = [os.open(drive.data_path, os.O_RDWR | os.O_DIRECT) for drive in loop.store.drives]

    def run(self, kind: str, num_threads: int, request_bytes: int, *, hot: bool = False) -> Run:
        reads = (os.preadv, self.loop.incoming.memory, 0.0)
        writes = (os.pwritev, self.loop.outgoing.memory, 0.5 if kind == "mixed" else 0.0)
        streams = {"read": [reads], "write": [writes], "mixed": [reads, writes]}[kind]
        works: list[Callable[[], None]] = []
        for call, memory, first in streams:
            places = self._places(request_bytes, first)
            for thread in range(num_threads):
                fixed = memory[thread * request_bytes : (thread + 1) * request_bytes] if hot else None
                works.append(partial(self._work, call, places, request_bytes, memory, fixed))

        def work() -> None:
            together(*works)
            if kind != "read":
                for descriptor in self.descriptors:
                    os.fdatasync(descriptor)

        return timed(self.loop.num_bytes * len(streams), work)

    def _places(self, request_bytes: int, first: float) -> Iterator[tuple[int, int, int, int]]:
        """Descriptor, offset, size and number of each request, taking the drives in turn.

        Slot 0, at the start of each file, is where the store works now. `first` says where in it to begin.
        """
        sizes = self.loop.store.layout.region_bytes
        offsets = list(range(0, max(sizes), request_bytes))
        begin = int(len(offsets) * first)
        places = [
            (descriptor, offset, min(request_bytes, size - offset))
            for offset in (*offsets[begin:], *offsets[:begin])
            for descriptor, size in zip(self.descriptors, sizes, strict=True)
            if offset < size
        ]
        return iter([(*place, number) for number, place in enumerate(places)])

    def _work(
        self,
        call: Callable[[int, list[memoryview], int], int],
        places: Iterator[tuple[int, int, int, int]],
        request_bytes: int,
        memory: memoryview,
        fixed: memoryview | None,
    ) -> None:
        for descriptor, offset, wanted, number in places:
            start = number % (len(memory) // request_bytes) * request_bytes
            buffer = memory[start : start + wanted] if fixed is None else fixed[:wanted]
            if call(descriptor, [buffer], offset) != wanted:
                raise OSError("the plain loop was cut short")

    def best_shapes(self, repeats: int) -> dict[str, tuple[int, int]]:
        """The fastest number of threads and request size for each kind."""
        rates: dict[tuple[str, tuple[int, int]], list[float]] = {}
        for _ in range(repeats):
            for shape in PLAIN_SHAPES:
                for kind in KINDS:
                    rates.setdefault((kind, shape), []).append(self.run(kind, *shape).rate)
        best = {}
        for kind in KINDS:
            best[kind] = max(PLAIN_SHAPES, key=lambda shape: statistics.median(rates[kind, shape]))
            threads, size = best[kind]
            rate = statistics.median(rates[kind, best[kind]])
            print(f"best plain {kind:5}: {threads} threads x {size // MIB} MiB, {rate / 1e9:.2f} GB/s")
        return best

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


# -- the store ----------------------------------------------------------------------------------------------------


class StoreLoop:
    """Streams all records of a store through an arena each way, as many in flight as the arena holds."""

    def __init__(self, store: Store, incoming: Arena, outgoing: Arena):
        self.store, self.incoming, self.outgoing = store, incoming, outgoing
        self.num_bytes = sum(record.num_bytes for record in store.layout.records)

    def write_every_slot(self) -> None:
        """So that no later write meets an extent for the first time."""
        for step in range(self.store.layout.versions):
            self.store.begin(step)
            self._write()
            self.store.commit(step).wait()
        self.store.begin(self.store.layout.versions)
        self._write()

    def run(self, kind: str) -> Run:
        if kind == "read":
            return timed(self.num_bytes, self._read)
        if kind == "write":
            return timed(self.num_bytes, self._write_and_sync)
        return timed(2 * self.num_bytes, self._mixed)

    def _mixed(self) -> None:
        # A write to a record waits for a read of it, so the two streams keep half a store apart.
        half = len(self.store.layout.records) // 2
        together(self._read, lambda: self._write(half))
        self._sync()

    def _write_and_sync(self) -> None:
        self._write()
        self._sync()

    def _sync(self) -> None:
        for drive in self.store.drives:
            drive.sync()

    def _read(self) -> None:
        self._stream(self.incoming, 0, self.store.read)

    def _write(self, first: int = 0) -> None:
        self._stream(self.outgoing, first, self.store.write)

    def _stream(self, arena: Arena, first: int, start: Callable[[str, memoryview], Handle]) -> None:
        records = self.store.layout.records
        pending: deque[tuple[Handle, Slab]] = deque()
        for record in (*records[first:], *records[:first]):
            while (slab := arena.try_lease(record.num_bytes)) is None:
                finish(pending)
            pending.append((start(record.name, slab.padded), slab))
        while pending:
            finish(pending)


def finish(pending: deque[tuple[Handle, Slab]]) -> None:
    handle, slab = pending.popleft()
    handle.wait()
    slab.release()


@contextmanager
def fresh_store(
    root: Path,
    *,
    record_bytes: int,
    total_bytes: int,
    num_directories: int,
    verify: bool = True,
    files: Files | None = None,
    weights: Sequence[float] | None = None,
) -> Iterator[StoreLoop]:
    """A store under `root` with every slot written, removed again on the way out."""
    with tempfile.TemporaryDirectory(dir=root, prefix="store.") as place:
        directories = [Path(place) / f"drive{i}" for i in range(num_directories)]
        num_records = max(2, total_bytes // record_bytes)
        records = [RecordSpec(name=f"record.{i}", num_bytes=record_bytes) for i in range(num_records)]
        if weights is None:
            weights = [1.0] * num_directories  # these directories are on one drive
        create_store(directories, records, weights=weights, files=files)
        arena_bytes = max(4 * record_bytes, 256 * MIB) if record_bytes < GIB else 2 * record_bytes
        arena_bytes = min(arena_bytes, num_records * record_bytes)
        with open_arena(arena_bytes) as incoming, open_arena(arena_bytes) as outgoing:
            fill(outgoing.memory)
            with open_any_store(directories, verify=verify, files=files) as store:
                loop = StoreLoop(store, incoming, outgoing)
                loop.write_every_slot()
                yield loop


def fill(memory: memoryview) -> None:
    for start in range(0, len(memory), MIB):
        memory[start : start + MIB] = BLOCK


# -- one slow drive -----------------------------------------------------------------------------------------------


def slow_drive(root: Path, *, record_bytes: int, total_bytes: int, rounds: int) -> None:
    """Three paced drives, the last at a quarter of the others' rate."""
    rates = {"drive0": 8e8, "drive1": 8e8, "drive2": 2e8}
    ideal = sum(rates.values())
    print(f"\nOne slow drive of three (800, 800 and 200 MB/s, paced); ideal {ideal / 1e9:.2f} GB/s")
    files = PacedFiles(rates)
    with tempfile.TemporaryDirectory(dir=root, prefix="rates.") as place:
        measured = []
        for name in rates:
            (Path(place) / name).mkdir()
            measured.append(measure_drive(files, Path(place) / name).weight)
    for label, weights in (("measured weights", measured), ("equal weights", [1.0] * 3)):
        with fresh_store(
            root, record_bytes=record_bytes, total_bytes=total_bytes, num_directories=3, files=files, weights=weights
        ) as loop:
            for kind in ("read", "write"):
                rates_found = [loop.run(kind).rate / 1e9 for _ in range(rounds)]
                of_ideal = statistics.median(rates_found) * 1e9 / ideal
                print(f"  {label:16} {kind:5} {spread(rates_found)} GB/s, {of_ideal:.2f} of ideal", flush=True)


# -- the whole comparison -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    ratios: dict[str, list[float]]
    cpu_per_gb: float


def compare(
    loop: StoreLoop, plain: PlainLoop, shapes: dict[str, tuple[int, int]], rounds: int, label: str
) -> Comparison:
    """Alternate store and plain loop; a ratio is always of two runs next to each other in time."""
    store_runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    plain_runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for index in range(rounds):
        for kind in KINDS:
            if index % 2:
                store_runs[kind].append(loop.run(kind))
            plain_runs[kind].append(plain.run(kind, *shapes[kind]))
            if not index % 2:
                store_runs[kind].append(loop.run(kind))
    ratios = {}
    for kind in KINDS:
        ours, theirs = store_runs[kind], plain_runs[kind]
        ratios[kind] = [a.rate / b.rate for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{label} {kind:5} | {spread([r.rate / 1e9 for r in ours])} | {spread([r.rate / 1e9 for r in theirs])} | "
            f"{spread(ratios[kind])} | {statistics.median(r.cpu_per_gb for r in ours):.3f}, "
            f"{statistics.median(r.cpu_per_gb for r in theirs):.3f}",
            flush=True,
        )
    everything = [run for runs in store_runs.values() for run in runs]
    cpu = sum(r.cpu_seconds for r in everything) / sum(r.num_bytes for r in everything) * 1e9
    return Comparison(ratios, cpu)


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def print_hot(plain: PlainLoop, shapes: dict[str, tuple[int, int]], rounds: int) -> None:
    for kind in KINDS:
        rates = [plain.run(kind, *shapes[kind], hot=True).rate / 1e9 for _ in range(rounds)]
        print(f"plain {kind:5} with one small buffer per thread: {spread(rates)} GB/s")


def checksum_cost(root: Path, *, record_bytes: int, total_bytes: int, rounds: int) -> None:
    data = os.urandom(64 * MIB)
    pieces = [memoryview(data)[start : start + MIB] for start in range(0, len(data), MIB)]

    def work() -> None:
        for piece in pieces:
            checksum(piece)

    alone = [timed(len(data), work) for _ in range(rounds)]
    print(f"\nChecksums alone: {spread([run.cpu_per_gb for run in alone])} CPU seconds per GB on one core")
    one = partial(fresh_store, root, record_bytes=record_bytes, total_bytes=total_bytes, num_directories=1)
    with one() as on, one(verify=False) as off:
        pairs = [(on.run("read"), off.run("read")) for _ in range(rounds)]
    print(
        f"Reading with and without checking: {spread([a.rate / b.rate for a, b in pairs])} of the rate, "
        f"{statistics.median(a.cpu_per_gb for a, _ in pairs):.3f} and "
        f"{statistics.median(b.cpu_per_gb for _, b in pairs):.3f} CPU seconds per GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("."), help="on the drive to measure")
    parser.add_argument("--record-mib", type=int, default=64)
    parser.add_argument("--total-gib", type=float, default=2, help="bytes moved by one run, each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only the given record size, in one directory")
    options = parser.parse_args()
    rounds, record_bytes, total_bytes = options.rounds, options.record_mib * MIB, int(options.total_gib * GIB)
    print(
        f"Python {platform.python_version()}, NumPy {np.__version__}, xxhash {xxhash.VERSION}, {os.cpu_count()} cores"
    )
    print(f"{options.record_mib} MiB records, {options.total_gib:g} GiB per run, {rounds} rounds")
    sizes = [record_bytes] if options.quick else sorted({record_bytes, 256 * MIB, GIB})
    first: Comparison | None = None
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store_io.") as place:
        root = Path(place)
        shapes: dict[str, tuple[int, int]] = {}
        for size, num_directories in product(sizes, (1,) if options.quick else (1, 3)):
            with (
                fresh_store(root, record_bytes=size, total_bytes=total_bytes, num_directories=num_directories) as loop,
                closing(PlainLoop(loop)) as plain,
            ):
                if not shapes:
                    shapes = plain.best_shapes(1 if options.quick else 5)
                    print_hot(plain, shapes, rounds)
                    print("\ndirectories x record, kind | store GB/s | plain GB/s | ratio | store, plain CPU s/GB")
                result = compare(loop, plain, shapes, rounds, f"{num_directories} x {size // MIB:4} MiB")
                if num_directories == 1 and size == record_bytes:
                    first = result
        if not options.quick:
            checksum_cost(root, record_bytes=record_bytes, total_bytes=total_bytes, rounds=rounds)
            slow_drive(root, record_bytes=record_bytes, total_bytes=total_bytes // 2, rounds=rounds)
    assert first is not None
    summary = {f"{kind}_ratio": round(statistics.median(first.ratios[kind]), 3) for kind in KINDS}
    print(json.dumps({**summary, "cpu_seconds_per_gb": round(first.cpu_per_gb, 4)}))


if __name__ == "__main__":
    main()
