"""What a user may choose for a training run; everything else is measured or derived."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lohan.errors import ConfigError
from lohan.optim import SGD, Adam, AdamW, Optimizer, StateFormat, decays, default_format, get_format, make_schedule

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


def dtype_of(value: str | torch.dtype, name: str) -> torch.dtype:
    """A dtype from what people write."""
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    raise ConfigError(f"{name} is {value!r}. Write bf16, fp16 or fp32.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a run trains. Two runs with equal settings, model and data give the same bits."""

    learning_rate: float = 1e-5
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Not applied to norms and biases: parameters with fewer than two dimensions."""

    momentum: float = 0.9
    """Only for sgd."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this. None: no clipping."""

    lr_schedule: str | Callable[[int], float] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    loss_scale: float | str | None = None
    """"dynamic" or a number; by default dynamic for fp16 and none otherwise."""

    state_format: str | None = None
    """fp32, split (lossless, the default with a bf16 wire) or bf16-moments."""

    wire_dtype: str | torch.dtype = "bf16"
    """How weights and gradients travel and are stored."""

    compute_dtype: str | torch.dtype | None = None
    """bf16 on CUDA; fp32 elsewhere, where it is four times as fast."""

    frozen: str | None = None
    """A regular expression: parameters whose name it is found in are not trained."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise ConfigError(f"learning_rate is {self.learning_rate}; it must be 0 or more.")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm is {self.max_grad_norm}; it must be above 0. For no clipping, use none.")
        if not self.weight_decay >= 0:
            raise ConfigError(f"weight_decay is {self.weight_decay}; it must be 0 or more.")
        if self.frozen is not None:
            try:
                re.compile(self.frozen)
            except re.error as error:
                raise ConfigError(f"frozen is {self.frozen!r}, not a regular expression: {error}.") from None
        dtype_of(self.wire_dtype, "wire_dtype")
        self.make_optimizer()
        self.make_format()
        self.make_schedule()

    @property
    def wire(self) -> torch.dtype:
        return dtype_of(self.wire_dtype, "wire_dtype")

    def compute(self, device: str) -> torch.dtype:
        if self.compute_dtype is not None:
            return dtype_of(self.compute_dtype, "compute_dtype")
        return torch.bfloat16 if device.startswith("cuda") else torch.float32

    def make_optimizer(self) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(betas=self.betas, eps=self.eps)
        if self.optimizer == "adam":
            return Adam(betas=self.betas, eps=self.eps)
        if self.optimizer == "sgd":
            return SGD(momentum=self.momentum)
        raise ConfigError(f"optimizer is {self.optimizer!r}. Write adamw, adam or sgd.")

    def make_format(self) -> StateFormat:
        return default_format(self.wire) if self.state_format is None else get_format(self.state_format)

    def make_schedule(self) -> Callable[[int], float]:
        if callable(self.lr_schedule):
            return self.lr_schedule
        if self.total_steps is None and self.lr_schedule not in ("constant", "constant_with_warmup", "inverse_sqrt"):
            raise ConfigError(f"lr_schedule {self.lr_schedule!r} needs total_steps: the step it ends at.")
        return make_schedule(
            self.lr_schedule,
            warmup_steps=self.warmup_steps,
            total_steps=self.total_steps or 0,
            learning_rate=self.learning_rate,
        )

    def decay(self, name: str, shape: tuple[int, ...]) -> float:
        return self.weight_decay if decays(name, shape) else 0.0

    def is_frozen(self, name: str) -> bool:
        return self.frozen is not None and re.search(self.frozen, name) is not None

    def identity(self) -> dict[str, object]:
        """What a resumed run must share with the one that made the store."""
        return {
            "optimizer": self.optimizer,
            "state_format": self.make_format().name,
            "wire_dtype": str(self.wire).removeprefix("torch."),
            "frozen": self.frozen,
        }
