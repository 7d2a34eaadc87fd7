"""`lohan train` as a process: stopped by signals at random moments, and on drives that fail it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lohan.testing import train_kill


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from lohan.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_stopped_at_random_moments_it_ends_with_the_same_bits(tmp_path):
    tally = train_kill.run(tmp_path, num_rounds=3, seed=1)
    assert tally.failures == 0
    assert tally.kills + tally.stops + tally.finished == 3


def test_a_drive_that_is_too_small_is_refused_before_anything_is_made(tmp_path):
    train_kill.prepare(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small filesystem")
    try:
        done = command("train", tmp_path / "straight.yaml", "--set", f"ssd=[{small / 'ssd'}]")
        assert done.returncode == 2
        assert "The store needs" in done.stderr
        assert "1.05 MB are free" in done.stderr
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_full_disk_under_output_dir_stops_with_a_message_and_can_be_gone_on_from(tmp_path):
    train_kill.prepare(tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a small filesystem")
    try:
        place = ["--set", f"dataset_cache_dir={tmp_path / 'cache'}"]
        done = command("train", tmp_path / "straight.yaml", *place, "--set", f"output_dir={small / 'out'}")
        assert done.returncode == 2
        assert done.stderr.startswith("lohan: ")
        assert "No space left on device" in done.stderr
        assert "Traceback" not in done.stderr
    finally:
        subprocess.run(["umount", small], check=True)
    again = command("train", tmp_path / "straight.yaml", *place)
    assert again.returncode == 0
    assert (tmp_path / "straight" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("key", ["output_dir", "ssd"])
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, key):
    train_kill.prepare(tmp_path)
    done = command("train", tmp_path / "straight.yaml", "--set", f"{key}=/proc/nothing")
    assert done.returncode == 2
    assert "/proc/nothing" in done.stderr
    assert done.stderr.startswith("lohan: ")
    assert "Traceback" not in done.stderr


def test_a_config_that_is_wrong_is_told_without_loading_torch(tmp_path):
    (tmp_path / "bad.yaml").write_text("learning_rate: 1\nlearning_rat: 2\n")
    code = f"""
import sys
sys.argv = ["lohan", "train", {str(tmp_path / "bad.yaml")!r}]
from lohan.cli import main
try:
    main()
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"
    assert "line 2: there is no key 'learning_rat'. Did you mean learning_rate?" in done.stderr
    assert Path(tmp_path / "bad.yaml").exists()
