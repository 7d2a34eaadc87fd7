"""Strategies the engine runs: by name, what each asks of a Plan.

`lohan` is this project. The others are for comparison on equal terms, in the same engine and on the simulator's clock:
`lohan-paper` is LoHan as published, `lohan-paper-naive` and `separate-stage` are its ablations, `in-memory` has
everything in RAM. Why the published system has one unit's state in host memory at a time: docs/simulator.md.
"""

from __future__ import annotations

from typing import Any

from lohan.errors import ConfigError

RULES: dict[str, dict[str, Any]] = {
    "lohan": {},
    "lohan-paper": {"barrier": True, "blocks_in_flight": 1},
    "lohan-paper-naive": {"barrier": True, "blocks_in_flight": 1, "device_waits": True},
    "separate-stage": {"barrier": True, "separate_stage": True},
    "in-memory": {"barrier": True},
}
"""Fields of the Plan."""

ENGINE_STRATEGIES = tuple(RULES)
PUBLISHED = ("lohan-paper", "lohan-paper-naive", "separate-stage")
"""Weights and state live on SSD, however much RAM is free: that is for activations."""

ONE_MICRO_BATCH = ("lohan-paper", "lohan-paper-naive")
"""As published, a step's batch passes as a whole. Several micro-batches would pass one after another, which no Schedule
of ours does."""


def check_strategy(name: str) -> None:
    """Refuse what the engine cannot run."""
    if name not in RULES:
        known = f"strategy is {name!r}. The engine runs {', '.join(RULES)}"
        raise ConfigError(f"{known}; `lohan estimate --compare` has others, simulated.")


def check_micro_batches(name: str, count: int) -> None:
    """Refuse several micro-batches where a strategy takes its batch as one."""
    if count > 1 and name in ONE_MICRO_BATCH:
        raise ConfigError(
            f"strategy {name} takes a step's batch as one micro-batch, as published, and this step has {count}. "
            "Pass one, or use strategy: lohan."
        )
