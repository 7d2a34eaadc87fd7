"""The first run's training: what `lohan train` does, on a model and a task that are made here.

Everything a user would bring is written into a folder, so nothing is downloaded: a Llama of about five million random
parameters, a byte-level tokenizer, questions like "520841=" whose answer is "012458" (no digit comes twice), and a
config. host_memory is so small that no part of the model stays in memory: weights and states are read from the drive,
updated and written back in every step. Then the trained model is asked what it was never shown: by `lohan generate`,
streamed from the run, and by plain transformers from the exported folder.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import lohan
from lohan.engine.memory import resident_bytes
from lohan.errors import LohanError, PlanInfeasible
from lohan.train.config import TrainConfig

NUM_DIGITS = 6
HIDDEN_SIZE = 320
ROWS = 64
"""Questions in a step, which is one micro-batch."""

STEPS = 48
ASKED = 256
"""Questions the model is asked before and after."""

BOS, EOS, PAD = 256, 257, 258  # after the 256 bytes
CONFIG_NAME = "config.yaml"
_ASKED, _HELD_OUT, _TRAINED = 0, 1000, 2000
"""The first of the questions to ask at the end, to evaluate on, and to train on: no question is among two of them."""

_CONFIG = """\
# What `lohan first-run` trains. Try it again: remove {folder}/ssd, change something, lohan train {folder}/config.yaml
model_name_or_path: {folder}/model
train_file: {folder}/train.jsonl
eval_file: {folder}/eval.jsonl
output_dir: {folder}/out
run_name: first-run

ssd: [{folder}/ssd]
host_memory: {memory}               # the least that works: weights and states live on SSD
device: cpu
machine: {folder}/machine.yaml       # measured by `lohan profile`: time is foretold

