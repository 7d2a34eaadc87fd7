"""Everything a person may set for `lohan train`, with the names Hugging Face gives where it has one.

The file is read by config_file.py, which adds line numbers to what is wrong; here is what each key means and which
values can work. docs/config.md lists the same keys, and a test keeps the two together. Nothing here imports torch, so
that a misspelt key is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.nearest import did_you_mean
from lohan.plan.strategies import ENGINE_STRATEGIES, ONE_MICRO_BATCH
from lohan.sizes import parse_size

AUTO = "auto"
CHOICES: dict[str, tuple[str, ...]] = {
    "lr_scheduler_type": (
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr",
        "polynomial", "inverse_sqrt",
    ),
    "optim": ("adamw", "adamw_torch", "adamw_torch_fused", "adam", "sgd"),
    "dataset_format": ("auto", "messages", "prompt-completion", "text", "alpaca", "sharegpt"),
    "eval_strategy": ("no", "steps", "epoch"),
    "state_format": ("fp32", "split", "bf16-moments"),
    "compute_dtype": ("bf16", "fp16", "fp32"),
    "strategy": ENGINE_STRATEGIES,
    "clip": ("auto", "deferred", "speculative"),
    "report_to": ("none", "tensorboard", "wandb"),
}  # fmt: skip
"""Keys that take one of a few words."""

ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on where the training ends."""


class BadValue(ConfigError):
    """A key whose value cannot work."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    # -- model and places
    model_name_or_path: str
    """A local Hugging Face folder: config, tokenizer and safetensors."""

    output_dir: str
    """Metrics, the config, tokenised data and the exported model."""

    ssd: tuple[str, ...]
    """One directory per drive: weights and optimizer state live here. The same directories go on with the run."""

    host_memory: str = AUTO
    """RAM the run may take, like 24GB. auto: three quarters of what is free at the start."""

    gpu_memory: str | None = None
    """Device memory the run may take, like 20GB. None: all of the device's."""

    device: str = AUTO
    """cuda, cuda:1, cpu or virtual. auto: the first GPU, else cpu."""

    machine: str | None = None
    """A file of `lohan profile`: time is predicted before the run, and activations are planned by its rates."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder."""

    # -- data
    train_file: tuple[str, ...]
    """JSONL, JSON, Parquet or CSV files, or folders written by datasets' save_to_disk; read in this order."""

    eval_file: tuple[str, ...] = ()
    """Held-out data of its own."""

    eval_share: float = 0.0
    """Share of train_file to hold out instead. Equal examples stay on one side."""

    max_eval_samples: int | None = None
    """Evaluate on at most so many held-out examples."""

    dataset_format: str = AUTO
    """The shape of an example. auto: told from the keys of the first one of each file."""

    dataset_text_field: str = "text"
    """The key of the text in the shape `text`."""

    max_length: int = 2048
    """Tokens of an example; the rest is cut off and counted."""

    packing: bool = False
    """Put several examples into one row of max_length tokens. None of them sees another."""

    assistant_only_loss: bool = True
    """Learn answers only: assistant turns, completions, outputs. False: every token. Plain text is always learnt."""

    apply_chat_template: bool = True
    """False: the plain form, even if the tokenizer has a chat template."""

    chat_template_path: str | None = None
    """A Jinja file to use as chat template instead of the tokenizer's."""

    dataset_cache_dir: str | None = None
    """Where tokenised data is kept. None: `data` in output_dir."""

    # -- steps
    per_device_train_batch_size: int = 1
    """Rows in a micro-batch."""

    gradient_accumulation_steps: int = 16
    """Micro-batches in a step. More of them hide the SSD: they add compute and no traffic."""

    per_device_eval_batch_size: int | None = None
    """Rows in a micro-batch of an evaluation. None: as in training."""

    dataloader_drop_last: bool = False
    """Leave out the last rows of an epoch where they fill no whole step. False: they are a smaller step."""

    num_train_epochs: float = 3.0
    """How often the data is gone through."""

    max_steps: int = -1
    """Train for so many steps instead, if above 0."""

    # -- optimizer
    learning_rate: float = 1e-5
    lr_scheduler_type: str = "linear"
    """How the learning rate changes, with the values transformers gives."""

    warmup_ratio: float = 0.0
    """Share of all steps in which the learning rate rises from 0."""

    warmup_steps: int = 0
    """The same as a number of steps; only one of the two can be set."""

    min_lr_rate: float | None = None
    """Only for cosine_with_min_lr: the share of the learning rate it ends at."""

    optim: str = "adamw"
    """adamw (adamw_torch and adamw_torch_fused mean the same here), adam or sgd."""

    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    momentum: float = 0.9
    """Only for sgd."""

    weight_decay: float = 0.0
    """Not applied to norms and biases."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this. 0 or None: no clipping."""

    frozen: str | None = None
    """A regular expression: parameters whose name it is found in are not trained."""

    seed: int = 42
    """For dropout, and for data_seed where that is not set."""

    data_seed: int | None = None
    """For the order of the data and the held-out share. None: seed."""

    # -- numbers and plan
    bf16: bool = True
    """Weights and gradients are stored and travel as bf16. With neither bf16 nor fp16: as fp32."""

    fp16: bool = False
    """Weights and gradients are stored and travel as fp16, with a dynamic loss scale."""

    compute_dtype: str | None = None
    """None: bf16 on CUDA, fp32 elsewhere."""

    state_format: str | None = None
    """How optimizer state is kept. None: split (lossless, smaller) with bf16, fp32 otherwise."""

    strategy: str = "lohan"
    """Which plan runs. lohan-paper (as published), lohan-paper-naive, separate-stage (updates after backward) and
    in-memory are there for comparison. All give the same bits."""

    clip: str = AUTO
    """When clipped updates run. All give the same bits."""

    # -- saving, evaluating, reporting
    save_steps: int = 1
    """Commit every so many steps: what a power cut can cost. A commit adds no traffic of its own."""

    export_at_end: bool = True
    """Write the trained model to output_dir/model as a Hugging Face folder."""

    eval_strategy: str = "no"
    """no, every eval_steps steps, or at the end of each epoch."""

    eval_steps: int | None = None
    """None: logging_steps."""

    eval_on_start: bool = False
    """Evaluate before the first step too."""

    load_best_model_at_end: bool = False
    """Keep the weights with the lowest evaluation loss in output_dir/best as they come."""

    early_stopping_patience: int | None = None
    """Stop after so many evaluations without a better loss."""

    early_stopping_threshold: float = 0.0
    """By how much a loss must be lower to count as better."""

    sample_prompts: tuple[str, ...] = ()
    """Let the model answer these after every evaluation, as in `lohan generate`."""

    sample_max_new_tokens: int = 64
    """Tokens of such an answer, at most."""

    logging_steps: int = 1
    """Print a line every so many steps. metrics.jsonl has every step."""

    report_to: tuple[str, ...] = ()
    """tensorboard, wandb or both, beside metrics.jsonl."""

    run_name: str | None = None
    """The run's name for wandb. None: the last part of output_dir."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def wire_dtype(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def order_seed(self) -> int:
        """What fixes the order of the data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def evaluates(self) -> bool:
        return self.eval_strategy != "no"

    @property
    def eval_every(self) -> int:
        return self.logging_steps if self.eval_steps is None else self.eval_steps


