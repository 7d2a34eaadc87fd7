"""How close does training from SSD come to plain PyTorch with everything in RAM?

    python benchmarks/against_ram.py [--directory DIR] [--tokens 4096] [--rounds 5] [--quick]

A Llama-shaped model of about 100M parameters, 4096 tokens per step in micro-batches of 1024, fp32 compute on both
sides. One side is plain PyTorch: fp32 weights, gradient checkpointing, AdamW(fused=True), clip_grad_norm_. The other is
lohan with a bf16 wire and a budget so small that next to nothing stays in memory: at least 80 % of weights and state
cross the SSD in every step (printed). It has measured the machine first, as `lohan train` does, so that its plan may
swap activations to the SSD where that is faster than computing them again (also printed). Both have all cores: torch's
own number of threads for every operator; lohan's compute and update take turns on them, and its I/O threads (which
mostly wait, and checksum) come on top. Each side is a process of its own that does one step when told, in turn, after
two warm-up steps; the ratio is that of the medians.

The last line is JSON: ratio (tokens/s over plain PyTorch's), ssd_bytes_per_step, state_bytes, peak_rss_bytes,
ram_peak_rss_bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {
    "100M": {
        "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 18, "num_attention_heads": 10,
        "num_key_value_heads": 10, "vocab_size": 8192,
    },
    "8M": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 2048,
    },
}  # fmt: skip
SEQUENCE = 512
MICRO_BATCH_TOKENS = 1024


def make_model(shape: str, folder: Path) -> int:
    """Write a random model of this shape; returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=False, **SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def batches(step: int, tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """The same data for both sides."""
    import torch

    generator = torch.Generator().manual_seed(step)
    per_batch = min(tokens, MICRO_BATCH_TOKENS)
    made = []
    for _ in range(tokens // per_batch):
        rows = max(1, per_batch // SEQUENCE)
        ids = torch.randint(0, vocabulary, (rows, min(SEQUENCE, per_batch)), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def plain_worker(folder: Path) -> Callable[[list[dict[str, Any]]], dict[str, float]]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def step(micro_batches: list[dict[str, Any]]) -> dict[str, float]:
        total = torch.tensor(sum(int((b["labels"][..., 1:] != -100).sum()) for b in micro_batches))
        loss = 0.0
        for batch in micro_batches:
            part = model(**batch, num_items_in_batch=total).loss
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "ssd_bytes": 0.0}

    return step


def measure_machine(directory: Path) -> Path:
    """`lohan profile`, in a process of its own so that its memory is not counted as training's."""
    drive, out = directory / "profile", directory / "machine.yaml"
    drive.mkdir()
    command = [
        sys.executable,
        "-c",
        "from lohan.cli import main; main()",
        "profile",
        "--tokens",
        str(MICRO_BATCH_TOKENS),
    ]
    subprocess.run([*command, "--ssd", str(drive), "--out", str(out)], check=True)
    return out


def work(side: str, folder: Path, directory: Path, tokens: int, vocabulary: int, host_memory: str) -> None:
    """A process that does one step for every line it is sent, and answers with one line."""
    if side == "plain":
        _serve(plain_worker(folder), tokens, vocabulary)
        return
    from lohan.engine.run import open_run
    from lohan.hardware import load_machine

    with open_run(
        model=folder, ssd=[directory / "run"], host_memory=host_memory, device="cpu", learning_rate=1e-5,
        max_grad_norm=1.0, commit_every=10, machine=load_machine(directory / "machine.yaml"),
    ) as run:  # fmt: skip

        def step(micro_batches: list[dict[str, Any]]) -> dict[str, float]:
            before = run.ssd_bytes
            loss = run.step(micro_batches).loss
            return {
                "loss": loss,
                "ssd_bytes": float(run.ssd_bytes - before),
                "crossing": crossing(run),
                "kept": kept(run),
            }

        _serve(step, tokens, vocabulary)


def crossing(run: Any) -> float:
    """The share of weights and state that the plan does not keep in memory."""
    total = away = 0
    for number, unit in enumerate(run.planned.size.units):
        state = sum(unit.state_bytes)
        total += unit.weights_bytes + state
        away += unit.weights_bytes if number not in run.plan.resident_weights else 0
        away += state if number not in run.plan.resident_state else 0
    return away / total


def kept(run: Any) -> float:
    """The share of the blocks' heavy operators whose outputs wait for backward instead of being computed again."""
    units = [(unit, size) for unit, size in enumerate(run.planned.size.units) if size.kind == "block"]
    needed = sum(sum(op.needed for op in size.operators) for _, size in units)
    return sum(len(run.plan.keeps(unit)) for unit, _ in units) / max(1, needed)


def _serve(step: Callable[[list[dict[str, Any]]], dict[str, float]], tokens: int, vocabulary: int) -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        number = int(line)
        if number < 0:
            break
        data = batches(number, tokens, vocabulary)
        started = time.perf_counter()
        said = step(data)
        said["seconds"] = time.perf_counter() - started
        said["peak_rss"] = peak_rss()
        print(json.dumps(said), flush=True)


def peak_rss() -> float:
    """Of this process alone; ru_maxrss would include what its parent held before exec."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024.0


class Worker:
    """One side, from outside."""

    def __init__(self, side: str, arguments: list[str]):
        command = [sys.executable, __file__, "--worker", side, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")

    def _read(self, wanted: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(wanted):
                return line
        raise SystemExit("a worker ended early")

    def step(self, number: int) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        said: dict[str, float] = json.loads(self._read("{"))
        return said

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the store goes; a drive's, not RAM's")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-memory", default="900MB")
    parser.add_argument("--quick", action="store_true", help="a tiny model, for trying the benchmark itself")
    parser.add_argument("--worker", choices=("plain", "lohan"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = "8M" if options.quick else "100M"
    vocabulary = int(SHAPES[shape]["vocab_size"])
    if options.worker:
        work(options.worker, options.folder, options.directory, options.tokens, vocabulary, options.host_memory)
        return
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name:
        directory = Path(name)
        parameters = make_model(shape, directory / "model")
        arguments = ["--folder", str(directory / "model"), "--directory", name, "--tokens", str(options.tokens)]
        arguments += ["--host-memory", options.host_memory] + (["--quick"] if options.quick else [])
        measure_machine(directory)
        sides = {side: Worker(side, arguments) for side in ("plain", "lohan")}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        last: dict[str, dict[str, float]] = {}
        for number in range(1, options.rounds + 3):
            for side, worker in sides.items():
                said = last[side] = worker.step(number)
                if number > 2:
                    seconds[side].append(said["seconds"])
                print(f"step {number} {side:5} {said['seconds']:7.2f} s   loss {said['loss']:.4f}", flush=True)
        for worker in sides.values():
            worker.close()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for side, values in seconds.items():
        spread = (max(values) - min(values)) / medians[side]
        rate = options.tokens / medians[side]
        print(f"{side:5} {rate:8.0f} tokens/s   median {medians[side]:.2f} s   spread {spread:.0%}")
    state = parameters * 12
    crossed = last["lohan"]["crossing"]
    print(f"{parameters / 1e6:.1f}M parameters, {state / 1e9:.2f} GB of weights and state, {crossed:.0%} only on SSD")
    print(f"{last['lohan']['kept']:.0%} of the operators that backward needs are kept instead of computed again")
    print(
        json.dumps(
            {
                "ratio": round(medians["plain"] / medians["lohan"], 3),
                "ssd_bytes_per_step": int(last["lohan"]["ssd_bytes"]),
                "state_bytes": state,
                "peak_rss_bytes": int(last["lohan"]["peak_rss"]),
                "ram_peak_rss_bytes": int(last["plain"]["peak_rss"]),
            }
        )
    )


if __name__ == "__main__":
    main()
