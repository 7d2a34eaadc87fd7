"""Does a long training with every state format give plain PyTorch's loss curve?

    python benchmarks/parity_curves.py [--steps 320] [--save FILE.json] [--draw OUT.png] [--directory DIR]

A small Llama learns to sort digits. Each run keeps all weights and state on SSD and is compared step by step with two
trainings in RAM: the oracle of lohan.testing with the same formats (same wire, same moments), which it must equal to
the bit, in every loss and in all weights, masters and moments at the end; and an ordinary Hugging Face loop in fp32
(AdamW, clip_grad_norm_, no rounding anywhere), which says what a format costs in loss. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from lohan.engine.run import open_run
from lohan.testing.oracle import Oracle
from lohan.testing.parity import compare_state, oracle_settings

FORMATS: dict[str, dict[str, Any]] = {
    "fp32 wire": {"wire_dtype": "fp32", "state_format": "fp32"},
    "fp32": {"wire_dtype": "bf16", "state_format": "fp32"},
    "split": {"wire_dtype": "bf16", "state_format": "split"},
    "bf16-moments": {"wire_dtype": "bf16", "state_format": "bf16-moments"},
}
COLOURS = {"fp32 wire": "#6B7A8F", "fp32": "#1F3D63", "split": "#C2803B", "bf16-moments": "#B23A48"}
DIGITS, ROWS, MICRO_BATCHES = 6, 16, 2
SETTINGS: dict[str, Any] = {"learning_rate": 2e-3, "betas": (0.9, 0.95), "max_grad_norm": 1.0, "weight_decay": 0.01}


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def batches(step: int) -> list[dict[str, Tensor]]:
    """Digits, an equals sign, the same digits sorted; only these are learnt."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for _ in range(MICRO_BATCHES):
        digits = torch.randint(0, 10, (ROWS, DIGITS), generator=generator)
        ids = torch.cat([digits, torch.full((ROWS, 1), 10), digits.sort(dim=1).values], dim=1)
        labels = ids.clone()
        labels[:, : DIGITS + 1] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def ordinary(folder: Path, steps: int) -> list[float]:
    """What anybody would write: a Hugging Face model in fp32 and torch's AdamW."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": SETTINGS["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=SETTINGS["learning_rate"], betas=SETTINGS["betas"], fused=True)
    losses = []
    for step in range(1, steps + 1):
        data = batches(step)
        total = torch.tensor(sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in data))
        loss = 0.0
        for batch in data:
            part = model(**batch, num_items_in_batch=total, use_cache=False).loss
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
    return losses


def streamed(folder: Path, directory: Path, steps: int, chosen: dict[str, Any]) -> dict[str, Any]:
    """A run from SSD beside the oracle with the same formats."""
    settings = {**SETTINGS, **chosen}
    oracle = Oracle(folder, **oracle_settings(settings))
    expected, losses = [], []
    with open_run(
        model=folder, ssd=[directory], host_memory="400MB", device="cpu", keep_nothing_in_memory=True, commit_every=50,
        **settings,
    ) as run:  # fmt: skip
        for step in range(1, steps + 1):
            data = batches(step)
            expected.append(oracle.step(data).loss)
            losses.append(run.step(data).loss)
        difference = compare_state(oracle, run)
        bytes_per_step = run.ssd_bytes / steps
    return {
        "losses": losses,
        "from_oracle": max(abs(a - b) for a, b in zip(expected, losses, strict=True)),
        "state": None if difference is None else str(difference),
        "ssd_bytes_per_step": round(bytes_per_step),
    }


def draw(found: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = found["ordinary"]
    steps = range(1, len(plain) + 1)
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, constrained_layout=True, height_ratios=[3, 2]
    )
    above.plot(steps, plain, color="black", linewidth=3.5, alpha=0.25, label="plain PyTorch, fp32")
    for name, one in found["formats"].items():
        style = "--" if name == "split" else "-"  # the same numbers as fp32: drawn over it
        above.plot(steps, one["losses"], style, color=COLOURS[name], linewidth=1.1, label=f"lohan, {name}")
        apart = [max(abs(a - b), 1e-9) for a, b in zip(plain, one["losses"], strict=True)]
        below.semilogy(steps, apart, style, color=COLOURS[name], linewidth=0.9)
    above.set_ylabel("loss")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    below.set_ylabel("|loss − plain PyTorch's|")
    below.set_ylim(5e-10, 1)
    below.text(
        len(plain) * 0.55, 1.5e-9, "fp32 wire: equal to the bit (drawn at 1e-9)", fontsize=8, color=COLOURS["fp32 wire"]
    )
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def table(found: dict[str, Any]) -> str:
    plain = found["ordinary"]
    lines = [
        "| format | last loss (mean of 20) | from its oracle, every step | weights, masters, moments at the end "
        "| largest distance from fp32 PyTorch | mean of the last 100 |",
        "|---|---|---|---|---|---|",
        f"| plain PyTorch, fp32 | {_mean(plain[-20:]):.4f} | | | | |",
    ]
    for name, one in found["formats"].items():
        apart = [abs(a - b) for a, b in zip(plain, one["losses"], strict=True)]
        own = "**0, to the bit**" if one["from_oracle"] == 0 else f"{one['from_oracle']:.2g}"
        state = "**equal to the bit**" if one["state"] is None else one["state"]
        far = "**0, to the bit**" if max(apart) == 0 else f"{max(apart):.2g}"
        late = "0" if max(apart) == 0 else f"{_mean(apart[-100:]):.2g}"
        lines.append(f"| {name} | {_mean(one['losses'][-20:]):.4f} | {own} | {state} | {far} | {late} |")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--directory", type=Path, help="where the stores go")
    parser.add_argument("--save", type=Path, help="write all losses as JSON")
    parser.add_argument("--draw", type=Path, help="draw the curves (needs matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is smaller than the cost of sharing it
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-parity-") as name:
        folder = Path(name) / "model"
        make_model(folder)
        found: dict[str, Any] = {"ordinary": ordinary(folder, options.steps), "formats": {}}
        for format_name, chosen in FORMATS.items():
            place = Path(name) / format_name.replace(" ", "-")
            found["formats"][format_name] = streamed(folder, place, options.steps, chosen)
            print(f"{format_name}: {options.steps} steps done", flush=True)
    if options.save is not None:
        options.save.write_text(json.dumps(found))
    if options.draw is not None:
        draw(found, options.draw)
    print(table(found))
    plain = found["ordinary"]
    formats = found["formats"].items()
    apart = {k: max(abs(a - b) for a, b in zip(plain, v["losses"], strict=True)) for k, v in formats}
    equal = {k: v["from_oracle"] == 0 and v["state"] is None for k, v in formats}
    print(json.dumps({"steps": options.steps, "equal_to_the_bit": equal, "from_fp32_pytorch": apart}))


if __name__ == "__main__":
    main()