_AT_LEAST: dict[str, float] = {
    "eval_share": 0, "max_eval_samples": 1, "max_length": 2, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 1, "num_train_epochs": 0, "learning_rate": 0,
    "warmup_ratio": 0, "warmup_steps": 0, "min_lr_rate": 0, "adam_beta1": 0, "adam_beta2": 0, "adam_epsilon": 0,
    "momentum": 0, "weight_decay": 0, "max_grad_norm": 0, "seed": 0, "data_seed": 0, "save_steps": 1, "eval_steps": 1,
    "early_stopping_patience": 1, "early_stopping_threshold": 0, "logging_steps": 1, "sample_max_new_tokens": 1,
}  # fmt: skip
_BELOW: dict[str, float] = {"eval_share": 1, "adam_beta1": 1, "adam_beta2": 1, "momentum": 1}
_AT_MOST: dict[str, float] = {"warmup_ratio": 1, "min_lr_rate": 1}


def _check(config: TrainConfig) -> None:
    for key in ("model_name_or_path", "output_dir", "ssd", "train_file"):
        value = getattr(config, key)
        if not value or any(not part for part in value):
            raise BadValue(key, f"{key} is empty. Write a path.")
    for key, choices in CHOICES.items():
        _check_choice(key, getattr(config, key), choices)
    _check_ranges(config)
    _check_sizes(config)
    _check_pairs(config)
    _check_evaluation(config)


def _check_choice(key: str, value: str | tuple[str, ...] | None, choices: tuple[str, ...]) -> None:
    for word in (value,) if isinstance(value, str) else value or ():
        if word not in choices:
            hint = did_you_mean(word, choices)
            raise BadValue(key, f"{key} is {word!r}.{hint} Write one of: {', '.join(choices)}.")


def _check_ranges(config: TrainConfig) -> None:
    limits: tuple[tuple[dict[str, float], str, Callable[[float, float], bool]], ...] = (
        (_AT_LEAST, "at least", lambda value, limit: value >= limit),
        (_BELOW, "below", lambda value, limit: value < limit),
        (_AT_MOST, "at most", lambda value, limit: value <= limit),
    )
    for table, words, holds in limits:
        for key, limit in table.items():
            value = getattr(config, key)
            if value is not None and not holds(value, limit):
                raise BadValue(key, f"{key} is {value}; it must be {words} {limit:g}.")
    if config.max_steps == 0 or config.max_steps < -1:
        raise BadValue(
            "max_steps", f"max_steps is {config.max_steps}. Write the number of steps, or -1 to go by num_train_epochs."
        )
    if config.max_steps == -1 and config.num_train_epochs == 0:
        raise BadValue("num_train_epochs", "num_train_epochs is 0 and max_steps is not set: nothing would be trained.")


