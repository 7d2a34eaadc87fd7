"""Profiles, presets, plan/ and sim/ load without torch and read no file, no clock."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import lohan

SOURCE = Path(lohan.__file__).parent
PURE = [
    SOURCE / "profiles.py",
    SOURCE / "presets.py",
    SOURCE / "preset_shapes.py",
    *sorted((SOURCE / "plan").rglob("*.py")),
    *sorted((SOURCE / "sim").rglob("*.py")),
]


def module_name(path):
    name = "lohan." + ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def test_everything_pure_loads_without_torch():
    names = ", ".join(module_name(path) for path in PURE)
    code = f"import {names}; import json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not {"torch", "transformers", "safetensors", "psutil", "yaml"} & loaded


@pytest.mark.parametrize("path", PURE, ids=module_name)
def test_nothing_pure_opens_a_file_or_reads_a_clock(path):
    tree = ast.parse(path.read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "open"
    assert not imported & {"torch", "time", "datetime", "os", "pathlib", "io", "random", "numpy"}
