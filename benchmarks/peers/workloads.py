"""What every system trains: the same models, written once to a folder, and the same data.

Used by every worker, also in the peers' own virtual environment, so this file imports nothing of lohan.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512,
    },
    "60M": {
        "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 11, "num_attention_heads": 10,
        "num_key_value_heads": 10, "vocab_size": 4096,
    },
    "250M": {
        "hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 17, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 16384,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 18, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 32000,
    },
}  # fmt: skip
SEQUENCE = 512
LEARNING_RATE = 1e-5
NUM_THREADS = 2
"""For every system: torch's threads. I/O threads, which mostly wait, come on top on every side that does I/O."""


def num_parameters(shape: str) -> int:
    """Of a model of this shape: untied embedding and head, no biases."""
    s = SHAPES[shape]
    hidden, kv = s["hidden_size"], s["num_key_value_heads"] * (s["hidden_size"] // s["num_attention_heads"])
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * s["intermediate_size"] + 2 * hidden
    return s["num_hidden_layers"] * block + 2 * hidden * s["vocab_size"] + hidden


def make_model(shape: str, folder: Path) -> None:
    """Write a random fp32 model of this shape as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=False, **SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != num_parameters(shape):
        raise SystemExit(f"The {shape} model has {found} parameters and {num_parameters(shape)} were counted.")
    model.save_pretrained(folder)


def batches(step: int, tokens: int, micro_batch_tokens: int, vocabulary: int) -> Iterator[dict[str, Any]]:
    """The data of one step, in micro-batches. How it is cut changes no token."""
    import torch

    sequence = min(SEQUENCE, tokens)
    rows = tokens // sequence
    ids = torch.randint(0, vocabulary, (rows, sequence), generator=torch.Generator().manual_seed(step))
    for part in torch.split(ids, max(1, micro_batch_tokens // sequence)):
        yield {"input_ids": part, "labels": part.clone()}


def forget(folder: Path) -> None:
    """Drop what the page cache holds of a folder, so that whoever reads it next reads the drive."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    import sys

    make_model(sys.argv[1], Path(sys.argv[2]))
