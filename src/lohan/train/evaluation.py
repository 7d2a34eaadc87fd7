"""The loss on held-out data, which evaluation was best, and when to stop because none gets better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lohan.engine.compute import num_labels
from lohan.engine.run import Run
from lohan.train.config import TrainConfig
from lohan.train.data.batches import MicroBatch, TokenData


@dataclass(slots=True)
class Evaluations:
    """What earlier evaluations found. Kept with every commit, so a run that goes on knows it."""

    last_step: int = -1
    last_loss: float | None = None
    best_step: int = -1
    best_loss: float | None = None
    num_worse: int = 0
    """Evaluations since the best one."""

    def record(self, step: int, loss: float, threshold: float) -> bool:
        """Note an evaluation; True if it is the best so far."""
        better = self.best_loss is None or loss < self.best_loss - threshold
        self.last_step, self.last_loss = step, loss
        if better:
            self.best_step, self.best_loss, self.num_worse = step, loss, 0
        else:
            self.num_worse += 1
        return better

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Evaluations:
        return cls(**saved)


def is_due(config: TrainConfig, step: int, *, steps_per_epoch: int, total_steps: int) -> bool:
    """Whether an evaluation follows this step. The last step always has one."""
    if not config.evaluates:
        return False
    if step == 0:
        return config.eval_on_start
    every = config.eval_every if config.eval_strategy == "steps" else steps_per_epoch
    return step % every == 0 or step == total_steps


def evaluate(run: Run, data: TokenData, *, at_once: int, stop: Callable[[], bool] = lambda: False) -> float | None:
    """The mean loss per label over all of the data, `at_once` micro-batches at a time so that memory stays bounded.

    None if `stop` said so on the way.
    """
    total, labels = 0.0, 0
    for group in _groups(data.in_order(), at_once):
        if stop():
            return None
        here = num_labels(group)
        total += run.evaluate(group) * here
        labels += here
    return total / labels


def _groups(batches: Iterator[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    group: list[MicroBatch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
