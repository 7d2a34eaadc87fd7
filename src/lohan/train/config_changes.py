"""Which settings a run may be gone on with after they were changed, and which would give other bits.

Paths of data are free: what counts is the content, and TokenData.fingerprint speaks for that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lohan.train.config import ENDLESS_SCHEDULES, TrainConfig

FREE = frozenset(
    {
        "output_dir", "ssd", "host_memory", "gpu_memory", "machine", "trust_remote_code", "train_file", "eval_file",
        "max_eval_samples", "dataset_cache_dir", "chat_template_path", "per_device_eval_batch_size", "strategy", "clip",
        "save_steps", "export_at_end", "eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end",
        "early_stopping_patience", "early_stopping_threshold", "sample_prompts", "sample_max_new_tokens",
        "logging_steps", "report_to", "run_name",
    }
)  # fmt: skip
"""Keys that never change a run's bits."""

_END = frozenset({"num_train_epochs", "max_steps"})
"""Where the training ends. Free under a schedule that does not look at it."""


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} was {_told(self.old)} and is {_told(self.new)}"


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys that differ, by what that means for a run that is gone on with."""

    breaking: tuple[Change, ...]
    """Would give other bits than a run that was never stopped."""

    free: tuple[Change, ...]


def changes_result(old: TrainConfig, new: TrainConfig) -> Changes:
    """What differs between the config a run was made with and the one it should go on with."""
    breaking: list[Change] = []
    free: list[Change] = []
    for each in fields(TrainConfig):
        before, after = getattr(old, each.name), getattr(new, each.name)
        if each.name == "data_seed" and before == after:
            continue  # where it follows seed, seed is told
        if _meaning(old, each.name) != _meaning(new, each.name):
            (free if _is_free(each.name, old, new) else breaking).append(Change(each.name, before, after))
        elif before != after:
            free.append(Change(each.name, before, after))
    return Changes(tuple(breaking), tuple(free))


def _meaning(config: TrainConfig, key: str) -> Any:
    """A value as the run sees it: two ways to write the same thing are no change."""
    value = getattr(config, key)
    if key == "data_seed":
        return config.order_seed
    if key == "state_format":
        return value or ("split" if config.bf16 else "fp32")
    if key == "max_grad_norm":
        return value or None
    if key == "optim":
        return "adamw" if value.startswith("adamw") else value
    if key == "min_lr_rate" and config.lr_scheduler_type != "cosine_with_min_lr":
        return None
    if key == "momentum" and config.optim != "sgd":
        return None
    if key.startswith("adam_") and config.optim == "sgd":
        return None
    if key == "num_train_epochs" and config.max_steps > 0:
        return None
    return value


def _is_free(key: str, old: TrainConfig, new: TrainConfig) -> bool:
    if key in _END:
        return old.lr_scheduler_type in ENDLESS_SCHEDULES and not old.warmup_ratio and not new.warmup_ratio
    return key in FREE


def _told(value: Any) -> str:
    if value is None:
        return "not set"
    return str(list(value)) if isinstance(value, tuple) else str(value)
