import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "train"))  # tiny_tokenizers


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
