"""Everything that is known of a run, read from its files without its lock. What is missing is None, never an error."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError, LohanError
from lohan.report.record import FOLDER_NAME, PLAN_NAME, STEP_NAME
from lohan.store.report import describe_store
from lohan.train.config import TrainConfig
from lohan.train.metrics import FILE_NAME as METRICS_NAME
from lohan.train.metrics import read_metrics
from lohan.train.status import FILE_NAME as STATUS_NAME
from lohan.train.status import Status, find_config, status_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """A run, as its files tell it."""

    output: Path
    config: TrainConfig
    status: Status
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl that are steps."""

    evaluations: list[dict[str, Any]]
    plan: dict[str, Any] | None
    """plan.json of the last start; None of a run made before there was one."""

    step: dict[str, Any] | None
    """step.json."""

    store: dict[str, Any] | None
    """As `lohan store info` tells it; None where it cannot be read from here."""


def gather(place: Path) -> Gathered:
    """The run that `place` names: its output_dir, its config file or its first SSD directory."""
    config = find_config(place)
    output = place if _is_output(place) else Path(config.output_dir)
    if not _is_output(output):
        raise ConfigError(f"{place} names a run that has not begun: there is nothing in {output}. Train it first.")
    lines = read_metrics(output)
    try:
        store = describe_store([Path(directory) for directory in config.ssd])
    except (LohanError, OSError):
        store = None
    return Gathered(
        output=output,
        config=config,
        status=status_of(config, output),
        steps=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if number(line.get("eval_loss")) is not None],
        plan=_read(output / FOLDER_NAME / PLAN_NAME, ("preview", "plan", "memory")),
        step=_read(output / FOLDER_NAME / STEP_NAME, ("step", "seconds", "lanes", "busy")),
        store=store,
    )


def number(value: Any) -> float | None:
    """A finite number, or None: files may come from anywhere."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _is_output(folder: Path) -> bool:
    return (folder / STATUS_NAME).is_file() or (folder / METRICS_NAME).is_file()


def _read(path: Path, needed: tuple[str, ...]) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and all(key in found for key in needed) else None
