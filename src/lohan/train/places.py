"""Whether a run's folders can be what the config says, told before anything is read or written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lohan.engine.run_folder import refuse_foreign_files, refuse_lost_store
from lohan.errors import ConfigError, StoreMissing
from lohan.train.config import TrainConfig


def check_places(config: TrainConfig) -> None:
    """Refuse `ssd` directories that cannot be made, or that others use."""
    taken = {
        os.path.realpath(config.model_name_or_path): "is the model's folder",
        os.path.realpath(config.output_dir): "is output_dir",
    }
    for directory in config.ssd:
        name = os.path.realpath(directory)
        if name in taken:
            raise ConfigError(
                f"ssd: {directory} {taken[name]}. Each drive needs a directory of its own, like "
                f"{Path(directory) / 'run'}."
            )
        taken[name] = "is named twice"
        _check_directory(Path(directory))
    refuse_foreign_files(Path(config.ssd[0]))
    refuse_lost_store(Path(config.ssd[0]))


def _check_directory(directory: Path) -> None:
    parent = directory.absolute().parent
    if directory.is_dir():
        return
    if os.path.lexists(directory):
        raise StoreMissing(f"{directory} is not a directory. Correct the path in `ssd`.")
    if not parent.is_dir():
        # A drive that is not mounted must not turn into a folder, so parents are never made.
        raise StoreMissing(
            f"{directory.parent} does not exist or is not a directory. Mount the drive or make the directory, then "
            "repeat the command."
        )


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """output_dir, made if need be. If the run comes to nothing, what was made for it and is still empty goes again."""
    with removed_if_empty(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink()
        except OSError as error:
            raise ConfigError(
                f"output_dir: {folder} cannot be written to: {error.strerror}. Set another one."
            ) from None
        yield


@contextmanager
def removed_if_empty(folder: Path) -> Iterator[None]:
    """After an error inside, remove this folder and its parents where they were not there before and hold nothing."""
    new = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        yield
    except BaseException:
        for each in new:
            try:
                each.rmdir()
            except OSError:
                pass  # it was never made, or holds something
        raise
