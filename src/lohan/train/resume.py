"""What a run remembers with every commit, and whether it may go on with a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lohan.errors import ConfigError
from lohan.train.config import TrainConfig
from lohan.train.config_changes import changes_result
from lohan.train.config_file import dump_config, parse_config
from lohan.train.evaluation import Evaluations


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the last commit; empty before the first step and for runs made without a config."""

    config: str | None
    fingerprint: str | None
    evaluations: Evaluations


def memory_of(config: TrainConfig, fingerprint: str, evaluations: Evaluations) -> dict[str, Any]:
    """As it is kept with a commit."""
    return {"config": dump_config(config), "data": fingerprint, "evaluations": evaluations.to_dict()}


def recall(metadata: Mapping[str, Any]) -> Memory:
    """From a store's metadata."""
    user = metadata.get("user") or {}
    return Memory(user.get("config"), user.get("data"), Evaluations.from_dict(user.get("evaluations") or {}))


def check_same(
    saved: Memory, config: TrainConfig, fingerprint: str, *, accept: bool, say: Callable[[str], None]
) -> None:
    """Refuse to go on with what would give another result, unless that is accepted. What may change is told."""
    if saved.config is None:
        return
    found = changes_result(parse_config(saved.config, name="the run's config"), config)
    breaking = [str(change) for change in found.breaking]
    if saved.fingerprint != fingerprint:
        breaking.append("the content of train_file, the tokenizer or its template is another one")
    for change in found.free:
        say(f"Changed since the last time, with the same result: {change}.")
    if not breaking:
        return
    if not accept:
        raise ConfigError(
            f"This run would not give the result it was begun for: {'; '.join(breaking)}. Set it back, accept the "
            "change with --accept-changes, or start a new run in other directories of ssd."
        )
    for each in breaking:
        say(f"Changed since the last time, and accepted: {each}.")
