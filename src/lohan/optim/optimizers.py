"""The update rules, on any piece of a parameter: f32 in, f32 out, in place.

Each rule gives the bits of its torch.optim namesake with fused=True on the whole tensor, at any number of threads,
provided a piece starts at a multiple of CHUNK_ALIGNMENT elements of its own tensor and ends at another or at the
tensor's end. The kernel rounds differently in its vector loop and in the scalar loop for what is left at the end, so
a piece cut anywhere else moves elements from one loop to the other: about one in four changes its last bit.

An optimizer holds no state and is safe from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lohan.errors import ConfigError

CHUNK_ALIGNMENT = 64
"""The kernel needs its vector length, 8 floats with AVX2 (measured: every multiple of 8 is exact, 4 and 12 are not)
and 16 with AVX-512, and shares work between threads in cache lines of 16. 64 leaves room and keeps every array of a
chunk, 16-bit ones too, on cache lines of its own."""


class Optimizer(ABC):
    """One update rule. `moments` names the f32 values it keeps per parameter; they start at zero."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]:
        """What it keeps per parameter, under torch's names."""

    @abstractmethod
    def update(
        self, master: Tensor, grad: Tensor, moments: Mapping[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        """Step number `step`, counted from 1, on 1-D f32 tensors. Changes master and moments, never grad."""


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """torch.optim.Adam(fused=True): weight decay is added to the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    name: ClassVar[str] = "adam"
    decoupled_weight_decay: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for index, beta in enumerate(self.betas, start=1):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"adam_beta{index} is {beta}, outside [0, 1). Usual values are 0.9 and 0.999.")
        if not self.eps >= 0.0:
            raise ConfigError(f"adam_epsilon is {self.eps}, and it cannot be negative. The usual value is 1e-8.")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def update(
        self, master: Tensor, grad: Tensor, moments: Mapping[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        rule = adamw if self.decoupled_weight_decay else adam
        rule(
            [master],
            [grad],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            # The call adds 1 to this tensor before it uses it. A new one each time, so that threads share nothing.
            [torch.tensor(step - 1.0)],
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """torch.optim.AdamW(fused=True): weight decay shrinks the weight itself."""

    name: ClassVar[str] = "adamw"
    decoupled_weight_decay: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """torch.optim.SGD(fused=True), with or without momentum."""

    momentum: float = 0.0
    nesterov: bool = False

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        if not self.momentum >= 0.0:
            raise ConfigError(f"momentum is {self.momentum}, and it cannot be negative. Usual values are 0 and 0.9.")
        if self.nesterov and self.momentum == 0.0:
            raise ConfigError("nesterov needs momentum and momentum is 0. Set momentum to 0.9, or nesterov to false.")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self, master: Tensor, grad: Tensor, moments: Mapping[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        stored = moments["momentum_buffer"] if self.momentum else None
        # None asks for torch's first step, which sets the buffer to the gradient. A buffer of zeros would give the
        # same numbers but turn -0.0 into 0.0.
        buffers: list[Tensor | None] = [None if step == 1 else stored]
        sgd(
            [master],
            [grad],
            buffers,
            fused=True,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.nesterov,
            maximize=False,
        )
        if step == 1 and stored is not None and buffers[0] is not None:
            stored.copy_(buffers[0])


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies to a parameter: not to norms and biases, which have fewer than two dimensions."""
    del name  # the default rule needs only the shape; callers have both
    return len(shape) >= 2
