import os
import tempfile
from pathlib import Path

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def one_thread():
    """A zoo model is smaller than the cost of sharing it between cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder_in_memory(tmp_path):
    """For what tests arithmetic and order: a busy disk must not make it slow."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="lohan-test-", dir=shared) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Where the zoo's folders are made, each once."""
    return tmp_path_factory.mktemp("models")
