"""A run's store: made from a model the first time, found again afterwards.

Making one streams the model's weights from its folder into the store, piece by piece, while the module is on the meta
device; memory does not depend on the model's size. Whatever is wrong with the model is said before any space is
taken, and a creation that is cut off is begun again the next time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan.engine.layout import UnitLayout, lay_out, records_of
from lohan.engine.load import fill_store
from lohan.engine.run_folder import (
    MODEL_FOLDER,
    RUN_FILE,
    RunFolder,
    read_run_folder,
    refuse_foreign_files,
    refuse_lost_store,
)
from lohan.engine.run_folder import write_run_folder as write_files
from lohan.engine.settings import Settings
from lohan.errors import ConfigError, LohanError
from lohan.models.checkpoint import Checkpoint, match_folder
from lohan.models.folder import open_folder
from lohan.models.skeleton import build_skeleton
from lohan.models.source import ModuleSource
from lohan.models.units import Units, partition
from lohan.optim import Updater
from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.store import Files, RecordSpec, Store, create_store, has_store, open_store

Model = str | Path | nn.Module
Observer = Callable[[str, int, str, int, float, float], None]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model without its weights (unless it came with them), cut into units and pieces."""

    module: nn.Module
    units: Units
    layouts: list[UnitLayout]
    updater: Updater
    piece_elements: int
    folder: Path | None
    """Where its weights are; None for a module that has them."""

    @property
    def name(self) -> str:
        return type(self.module).__name__ if self.folder is None else self.folder.resolve().name

    @contextmanager
    def open_weights(self) -> Iterator[Checkpoint | ModuleSource]:
        """Where the weights come from. Everything that is wrong with a folder is one error here."""
        if self.folder is None:
            yield ModuleSource(self.module)
            return
        with open_folder(self.folder, direct=True) as folder:  # the store's own copy is read from now on
            yield match_folder(folder, self.module, self.units)


def build_model(
    model: Model | None,
    settings: Settings,
    directories: Sequence[Path],
    *,
    device: str,
    blocks: str | None,
    piece_elements: int | None,
    trust_remote_code: bool,
) -> BuiltModel:
    """The model without weights. None: the one the run in these directories was made from, cut as it was there."""
    folder: Path | None = None
    piece_elements = piece_elements or _own_pieces(directories) or PIECE_ELEMENTS
    if isinstance(model, nn.Module):
        module = model
    else:
        folder = _own_model(directories) if model is None else Path(model)
        module = build_skeleton(folder, compute_dtype=settings.compute(device), trust_remote_code=trust_remote_code)
    for name, parameter in module.named_parameters():
        if settings.is_frozen(name):
            parameter.requires_grad_(False)
    units = partition(module, blocks)
    updater = Updater(settings.make_optimizer(), settings.make_format(), settings.wire)
    return BuiltModel(
        module, units, lay_out(units, settings.wire, updater, piece_elements), updater, piece_elements, folder
    )


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """What keeps tensors of blocks for later, off while the run is open: key-value caches and hidden states."""
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    saved = [
        (part, name, getattr(part, name))
        for part in (config, text)
        for name in ("use_cache", "output_hidden_states")
        if getattr(part, name, False)
    ]
    try:
        for part, name, _ in saved:
            setattr(part, name, False)
        yield
    finally:
        for part, name, value in saved:
            setattr(part, name, value)


def _own_model(directories: Sequence[Path]) -> Path:
    for directory in directories:
        if (directory / RUN_FILE).exists() and (directory / MODEL_FOLDER / "config.json").exists():
            return directory / MODEL_FOLDER
    raise ConfigError(f"There is no run in {directories[0]} to go on with. Name the model to make one from: model=...")


def _own_pieces(directories: Sequence[Path]) -> int | None:
    """How the tensors of the run in these directories were cut; None where there is none, or none that can be read."""
    for directory in directories:
        try:
            return read_run_folder(directory).info.piece_elements
        except (LohanError, OSError):
            continue  # what is wrong with it is told when it is opened
    return None


def may_clip(settings: Settings) -> bool:
    """Whether a step's norm or overflow can change its update, so that gradients may have to be held."""
    return settings.max_grad_norm is not None or settings.loss_scale is not None or settings.wire == torch.float16


def num_versions(settings: Settings, *, clip: str, commit_every: int) -> int:
    """How many versions a store needs where nobody has said."""
    return 3 if may_clip(settings) and clip == "speculative" and commit_every > 1 else 2


