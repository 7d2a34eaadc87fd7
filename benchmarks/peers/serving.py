"""The worker's side of the line protocol: load once, then do what each line asks and answer with one line.

    {"folder": .., "directory": .., ...}   first line in: the Job     -> @@ {"seconds": .., ..} once it is loaded
    step N                                 one optimizer step         -> @@ {"seconds": .., "loss": .., ..}
    settle                                 finish what is under way   -> @@ {}
    export PATH                            weights into a new folder  -> @@ {"seconds": .., ..}

Every answer starts with `@@ `, so that what libraries print does no harm. Every answer has the peak RSS since the last
one and the bytes the process (all its threads) had the drive read and write: /proc/self/io. The end of input ends the
worker. Used in the peers' own virtual environment too, so this file imports nothing of lohan.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from peers.workloads import NUM_THREADS, SHAPES, batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What one worker is to do."""

    folder: str
    """The model, as a Hugging Face folder."""

    directory: str
    """Its own, on the drive; removed by whoever started it."""

    shape: str
    tokens: int
    micro_batch_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    """The system's own: see systems.py."""

    def to_line(self) -> str:
        return json.dumps(asdict(self))


class System(Protocol):
    """What a worker offers."""

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One optimizer step; at least the loss."""

    def settle(self) -> None:
        """Finish what a step may have left under way."""

    def export(self, out: Path) -> None:
        """The weights as they are now, as files another program can open."""


Load = Callable[[Job], AbstractContextManager[System]]


class Meter:
    """Seconds, peak RSS and drive traffic of one piece of work, and what others took of the cores meanwhile."""

    def __init__(self) -> None:
        _forget_peak()
        self._read, self._written = _traffic()
        self._stolen, self._ticks = _stolen_ticks()
        self._started = time.perf_counter()

    def read(self) -> dict[str, float]:
        seconds = time.perf_counter() - self._started
        read, written = _traffic()
        stolen, ticks = _stolen_ticks()
        return {
            "seconds": seconds,
            "peak_rss": peak_rss(),
            "read_bytes": read - self._read,
            "write_bytes": written - self._written,
            "stolen": (stolen - self._stolen) / max(1, ticks - self._ticks),
        }


def serve(load: Load) -> None:
    """Be a worker: see above. `load` is called once the job is known; imports it makes before count as its own."""
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401  (imports are no loading, whoever makes them)

    torch.set_num_threads(NUM_THREADS)
    job = Job(**json.loads(sys.stdin.readline()))
    with _answering() as answer:
        meter = Meter()
        with load(job) as system:
            answer(meter.read())
            for line in sys.stdin:
                command, _, argument = line.strip().partition(" ")
                if command == "step":
                    vocabulary = SHAPES[job.shape]["vocab_size"]
                    data = list(batches(int(argument), job.tokens, job.micro_batch_tokens, vocabulary))
                    meter = Meter()
                    said = system.step(data)
                    answer({**meter.read(), **said})
                elif command == "settle":
                    system.settle()
                    answer({})
                elif command == "export":
                    meter = Meter()
                    system.export(Path(argument))
                    sync(Path(argument))
                    answer(meter.read())
                else:
                    raise SystemExit(f"a worker knows no command {command!r}")


@contextmanager
def _answering() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Answers go to the real standard output; all else that is printed goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(said: dict[str, Any]) -> None:
        out.write(f"@@ {json.dumps(said)}\n")
        out.flush()

    yield answer


def peak_rss() -> int:
    """Of this process since the last Meter began, in bytes."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found.group(1)) * 1024 if found else 0
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak is then that of the whole life


def _traffic() -> tuple[int, int]:
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def _stolen_ticks() -> tuple[int, int]:
    """What the host of a virtual machine gave to others while we wanted to run, and all time, over all cores."""
    counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (counts[7] if len(counts) > 7 else 0), sum(counts)


def sync(folder: Path) -> None:
    """Whoever leaves an export in the page cache has not written it yet: it counts when it is on the drive."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
