"""Small runs to report about."""

from __future__ import annotations

import json
from pathlib import Path

from lohan.cli_profile import write_machine
from lohan.first_training import make_tokenizer
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing.zoo import tiny_model_folder
from lohan.train.config import TrainConfig

MACHINE = MachineProfile(
    name="desk", gpu_name="cpu", gpu_flops_per_second=4e9, gpu_memory_bytes=8 * 10**9, separate_memory=False,
    to_gpu_bytes_per_second=1e10, to_host_bytes_per_second=1e10, host_memory_bytes=8 * 10**9,
    drives=(DriveProfile(read_bytes_per_second=2e9, write_bytes_per_second=1e9, endurance_bytes=6e14),),
    update_parameters_per_second=2e8,
)  # fmt: skip


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
