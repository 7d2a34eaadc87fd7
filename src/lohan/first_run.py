"""The first run: what lohan does, for anyone to watch, with nothing to download and nothing to configure.

First a store round trip: records of unlike sizes are written over two directories through a staging arena, committed,
and read back to the bit; then a second process starts the next step and is killed in the middle of it, and the
committed step must still be there. Then `lohan train` with weights and state on SSD (first_training.py). Works in a
folder of its own and touches nothing else.

    python -m lohan.first_run DIR_A DIR_B      the writer that gets killed; not for people
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from lohan.errors import ConfigError, LohanError, StoreLocked
from lohan.sizes import format_bytes
from lohan.store import Arena, Files, Handle, RecordSpec, Slab, Store, create_store, open_arena, open_store, round_up

if TYPE_CHECKING:
    from lohan.first_training import Training

MARK_NAME = ".lohan-first-run"
DRIVE_NAMES = ("drive-a", "drive-b")
TRAINING_NAME = "training"
REPORT_NAME = "report.html"
MIN_BYTES = 8 << 20
_IN_FLIGHT = 4
# The first steps fill both versions, so that the last one is timed on places written before, like any real step.
_STEPS = 3
# The writer that waits to be killed ends by itself after this, should nobody kill it.
_WRITER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Summary:
    """What a first run found out."""

    record_bytes: int
    num_records: int
    step: int
    write_rate: float
    read_rate: float
    direct: bool
    killed_after_bytes: int
    """What the killed writer had written of the step that was never committed."""

    arena_bytes: int
    seconds: float


def make_records(num_bytes: int) -> list[RecordSpec]:
    """About `num_bytes` in records as unlike as a model's: one large, groups of odd sizes, and tiny ones."""
    quarter = num_bytes // 4
    records = [RecordSpec(name="embedding", num_bytes=quarter)]
    block = (num_bytes - quarter) // 6
    for index in range(6):
        group = f"block.{index}"
        sizes = {"norm": 4095 + index, "attention": block // 3 + 17, "mlp": block - block // 3 - 5000, "bias": 100}
        records += [RecordSpec(name=f"{group}.{name}", num_bytes=size, group=group) for name, size in sizes.items()]
    return records


def fill(view: memoryview, record: int, step: int) -> None:
    """Bytes that differ from place to place, record to record and step to step, faster than any drive."""
    words = np.frombuffer(view, np.uint64)
    np.multiply(_counting(len(words)), np.uint64(0x9E3779B97F4A7C15), out=words)
    np.bitwise_xor(words, np.uint64(record * 0x100000001B3 + step * 0xC2B2AE3D27D4EB4F & (1 << 64) - 1), out=words)


_counts: npt.NDArray[np.uint64] = np.arange(0, dtype=np.uint64)


def _counting(length: int) -> npt.NDArray[np.uint64]:
    global _counts
    if len(_counts) < length:
        _counts = np.arange(length, dtype=np.uint64)
    return _counts[:length]


class Busy:
    """An observer of the store that knows how long it was really reading or writing."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
        self._bytes = {"read": 0, "write": 0}

    def __call__(self, kind: str, drive: int, record: str, num_bytes: int, started: float, ended: float) -> None:
        self._spans[kind].append((started, ended))
        self._bytes[kind] += num_bytes

    def rate(self, kind: str) -> float:
        """Bytes per second while at least one request was under way."""
        busy, reached = 0.0, 0.0
        for started, ended in sorted(self._spans[kind]):
            busy += max(0.0, ended - max(started, reached))
            reached = max(reached, ended)
        return self._bytes[kind] / max(busy, 1e-9)


def write_step(store: Store, arena: Arena, step: int, tell: Callable[[int], None] = lambda _: None) -> None:
    """Write all records of a step, several at once; `tell` hears the bytes of each one written."""

    def start(index: int, slab: Slab) -> Handle:
        fill(slab.padded, index, step)
        return store.write(store.layout.records[index].name, slab.padded)

    _in_flight(store, arena, start, lambda index, slab: tell(slab.num_bytes))


def read_step(store: Store, arena: Arena) -> None:
    """Read all records, several at once, and do nothing with them: how fast the drives and checksums are."""
    _in_flight(store, arena, partial(_start_read, store), lambda index, slab: None)


def check_step(store: Store, arena: Arena, step: int) -> None:
    """Read all records, several at once, and compare every byte. LohanError if one differs."""

    def compare(index: int, slab: Slab) -> None:
        record = store.layout.records[index]
        expected = memoryview(bytearray(round_up(record.num_bytes)))
        fill(expected, index, step)
        if not np.array_equal(
            np.frombuffer(slab.view, np.uint8), np.frombuffer(expected[: record.num_bytes], np.uint8)
        ):
            raise LohanError(f"Record {record.name!r} of step {step} came back different. This must never happen.")

    _in_flight(store, arena, partial(_start_read, store), compare)


def _start_read(store: Store, index: int, slab: Slab) -> Handle:
    return store.read(store.layout.records[index].name, slab.padded)


def _in_flight(
    store: Store, arena: Arena, start: Callable[[int, Slab], Handle], done: Callable[[int, Slab], None]
) -> None:
    """Start an operation for each record in memory of its own, as many at once as the arena and the limit allow."""
    pending: deque[tuple[int, Handle, Slab]] = deque()

    def finish() -> None:
        index, handle, slab = pending.popleft()
        with slab:
            handle.wait()
            done(index, slab)

    try:
        for index, record in enumerate(store.layout.records):
            if len(pending) == _IN_FLIGHT:
                finish()
            # Never wait for a lease here: this is the thread that gives the others back.
            while (slab := arena.try_lease(record.num_bytes)) is None:
                finish()
            pending.append((index, start(index, slab), slab))
        while pending:
            finish()
    finally:
        store.drain()  # after an error, nothing may still be moving in memory that is given back
        for _, _, slab in pending:
            slab.release()


@contextmanager
def own_folder(folder: Path, *, keep: bool) -> Iterator[list[Path]]:
    """Two empty drive directories, and one for training, in a folder of our own; removed at the end unless `keep`.

    A folder that was not made by a first run is refused, and only what a first run makes is ever removed. The report
    stays until the next first run.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Give another folder with --directory.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK_NAME).exists():
        raise ConfigError(f"{folder} is not empty and was not made by a first run. Give a new folder with --directory.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Files().lock(folder / MARK_NAME)
    except BlockingIOError:
        raise StoreLocked(f"Another first run is at work in {folder}. Wait for its end, or give --directory.") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used: {error.strerror}. Give another folder with --directory.") from None
    drives = [folder / name for name in DRIVE_NAMES]
    own = [*drives, folder / TRAINING_NAME]
    report = folder / REPORT_NAME
    try:
        _remove(own)
        report.unlink(missing_ok=True)
        for made in own:
            made.mkdir()
        yield drives
    finally:
        if not keep:
            _remove(own)
            if not report.exists():
                (folder / MARK_NAME).unlink(missing_ok=True)
                if not any(folder.iterdir()):
                    folder.rmdir()
        Files().close(lock)


def _remove(own: Sequence[Path]) -> None:
    for path in own:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def kill_a_writer(drives: Sequence[Path]) -> int:
    """Start a process that writes the next step, SIGKILL it in mid-write; returns how much it had written."""
    command = [sys.executable, "-m", "lohan.first_run", *map(str, drives)]
    # In a session of its own: Ctrl-C is for us, and we end the writer.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as writer:
        assert writer.stdout is not None
        try:
            line = writer.stdout.readline()
            if not line:
                raise LohanError(f"The writer that was to be killed ended by itself (exit code {writer.wait()}).")
            time.sleep(0.1)  # it goes on writing; somewhere in there it dies
        finally:
            writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
    return int(rest[-1] if rest else line)


def _be_killed(drives: Sequence[str]) -> None:
    """The writer: one uncommitted step, written over and over until the end comes."""
    ends = time.monotonic() + _WRITER_SECONDS
    written = 0

    def tell(num_bytes: int) -> None:
        nonlocal written
        written += num_bytes
        if written >= 1 << 20:
            print(written, flush=True)

    with open_store(drives) as store, open_arena(_arena_bytes(store.layout.records)) as arena:
        assert store.committed_step is not None
        store.begin(store.committed_step + 1)
        while time.monotonic() < ends:
            write_step(store, arena, store.committed_step + 1, tell)


def _arena_bytes(records: Sequence[RecordSpec]) -> int:
    """The largest record and the next ones beside it, so that several are always under way."""
    sizes = sorted((round_up(record.num_bytes) for record in records), reverse=True)
    return sum(sizes[:_IN_FLIGHT])


def round_trip(drives: Sequence[Path], num_bytes: int, say: Callable[[str], None]) -> Summary:
    """What the first run does with a store, in two empty directories."""
    started = time.perf_counter()
    records = make_records(num_bytes)
    arena_bytes = _arena_bytes(records)
    total = sum(record.num_bytes for record in records)
    say(f"Creating a store for {format_bytes(total)} over two directories")
    create_store(drives, records, versions=2, weights=[1.0, 1.0])
    busy = Busy()
    with open_arena(arena_bytes) as arena:
        for step in range(1, _STEPS + 1):
            say(f"Writing and committing step {step} of {_STEPS}")
            last = step == _STEPS
            with open_store(drives, observer=busy if last else None) as store:
                store.begin(step)
                write_step(store, arena, step)
                store.commit(step, {"note": "first run"}).wait()
        say("Killing a process in the middle of the next step")
        killed_after = kill_a_writer(drives)
        say("Opening the store again and reading it")
        with open_store(drives, observer=busy) as store:
            # Timed before anything is compared: that would take cores away from the checksums.
            read_step(store, arena)
        say("Comparing every byte")
        with open_store(drives) as store:
            if store.committed_step != _STEPS:
                raise LohanError(
                    f"The store holds step {store.committed_step} and {_STEPS} was committed. This must never happen."
                )
            check_step(store, arena, _STEPS)
            direct = all(drive.direct for drive in store.drives)
    return Summary(
        record_bytes=total,
        num_records=len(records),
        step=_STEPS,
        write_rate=busy.rate("write"),
        read_rate=busy.rate("read"),
        direct=direct,
        killed_after_bytes=killed_after,
        arena_bytes=arena_bytes,
        seconds=time.perf_counter() - started,
    )


def run(folder: Path, num_bytes: int, *, keep: bool, steps: int | None = None) -> None:
    """`lohan first-run`. `steps` of training, if not the usual number."""
    if num_bytes < MIN_BYTES:
        raise ConfigError(f"--size is {format_bytes(num_bytes)}; give at least {format_bytes(MIN_BYTES)}, like 8MiB.")
    console = Console()
    with own_folder(folder, keep=keep) as drives:
        console.print("[bold]A store on SSD[/]", highlight=False)
        with console.status("") as status:
            summary = round_trip(drives, num_bytes, lambda text: status.update(text))
        _print_rows(console, _store_rows(summary))
        console.print("\n[bold]Training from SSD[/]", highlight=False)
        config = folder / TRAINING_NAME / "config.yaml"
        with console.status("Loading torch and transformers") as status:
            from lohan.first_training import STEPS, train

            training = train(
                folder / TRAINING_NAME,
                lambda text: status.update(text),
                steps=STEPS if steps is None else steps,
                quiet=lambda: _paused(console, status, f"lohan train {config}"),
            )
        _print_rows(console, _training_rows(training))
        from lohan.report.page import write_report

        report = write_report(folder / TRAINING_NAME / "out", folder / REPORT_NAME)
    console.print(f"\n[bold green]lohan works here[/] ({summary.seconds + training.seconds:.0f} s)", highlight=False)
    console.print(
        f"The training's report is {escape(str(report))}: open it in a browser", highlight=False, soft_wrap=True
    )
    _print_next(console, folder if keep else None)


@contextmanager
def _paused(console: Console, status: Status, command: str) -> Iterator[None]:
    """What the command itself says is shown as it says it."""
    status.stop()
    console.print(f"[dim]$ {escape(command)}[/]", highlight=False, soft_wrap=True)
    yield
    status.start()


def _print_rows(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(f"[green]ok[/]  [bold]{name}[/]", value)
    console.print(table, highlight=False)


def _store_rows(summary: Summary) -> list[tuple[str, str]]:
    how = "direct I/O" if summary.direct else "buffered: the filesystem refuses direct I/O"
    size = format_bytes(summary.record_bytes)
    return [
        ("store", f"{size} in {summary.num_records} records over 2 directories, 2 versions"),
        ("staging", f"{format_bytes(summary.arena_bytes)} of RAM, {_IN_FLIGHT} records under way at once"),
        ("write", f"{format_bytes(summary.write_rate)}/s with checksums ({how})"),
        ("read", f"{format_bytes(summary.read_rate)}/s with checksums verified"),
        (
            "kill -9",
            f"a writer died after {format_bytes(summary.killed_after_bytes)} of step {summary.step + 1}, not committed",
        ),
        ("reopened", f"step {summary.step} is whole: all {size} match, to the bit"),
    ]


def _training_rows(training: Training) -> list[tuple[str, str]]:
    resting = format_bytes(training.resting_rss_bytes)
    beyond = format_bytes(max(0, training.peak_rss_bytes - training.resting_rss_bytes))
    stayed = f"{training.resident_units or 'none'} of {training.num_units} parts of the model stayed in memory"
    return [
        ("model", f"Llama of {training.num_parameters / 1e6:.1f} million parameters, learns to sort digits"),
        ("training", f"{training.steps} steps, {training.tokens_per_second:,.0f} tokens/s on the CPU"),
        (
            "SSD",
            f"{format_bytes(training.ssd_bytes_per_step)} per step ({format_bytes(training.foretold_ssd_bytes)} "
            f"foretold): {stayed}",
        ),
        ("time", f"{training.seconds_per_step:.2f} s per step, {training.foretold_seconds:.2f} s foretold"),
        ("memory", f"{beyond} at most after a step, on top of the {resting} of Python, torch and transformers"),
        ("held out", f"loss {training.loss_before:.3f} before, {training.loss_after:.3f} after"),
        ("export", "opened with transformers: every weight is the trained one, to the bit"),
        (
            "new digits",
            f"{training.solved_after} of {training.asked} sorted right by the exported model, "
            f"{training.solved_before} before",
        ),
        (
            "generate",
            f"streamed from SSD: {training.question}{training.answer} "
            f"({training.generate_tokens_per_second:.0f} tokens/s)",
        ),
    ]


def _print_next(console: Console, kept: Path | None) -> None:
    console.print("\n[bold]Next[/]", highlight=False)
    # `make first-run` calls the command in .venv, where a new user's shell would not find it.
    here = sys.argv[0]
    hidden = Path(here).name == "lohan" and not shutil.which("lohan")
    lohan = min(here, os.path.relpath(here), key=len) if hidden else "lohan"
    commands = [
        (f"{lohan} doctor /path/on/ssd", "is that drive fit for a run?"),
        (f"{lohan} first-run --directory /path/on/ssd/first --size 4GiB", "the same on that drive"),
        (f"{lohan} init", "a config for a model of yours; then: lohan train config.yaml"),
    ]
    if kept:
        directories = " ".join(str(kept / name) for name in DRIVE_NAMES)
        training = kept / TRAINING_NAME
        commands = [
            (f"{lohan} store info {directories}", ""),
            (f"{lohan} store verify {directories}", ""),
            (f"{lohan} status {training / 'out'}", ""),
            (f"{lohan} report {training / 'out'}", ""),
            (f"{lohan} generate {training / 'ssd'} 271803=", ""),
            (f"{lohan} export {training / 'ssd'} {training / 'again'}", ""),
            (str(training / "trace.json"), "the last step: open it at https://ui.perfetto.dev"),
            *commands,
        ]
    else:
        commands.append((f"{lohan} first-run --keep", "leaves store, run, export and trace there to look at"))
    for command, why in commands:
        reason = f"  [dim]# {escape(why)}[/]" if why else ""
        console.print(f"  {escape(command)}{reason}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    _be_killed(sys.argv[1:])
