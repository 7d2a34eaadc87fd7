"""What a run keeps beside its store, in its first SSD directory, so that it needs nothing else to go on or be exported.

    run.json        what this is: format, directories, settings that cannot change, the model's name
    tensors.json    units and parameters, and the layout of the folder they came from
    model/          config.json, tokenizer, generation settings and the like; buffers.safetensors if there are buffers

Written once, when the run is created and before its first commit: a run with a commit has all of them. Each file
appears under its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import lohan
from lohan.engine.layout import UnitLayout
from lohan.engine.settings import DTYPES
from lohan.errors import ConfigError, ModelError, StoreMissing
from lohan.models.checkpoint import Checkpoint
from lohan.models.export import files_to_copy
from lohan.models.origin import recall, remember, remember_module
from lohan.models.units import ParamSpec, Units, UnitSpec
from lohan.optim import Updater
from lohan.plan.pieces import TensorSize, cut_unit

FORMAT_VERSION = 1
RUN_FILE = "run.json"
TENSORS_FILE = "tensors.json"
MODEL_FOLDER = "model"
BUFFERS_FILE = "buffers.safetensors"
_RUN_KEYS = {
    "format_version": int, "lohan": str, "model": str, "store": str, "directories": list, "settings": dict,
    "piece_elements": int, "checksums": dict,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What run.json says."""

    model: str
    """The name of the folder or class the run was made from; for people."""

    store: str
    """The random name of the store this belongs to."""

    directories: tuple[str, ...]
    """All SSD directories, absolute, in the order they were given in when the run was made or last opened."""

    settings: dict[str, Any]
    piece_elements: int
    checksums: dict[str, str]
    """xxh64 of the files a run's bits depend on."""

    lohan: str = lohan.__version__
    """The version that made the run."""

    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one run, read."""

    directory: Path
    info: RunInfo
    tensors: dict[str, Any]

    @property
    def model_folder(self) -> Path:
        return self.directory / MODEL_FOLDER

    def origin(self) -> Checkpoint:
        """The layout the weights came in, and the values of buffers."""
        return recall(self.tensors["origin"], self.model_folder / BUFFERS_FILE)

    def layouts(self, updater: Updater) -> list[UnitLayout]:
        """The run's units, cut as they were; no model is needed for it."""
        wire = wire_dtype(self.info)
        layouts = []
        for index, (name, kind, listed) in enumerate(self.tensors["units"]):
            params = tuple(ParamSpec(p, tuple(shape), wire, trainable, ()) for p, shape, trainable in listed)
            sizes = [TensorSize(param.name, param.num_elements, param.trainable) for param in params]
            pieces = cut_unit(
                sizes,
                element_bytes=wire.itemsize,
                state_bytes=updater.state_bytes,
                piece_elements=self.info.piece_elements,
            )
            layouts.append(UnitLayout(UnitSpec(index, name, kind, params, None), pieces, wire))
        return layouts

    def moved_to(self, directories: Sequence[Path]) -> None:
        """Note where the run's directories are now."""
        here = tuple(os.path.abspath(directory) for directory in directories)
        if here != self.info.directories:
            _write_info(self.directory, replace(self.info, directories=here))


def wire_dtype(info: RunInfo) -> torch.dtype:
    return DTYPES[info.settings["wire_dtype"]]


def refuse_foreign_files(directory: Path) -> None:
    """Before a run is made here: nothing that is not a run's own may stand where its files go."""
    if (directory / MODEL_FOLDER).exists() and not (directory / RUN_FILE).exists():
        raise ConfigError(
            f"{directory / MODEL_FOLDER} exists and was not made by a run, which keeps its model's files there.\n"
            f"Give a directory of its own in `ssd`, like {directory / 'run'}."
        )
    if (directory / RUN_FILE).exists():
        _read_json(directory / RUN_FILE)  # somebody else's run.json is not overwritten


def refuse_lost_store(directory: Path) -> None:
    """Before a store is made here: files of a run whose store has gone are not taken for an empty directory."""
    if (directory / RUN_FILE).exists():
        raise StoreMissing(
            f"{directory} holds a run whose lohan.* files are not there. Restore them, or remove the directory to "
            "begin anew."
        )


