"""`lohan train`, stopped again and again at random moments, must end with the bits of a run that was never stopped.

Every round starts the command in a process of its own and ends it: with SIGKILL at any moment, or with Ctrl-C or
SIGTERM, after which it must commit and say so. A run that reaches its end is compared with the reference, weight by
weight, and begun anew. Between two rounds the store must hold every step it promised to.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lohan.store.report import describe_store, verify_directories

STEPS = 24
_CONFIG = """\
model_name_or_path: {root}/model
train_file: {root}/data.jsonl
output_dir: {root}/{name}
ssd: [{root}/{name}-ssd-a, {root}/{name}-ssd-b]
host_memory: 400MB
device: cpu
max_length: 32
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
learning_rate: 1e-3
max_steps: {steps}
save_steps: {save_steps}
eval_share: 0.1
eval_strategy: steps
eval_steps: 5
seed: 3
"""


@dataclass(slots=True)
class Tally:
    """What a campaign saw."""

    kills: int = 0
    stops: int = 0
    """Ended by Ctrl-C or SIGTERM."""

    finished: int = 0
    """Runs that came to their end, all of them with the reference's bits."""

    lost_steps: int = 0
    """Steps that were done and had to be done again."""

    failures: int = 0


def prepare(root: Path, *, save_steps: int = 1) -> None:
    """A tiny model, data and a config for the reference and for the run that is stopped."""
    import torch

    from lohan.first_training import make_tokenizer, questions
    from lohan.testing.zoo import tiny_model_folder

    tiny_model_folder("llama", root / "model", vocab_size=259, dtype=torch.bfloat16)
    make_tokenizer().save_pretrained(root / "model")
    lines = [json.dumps({"prompt": asked, "completion": answered}) for asked, answered in questions(5, 60)]
    (root / "data.jsonl").write_text("\n".join(lines))
    for name in ("straight", "stopped"):
        text = _CONFIG.format(root=root, name=name, steps=STEPS, save_steps=save_steps)
        (root / f"{name}.yaml").write_text(text)


def start(root: Path, name: str) -> subprocess.Popen[str]:
    """`lohan train`, its lines to be read from stdout."""
    command = [sys.executable, "-c", "from lohan.cli import main; main()", "train", str(root / f"{name}.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # the same everywhere: other sums would be other bits
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def finish(root: Path, name: str) -> None:
    """Run to the end; RuntimeError with what was said if it does not get there."""
    with start(root, name) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"lohan train ended with {process.returncode}: {said}")


def run(
    root: Path,
    *,
    num_rounds: int,
    seed: int,
    save_steps: int = 1,
    progress: Callable[[Tally], None] | None = None,
) -> Tally:
    """Stop a training `num_rounds` times, then let it end. Failures are counted and printed to stderr."""
    rng = random.Random(seed)
    prepare(root, save_steps=save_steps)
    finish(root, "straight")
    tally = Tally()
    for _ in range(num_rounds):
        try:
            _round(root, rng, save_steps, tally)
        except Exception as error:  # whatever it is, it is a failure of this round
            print(f"round {tally.kills + tally.stops}: {type(error).__name__}: {error}", file=sys.stderr)
            tally.failures += 1
            return tally
        if progress is not None:
            progress(tally)
    finish(root, "stopped")
    _compare(root, tally)
    return tally


def _round(root: Path, rng: random.Random, save_steps: int, tally: Tally) -> None:
    by = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    wait_steps, early = rng.randint(1, STEPS // 2), rng.random() < 0.15
    heard, said = _committed(root), []
    before = heard
    with start(root, "stopped") as process:
        assert process.stdout is not None
        if early and by == signal.SIGKILL:
            time.sleep(rng.uniform(0, 6))
        else:
            for line in process.stdout:
                said.append(line)
                heard = max(heard, _step_of(line))
                if heard >= before + wait_steps:
                    time.sleep(rng.uniform(0, 0.15))
                    break
        process.send_signal(by)
        for line in process.stdout:
            said.append(line)
            heard = max(heard, _step_of(line))
    if process.returncode == 0:
        tally.finished += 1
        _compare(root, tally)
        _remove(root)
        return
    if by == signal.SIGKILL:
        tally.kills += 1
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"ended with {process.returncode}: {''.join(said)}")
    else:
        tally.stops += 1
        # After the last step there is nothing to stop but the export and the interpreter, which die in their own ways.
        if heard < STEPS and (process.returncode != 130 or "goes on from there" not in said[-1]):
            raise RuntimeError(f"ended with {process.returncode}: {''.join(said)}")
    found = _committed(root)
    # A step is told when its norm is known; it is durable when its last update is written, inside the next one.
    least = heard if by != signal.SIGKILL and heard < STEPS else max(before, (heard - 1) // save_steps * save_steps)
    if found < least:
        raise RuntimeError(f"step {heard} was told, {least} must be there and {found} is")
    tally.lost_steps += max(0, heard - found)


def _step_of(line: str) -> int:
    return int(line[5 : line.index("/")]) if line.startswith("step ") and "  epoch " in line else 0


def _drives(root: Path) -> list[Path]:
    return [root / "stopped-ssd-a", root / "stopped-ssd-b"]


def _committed(root: Path) -> int:
    """The durable step, every byte of it checked; 0 where there is no store yet."""
    if not all((drive / "lohan.data").exists() for drive in _drives(root)):
        return 0
    try:
        step = describe_store(_drives(root))["committed_step"]
    except Exception:  # killed while the store was being made: there is none yet, and the next start makes it
        return 0
    problems = verify_directories(_drives(root))["problems"]
    if problems:
        raise RuntimeError(f"the store is damaged: {problems[0]}")
    return int(step or 0)


def _compare(root: Path, tally: Tally) -> None:
    import torch
    from safetensors.torch import load_file

    one, other = (load_file(root / name / "model" / "model.safetensors") for name in ("straight", "stopped"))
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    told = [_metrics(root / name) for name in ("straight", "stopped")]
    if differing or told[0] != told[1]:
        tally.failures += 1
        raise RuntimeError(f"other bits than a run that was never stopped: {differing or 'in metrics.jsonl'}")


def _metrics(folder: Path) -> list[tuple[object, ...]]:
    from lohan.train.metrics import read_metrics

    keys = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "best")
    return [tuple(line.get(key) for key in keys) for line in read_metrics(folder)]


def _remove(root: Path) -> None:
    for folder in (*_drives(root), root / "stopped"):
        shutil.rmtree(folder, ignore_errors=True)
