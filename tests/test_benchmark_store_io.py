"""The store's benchmarks run and end with the line that is read by machines. What they find is not checked here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def last_line(script: str, *options: object) -> dict[str, float]:
    command = [sys.executable, BENCHMARKS / script, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_store_io_ends_with_its_ratios(tmp_path: Path) -> None:
    options = ("--record-mib", 4, "--total-gib", 0.03125, "--rounds", 1, "--quick")
    found = last_line("store_io.py", "--directory", tmp_path, *options)
    assert list(found) == ["read_ratio", "write_ratio", "mixed_ratio", "cpu_seconds_per_gb"]
    assert all(value > 0 for value in found.values())
    assert not list(tmp_path.iterdir())


def test_store_open_ends_with_its_times(tmp_path: Path) -> None:
    found = last_line("store_open.py", "--directory", tmp_path, "--records", 100, "--rounds", 1, "--large-tb", 0.01)
    assert list(found) == ["open_seconds", "open_peak_mb", "create_seconds", "deal_seconds"]
    assert not list(tmp_path.iterdir())
