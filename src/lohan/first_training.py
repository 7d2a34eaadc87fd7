"""The first run's training: a small model learns to sort digits with its weights and state on SSD.

Everything is made here, so nothing is downloaded: a Llama of about five million random parameters, and questions like
"520841=" whose answer is "012458", spelled in bytes. Budgets are set so that no weight stays in memory: every one of
them is read from the drive, updated and written back in every step. The result is exported and opened with plain
transformers, which must find the same weights, and then sorts digits it was never shown.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lohan
from lohan.errors import LohanError

NUM_DIGITS = 6
ROWS = 32
"""Questions in a micro-batch; a step has two of them."""

STEPS = 80
BOS, EOS, PAD = 256, 257, 258  # after the 256 bytes
_HELD_OUT = 1 << 40
"""The seed of questions that are kept for the test; training's are 1, 2, 3 and so on."""


@dataclass(frozen=True, slots=True)
class Training:
    """What the training found out."""

    num_parameters: int
    steps: int
    loss_before: float
    """On questions the model is not trained on."""

    loss_after: float
    tokens_per_second: float
    ssd_bytes_per_step: float
    resting_rss_bytes: int
    """Of this process before the run was opened: the interpreter, torch and transformers."""

    peak_rss_bytes: int
    """Of this process while it trained."""

    num_solved: int
    num_asked: int
    question: str
    answer: str
    seconds: float


def make_model(folder: Path) -> int:
    """Write a small random Llama as a Hugging Face folder. Returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259, hidden_size=320, intermediate_size=896, num_hidden_layers=4, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=64, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def questions(seed: int, num: int) -> tuple[Tensor, Tensor]:
    """Rows of random digits, and the same digits in order."""
    digits = torch.randint(0, 10, (num, NUM_DIGITS), generator=torch.Generator().manual_seed(seed))
    return digits, digits.sort(dim=1).values


def micro_batches(seed: int) -> list[dict[str, Tensor]]:
    """The two micro-batches of a step: bytes, with labels on the answer only."""
    batches = []
    for half in range(2):
        asked, answered = questions(2 * seed + half, ROWS)
        ids = torch.cat([_prompt(asked), answered + ord("0"), torch.full((ROWS, 1), EOS)], dim=1)
        labels = ids.clone()
        labels[:, : NUM_DIGITS + 2] = -100
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return batches


def train(
    folder: Path, say: Callable[[str], None], show: Callable[[int, int, float], None], *, steps: int = STEPS
) -> Training:
    """All of it, in an empty folder. `show` hears (step, steps, loss)."""
    from transformers.utils import logging

    started = time.perf_counter()
    logging.disable_progress_bar()
    say("Making a small Llama")
    num_parameters = make_model(folder / "model")
    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    say("Streaming it into a store")
    with lohan.open_run(
        model=folder / "model", ssd=folder / "ssd", host_memory="256MB", device="cpu", keep_nothing_in_memory=True,
        learning_rate=2e-3, betas=(0.9, 0.95), lr_schedule="linear", warmup_steps=min(8, steps), total_steps=steps + 1,
    ) as run:  # fmt: skip
        say("Asking it before the training")
        before = run.evaluate(micro_batches(_HELD_OUT))
        moved, tokens, busy = 0, 0, 0.0
        for step in range(1, steps + 1):
            if step == 2:  # the first one also makes the plan and loads libraries
                moved, tokens, busy = run.ssd_bytes, 0, 0.0
            out = run.step(micro_batches(step))
            tokens, busy = tokens + out.tokens, busy + out.seconds
            show(step, steps, out.loss)
        moved = run.ssd_bytes - moved
        say("Asking it again")
        after = run.evaluate(micro_batches(_HELD_OUT))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        say("Exporting it")
        run.export(folder / "export")
        trained = dict(run.read_weights())
        run.write_trace(folder / "trace.json")
    say("Opening the export with transformers")
    model = open_export(folder / "export", trained)
    solved, question, answer = ask(model, 256)
    return Training(
        num_parameters=num_parameters,
        steps=steps,
        loss_before=before,
        loss_after=after,
        tokens_per_second=tokens / busy,
        ssd_bytes_per_step=moved / max(steps - 1, 1),
        resting_rss_bytes=resting,
        peak_rss_bytes=peak,
        num_solved=solved,
        num_asked=256,
        question=question,
        answer=answer,
        seconds=time.perf_counter() - started,
    )


def open_export(folder: Path, trained: dict[str, Tensor]) -> Any:
    """The exported model, as transformers opens it. LohanError unless every weight is the trained one."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, trained[name]):
            raise LohanError(f"{name} is not what was trained. This must never happen.")
    return model.float().eval()  # on a CPU, bf16 arithmetic is the slow one


def ask(model: Any, num: int) -> tuple[int, str, str]:
    """How many of so many new questions the model answers right, and one of them with its answer."""
    asked, expected = questions(2 * _HELD_OUT + 7, num)
    with torch.no_grad():
        given = model.generate(
            _prompt(asked), attention_mask=torch.ones(num, NUM_DIGITS + 2, dtype=torch.int64),
            max_new_tokens=NUM_DIGITS, do_sample=False,
        )[:, NUM_DIGITS + 2 :]  # fmt: skip
    padded = torch.full((num, NUM_DIGITS), PAD)
    padded[:, : given.shape[1]] = given
    right = (padded == expected + ord("0")).all(dim=1)
    shown = int(right.int().argmax())
    return int(right.sum()), _spelled(asked[shown] + ord("0")), _spelled(padded[shown])


def _prompt(asked: Tensor) -> Tensor:
    rows = len(asked)
    return torch.cat([torch.full((rows, 1), BOS), asked + ord("0"), torch.full((rows, 1), ord("="))], dim=1)


def _spelled(tokens: Tensor) -> str:
    return "".join(chr(token) if 32 <= token < 127 else "?" for token in tokens.tolist())
