"""Does a model with 14 GB of state train in 3 GB of host memory?

    python benchmarks/memory_1b.py [--directory DIR] [--host-memory 3GB] [--steps 3] [--quick]

A Llama-shaped model of about 1.0B random parameters (vocabulary 32,000) trains on `cpu`, 256 tokens per step.
Prints each step and the process's own peak RSS, everything included: interpreter, torch, transformers. The last line is
JSON. The folder is made by another process, so that making it does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from lohan.engine.run import open_run

_MAKE = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
layers, hidden = int(sys.argv[2]), int(sys.argv[3])
config = LlamaConfig(hidden_size=hidden, intermediate_size=hidden * 43 // 16, num_hidden_layers=layers,
                     num_attention_heads=16, num_key_value_heads=16, vocab_size=32000, tie_word_embeddings=False)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(sys.argv[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where model and store go; a drive's, not RAM's")
    parser.add_argument("--host-memory", default="3GB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--state-format", default="fp32", help="fp32 has the most state: 14 bytes per parameter")
    parser.add_argument("--quick", action="store_true", help="a small model, for trying the benchmark itself")
    options = parser.parse_args()
    shape = ["2", "256"] if options.quick else ["18", "2048"]
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name:
        folder = Path(name) / "model"
        subprocess.run([sys.executable, "-c", _MAKE, str(folder), *shape], check=True)
        generator = torch.Generator().manual_seed(0)
        with open_run(
            model=folder, ssd=[Path(name) / "run"], host_memory=options.host_memory, device="cpu",
            state_format=options.state_format,
        ) as run:  # fmt: skip
            parameters = sum(layout.pieces.num_elements for layout in run.layouts)
            state = sum(layout.pieces.state_bytes + layout.pieces.weights_bytes for layout in run.layouts)
            print(f"{parameters / 1e6:.0f}M parameters, {state / 1e9:.1f} GB of weights and state on SSD", flush=True)
            for _ in range(options.steps):
                ids = torch.randint(0, 32000, (1, 256), generator=generator)
                done = run.step([{"input_ids": ids, "labels": ids.clone()}])
                print(
                    f"step {done.step}  loss {done.loss:.3f}  {done.seconds:.1f} s  peak {_peak() / 1e9:.2f} GB",
                    flush=True,
                )
    print(json.dumps({"parameters": parameters, "state_bytes": state, "peak_rss_bytes": _peak()}))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
