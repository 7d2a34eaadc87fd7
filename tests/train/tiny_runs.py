"""Runs so small that a test can afford many: the zoo's llama on 36 questions, on one thread of a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from tiny_tokenizers import CHATML, byte_level
from torch import Tensor

from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig
from lohan.train.metrics import read_metrics

WORDS = ["two", "four", "dog", "fox", "lazy", "quick"]
EXAMPLES = [{"prompt": f"What is {a} {b}?", "completion": f"It is {b} {a}."} for a in WORDS for b in WORDS]


def make_model(folder: Path) -> Path:
    """The model and a tokenizer with a chat template."""
    tiny_model_folder("llama", folder, vocab_size=512)
    byte_level(CHATML).save_pretrained(folder)
    return folder


def make_config(model: Path, folder: Path, **changed: object) -> TrainConfig:
    """Six steps on EXAMPLES, everything in this folder."""
    data = folder / "data.jsonl"
    if not data.exists():
        data.write_text("\n".join(map(json.dumps, EXAMPLES)))
    plain = TrainConfig(
        model_name_or_path=str(model), output_dir=str(folder / "out"), ssd=(str(folder / "ssd"),), device="cpu",
        host_memory="400MB", train_file=(str(data),), max_length=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=6, seed=3,
    )  # fmt: skip
    return replace(plain, **changed)  # type: ignore[arg-type]


def elsewhere(config: TrainConfig, name: str, **changed: object) -> TrainConfig:
    """The same run in other places."""
    root = Path(config.output_dir).parent
    places = {"output_dir": str(root / name), "ssd": (str(root / f"{name}-ssd"),)}
    return replace(config, **(places | changed))  # type: ignore[arg-type]


def weights(config: TrainConfig) -> dict[str, Tensor]:
    """What was exported."""
    return load_file(Path(config.output_dir) / "model" / "model.safetensors")


def told(config: TrainConfig, *keys: str) -> list[tuple]:
    """These values of all lines of the metrics that have them."""
    lines = read_metrics(Path(config.output_dir))
    return [tuple(line[key] for key in keys) for line in lines if all(key in line for key in keys)]
