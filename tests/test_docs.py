"""Pages that must keep up with the code: errors, configs and the API reference."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lohan.models.tensor_file
import lohan.train.config  # noqa: F401 - has an error of its own
from lohan.errors import LohanError
from lohan.hardware.catalogue import load_drives
from lohan.train.config_file import parse_config

DOCS = Path(__file__).parents[1] / "docs"


def all_errors(kind: type = LohanError) -> set[str]:
    return {kind.__name__}.union(*(all_errors(sub) for sub in kind.__subclasses__()))


def test_every_error_is_in_the_troubleshooting_page():
    rows = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE))
    assert {name for name in all_errors() if not name.startswith("_")} <= rows


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_configs_that_are_shown_can_be_read(page):
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert parse_config(text, name=page.name)


def test_the_api_reference_is_current():
    done = subprocess.run([sys.executable, DOCS / "api.py", "--check"], timeout=100)
    assert done.returncode == 0, "write it again with: make docs"


def test_figures_of_drives_are_the_catalogue_s():
    drives = load_drives()
    text = (DOCS / "choosing-ssds.md").read_text()
    for name, title in (
        ("samsung-pm9a3-3.84tb", "Samsung PM9A3 3.84 TB (data centre)"),
        ("micron-7450-pro-3.84tb", "Micron 7450 PRO 3.84 TB (data centre)"),
        ("crucial-t700-2tb", "Crucial T700 2 TB"),
        ("samsung-990-pro-2tb", "Samsung 990 PRO 2 TB"),
        ("samsung-980-pro-1tb", "Samsung 980 PRO 1 TB"),
        ("crucial-p1-1tb", "Crucial P1 1 TB (QLC)"),
    ):
        drive = drives[name]
        row = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
        assert row.startswith(f"| {title} | {drive.read_bytes_per_second / 1e9} GB/s |")
        assert f"| {drive.write_bytes_per_second / 1e9} GB/s |" in row
        assert row.endswith(f"| {drive.endurance_bytes / 1e12:,.0f} TB |")
