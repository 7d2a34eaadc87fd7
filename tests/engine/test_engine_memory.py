"""The memory promise, on a process's real peak RSS: what is imported, the budget, and no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import json, sys
peak_kib = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss has the parent's
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from lohan.engine.run import open_run

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def batch(vocabulary, tokens):
    ids = torch.randint(0, vocabulary, (1, tokens))
    return [{"input_ids": ids, "labels": ids.clone()}]

folder, store, budget, device = sys.argv[1:5]
tiny = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                   num_key_value_heads=2, vocab_size=64)
model = AutoModelForCausalLM.from_config(tiny)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
model(**batch(64, 8)[0]).loss.backward()
optimizer.step()
del model, optimizer
base = rss()
after = []
extra = {"gpu_memory": "2GB"} if device == "virtual" else {}
with open_run(model=folder, ssd=[store], host_memory=int(budget), device=device, **extra) as run:
    for _ in range(4):
        run.step(batch(8000, 256))
        run.drain()
        after.append(rss())
    device_peak = run.device.peak_bytes
peak = peak_kib() * 1024
print(json.dumps({"base": base, "peak": peak, "after": after, "device_peak": device_peak}))
"""


def _make_model(folder: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=640, intermediate_size=1728, num_hidden_layers=18, num_attention_heads=10, num_key_value_heads=10,
        vocab_size=8192, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_hundred_million_parameters_train_within_the_budget(tmp_path: Path) -> None:
    parameters = _make_model(tmp_path / "model")
    budget = 400_000_000
    assert parameters * 12 > 2.5 * budget  # weights and state could never be held
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "model"), str(tmp_path / "run"), str(budget), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["peak"] <= (said["base"] + budget) * 1.1, said
    # Steps leave nothing behind: the last is no larger than the second, but for the allocator's own slack.
    assert said["after"][-1] <= said["after"][1] * 1.1, said
