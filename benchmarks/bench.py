"""How fast, how small and how exact is lohan beside what people use today, on this machine, in this run?

    make bench                       everything; hours
    make bench ARGS=--quick          60M parameters, 512 tokens, all systems; within 10 minutes (no step is done again)
    python benchmarks/bench.py --parameters 250M 1B --tokens 256 --systems lohan deepspeed-nvme --rounds 5
    python benchmarks/bench.py --resume bench.json --models DIR --minutes 5      a piece; again until nothing is left

Systems (benchmarks/peers/systems.py): plain PyTorch in RAM, torch FSDP2, DeepSpeed ZeRO-3 with CPU offload and on NVMe
(in a virtual environment of their own, installed by the command), and lohan with its strategies. All train the same
Llama-shaped model on the same data in fp32 with two threads on the same drive. Every system is checked against plain
PyTorch first: losses and weights after two steps at 60M.

Rounds go over all systems in turn. A turn is one step (two after a start, or --warm-up) that does not count and two
that do (--counted). Where the host of a virtual machine gives more than 2 % of the cores to others during a step, the
step is done again, whoever's it is, up to twice in a turn (--again); the calmest ones count. Up to 60M all systems stay
open; larger models are loaded again for every turn, one at a time. The limit is the busiest resource's own time,
measured alone in the same rounds: computing + updating + checksums on the cores, the step's bytes on the drive.
Results are saved after every turn: an interrupted benchmark goes on with --resume FILE, and a long one can be run in
pieces: no turn begins after --minutes, and --models DIR keeps the models between pieces.

Prints a table; the last line is JSON. benchmarks/draw_bench.py makes the page and the plots from the results file.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import checking, install
from peers.driving import Worker, WorkerFailed
from peers.findings import (
    FOLDER_HEADINGS,
    HEADINGS,
    MOST_STOLEN,
    Findings,
    Record,
    Turn,
    folder_rows,
    json_rows,
    limit_line,
    point_rows,
    read_findings,
    text_table,
)
from peers.serving import Job
from peers.systems import LIMITS, SYSTEMS, System
from peers.workloads import SHAPES, num_parameters

WORKLOADS = Path(__file__).resolve().parent / "peers" / "workloads.py"
STAY_OPEN_PARAMETERS = 100_000_000
"""Above this, all systems together do not fit in the memory of an ordinary machine."""

WARM_UP, COUNTED = 2, 2
"""Steps of a turn after a start."""


class Bench:
    """One benchmark: its folder on the drive, the models in it, the workers that are open, and what was found."""

    def __init__(
        self,
        directory: Path,
        findings: Findings,
        save_to: Path,
        *,
        models: Path | None = None,
        minutes: float = math.inf,
        counted: int = COUNTED,
        warm_up: int = WARM_UP,
        again: int = 0,
        keep_freed_memory: bool = False,
    ):
        self._directory, self.findings, self._save_to = directory, findings, save_to
        self._models, self._keep_models = models or directory, models is not None
        self._no_turn_after = time.monotonic() + 60 * minutes
        self._counted, self._warm_up, self._again = counted, warm_up, again
        self._keep_freed_memory = keep_freed_memory
        self.left = 0
        """Turns that did not begin, because the time was up."""
        self._open: dict[str, Worker] = {}
        self._steps: dict[str, int] = {}
        self._started = 0

    def model(self, shape: str) -> Path:
        """The folder of a model, made by another process when it is first needed."""
        folder = self._models / f"model-{shape}"
        if not folder.exists():
            partial = self._models / f"partial-{shape}"  # a model that was interrupted must not look like one
            shutil.rmtree(partial, ignore_errors=True)
            make = [sys.executable, str(WORKLOADS), shape, str(partial)]
            subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
            partial.rename(folder)
        return folder

    def done_with(self, shape: str) -> None:
        """Its model makes room on the drive, unless it is to be kept."""
        if not self._keep_models:
            shutil.rmtree(self._models / f"model-{shape}", ignore_errors=True)

    def machine(self) -> Path:
        """This machine as `lohan profile` finds it, which our plans are made with; measured when first needed."""
        path = self._directory / "machine.yaml"
        if not path.exists():
            print("lohan profile (20 s)", flush=True)
            command = ["profile", "--ssd", str(self._directory), "--device", "cpu", "--out", str(path)]
            subprocess.run(
                [sys.executable, "-m", "lohan", *command], check=True, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return path

    def start(self, system: System, shape: str, tokens: int) -> Worker:
        self._started += 1
        options = system.options_for(shape, tokens)
        if system.worker == "lohan_worker" and system.name != "drive":
            options["machine"] = str(self.machine())
        job = Job(
            folder=str(self.model(shape)), directory=str(self._directory / f"{self._started}-{system.name}"),
            shape=shape, tokens=tokens, micro_batch_tokens=system.micro_batch_tokens(shape, tokens), options=options,
        )  # fmt: skip
        return Worker(system, job, keep_freed_memory=self._keep_freed_memory)

    # -- the check ------------------------------------------------------------------------------------

    def check(self, systems: Sequence[System], shape: str, tokens: int) -> None:
        """Two steps by every system that is not checked yet, compared with plain PyTorch's."""
        todo = [system for system in systems if system.name not in self.findings.checks and system.name != "pytorch"]
        if not todo:
            return
        print(f"Check: losses and weights after {checking.STEPS} steps at {shape}, {tokens} tokens", flush=True)
        plain = self._train(SYSTEMS["pytorch"], shape, tokens)
        for system in todo:
            try:
                other = self._train(system, shape, tokens)
                found = checking.compare(self.model(shape), plain, other, exact=system.exact)
                shutil.rmtree(other.folder)
            except WorkerFailed as failure:
                found = {"failed": str(failure), "ok": False}
            self.findings.checks[system.name] = found
            self.findings.save(self._save_to)
            print(f"  {checking.sentence(system.name, found)}", flush=True)
        shutil.rmtree(plain.folder)

    def _train(self, system: System, shape: str, tokens: int) -> checking.Trained:
        worker = self.start(system, shape, tokens)
        out = self._directory / f"check-{system.name}"
        try:
            losses = [worker.step(number)["loss"] for number in range(1, checking.STEPS + 1)]
            worker.settle()
            worker.export(out)
        finally:
            worker.close()
        return checking.Trained(losses, out)

    # -- the rounds -----------------------------------------------------------------------------------

    def point(self, systems: Sequence[System], shape: str, tokens: int, rounds: int) -> None:
        """All rounds of one point that are not in the results yet."""
        stay = num_parameters(shape) <= STAY_OPEN_PARAMETERS
        try:
            for number in range(1, rounds + 1):
                for system in systems:
                    record = self.findings.record(shape, tokens, system.name)
                    if record.failed is not None or len(record.turns) >= number:
                        continue
                    if time.monotonic() > self._no_turn_after:
                        self.left += 1
                        continue
                    self._turn_or_failure(system, record, number, stay=stay and number < rounds)
                    self.findings.save(self._save_to)
        finally:
            self.close()

    def _turn_or_failure(self, system: System, record: Record, number: int, *, stay: bool) -> None:
        head = f"{record.parameters:>4} {record.tokens:>5} tokens  round {number}  {system.name:15}"
        try:
            turn = self._turn(system, record, number, stay=stay)
        except WorkerFailed as failure:
            record.failed = str(failure)
            self._open.pop(system.name, None)
            print(f"{head} {failure}", flush=True)
            return
        said = ", ".join(f"{seconds:.2f}" for seconds in turn.seconds)
        moved = (turn.read_bytes + turn.write_bytes) / 1e9
        stolen = f"  (the host took {turn.stolen:.0%} of the cores)" if turn.stolen > MOST_STOLEN else ""
        print(f"{head} {said} s  peak {turn.peak_rss / 1e9:.2f} GB  SSD {moved:.2f} GB a step{stolen}", flush=True)

    def _turn(self, system: System, record: Record, number: int, *, stay: bool) -> Turn:
        worker = self._open.pop(system.name, None)
        fresh = worker is None
        if worker is None:
            worker = self.start(system, record.parameters, record.tokens)
            self._steps[system.name] = 0
            record.load.append(worker.loaded)
        try:
            said = []

            def step() -> None:
                self._steps[system.name] += 1
                said.append({"number": self._steps[system.name], **worker.step(self._steps[system.name])})

            warm_up = max(self._warm_up, system.least_warm_up) if fresh else 1
            for _ in range(warm_up + self._counted):
                step()
            for _ in range(self._again):
                if sum(one["stolen"] <= MOST_STOLEN for one in said[warm_up:]) < self._counted:
                    step()
            worker.settle()
            turn = turn_of(number, said, warm_up, self._counted)
            record.turns.append(turn)
            if not stay and not system.limit_only:
                out = self._directory / f"export-{system.name}"
                record.export.append(worker.export(out))
                shutil.rmtree(out)
        except BaseException:
            worker.kill()
            raise
        if stay:
            self._open[system.name] = worker
        else:
            worker.close()
        return turn

    def close(self) -> None:
        for worker in self._open.values():
            worker.close()
        self._open.clear()


