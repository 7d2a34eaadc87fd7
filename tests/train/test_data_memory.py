"""Tokenising takes the same memory for any number of examples. The full figure: benchmarks/tokenise.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tokenise.py"


def measure(num: int, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--examples", str(num), "--directory", folder],
        capture_output=True, text=True, check=True, timeout=200,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def test_five_times_the_examples_take_no_more_memory(tmp_path):
    small, large = measure(1000, tmp_path), measure(5000, tmp_path)
    assert large["examples"] == 5000
    assert large["peak_rss_megabytes"] < 600
    assert large["peak_rss_megabytes"] - small["peak_rss_megabytes"] < 30
