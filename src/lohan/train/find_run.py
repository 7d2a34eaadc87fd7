"""The run that a person means: by its first SSD directory, its output_dir or its config file."""

from __future__ import annotations

from pathlib import Path

from lohan.engine.run_folder import RUN_FILE
from lohan.errors import ConfigError
from lohan.store import has_store
from lohan.train.status import CONFIG_NAME, find_config


def find_run(place: Path) -> Path | None:
    """The first SSD directory of the run that `place` names; None if it names none."""
    if (place / RUN_FILE).is_file() and has_store(place):
        return place
    if (place / "config.json").is_file() or not (place.is_file() or (place / CONFIG_NAME).is_file()):
        return None
    for directory in find_config(place).ssd:
        if (Path(directory) / RUN_FILE).is_file():
            return Path(directory)
    raise ConfigError(f"The run of {place} has not begun: there is nothing in its `ssd` yet. Start it: lohan train.")