def write_run_folder(
    directory: Path,
    *,
    model: str,
    store: str,
    directories: Sequence[Path],
    settings: dict[str, Any],
    piece_elements: int,
    units: Units,
    source: Checkpoint | nn.Module,
) -> None:
    """Write everything for a new run. `directory` is its first."""
    refuse_foreign_files(directory)
    partial = directory / f".{MODEL_FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        buffers = partial / BUFFERS_FILE
        if isinstance(source, Checkpoint):
            origin = remember(source, buffers)
            _copy_small_files(source.folder.path, partial)
        else:
            origin = remember_module(source, units, buffers)
            _save_config(source, partial)
        tensors = {
            "units": [
                [unit.name, unit.kind, [[param.name, list(param.shape), param.trainable] for param in unit.params]]
                for unit in units
            ],
            "origin": origin,
        }
        text = json.dumps(tensors, separators=(",", ":")).encode()
        checksums = {TENSORS_FILE: xxhash.xxh64_hexdigest(text)}
        if buffers.exists():
            checksums[f"{MODEL_FOLDER}/{BUFFERS_FILE}"] = xxhash.xxh64_hexdigest(buffers.read_bytes())
        for file in partial.rglob("*"):
            _flush(file)
        _flush(partial)
        _write_file(directory / TENSORS_FILE, text)
        _write_info(
            directory,
            RunInfo(
                model=model,
                store=store,
                directories=tuple(os.path.abspath(path) for path in directories),
                settings=settings,
                piece_elements=piece_elements,
                checksums=checksums,
            ),
        )
        shutil.rmtree(directory / MODEL_FOLDER, ignore_errors=True)  # of a creation that was cut off here
        os.rename(partial, directory / MODEL_FOLDER)
        _flush(directory)
    except OSError as error:
        raise ModelError(
            f"The model's files cannot be copied to {directory}: {error.strerror or error}. Mend that and repeat."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_run_folder(directory: Path) -> RunFolder:
    """The files of the run whose first SSD directory this is."""
    if not (directory / RUN_FILE).is_file():
        raise StoreMissing(
            f"{directory} holds no run: it has no {RUN_FILE}. Give a run's output_dir, or its first SSD directory (the "
            "first in `ssd` when it was made)."
        )
    found = _read_json(directory / RUN_FILE)
    info = RunInfo(**{**found, "directories": tuple(found["directories"])})
    for name, expected in info.checksums.items():
        try:
            actual = xxhash.xxh64_hexdigest((directory / name).read_bytes())
        except OSError as error:
            raise ModelError(f"{directory / name} cannot be read: {error.strerror}. Restore the file.") from error
        if actual != expected:
            raise ModelError(
                f"{directory / name} is not what this run wrote there (checksum {actual}, expected {expected}). "
                "Restore the file."
            )
    return RunFolder(directory, info, json.loads((directory / TENSORS_FILE).read_bytes()))


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any]
    try:
        found = json.loads(path.read_bytes())
        good = isinstance(found, dict) and "format_version" in found
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Restore the file, or give another directory.") from error
    if not good:
        raise ConfigError(f"{path} was not written by a run. Give another directory in `ssd`.")
    if found["format_version"] != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {found['format_version']} and this lohan ({lohan.__version__}) knows "
            f"{FORMAT_VERSION}. Use the version that made the run: {found.get('lohan', 'unknown')}."
        )
    if found.keys() != _RUN_KEYS.keys() or not all(type(found[key]) is kind for key, kind in _RUN_KEYS.items()):
        raise ModelError(f"{path} is damaged: its entries are not those of a run. Restore the file.")
    return found


def _write_info(directory: Path, info: RunInfo) -> None:
    content = {key: getattr(info, key) for key in _RUN_KEYS}
    _write_file(directory / RUN_FILE, (json.dumps(content, indent=2) + "\n").encode())


def _copy_small_files(source: Path, target: Path) -> None:
    for file in (source / "config.json", *files_to_copy(source)):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _save_config(module: nn.Module, target: Path) -> None:
    """What a transformers model can say of itself; another module cannot be exported as a folder."""
    for name in ("config", "generation_config"):
        save = getattr(getattr(module, name, None), "save_pretrained", None)
        if save is not None:
            save(target)


def _write_file(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    _flush(partial)
    os.replace(partial, path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
