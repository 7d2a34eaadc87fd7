"""What does a step look like: which lane did what when?

    python benchmarks/draw_trace.py TRACE.json OUT.png
    python benchmarks/draw_trace.py --demo DIRECTORY OUT.png [--save-trace TRACE.json]

Draws a file that run.write_trace() or open_run(trace=...) has written: time to the right, a row for each lane and for
each direction of each drive, a colour for each kind of work. --demo first trains a Llama of 25 million parameters in
DIRECTORY for three steps, on the `virtual` device with a paced compute lane and nothing kept in memory, and draws the
third. Needs matplotlib (pip install 'lohan[pictures]').
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Kind of work: colour, and what the legend calls it.
KINDS = {
    "forward": ("#5B8CC2", "forward"),
    "backward": ("#1F3D63", "recompute and backward"),
    "to_gpu": ("#8E7CC3", "weights to device"),
    "input_in": ("#C9BFE8", "block inputs to device"),
    "gradient": ("#7A5195", "gradient to host"),
    "input_out": ("#C3A6DB", "block inputs to host"),
    "update": ("#E8871E", "update (AdamW)"),
    "norm": ("#F6C177", "gradient norm"),
    "read weights": ("#7CC3A2", "read weights"),
    "read state": ("#2E7D5B", "read state"),
    "read gradient": ("#B8D86B", "read held gradient"),
    "write weights": ("#DE8FA8", "write weights"),
    "write state": ("#A83A62", "write state"),
    "write gradient": ("#F2C4D0", "hold gradient on SSD"),
}
LANES = {"gpu": "compute", "to_gpu": "to device", "to_host": "to host", "cpu_update": "CPU update"}
# What a lane that only issues I/O calls its time includes waiting for memory; the drives' own rows show the truth.
LEFT_OUT = ("ssd_read", "ssd_write")


def kind_of(row: str, span: dict[str, Any]) -> str:
    """The kind of work of a span; for a request to a drive by the name of its record."""
    kind: str = span["cat"]
    if row in LANES:
        return "norm" if kind == "clip" else kind
    what = next((part for part in ("weights", "state", "gradient") if f"/{part}" in span["name"]), "")
    return f"{kind} {what}"


def rows_of(trace: dict[str, Any]) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """The spans of each row, and the steps. Tracks of one lane or drive share a row, one above the other."""
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"].split(" (")[0]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault(threads[event["pid"], event["tid"]], []).append(event)
    steps = rows.pop("step", [])
    drives = sorted(name for name in rows if name not in LANES and name not in LEFT_OUT)
    order = [name for name in LANES if name in rows] + drives
    return {name: rows[name] for name in order}, steps


def draw(trace: dict[str, Any], out: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows, steps = rows_of(trace)
    zero = min(step["ts"] for step in steps)
    end = max(step["ts"] + step["dur"] for step in steps)
    figure, axes = pyplot.subplots(figsize=(13, 0.62 * len(rows) + 1.9), dpi=150)
    figure.patch.set_facecolor("white")
    used: set[str] = set()
    for position, (name, spans) in enumerate(rows.items()):
        axes.axhspan(position - 0.42, position + 0.42, color="#F4F5F7", zorder=0)
        # A drive serves several requests at once: a thin row for each of its tracks.
        tracks = sorted({span["tid"] for span in spans})
        height = 0.76 / len(tracks)
        for span in spans:
            kind = kind_of(name, span)
            used.add(kind)
            colour = KINDS[kind][0] if kind in KINDS else "#999999"
            top = position - 0.38 + tracks.index(span["tid"]) * height
            left, width = (span["ts"] - zero) / 1e3, span["dur"] / 1e3
            axes.broken_barh(
                [(left, width)], (top, height * 0.94), facecolors=colour, edgecolor="white",
                linewidth=0.35 if width > (end - zero) / 1e3 / 300 else 0, zorder=2,
            )  # fmt: skip
            if name == "gpu" and width > (end - zero) / 1e3 / 32:
                unit = span["name"].split()[-1]
                axes.text(
                    left + width / 2, position, unit, ha="center", va="center", color="white", fontsize=8, zorder=3
                )
    axes.set_yticks(range(len(rows)), [LANES.get(name, name) for name in rows], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - zero) / 1e3)
    axes.set_xlabel("milliseconds since the step was called", fontsize=10, color="#444444")
    axes.tick_params(length=0, colors="#333333")
    axes.grid(axis="x", color="white", linewidth=1.2, zorder=1)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(title, loc="left", fontsize=13, color="#222222", pad=12)
    shown = [(Patch(facecolor=colour), name) for kind, (colour, name) in KINDS.items() if kind in used]
    axes.legend(
        [patch for patch, _ in shown], [name for _, name in shown], loc="upper center",
        bbox_to_anchor=(0.5, -0.75 / len(rows)), ncols=6, frameon=False, fontsize=9, handlelength=1.2,
    )  # fmt: skip
    figure.savefig(out, bbox_inches="tight", facecolor="white")


def demo(directory: Path) -> dict[str, Any]:
    """Train a small model and return the trace of its third step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import lohan
    from lohan.testing.zoo import random_batches

    directory.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=directory))
    try:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=False,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(place / "model")
        with lohan.open_run(
            model=place / "model", ssd=place / "run", host_memory="700MB", gpu_memory="1500MB", device="virtual",
            virtual=lohan.VirtualOptions(
                flops_per_second=2.5e10, to_gpu_bytes_per_second=2e8, to_host_bytes_per_second=2e8, poison=False
            ),
            keep_nothing_in_memory=True, learning_rate=1e-3, max_grad_norm=None,
        ) as run:  # fmt: skip
            for step in range(1, 4):
                run.step(random_batches(4096, num_micro_batches=2, batch=1, seq=128, seed=0, step=step))
            run.write_trace(place / "trace.json")
        trace: dict[str, Any] = json.loads((place / "trace.json").read_text())
        return trace
    finally:
        shutil.rmtree(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--demo", type=Path, metavar="DIRECTORY")
    parser.add_argument("--save-trace", type=Path)
    parser.add_argument("--title", default="One training step (numbers: units)")
    arguments = parser.parse_args()
    if arguments.demo is None and arguments.trace is None:
        parser.error("name a trace, or --demo DIRECTORY")
    trace = demo(arguments.demo) if arguments.demo else json.loads(arguments.trace.read_text())
    if arguments.save_trace:
        arguments.save_trace.write_text(json.dumps(trace))
    draw(trace, arguments.out, arguments.title)


if __name__ == "__main__":
    main()