def turn_of(number: int, said: Sequence[dict[str, Any]], warm_up: int, num_counted: int) -> Turn:
    """A turn from what its steps said; of those after the warm-up, the ones with the least time stolen count."""
    counted = sorted(said[warm_up:], key=lambda step: max(step["stolen"], MOST_STOLEN))[:num_counted]
    more = {key: value for key, value in counted[-1].items() if key in _MORE}
    if "busy_seconds" in counted[-1]:
        for name in ("compute", "update"):
            more[f"{name}_seconds"] = statistics.median(step["busy_seconds"][name] for step in counted)
    return Turn(
        round=number,
        seconds=[step["seconds"] for step in counted],
        losses={str(step["number"]): step["loss"] for step in said},
        peak_rss=int(max(step["peak_rss"] for step in said)),
        read_bytes=sum(step["read_bytes"] for step in counted) / num_counted,
        write_bytes=sum(step["write_bytes"] for step in counted) / num_counted,
        more=more,
        stolen=max(step["stolen"] for step in counted),
    )


_MORE = ("crossing", "store_bytes", "checksum_rate", "alone_seconds", "alone_bytes", "read_rate", "write_rate")


def machine() -> dict[str, Any]:
    import psutil
    import torch
    import transformers

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if (deepspeed := install.version("deepspeed")) is not None:
        versions["deepspeed"] = deepspeed
    memory = psutil.virtual_memory().total
    return {
        "cores": psutil.cpu_count(), "memory_bytes": memory, "system": f"{platform.system()} {platform.release()}",
        "versions": versions, "started": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def print_tables(findings: Findings) -> None:
    for point in findings.points:
        parameters, tokens = point
        print(f"\n{parameters} ({num_parameters(parameters):,} parameters), {tokens} tokens per step")
        print(text_table(HEADINGS, point_rows(findings, point)))
        print(limit_line(findings, point))
        crossed = [(one.system, one.more("crossing")) for one in findings.records if one.point == point]
        share = min((share for name, share in crossed if name in SYSTEMS and share), default=None)
        if share is not None:
            print(f"At least {share:.0%} of weights and state cross the SSD in every step of ours.")
        if folders := folder_rows(findings, point):
            print(text_table(FOLDER_HEADINGS, folders))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="60M parameters, 512 tokens, 2 rounds, no turn after 8 minutes"
    )
    parser.add_argument("--parameters", nargs="+", choices=list(SHAPES), default=["60M", "250M", "1B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counted", type=int, default=COUNTED, help="steps of a turn that count")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps after a start that do not")
    parser.add_argument("--again", type=int, default=2, help="steps of a turn done again for the host's noise, at most")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no turn after this time")
    parser.add_argument("--models", type=Path, help="where models are kept for the next piece; a drive's, not RAM's")
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="where models and stores go; a drive's, not RAM's"
    )
    parser.add_argument("--save", type=Path, default=Path("bench.json"), help="the results file to write")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with this results file, or begin it")
    parser.add_argument("--check-parameters", choices=list(SHAPES), default="60M", help="the model of the check")
    parser.add_argument("--no-check", action="store_true", help="do not compare the systems' updates first")
    parser.add_argument("--no-limit", action="store_true", help="do not measure the resources alone")
    parser.add_argument("--keep-freed-memory", action="store_true", help="glibc keeps freed memory, on all sides")
    options = parser.parse_args(arguments)
    if options.quick:
        options.parameters, options.tokens, options.rounds = ["60M"], [512], 2
        options.check_parameters, options.again = "tiny", 0
        options.minutes = min(options.minutes, 8)
    for tokens in options.tokens:
        if tokens > 512 and tokens % 512:
            parser.error(f"--tokens {tokens}: sequences have 512 tokens, so use up to 512 or a multiple of it.")
    if min(options.rounds, options.counted, options.warm_up) < 1 or options.again < 0:
        parser.error("--rounds, --counted and --warm-up: at least 1; --again: at least 0.")
    chosen = [SYSTEMS[name] for name in options.systems]
    if any(system.peer for system in chosen):
        try:
            install.ensure(nvme="deepspeed-nvme" in options.systems)
        except install.CannotInstall as problem:
            print(f"{problem}\nOr leave the peers out: --systems pytorch fsdp2-cpu lohan", file=sys.stderr)
            return 2
    save_to = options.resume or options.save
    resumed = options.resume is not None and options.resume.exists()
    findings = read_findings(options.resume) if resumed else Findings(machine=machine())
    for folder in (options.directory, options.models or options.directory, save_to.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name:
        bench = Bench(
            Path(name), findings, save_to, models=options.models, minutes=options.minutes, counted=options.counted,
            warm_up=options.warm_up, again=options.again, keep_freed_memory=options.keep_freed_memory,
        )  # fmt: skip
        if not options.no_check:
            bench.check(chosen, options.check_parameters, 256)
            chosen = [one for one in chosen if one.name == "pytorch" or findings.checks[one.name]["ok"]]
        measured = chosen if options.no_limit else [*chosen, *LIMITS.values()]
        for shape in options.parameters:
            for tokens in options.tokens:
                bench.point(measured, shape, tokens, options.rounds)
            bench.done_with(shape)
    print_tables(findings)
    for name, check in findings.checks.items():
        print(checking.sentence(name, check))
    if bench.left:
        print(f"{bench.left} turns are left after {options.minutes:g} minutes: run it again with --resume {save_to}")
    print(json.dumps(json_rows(findings)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
