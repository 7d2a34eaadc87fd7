from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from lohan.cli_profile import write_machine
from lohan.first_training import least_memory, make_tokenizer
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig
from lohan.train.loop import train

MACHINE = MachineProfile(
    name="desk", gpu_name="cpu", gpu_flops_per_second=4e9, gpu_memory_bytes=8 * 10**9, separate_memory=False,
    to_gpu_bytes_per_second=1e12, to_host_bytes_per_second=1e12, host_memory_bytes=8 * 10**9,
    drives=(DriveProfile(read_bytes_per_second=2e9, write_bytes_per_second=1e9, endurance_bytes=6e14),),
    update_parameters_per_second=2e8,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """A zoo model is smaller than the cost of sharing it between cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


def make_config(folder: Path, **changed) -> TrainConfig:
    """A run of the zoo's llama on 24 questions, everything in this folder."""
    if not (folder / "model").exists():
        tiny_model_folder("llama", folder / "model", vocab_size=512)
        make_tokenizer().save_pretrained(folder / "model")
        lines = [json.dumps({"prompt": f"{a}{b}=", "completion": f"{b}{a}"}) for a in range(6) for b in range(4)]
        (folder / "data.jsonl").write_text("\n".join(lines))
        write_machine(MACHINE, folder / "machine.yaml")
    return TrainConfig(
        **{
            "model_name_or_path": str(folder / "model"), "output_dir": str(folder / "out"),
            "ssd": (str(folder / "ssd"),), "device": "cpu", "host_memory": "400MB",
            "train_file": (str(folder / "data.jsonl"),), "eval_share": 0.2, "eval_strategy": "steps", "eval_steps": 3,
            "max_length": 16, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5,
            "max_grad_norm": 100.0,  # never reached: nothing is updated twice
            "learning_rate": 1e-3, "machine": str(folder / "machine.yaml"), "export_at_end": False, "seed": 3,
            **changed,
        }
    )  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """A folder with a finished run that had a machine's profile. Not to be changed: copy `out`."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(folder)
    # So little memory that weights and states live on SSD.
    train(replace(config, host_memory=least_memory(config)), live=False, say=lambda text: None)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of its output_dir."""
    return Path(shutil.copytree(trained / "out", tmp_path / "copy"))