max_length: 32
max_steps: {steps}
per_device_train_batch_size: {rows}
gradient_accumulation_steps: 1
learning_rate: 2.0e-3
adam_beta2: 0.95
lr_scheduler_type: linear
warmup_steps: {warmup}
eval_strategy: steps
eval_steps: {evaluating}
eval_on_start: true
logging_steps: {logging}
seed: 0
"""
PROFILE_SECONDS = 8.0
"""Less than `lohan profile` takes: rates come out a little rougher."""


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
    foretold_ssd_bytes: int
    """Per step, as told before the run began."""

    seconds_per_step: float
    foretold_seconds: float
    resident_units: int
    num_units: int
    resting_rss_bytes: int
    """Of this process before the run was opened: the interpreter, torch, transformers, and what they keep."""

    peak_rss_bytes: int
    """The most of this process after any step."""

    asked: int
    solved_before: int
    solved_after: int
    """Of those asked, by plain transformers."""

    question: str
    answer: str
    """Of `lohan generate`."""

    generate_tokens_per_second: float
    seconds: float


def make_model(folder: Path) -> int:
    """Write a small random Llama as a Hugging Face folder. Returns its number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=259, hidden_size=HIDDEN_SIZE, intermediate_size=HIDDEN_SIZE * 14 // 5, num_hidden_layers=4,
        num_attention_heads=HIDDEN_SIZE // 64, num_key_value_heads=HIDDEN_SIZE // 64, max_position_embeddings=64,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer() -> Any:
    """A token per byte, and three that mark begin, end and filling."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<pad>")])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def questions(first: int, num: int) -> list[tuple[str, str]]:
    """Digits in any order with "=", and the same digits sorted: a part of all such questions, shuffled once."""
    every = list(permutations("0123456789", NUM_DIGITS))
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[first : first + num].tolist()
    return [("".join(every[place]) + "=", "".join(sorted(every[place]))) for place in order]


def write_task(folder: Path, *, steps: int, memory: str = "1GB") -> Path:
    """Training and held-out questions as JSONL, and the config. Returns the config's path."""
    for name, seed, num in (("train", _TRAINED, ROWS * steps), ("eval", _HELD_OUT, ROWS)):
        lines = [json.dumps({"prompt": asked, "completion": answered}) for asked, answered in questions(seed, num)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = folder / CONFIG_NAME
    config.write_text(
        _CONFIG.format(
            folder=folder,
            memory=memory,
            steps=steps,
            rows=ROWS,
            warmup=min(8, steps),
            logging=max(1, steps // 10),
            evaluating=max(1, steps // 4),
        )
    )
    return config


def least_memory(config: TrainConfig) -> str:
    """The least host_memory, in steps of 0.1 MB, that this run can be planned for: less is left over than its smallest
    part takes."""
    from lohan.train.data.splits import open_data
    from lohan.train.data.tokenizer import load_tokenizer
    from lohan.train.loop import run_arguments
    from lohan.train.preview import preview

    model = Path(config.model_name_or_path)
    data = open_data(config, load_tokenizer(model))
    # Whether a run fits does not depend on the machine's rates; without them nothing is simulated, which takes time.
    config = replace(config, machine=None)

    def is_enough(kilobytes: int) -> bool:
        arguments = run_arguments(replace(config, host_memory=f"{kilobytes}kB"), config.max_steps)
        try:
            preview(arguments, model, data, total_steps=config.max_steps, done_steps=None)
        except PlanInfeasible:
            return False
        return True

    candidates = range(50_000, 1_000_000, 100)
    return f"{candidates[bisect_left(candidates, True, key=is_enough)] / 1000:g}MB"


def train(
    folder: Path, say: Callable[[str], None], *, steps: int = STEPS, quiet: Callable[[], Any] = nullcontext
) -> Training:
    """All of it, in an empty folder. `say` hears what is done; `quiet` makes room for the training's own lines."""
    from transformers.utils import logging

    from lohan.cli_profile import write_machine
    from lohan.generate import Sampling, open_generator
    from lohan.measure.machine import profile_machine
    from lohan.train import loop
    from lohan.train.config_file import load_config
    from lohan.train.metrics import read_metrics
    from lohan.train.preview import Preview

    started = time.perf_counter()
    logging.disable_progress_bar()
    say("Making a small Llama, a tokenizer and questions")
    num_parameters = make_model(folder / "model")
    say("Measuring this machine")
    tokens = ROWS * (2 * NUM_DIGITS + 3)
    machine = profile_machine([folder], device="cpu", tokens=tokens, seconds=PROFILE_SECONDS)
    write_machine(machine, folder / "machine.yaml")
    memory = least_memory(load_config(write_task(folder, steps=steps)))
    config = load_config(write_task(folder, steps=steps, memory=memory))
    say("Asking it before the training")
    before = ask(open_in_ram(folder / "model"))
    resting = resident_bytes()
    runs: list[lohan.Run] = []
    previews: list[Preview] = []

    def told(ahead: Preview) -> None:
        previews.append(ahead)
        print("\n".join(ahead.lines()), flush=True)

    with quiet():
        result = loop.train(config, resume=False, live=False, on_run=runs.append, on_preview=told)
    if result.stopped is not None:
        raise KeyboardInterrupt
    runs[0].write_trace(folder / "trace.json")
    say("Opening the export with transformers")
    check_export(folder / "out" / "model", folder / "ssd")
    model = open_in_ram(folder / "out" / "model")
    after = ask(model)
    say("Letting it write, streamed from the run")
    question = questions(_ASKED, 1)[0][0]
    with open_generator(folder / "ssd", memory="20MB") as generator:
        written = generator.write(question, Sampling(max_new_tokens=NUM_DIGITS + 1))
    lines = read_metrics(folder / "out")
    trained = [line for line in lines if "loss" in line]
    timed = trained[1:] or trained  # the first one also loads libraries
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return Training(
        num_parameters=num_parameters,
        steps=steps,
        loss_before=losses[0],
        loss_after=losses[-1],
        tokens_per_second=sum(line["tokens"] for line in timed) / sum(line["seconds"] for line in timed),
        ssd_bytes_per_step=sum(line["ssd_bytes"] for line in trained) / len(trained),
        foretold_ssd_bytes=previews[0].read_bytes_per_step + previews[0].write_bytes_per_step,
        seconds_per_step=median(line["seconds"] for line in timed),
        foretold_seconds=previews[0].seconds_per_step or 0.0,
        resident_units=previews[0].resident_units,
        num_units=previews[0].num_units,
        resting_rss_bytes=resting,
        peak_rss_bytes=max(line["rss_bytes"] for line in trained),
        asked=ASKED,
        solved_before=before,
        solved_after=after,
        question=question,
        answer=written.text,
        generate_tokens_per_second=len(written.tokens) / written.seconds,
        seconds=time.perf_counter() - started,
    )


def check_export(folder: Path, ssd: Path) -> None:
    """LohanError unless every weight that transformers finds in the exported folder is the run's, to the bit."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with lohan.open_run(ssd=ssd, host_memory="1GB", device="cpu") as run:
        trained = dict(run.read_weights())
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, trained[name]):
            raise LohanError(f"{name} is not what was trained. This must never happen.")


def open_in_ram(folder: Path) -> Any:
    """With plain transformers. On a CPU, bf16 arithmetic is the slow one."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ask(model: Any) -> int:
    """How many of ASKED new questions plain transformers has the model answer right."""
    tokenizer = make_tokenizer()
    asked = questions(_ASKED, ASKED)
    ids: Tensor = tokenizer([question for question, _ in asked], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        given = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_DIGITS, do_sample=False, pad_token_id=PAD
        )[:, ids.shape[1] :]
    answers = tokenizer.batch_decode(given, skip_special_tokens=True)
    return sum(answer == right for answer, (_, right) in zip(answers, asked, strict=True))