@contextmanager
def open_run_store(
    directories: Sequence[Path],
    model: BuiltModel,
    settings: Settings,
    *,
    versions: int,
    gradients: bool,
    weights: Sequence[float] | None,
    progress: Callable[[int], None] | None,
    observer: Observer | None = None,
    files: Files | None = None,
) -> Iterator[tuple[Store, RunFolder]]:
    """The run's store: the one that is there, or a new one filled from the model. Buffers get their stored values."""
    records = records_of(model.layouts, gradients=gradients)
    if not directories:
        raise ConfigError("No directory was given for the run. Name at least one in `ssd`.")
    if not any(has_store(directory, files) for directory in directories):
        refuse_foreign_files(directories[0])
        refuse_lost_store(directories[0])
        with model.open_weights():
            create_store(directories, records, versions=versions, weights=weights, files=files)
    with open_store(directories, observer=observer, files=files) as store:
        first = store.drives[0].directory
        if store.committed_step is None:
            _check_records(store, records, first)
            with model.open_weights() as source:
                write_files(
                    first,
                    model=model.name,
                    store=store.name,
                    directories=[drive.directory for drive in store.drives],
                    settings=settings.identity(),
                    piece_elements=model.piece_elements,
                    units=model.units,
                    source=source if isinstance(source, Checkpoint) else model.module,
                )
                fill_store(store, model.layouts, model.updater, source, _first_metadata(settings), progress)
        folder = read_run_folder(first)
        _check_run(folder, store, model, settings)
        _check_records(store, records_of(model.layouts, gradients=False), first)
        folder.moved_to([drive.directory for drive in store.drives])
        with ExitStack() as owned:
            origin = folder.origin()
            owned.callback(origin.folder.close)
            origin.load_buffers(model.module)
        yield store, folder


def load(
    folder: str | Path,
    *,
    ssd: str | Path | Sequence[str | Path],
    blocks: str | None = None,
    versions: int | None = None,
    clip: str = "auto",
    commit_every: int = 1,
    weights: Sequence[float] | None = None,
    piece_elements: int | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int], None] | None = None,
    **settings: Any,
) -> RunFolder:
    """Stream a Hugging Face folder into a new run on these SSD directories, without training it.

    open_run() with the same settings goes on from there. A run that is there already is only checked. The module is
    built on the meta device and every tensor goes from file to store in pieces: memory does not depend on the size of
    the model. Missing, unexpected, misshapen, truncated and duplicate tensors are listed in one ModelError before any
    space is taken. `progress` is told numbers of parameters as they are done.
    """
    chosen = Settings(**settings)
    directories = [Path(ssd)] if isinstance(ssd, (str, Path)) else [Path(directory) for directory in ssd]
    built = build_model(
        folder, chosen, directories, device="cpu", blocks=blocks, piece_elements=piece_elements,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    chosen_versions = num_versions(chosen, clip=clip, commit_every=commit_every) if versions is None else versions
    with open_run_store(
        directories, built, chosen, versions=chosen_versions, gradients=may_clip(chosen), weights=weights,
        progress=progress,
    ) as (_, run_folder):  # fmt: skip
        return run_folder


def _first_metadata(settings: Settings) -> dict[str, Any]:
    return {"step": 0, "updates": 0, "lag": {}, "loss_scale": None, "run": settings.identity(), "user": {}}


def _check_records(store: Store, records: Sequence[RecordSpec], directory: Path) -> None:
    sizes = {record.name: record.num_bytes for record in store.layout.records}
    for record in records:
        if sizes.get(record.name) != record.num_bytes:
            raise ConfigError(
                f"The run in {directory} was made for another model or other settings: it has "
                f"{sizes.get(record.name, 0)} bytes for {record.name} and {record.num_bytes} are needed. "
                "Give the model it was made from, or another directory in `ssd`."
            )


def _check_run(folder: RunFolder, store: Store, model: BuiltModel, settings: Settings) -> None:
    """A resumed run goes on with the model and the settings its store was made with."""
    info, directory = folder.info, folder.directory
    if info.store != store.name:
        raise ConfigError(
            f"{directory / RUN_FILE} belongs to another store ({info.store[:8]}) than the one beside it "
            f"({store.name[:8]}). Restore the file, or give another directory in `ssd`."
        )
    wanted = settings.identity() | {"piece_elements": model.piece_elements}
    saved = info.settings | {"piece_elements": info.piece_elements}
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"The run in {directory} was made with {name} = {saved.get(name)!r}, and now it is {value!r}. "
                f"Set {name} to {saved.get(name)!r}, or give another directory in `ssd`."
            )
    there = {name: (shape, trained) for _, _, params in folder.tensors["units"] for name, shape, trained in params}
    here = {param.name: (list(param.shape), param.trainable) for param in model.units.params}
    if there != here:
        name = next(name for name in [*here, *there] if there.get(name) != here.get(name))
        raise ConfigError(
            f"The run in {directory} was made from another model, {info.model}: {name} is {_told(there.get(name))} "
            f"there and {_told(here.get(name))} in this one. "
            "Give the model it was made from, or another directory in `ssd`."
        )


def _told(param: tuple[list[int], bool] | None) -> str:
    return "missing" if param is None else f"{param[0]}{'' if param[1] else ' (frozen)'}"
