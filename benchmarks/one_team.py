"""What does a second thread that computes cost the first, when it only stands idle?

    python benchmarks/one_team.py [--rounds 5]

Plain PyTorch trains four Llama blocks with gradient checkpointing, in rounds: alone, and beside two threads that have
run one large operator each and now sleep. OpenMP keeps helpers for them, counts more threads than cores, and lets all
helpers in the process sleep between operators (src/lohan/engine/cores.py). Prints medians in milliseconds per block;
the last line is JSON: by setting, the time with idle teams over the time without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

BLOCKS = 4
SETTINGS = ((640, 1024), (1024, 256), (1024, 1024), (2048, 256))
"""Hidden size, tokens."""


class Blocks:
    """A few blocks to train."""

    def __init__(self, hidden: int, tokens: int):
        config = LlamaConfig(
            vocab_size=256, hidden_size=hidden, intermediate_size=-(-hidden * 11 // 4 // 64) * 64,
            num_hidden_layers=BLOCKS, num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64,
            max_position_embeddings=2048, tie_word_embeddings=False, use_cache=False,
        )  # fmt: skip
        self._model = LlamaForCausalLM(config)
        self._model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._model.train()
        self._ids = torch.randint(256, (max(1, tokens // 512), min(512, tokens)))

    def seconds(self, times: int) -> float:
        """Of one block's forward and backward: the median."""
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            self._model(input_ids=self._ids, labels=self._ids).loss.backward()
            taken.append((time.perf_counter() - started) / BLOCKS)
            self._model.zero_grad()
        return statistics.median(taken)


class IdleTeams:
    """Threads that have computed once."""

    def __init__(self, num: int):
        self._over, self._ready = threading.Event(), threading.Barrier(num + 1)
        self._threads = [threading.Thread(target=self._stand_by) for _ in range(num)]

    def _stand_by(self) -> None:
        torch.randn(2000, 2000).mul(2)
        self._ready.wait()
        self._over.wait()

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self._ready.wait()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=10, help="steps of a turn")
    options = parser.parse_args()
    found = {}
    for hidden, tokens in SETTINGS:
        blocks, alone, beside = Blocks(hidden, tokens), [], []
        blocks.seconds(3)
        for _ in range(options.rounds):
            alone.append(blocks.seconds(options.times))
            with IdleTeams(2):
                beside.append(blocks.seconds(options.times))
        one, three = statistics.median(alone), statistics.median(beside)
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        print(
            f"hidden {hidden}, {tokens} tokens: {one * 1e3:.1f} ms alone, {three * 1e3:.1f} ms beside two idle teams; "
            f"ratio {three / one:.3f}, rounds {min(ratios):.3f} to {max(ratios):.3f}",
            flush=True,
        )
        found[f"{hidden}/{tokens}"] = round(three / one, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
