"""Reads a training config: one flat YAML file, and `key=value` overrides from the command line.

Every mistake is one sentence with the file and line it stands in: a key nobody knows (with the nearest one that
exists), a key written twice, a value of the wrong type, a value that cannot work, a key that is missing.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from lohan.errors import ConfigError
from lohan.nearest import did_you_mean
from lohan.train.config import BadValue, TrainConfig

_HINTS = get_type_hints(TrainConfig)
_FOREIGN = {
    "model": "model_name_or_path", "train_files": "train_file", "dataset": "train_file", "dataset_path": "train_file",
    "validation_file": "eval_file", "val_file": "eval_file", "eval_files": "eval_file", "eval_split": "eval_share",
    "lr": "learning_rate", "scheduler": "lr_scheduler_type", "lr_schedule": "lr_scheduler_type",
    "epochs": "num_train_epochs", "num_epochs": "num_train_epochs", "steps": "max_steps", "total_steps": "max_steps",
    "batch_size": "per_device_train_batch_size", "micro_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "seq_len": "max_length", "sequence_len": "max_length", "optimizer": "optim", "clip_grad": "max_grad_norm",
    "commit_every": "save_steps", "evaluation_strategy": "eval_strategy", "wandb": "report_to",
    "completion_only_loss": "assistant_only_loss", "train_on_inputs": "assistant_only_loss", "ram": "host_memory",
    "vram": "gpu_memory", "drives": "ssd", "cache_dir": "dataset_cache_dir",
}  # fmt: skip
"""What other tools call our keys."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The config in this file, with `key=value` overrides on top of it."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text: byte {error.start} cannot be read. Save it as UTF-8.") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}. `lohan init` writes a config.") from None
    return parse_config(text, overrides, name=str(file))


def parse_config(text: str, overrides: Sequence[str] = (), *, name: str = "config") -> TrainConfig:
    """The same from text; `name` is what errors call it."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, value, line in _pairs(text, name):
        where = f"{name}, line {line}"
        if key in places:
            raise ConfigError(f"{where}: {key} is set a second time; the first is in {places[key]}. Remove one.")
        values[key], places[key] = _checked(key, value, where), where
    for override in overrides:
        key, value = _split_override(override)
        places[key] = f"--set {override}"
        values[key] = _checked(key, value, places[key])
    _check_complete(values, name)
    try:
        return TrainConfig(**values)
    except BadValue as error:
        where = places.get(error.key, f"{name}, which does not set {error.key}")
        raise ConfigError(f"{where}: {error}") from None


def dump_config(config: TrainConfig) -> str:
    """The config as YAML that parse_config() reads back to the same."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=10_000)


def _pairs(text: str, name: str) -> list[tuple[str, Any, int]]:
    """Keys, values and line numbers of a flat YAML mapping."""
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{name} is not a list of `key: value` lines. `lohan init` writes a config to start from."
            )
        pairs = []
        for key, value in root.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{name}, line {key.start_mark.line + 1}: a key must be one word. Write `key: value`."
                )
            pairs.append((str(key.value), loader.construct_object(value, deep=True), key.start_mark.line + 1))
        return pairs
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: this is not YAML: {error.problem}. Write `key: value`.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that does not exist, a control character
        raise ConfigError(
            f"{name}: this is not YAML: {str(error).splitlines()[0]}. `lohan init` writes a config to start from."
        ) from None
    finally:
        if loader is not None:
            loader.dispose()


def _split_override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    key = key.strip()
    if not separator or not key:
        raise ConfigError(f"--set {text}: write it as key=value, like --set learning_rate=2e-5.")
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {text}: {value!r} is not a YAML value. Put it in quotes.") from None


def _checked(key: str, value: Any, where: str) -> Any:
    if key not in _HINTS:
        known = _FOREIGN.get(key.lower())
        hint = f" Here it is called {known}." if known else did_you_mean(key, _HINTS)
        if isinstance(value, dict):
            hint = " A config is flat: write the keys inside it as lines of their own, without the heading."
        raise ConfigError(f"{where}: there is no key {key!r}.{hint or ' All keys are in docs/config.md.'}")
    try:
        return coerce(key, value)
    except BadValue as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_complete(values: Mapping[str, Any], name: str) -> None:
    missing = [f.name for f in fields(TrainConfig) if f.default is MISSING and f.name not in values]
    if missing:
        examples = {"model_name_or_path": "/models/my-model", "output_dir": "out", "ssd": "[/mnt/nvme0/run]",
                    "train_file": "data.jsonl"}  # fmt: skip
        lines = ", ".join(f"`{key}: {examples[key]}`" for key in missing)
        raise ConfigError(f"{name} does not set {' or '.join(missing)}. Add {lines}.")


def coerce(key: str, value: Any) -> Any:
    """A YAML value as the type this key has. BadValue if it is another one."""
    hint = _HINTS[key]
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is tuple:
        return _strings(key, value)
    if key == "eval_strategy" and value is False:
        return "no"  # YAML reads a bare `no` as false
    if hint is bool:
        if not isinstance(value, bool):
            raise BadValue(key, f"{key} is {value!r}. Write true or false.")
        return value
    if hint in (int, float):
        return _number(key, value, hint)
    if isinstance(value, (bool, list, dict)) or value is None:
        raise BadValue(key, f"{key} is {value!r}. Write one value, in quotes if it looks like something else.")
    return str(value)


def _number(key: str, value: Any, kind: type) -> float | int:
    """A number. YAML reads 1e-5 as text (it wants 1.0e-5), and people write it."""
    sample = "a whole number, like 8" if kind is int else "a number, like 1e-5"
    wrong = BadValue(key, f"{key} is {value!r}. Write {sample}.")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong
    if kind is int and isinstance(value, int):
        return value
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise wrong
    return int(number) if kind is int else number


def _strings(key: str, value: Any) -> tuple[str, ...]:
    listed = [] if value is None else value if isinstance(value, list) else [value]
    for part in listed:
        if isinstance(part, (bool, list, dict)) or part is None:
            raise BadValue(key, f"{key} has {part!r} in it. Write a name, or a list like [first, second].")
    if key == "report_to" and listed == ["none"]:
        return ()
    return tuple(str(part) for part in listed)
