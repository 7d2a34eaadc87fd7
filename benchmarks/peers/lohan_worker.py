"""lohan and its strategies, and what a step takes of each resource alone.

options: strategy (lohan, lohan-paper, separate-stage, and `cores` and `drive` for the limit), wire_dtype, host_memory,
machine (a file of `lohan profile`: without it nothing is kept for backward but block inputs).

`lohan-paper` is LoHan as published: the step's tokens as one micro-batch, the state of one unit in host memory at a
time, and a barrier after every step. `cores` keeps everything in RAM and says what computing and updating took by
themselves; `drive` only reads and writes what a step does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alone import checksum_rate, drive_alone, sequential_rates, step_records
from lohan.engine.create import build_model
from lohan.engine.run import Run, open_run
from lohan.engine.settings import Settings
from lohan.hardware import load_machine
from peers.serving import Job, System, serve
from peers.workloads import LEARNING_RATE, num_parameters


class Lohan:
    """An open run."""

    def __init__(self, run: Run, *, barrier: bool):
        self._run, self._barrier = run, barrier

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        before, busy = self._run.ssd_bytes, self._run.busy_seconds
        loss = self._run.step(micro_batches).loss
        if self._barrier:
            self._run.drain()
        taken = {name: value - busy.get(name, 0.0) for name, value in self._run.busy_seconds.items()}
        return {
            "loss": loss,
            "store_bytes": self._run.ssd_bytes - before,
            "crossing": crossing(self._run),
            "busy_seconds": taken,
        }

    def settle(self) -> None:
        self._run.commit()

    def export(self, out: Path) -> None:
        self._run.export(out, master=True)


class Cores(Lohan):
    """Everything in RAM, one thing at a time: what a step takes of the cores."""

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**super().step(micro_batches), "checksum_rate": checksum_rate()}


class DriveAlone:
    """The records of one step, read and written with nothing else going on."""

    def __init__(self, job: Job):
        settings = Settings(wire_dtype=job.options.get("wire_dtype", "bf16"))
        self._layouts = build_model(
            job.folder, settings, [], device="cpu", blocks=None, piece_elements=None, trust_remote_code=False
        ).layouts
        self._directory = Path(job.directory) / "drive"
        drive_alone(self._layouts, self._directory)  # makes the store and writes both versions of every record
        file_bytes = max(64 << 20, min(1 << 30, num_parameters(job.shape)))
        self._read_rate, self._write_rate = sequential_rates(Path(job.directory), file_bytes)

    def step(self, micro_batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
        reads, writes = step_records(self._layouts)
        moved = sum(size for _, size in (*reads, *writes))
        seconds = drive_alone(self._layouts, self._directory)
        return {
            "loss": 0.0, "alone_seconds": seconds, "alone_bytes": moved, "read_rate": self._read_rate,
            "write_rate": self._write_rate,
        }  # fmt: skip

    def settle(self) -> None:
        """Nothing is ever left."""

    def export(self, out: Path) -> None:
        raise SystemExit("there is nothing to export")


def crossing(run: Run) -> float:
    """The share of weights and state that the plan does not keep in memory."""
    if run.planned is None or run.plan is None:
        return 0.0
    total = away = 0
    for number, unit in enumerate(run.planned.size.units):
        state = sum(unit.state_bytes)
        total += unit.weights_bytes + state
        away += unit.weights_bytes if number not in run.plan.resident_weights else 0
        away += state if number not in run.plan.resident_state else 0
    return away / total


@contextmanager
def load(job: Job) -> Iterator[System]:
    strategy = job.options["strategy"]
    if strategy == "drive":
        yield DriveAlone(job)
        return
    cores = strategy == "cores"
    options = {"wire_dtype": job.options["wire_dtype"]} if "wire_dtype" in job.options else {}
    machine = load_machine(job.options["machine"]) if "machine" in job.options else None
    with open_run(
        model=job.folder, ssd=[Path(job.directory) / "run"], host_memory=job.options["host_memory"], device="cpu",
        strategy="lohan" if cores else strategy, keep_nothing_in_memory=not cores, learning_rate=LEARNING_RATE,
        max_grad_norm=None, commit_every=job.options.get("commit_every", 1000), machine=machine, **options,
    ) as run:  # fmt: skip
        yield (Cores if cores else Lohan)(run, barrier=cores)


if __name__ == "__main__":
    serve(load)
