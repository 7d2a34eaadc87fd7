"""A commented config for this machine, for `lohan init`.

find_machine() looks at drives, RAM and GPUs without writing anything; write_example() turns such facts into text, so
that any machine can be described in a test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.sizes import format_bytes

_MIN_DRIVE_BYTES = 20 * 10**9
"""A drive with less has no room for a model worth streaming. By feel."""

_BYTES_PER_PARAMETER = 26
"""Two versions of 12 bytes, and 2 for gradients that wait for clipping: docs/training.md."""


@dataclass(frozen=True, slots=True)
class DriveFact:
    path: str
    """A directory on it that this user can write to."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class GpuFact:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class MachineFacts:
    drives: tuple[DriveFact, ...]
    """Different disks, the one with most free space first."""

    free_ram_bytes: int
    gpus: tuple[GpuFact, ...] = ()


def find_machine(places: Sequence[str] | None = None) -> MachineFacts:
    """This machine. `places` are directories to consider; by default every mounted filesystem and the home folder."""
    from lohan.doctor.machine import find_torch

    torch = find_torch()
    gpus = () if torch is None else tuple(GpuFact(gpu.name, gpu.memory_bytes) for gpu in torch.gpus)
    return MachineFacts(_find_drives(places), free_ram(), gpus)


def all_ram() -> int:
    """RAM this process could ever take: the machine's, within its control group."""
    import psutil

    from lohan.doctor.machine import find_cgroup_memory

    there = int(psutil.virtual_memory().total)
    group = find_cgroup_memory()
    return there if group is None else min(there, group.limit_bytes)


def free_ram() -> int:
    """RAM this process can still take: what is free, within its control group."""
    import psutil

    from lohan.doctor.machine import find_cgroup_memory

    free = int(psutil.virtual_memory().available)
    group = find_cgroup_memory()
    return free if group is None else min(free, max(0, group.limit_bytes - group.used_bytes))


def _find_drives(places: Sequence[str] | None) -> tuple[DriveFact, ...]:
    from lohan.doctor.drives import find_facts
    from lohan.doctor.mounts import kind_of, parse_mountinfo

    try:
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    except OSError:
        return ()
    tried = [str(Path.home()), str(Path.cwd()), *(m.point for m in mounts)] if places is None else list(places)
    best: dict[frozenset[str] | str, DriveFact] = {}
    for place in tried:
        if not os.path.isdir(place):
            continue
        facts = find_facts(place, mounts)
        if facts.problem or facts.mount is None or kind_of(facts.mount.filesystem) not in ("disk", "copy-on-write"):
            continue
        if facts.rotational or facts.free_bytes < _MIN_DRIVE_BYTES:
            continue
        disk = facts.disks or facts.mount.device
        if disk not in best or facts.free_bytes > best[disk].free_bytes:
            best[disk] = DriveFact(place, facts.free_bytes)
    return tuple(sorted(best.values(), key=lambda drive: -drive.free_bytes))


def write_example(machine: MachineFacts, *, name: str = "my-run") -> str:
    """The text of a config with what must be set, what this machine has, and what is usually changed."""
    ram = _gigabytes(0.75 * machine.free_ram_bytes)
    if machine.gpus:
        gpu = machine.gpus[0]
        device = _line("device: cuda", f"{gpu.name}, {format_bytes(gpu.memory_bytes)}")
        device += f"\ngpu_memory: {_gigabytes(0.9 * gpu.memory_bytes)}"
    else:
        device = _line("device: cpu", "no GPU was found")
    return _TEMPLATE.format(
        output=_line(f"output_dir: {_quoted(name)}", "metrics, tokenised data, the trained model"),
        drives=_drive_lines(machine, name),
        memory=_line(f"host_memory: {ram}", f"of {format_bytes(machine.free_ram_bytes)} free"),
        device=device,
    )


def _line(text: str, comment: str) -> str:
    return f"{text:<38} # {comment}"


def _gigabytes(num_bytes: float) -> str:
    return f"{int(num_bytes // 10**9)}GB" if num_bytes >= 2 * 10**9 else f"{int(num_bytes // 10**6)}MB"


def _drive_lines(machine: MachineFacts, name: str) -> str:
    if not machine.drives:
        return _line(
            f"ssd: [{_quoted(name + '/ssd')}]",
            f"no drive with {format_bytes(_MIN_DRIVE_BYTES)} free was found: name one",
        )
    lines = ["ssd:"]
    for drive in machine.drives:
        parameters = drive.free_bytes / _BYTES_PER_PARAMETER / 1e9
        path = os.path.join(drive.path, name)
        room = f"{format_bytes(drive.free_bytes)} free: room for {parameters:.1f}e9 parameters"
        lines.append(_line(f"  - {_quoted(path)}", room))
    return "\n".join(lines)


def _quoted(path: str) -> str:
    """A path as YAML: bare where that means the same."""
    import yaml

    return str(yaml.safe_dump(path, width=10_000).splitlines()[0])


_TEMPLATE = """\
# A training run. Start it, and go on with it after any interruption, with: lohan train THIS_FILE
# All keys: docs/config.md. Change one for a single run with: --set key=value

model_name_or_path: /models/my-model   # a Hugging Face folder: config, tokenizer, *.safetensors
train_file: data.jsonl                 # messages, prompt/completion, text, alpaca or sharegpt; or a list of files
{output}

# -- this machine
# Weights and optimizer state live here: 26 bytes per parameter, over all drives. Leave out a drive you want to keep.
{drives}
{memory}
{device}

# -- data
max_length: 2048                       # tokens; longer examples are cut off, and counted
packing: true                          # several examples in a row; none of them sees another
eval_share: 0.01                       # held out; or give an eval_file
eval_strategy: epoch

# -- training
num_train_epochs: 3
per_device_train_batch_size: 1         # rows of a micro-batch: sets how much the device must hold
gradient_accumulation_steps: 16        # micro-batches of a step: more of them hide the SSD
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.03
weight_decay: 0.0
max_grad_norm: 1.0
seed: 42

# -- reporting
logging_steps: 1
# report_to: tensorboard               # or wandb; metrics.jsonl is always written
# early_stopping_patience: 3
# load_best_model_at_end: true         # keep the best weights in output_dir/best
"""
