from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from small_runs import make_config

from lohan.first_training import least_memory
from lohan.sizes import parse_size
from lohan.train.config_file import dump_config


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """A zoo model is smaller than the cost of sharing it between cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with a finished run that had a machine's profile. Not to be changed: copy `out`."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(folder)
    # So little memory that weights and states live on SSD. In a process of its own: one that has held more memory
    # before takes none of the system's for this run, and there would be nothing to measure.
    least = parse_size(least_memory(config), name="host_memory")
    config = replace(config, host_memory=f"{least // 1000 + 600}kB")  # gradients of a clipped step need not go to SSD
    (folder / "config.yaml").write_text(dump_config(config))
    # However slow this machine is just now, all upgrades are to be looked at.
    code = "from lohan.report import predicted; predicted._UPGRADE_SECONDS = 1e9; from lohan.cli import main; main()"
    command = [sys.executable, "-c", code, "train", str(folder / "config.yaml")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of its output_dir."""
    return Path(shutil.copytree(trained / "out", tmp_path / "copy"))
