"""What the model writes during training: the weights of that step, and no bit of the training changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_tokenizers import CHATML, byte_level

from lohan.errors import ConfigError
from lohan.generate import Sampling, open_generator
from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig
from lohan.train.loop import train
from lohan.train.metrics import read_metrics

WORDS = ["two", "four", "dog", "fox", "lazy", "quick"]
PROMPTS = ("What is two dog?", "What is lazy fox?")


@pytest.fixture
def config(tmp_path):
    # Dropout: random numbers that a sample could disturb.
    folder = tiny_model_folder("gpt2", tmp_path / "model", vocab_size=512)
    byte_level(CHATML).save_pretrained(folder)
    lines = [json.dumps({"prompt": f"What is {a} {b}?", "completion": f"It is {b} {a}."}) for a in WORDS for b in WORDS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return TrainConfig(
        model_name_or_path=str(folder), output_dir=str(tmp_path / "out"), ssd=(str(tmp_path / "ssd"),), device="cpu",
        host_memory="400MB", train_file=(str(tmp_path / "data.jsonl"),), max_length=64, per_device_train_batch_size=4,
        gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=6, seed=3, eval_share=0.2, eval_strategy="steps",
        eval_steps=2,
    )  # fmt: skip


def elsewhere(config, name: str, **changed) -> TrainConfig:
    root = Path(config.output_dir).parent
    return replace(config, output_dir=str(root / name), ssd=(str(root / f"{name}-ssd"),), **changed)


def weights(config) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output_dir) / "model" / "model.safetensors")


def told(config, key: str) -> list:
    return [line[key] for line in read_metrics(Path(config.output_dir)) if key in line]


@pytest.mark.parametrize("save_steps", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "virtual"])
def test_samples_change_no_bit_and_are_what_the_model_writes(config, device, save_steps, capsys):
    config = replace(config, save_steps=save_steps, device=device, compute_dtype="fp32")
    sampled = elsewhere(config, "sampled", sample_prompts=PROMPTS, sample_max_new_tokens=6)
    for each in (config, sampled):
        train(each)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert told(config, key) == told(sampled, key)
    one, other = weights(config), weights(sampled)
    assert all(torch.equal(one[name], other[name]) for name in one)
    samples = told(sampled, "samples")
    assert [[sample["prompt"] for sample in each] for each in samples] == [list(PROMPTS)] * 3
    with open_generator(Path(sampled.output_dir) / "model", dtype="fp32") as generator:
        for sample in samples[-1]:
            assert generator.write(sample["prompt"], Sampling(max_new_tokens=6)).text == sample["text"]
    assert "  What is two dog? -> " in capsys.readouterr().out


def test_a_model_that_is_too_large_to_write_here_goes_on_training(config, monkeypatch, capsys):
    monkeypatch.setattr("lohan.train.samples._WEIGHTS_SHARE", 1e-6)
    train(replace(config, sample_prompts=PROMPTS))
    assert "No samples: memory is" in capsys.readouterr().out
    assert told(config, "samples") == [[], [], []]


def test_samples_need_evaluations(config):
    with pytest.raises(ConfigError, match="sample_prompts needs evaluations"):
        replace(config, eval_strategy="no", eval_steps=None, eval_share=0.0, sample_prompts=PROMPTS)
