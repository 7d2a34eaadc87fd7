"""TensorBoard and W&B, through the callback classes transformers has for them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from lohan.errors import ConfigError
from lohan.train.config import TrainConfig


class _Arguments:
    """What the callbacks ask of TrainingArguments, which itself cannot be made without accelerate."""

    def __init__(self, config: TrainConfig):
        self.output_dir = str(Path(config.output_dir).absolute())  # W&B warns of a run_name that is equal to it
        self.run_name = config.run_name or Path(config.output_dir).name
        self.logging_steps = config.logging_steps
        self.load_best_model_at_end = config.load_best_model_at_end
        self._values = asdict(config)

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def to_json_string(self) -> str:
        return json.dumps(self._values, indent=2)


class Reporters:
    """Tells every reporter what it is told. Made before the run is opened, so that a missing package is told early."""

    def __init__(self, callbacks: Sequence[Any], config: TrainConfig):
        from transformers import TrainerControl, TrainerState

        self._callbacks = callbacks
        self._arguments, self._state, self._control = _Arguments(config), TrainerState(), TrainerControl()

    def __enter__(self) -> Reporters:
        for callback in self._callbacks:
            callback.on_train_begin(self._arguments, self._state, self._control)
        return self

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """Numbers of a step; names that begin with eval_ are those of an evaluation."""
        self._state.global_step = step
        logs = {name: value for name, value in values.items() if value is not None}
        for callback in self._callbacks:
            callback.on_log(self._arguments, self._state, self._control, logs=dict(logs))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for callback in self._callbacks:
            callback.on_train_end(self._arguments, self._state, self._control)


def make_reporters(config: TrainConfig) -> Reporters:
    """The reporters in report_to. W&B is offline unless WANDB_MODE says otherwise: nothing leaves unasked."""
    return Reporters([_make(name, config) for name in config.report_to if name != "none"], config)


def _make(name: str, config: TrainConfig) -> Any:
    from transformers.integrations import TensorBoardCallback, WandbCallback

    try:
        if name == "tensorboard":
            board = TensorBoardCallback()
            board.logging_dir = board.logging_dir or str(Path(config.output_dir) / "tensorboard")
            return board
        return _make_wandb(WandbCallback, config)
    except (RuntimeError, ImportError):
        raise ConfigError(
            f"report_to has {name}, which is not installed. Install it: pip install {name}. Or remove it: "
            "metrics.jsonl is always written."
        ) from None


def _make_wandb(callback: Any, config: TrainConfig) -> Any:
    """transformers' callback, which itself leaves a run open until the process ends."""
    import wandb

    class OneRun(callback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self._ours = wandb.run is None  # one that was there before belongs to whoever began it
            asked = {"WANDB_MODE": "offline", "WANDB_DIR": config.output_dir}
            added = {name: value for name, value in asked.items() if name not in os.environ}
            os.environ.update(added)
            try:
                super().on_train_begin(*args, **kwargs)
            finally:
                for name in added:
                    os.environ.pop(name, None)

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_end(*args, **kwargs)
            if self._ours:
                wandb.finish()

    return OneRun()
