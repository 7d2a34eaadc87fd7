"""The factor on the loss that keeps fp16 gradients in range, and how it moves when they overflow.

Behaves as torch.amp.GradScaler: grows after `growth_interval` good steps in a row, shrinks at once on overflow, and
the step that overflowed is skipped. A static scale never moves, but its overflowing steps are skipped too.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lohan.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LossScale:
    """The current scale and what moves it. Not shared between threads."""

    scale: float = 65536.0
    """Multiplies the loss before backward. 2^16 as in GradScaler; too high costs a few skipped steps at the start."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    """Powers of two keep scaling and unscaling exact."""

    growth_interval: int = 2000
    """Good steps in a row before the scale grows."""

    dynamic: bool = True
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ConfigError(f"The loss scale is {self.scale}; it must be positive and finite. Set it to 65536.")
        if self.growth_factor <= 1 or not 0 < self.backoff_factor < 1 or self.growth_interval < 1:
            raise ConfigError(
                f"The loss scale grows by {self.growth_factor} every {self.growth_interval} steps and shrinks by "
                f"{self.backoff_factor}. Use a growth above 1, a backoff between 0 and 1 and at least 1 step."
            )

    @classmethod
    def static(cls, scale: float) -> Self:
        """A scale that never moves."""
        return cls(scale=scale, dynamic=False)

    @property
    def inverse(self) -> float:
        """What gradients are multiplied by, rounded to f32 as GradScaler does."""
        return _f32(1.0 / self.scale)

    def record(self, *, overflow: bool) -> None:
        """Tell how a step went. After an overflow the step must not be applied."""
        if not self.dynamic:
            return
        if overflow:
            self.scale = _f32(self.scale * self.backoff_factor)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.good_steps = 0
            grown = _f32(self.scale * self.growth_factor)
            if math.isfinite(grown):
                self.scale = grown

    def to_dict(self) -> dict[str, float | int | bool]:
        """Plain numbers for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """The scale that to_dict saved."""
        names = {field.name for field in fields(cls)}
        if set(saved) != names:
            raise ConfigError(
                f"The saved loss scale has {sorted(saved)} and {sorted(names)} are needed: it was written by another "
                "version of lohan. Resume with that version, or start with a new loss scale."
            )
        return cls(**saved)


def _f32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
