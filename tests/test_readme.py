"""What the README shows must work as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from lohan.store.report import describe_store
from lohan.testing.zoo import tiny_model_folder

README = (Path(__file__).parents[1] / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(code: str, directory: Path) -> None:
    code = code.replace("/mnt/", f"{directory}/").replace("/models/", f"{directory}/")
    exec(compile(code, "README.md", "exec"), {})


def test_the_store_example_runs(tmp_path):
    [code] = [block for block in BLOCKS if "create_store" in block]
    for name in ("nvme0", "nvme1"):
        (tmp_path / name).mkdir()
    run(code, tmp_path)
    assert describe_store([tmp_path / "nvme0/run", tmp_path / "nvme1/run"])["committed_step"] == 1


def test_the_training_example_runs_and_can_be_gone_on_with(tmp_path, capsys):
    [code] = [block for block in BLOCKS if "open_run" in block]
    (tmp_path / "nvme0").mkdir()
    tiny_model_folder("llama", tmp_path / "my-model")
    run(code, tmp_path)
    assert "step 3: loss" in capsys.readouterr().out
    assert (tmp_path / "my-model-tuned" / "model.safetensors").exists()
    run(code.replace("my-model-tuned", "again"), tmp_path)
    assert "step 6: loss" in capsys.readouterr().out
    assert (tmp_path / "again" / "config.json").exists()


def test_every_link_leads_somewhere():
    root = Path(__file__).parents[1]
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
