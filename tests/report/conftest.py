from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from small_runs import make_config

from lohan.first_training import least_memory
from lohan.train.loop import train


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
    # So little memory that weights and states live on SSD.
    train(replace(config, host_memory=least_memory(config)), live=False, say=lambda text: None)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of its output_dir."""
    return Path(shutil.copytree(trained / "out", tmp_path / "copy"))
