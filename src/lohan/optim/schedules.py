"""Learning-rate schedules under the names transformers gives them (lr_scheduler_type), with the same values.

A schedule is a function from the optimizer step, counted from 1, to the factor on the base learning rate. As in
transformers, warm-up starts from zero: the first step of a run with warm-up has factor 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lohan.errors import ConfigError

Schedule = Callable[[int], float]

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
)


def make_schedule(
    name: str,
    *,
    warmup_steps: int = 0,
    total_steps: int,
    learning_rate: float | None = None,
    min_lr_rate: float | None = None,
    num_cycles: float | None = None,
    lr_end: float = 1e-7,
    power: float = 1.0,
) -> Schedule:
    """The factor for each step. Only polynomial needs `learning_rate`, because its `lr_end` is absolute; only
    cosine_with_min_lr needs `min_lr_rate`, the share of the learning rate it ends at."""
    if name not in SCHEDULES:
        raise ConfigError(f"There is no lr_scheduler_type {name!r}. Set it to one of: {', '.join(SCHEDULES)}.")
    if warmup_steps < 0 or total_steps < 0:
        raise ConfigError(f"warmup_steps={warmup_steps} and total_steps={total_steps}: neither can be negative.")
    decay = _decay(name, warmup_steps, total_steps, learning_rate, min_lr_rate, num_cycles, lr_end, power)
    warm = 0 if name == "constant" else warmup_steps

    def factor(step: int) -> float:
        done = step - 1
        return done / max(1, warm) if done < warm else decay(done)

    return factor


def _decay(
    name: str,
    warmup_steps: int,
    total_steps: int,
    learning_rate: float | None,
    min_lr_rate: float | None,
    num_cycles: float | None,
    lr_end: float,
    power: float,
) -> Callable[[int], float]:
    """The factor after warm-up, from the number of steps already done."""
    decay_steps = max(1, total_steps - warmup_steps)

    def progress(done: int) -> float:
        return (done - warmup_steps) / decay_steps

    if name in ("constant", "constant_with_warmup"):
        return lambda done: 1.0

    if name == "linear":
        return lambda done: max(0.0, (total_steps - done) / decay_steps)

    if name in ("cosine", "cosine_with_min_lr"):
        if name == "cosine_with_min_lr" and min_lr_rate is None:
            raise ConfigError(
                "lr_scheduler_type is cosine_with_min_lr and min_lr_rate is not set. Set min_lr_rate: 0.1."
            )
        floor = min_lr_rate if name == "cosine_with_min_lr" and min_lr_rate is not None else 0.0
        waves = 0.5 if num_cycles is None else num_cycles

        def cosine(done: int) -> float:
            wave = 0.5 * (1.0 + math.cos(math.pi * waves * 2.0 * progress(done)))
            return max(0.0, wave * (1 - floor) + floor)

        return cosine

    if name == "cosine_with_restarts":
        restarts = 1.0 if num_cycles is None else num_cycles

        def restarting(done: int) -> float:
            if progress(done) >= 1.0:
                return 0.0
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((restarts * progress(done)) % 1.0))))

        return restarting

    if name == "polynomial":
        if learning_rate is None or not learning_rate > lr_end:
            raise ConfigError(
                f"lr_scheduler_type is polynomial and falls to lr_end={lr_end} from learning_rate={learning_rate}.\n"
                f"Set learning_rate above {lr_end}."
            )
        start = learning_rate

        def polynomial(done: int) -> float:
            if done > total_steps:
                return lr_end / start
            return float(((start - lr_end) * (1 - progress(done)) ** power + lr_end) / start)

        return polynomial

    timescale = warmup_steps or 10_000
    return lambda done: 1.0 / math.sqrt((done + timescale - warmup_steps) / timescale)
