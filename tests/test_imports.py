"""What must stay light: the package, its command line, and the parts that may not know torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def loaded_after(code: str) -> set[str]:
    """The top-level modules a fresh interpreter has loaded after running this."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_lohan_loads_neither_torch_nor_numpy():
    assert not {"torch", "numpy", "typer", "rich"} & loaded_after("import lohan")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["doctor", "--help"],
        ["store", "info", "--help"],
        ["export", "--help"],
        ["report", "--help"],
    ],
)
def test_asking_the_command_line_for_help_loads_neither_torch_nor_numpy(arguments):
    code = f"""
import sys
sys.argv = ["lohan", *{arguments!r}]
from lohan.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert not {"torch", "numpy", "transformers", "psutil"} & loaded_after(code)


def test_the_store_knows_no_torch():
    assert "torch" not in loaded_after("import lohan.store, lohan.store.report, lohan.first_run")


def test_what_needs_torch_comes_when_it_is_asked_for():
    code = """
import sys, lohan
assert "open_run" in dir(lohan) and "torch" not in sys.modules
from lohan import Run, Settings, StepResult, VirtualOptions, export_run, open_run
assert lohan.models.load.__module__ == "lohan.engine.create" and lohan.errors.LohanError
assert not hasattr(lohan, "nothing") and not hasattr(lohan.models, "nothing")
"""
    assert "torch" in loaded_after(code)


def test_a_report_is_made_without_torch():
    assert not {"torch", "transformers"} & loaded_after("import lohan.report.page")


def test_a_trace_can_be_made_without_torch():
    assert "torch" not in loaded_after("import lohan.engine.trace")


def test_the_command_runs_as_a_module_too():
    said = subprocess.run([sys.executable, "-m", "lohan", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("lohan ")
