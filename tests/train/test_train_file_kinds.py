"""The same examples train the same model, whatever kind of file they come in."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from tiny_runs import EXAMPLES, elsewhere, make_config, make_model, told, weights

from lohan.train.loop import train


def write_json(path: Path) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps(EXAMPLES, indent=1))
    return path


def write_csv(path: Path) -> Path:
    path = path.with_suffix(".csv")
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(EXAMPLES)
    return path


def write_parquet(path: Path) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = path.with_suffix(".parquet")
    parquet.write_table(pyarrow.Table.from_pylist(EXAMPLES), path, row_group_size=10)
    return path


def write_folder(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(EXAMPLES).save_to_disk(path, num_shards=2)
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A run on JSONL."""
    folder = tmp_path_factory.mktemp("lines")
    config = make_config(make_model(folder / "model"), folder)
    train(config, live=False, say=lambda text: None)
    return config


@pytest.mark.parametrize("write", [write_json, write_csv, write_parquet, write_folder])
def test_every_kind_of_file_trains_like_lines(lines, tmp_path, write):
    said: list[str] = []
    config = elsewhere(lines, write.__name__, train_file=(str(write(tmp_path / "data")),))
    train(config, live=False, say=said.append)
    assert any("36 examples" in sentence for sentence in said)
    assert told(config, "step", "loss", "grad_norm", "tokens") == told(lines, "step", "loss", "grad_norm", "tokens")
    expected = weights(lines)
    assert all(torch.equal(value, expected[name]) for name, value in weights(config).items())


def test_other_examples_would_show(lines, tmp_path):
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps(each | {"completion": "No."}) for each in EXAMPLES))
    config = elsewhere(lines, "other", train_file=(str(tmp_path / "other.jsonl"),))
    train(config, live=False, say=lambda text: None)
    assert told(config, "step", "loss") != told(lines, "step", "loss")
