import sys

import pytest
import torch
import transformers

from lohan import cli


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
def lohan(capsys, monkeypatch):
    """Run a command in this process: its exit code, stdout and stderr."""

    def run(*arguments: object):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["lohan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return end.value.code or 0, out, err

    return run
