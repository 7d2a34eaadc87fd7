"""The other side of the line protocol of serving.py: a worker, seen from the benchmark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from peers import install
from peers.serving import Job
from peers.systems import System
from peers.workloads import NUM_THREADS, forget

HERE = Path(__file__).resolve().parent

KEEP_FREED_MEMORY = {
    "MALLOC_TOP_PAD_": str(256 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
}  # fmt: skip
"""glibc's settings with which freed memory stays with the process: faster on a CPU, larger RSS. For all or none."""


def _first_to_go(pid: int) -> None:
    """Where memory runs out the system ends this process, and neither the benchmark nor anything else."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    except OSError:
        pass  # it chooses by size then, which is nearly the same


class WorkerFailed(Exception):
    """A worker ended or was ended; the message has the end of what it said."""


class Worker:
    """A system that has loaded its model and does one step when told to."""

    def __init__(
        self,
        system: System,
        job: Job,
        *,
        timeout_seconds: float = 900,
        keep_freed_memory: bool = False,
        environment: dict[str, str] | None = None,
    ):
        self.system, self._timeout, self._directory = system, timeout_seconds, Path(job.directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        forget(Path(job.folder))
        python = str(install.PYTHON) if system.peer else sys.executable
        settings = {
            **os.environ,
            "OMP_NUM_THREADS": str(NUM_THREADS), "MKL_NUM_THREADS": str(NUM_THREADS), "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": f"{HERE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            # ninja is found beside the peers' interpreter
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            **install.EXTENSIONS, **(KEEP_FREED_MEMORY if keep_freed_memory else {}), **(environment or {}),
        }  # fmt: skip
        self._log = self._directory / "worker.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"peers.{system.worker}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, env=settings,
            )  # fmt: skip
        _first_to_go(self._process.pid)
        try:
            self.loaded = self._ask(job.to_line())
        except BaseException:
            self.kill()
            raise

    def step(self, number: int) -> dict[str, Any]:
        return self._ask(f"step {number}")

    def settle(self) -> None:
        self._ask("settle")

    def export(self, out: Path) -> dict[str, Any]:
        return self._ask(f"export {out}")

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(self._timeout, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            for said in self._process.stdout:
                if said.startswith("@@ "):
                    answer: dict[str, Any] = json.loads(said[3:])
                    return answer
        except BrokenPipeError:
            pass  # it is said below
        finally:
            was_late = late.finished.is_set()
            late.cancel()
        code = self._process.wait()
        reason = f"took more than {self._timeout:.0f} s" if was_late else f"ended with code {code}"
        raise WorkerFailed(f"{self.system.name} {reason}: {self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "Error" in line or "Killed" in line]
        return (told or lines or ["it said nothing"])[-1][:300]

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """Let it end by itself, and remove what it left on the drive."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=120)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass  # killed below
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # what was still to be said to it does not matter
        shutil.rmtree(self._directory, ignore_errors=True)