def _check_sizes(config: TrainConfig) -> None:
    for key in ("host_memory", "gpu_memory"):
        value = getattr(config, key)
        if value is None or (key == "host_memory" and value == AUTO):
            continue
        try:
            size = parse_size(value, name=key)
        except ConfigError as error:
            raise BadValue(key, str(error)) from None
        if size == 0:
            raise BadValue(key, f"{key} is 0. Write how much the run may take, like 24GB.")
    if not re.fullmatch(r"auto|cpu|virtual|cuda(:\d+)?", config.device):
        raise BadValue("device", f"device is {config.device!r}. Write auto, cuda, cuda:1 (the second GPU) or cpu.")
    if config.device == "cpu" and config.gpu_memory is not None:
        raise BadValue(
            "gpu_memory", "gpu_memory has no meaning on device: cpu, where host_memory covers all. Remove it."
        )


def _check_pairs(config: TrainConfig) -> None:
    if config.bf16 and config.fp16:
        raise BadValue(
            "fp16", "bf16 and fp16 are both true, and bf16 is on unless it is switched off. Add bf16: false."
        )
    if config.warmup_ratio and config.warmup_steps:
        raise BadValue("warmup_ratio", "warmup_ratio and warmup_steps are both set. Remove one of them.")
    if config.lr_scheduler_type == "cosine_with_min_lr" and config.min_lr_rate is None:
        raise BadValue("lr_scheduler_type", "cosine_with_min_lr needs min_lr_rate. Add min_lr_rate: 0.1.")
    if config.lr_scheduler_type == "constant" and (config.warmup_ratio or config.warmup_steps):
        key = "warmup_ratio" if config.warmup_ratio else "warmup_steps"
        raise BadValue(key, f"{key} has no effect with constant. Write lr_scheduler_type: constant_with_warmup.")
    if config.max_steps > 0 and config.warmup_steps > config.max_steps:
        raise BadValue(
            "warmup_steps",
            f"warmup_steps is {config.warmup_steps} and max_steps is {config.max_steps}. Lower the first.",
        )
    if config.frozen is not None:
        try:
            re.compile(config.frozen)
        except re.error as error:
            raise BadValue(
                "frozen",
                f"frozen is {config.frozen!r}, not a regular expression: {error}. Write one like embed_tokens|lm_head.",
            ) from None
    if not config.apply_chat_template and config.chat_template_path is not None:
        raise BadValue("chat_template_path", "chat_template_path is set and apply_chat_template is false. Remove one.")
    if len(set(config.ssd)) < len(config.ssd):
        raise BadValue("ssd", "ssd names a directory twice. Name each drive once.")
    if config.strategy != "lohan" and config.clip == "speculative":
        raise BadValue("clip", f"clip: speculative needs strategy: lohan, not {config.strategy}. Write clip: auto.")
    if config.strategy in ONE_MICRO_BATCH and config.gradient_accumulation_steps > 1:
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
        raise BadValue(
            "strategy",
            f"strategy: {config.strategy} takes a step's batch as one micro-batch, as published, and "
            f"gradient_accumulation_steps is {config.gradient_accumulation_steps}. "
            f"Write gradient_accumulation_steps: 1 and per_device_train_batch_size: {rows}.",
        )
    if "none" in config.report_to and len(config.report_to) > 1:
        raise BadValue("report_to", "report_to has none beside others. Remove none.")


def _check_evaluation(config: TrainConfig) -> None:
    if config.eval_file and config.eval_share:
        raise BadValue("eval_share", "eval_file and eval_share are both set. Remove one of them.")
    held_out = bool(config.eval_file or config.eval_share)
    if config.evaluates and not held_out:
        raise BadValue(
            "eval_strategy",
            f"eval_strategy is {config.eval_strategy} and there is nothing to evaluate on. Add eval_share: 0.01 or an "
            "eval_file.",
        )
    for key in ("early_stopping_patience", "load_best_model_at_end", "eval_on_start", "sample_prompts"):
        if getattr(config, key) and not config.evaluates:
            raise BadValue(key, f"{key} needs evaluations. Add eval_strategy: epoch, or remove it.")
    if config.eval_steps is not None and config.eval_strategy != "steps":
        raise BadValue(
            "eval_steps",
            f"eval_steps has no effect with eval_strategy: {config.eval_strategy}. Write eval_strategy: steps.",
        )
