"""How a run is doing, for somebody who asks from another terminal: read from its files, without its lock.

status.json in output_dir says who trains and how far it should go; metrics.jsonl what was done; the store what of it is
durable, and whether a process has it open.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lohan.errors import ConfigError, LohanError
from lohan.store import has_store, open_store
from lohan.store.report import describe_store
from lohan.train.config import TrainConfig
from lohan.train.config_file import load_config, parse_config
from lohan.train.metrics import read_metrics

FILE_NAME = "status.json"
CONFIG_NAME = "config.yaml"
_RECENT = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Everything `lohan status` says; the keys of its --json."""

    output_dir: str
    state: str
    """new (not begun), running, finished, early (nothing got better), interrupted, or died: it was killed."""

    pid: int | None
    step: int
    total_steps: int | None
    committed_step: int | None
    """The last step that a power cut cannot take away."""

    epoch: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    tokens_per_second: float | None
    """Over the last steps."""

    seconds_left: float | None
    eval_step: int | None
    eval_loss: float | None
    seconds_since_step: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def note_status(folder: Path, state: str, *, total_steps: int) -> None:
    """Written by the loop when it begins and when it ends."""
    new = folder / f".{FILE_NAME}.new"
    new.write_text(json.dumps({"state": state, "pid": os.getpid(), "total_steps": total_steps}) + "\n")
    new.replace(folder / FILE_NAME)


def read_status(place: Path) -> Status:
    """The run that `place` names: its output_dir, its config file or its first SSD directory."""
    config = find_config(place)
    return status_of(config, Path(config.output_dir))


def status_of(config: TrainConfig, output: Path) -> Status:
    """The run with this config whose metrics are in `output`, wherever that folder has been moved."""
    noted = _noted(output)
    committed, is_open = _store(config)
    lines = read_metrics(output)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    last = steps[-1] if steps else {}
    recent = steps[-_RECENT:]
    seconds = sum(line["seconds"] for line in recent)
    total = noted.get("total_steps")
    state = noted.get("state", "new")
    if is_open:
        state = "running"
    elif state == "running":
        state = "died"
    step = int(last.get("step", committed or 0))
    left = (total - step) * seconds / len(recent) if recent and total is not None and state == "running" else None
    return Status(
        output_dir=str(output),
        state=state,
        pid=noted.get("pid") if state == "running" else None,
        step=step,
        total_steps=total,
        committed_step=committed,
        epoch=last.get("epoch"),
        loss=last.get("loss"),
        grad_norm=last.get("grad_norm"),
        learning_rate=last.get("learning_rate"),
        tokens_per_second=sum(line["tokens"] for line in recent) / seconds if seconds else None,
        seconds_left=left,
        eval_step=evaluations[-1]["step"] if evaluations else None,
        eval_loss=evaluations[-1]["eval_loss"] if evaluations else None,
        seconds_since_step=max(0.0, time.time() - last["time"]) if "time" in last else None,
    )


def find_config(place: Path) -> TrainConfig:
    """The config of the run that `place` names."""
    if place.is_file():
        return load_config(place)
    if (place / CONFIG_NAME).is_file():
        return load_config(place / CONFIG_NAME)
    if place.is_dir() and has_store(place):
        text = _config_in_store(place)
        if text is not None:
            return parse_config(text, name=f"the run in {place}")
        raise ConfigError(f"The run in {place} has taken no step with `lohan train` yet. Name its output_dir.")
    raise ConfigError(f"{place} holds no run of `lohan train`. Name its output_dir, its config or its SSD directory.")


def _config_in_store(place: Path) -> str | None:
    try:
        directories = json.loads((place / "run.json").read_bytes())["directories"]
    except (OSError, ValueError, KeyError):
        directories = [str(place)]
    with open_store([place, *map(Path, directories[1:])], read_only=True) as store:
        text = (store.metadata.get("user") or {}).get("config")
    return None if text is None else str(text)


def _store(config: TrainConfig) -> tuple[int | None, bool]:
    """The committed step and whether somebody has the store open; (None, False) where there is none yet."""
    try:
        found = describe_store([Path(directory) for directory in config.ssd])
    except LohanError:
        return None, False
    return found["committed_step"], found["state"] == "open"


def _noted(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / FILE_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
