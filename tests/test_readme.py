"""What the README shows must work as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from lohan.store.report import describe_store

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_runs(tmp_path):
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for name in ("nvme0", "nvme1"):
        (tmp_path / name).mkdir()
    exec(compile(code.replace("/mnt/", f"{tmp_path}/"), "README.md", "exec"), {})
    assert describe_store([tmp_path / "nvme0/run", tmp_path / "nvme1/run"])["committed_step"] == 1
