"""What the model writes, after an evaluation, with the weights it has then. Training's bits are not touched.

The run rests meanwhile: its staging memory is given back and taken again, so the budget holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lohan.engine.run import Run
from lohan.generate.generator import Generator, Sampling, generation_settings, writing
from lohan.generate.streamed import StreamedModel
from lohan.generate.weights import StoreWeights

_WEIGHTS_SHARE = 0.5
"""Of the run's memory, for weights. The rest is for caches, activations and what Python holds. By feel."""


def write_samples(
    run: Run,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    memory_bytes: int,
    raw: bool,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, str]]:
    """The likeliest answer to each prompt. `memory_bytes` is the run's budget where it computes. PlanInfeasible if the
    largest part of the model does not fit into half of it. The run needs reserve() again afterwards."""
    run.rest()
    device = run.device.torch_device
    streamed = StreamedModel(
        run.model, run.units, StoreWeights(run.store, run.layouts), memory_bytes=int(_WEIGHTS_SHARE * memory_bytes),
        device=device,
    )  # fmt: skip
    settings = generation_settings(Path(run.folder.model_folder), run.model, tokenizer)
    samples = []
    with run.device.rng_state_guard(), streamed, writing(run.model):
        generator = Generator(streamed, tokenizer, settings, device)
        for prompt in prompts:
            if stop():
                break
            written = generator.write(prompt, Sampling(max_new_tokens=max_new_tokens), raw=raw)
            samples.append({"prompt": prompt, "text": written.text})
    return samples
