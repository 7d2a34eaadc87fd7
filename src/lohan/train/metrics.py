"""metrics.jsonl: a line for every step and every evaluation, each step once however often the run was stopped."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from lohan.errors import ConfigError

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Appends to metrics.jsonl. Opened, it first drops lines of steps and evaluations that will be done again."""

    def __init__(self, folder: Path, *, after_step: int, after_evaluation: int):
        self.path = folder / FILE_NAME
        try:
            kept = [
                line
                for line in read_metrics(folder)
                if line["step"] <= (after_evaluation if "eval_loss" in line else after_step)
            ]
            new = folder / f".{FILE_NAME}.new"
            new.write_text("".join(_line(record) for record in kept), encoding="utf-8")
            new.replace(self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}. Set another output_dir.") from None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        """One line, on its way to the drive when this returns."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole lines; the last one may have been cut off."""
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def _line(record: dict[str, Any]) -> str:
    """JSON has no word for infinite; null is what readers of other languages can take."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(clean) + "\n"
