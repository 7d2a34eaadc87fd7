"""Does a system train on the right numbers? Its losses and weights after two steps beside plain PyTorch's.

A faster way to wrong weights is no comparison, so the benchmark checks every system before it times one. The distance
of an update is |update - plain update| over |plain update|, both as vectors of all parameters: rounding gives a few
thousandths, because Adam's first steps are signs where gradients are tiny; wrong gradients give about one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 2
MOST_LOSS = 1e-3
MOST_DISTANCE = 0.05
MOST_WIRE_DISTANCE = 0.25
"""For systems that round weights and gradients to bf16 between SSD and device: they must be near, not equal."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a worker gave."""

    losses: list[float]
    folder: Path


def compare(initial: Path, plain: Trained, other: Trained, *, exact: bool) -> dict[str, Any]:
    """Distances, how many tensors are too far, and the verdict."""
    most = MOST_DISTANCE if exact else MOST_WIRE_DISTANCE
    with ExitStack() as owned:
        before, wanted, found = (_open(folder, owned) for folder in (initial, plain.folder, other.folder))
        names = sorted(before)
        off = moved = 0.0
        largest, wrong = 0.0, []
        for name in names:
            start, right, ours = before[name](), wanted[name](), found[name]()
            apart = float((ours.double() - right.double()).norm()) ** 2
            way = float((right.double() - start.double()).norm()) ** 2
            off, moved = off + apart, moved + way
            largest = max(largest, float((ours.float() - right.float()).abs().max()))
            if math.sqrt(apart) > most * math.sqrt(way):
                wrong.append(name)
    distance = math.sqrt(off / moved)
    loss = max(abs(a - b) for a, b in zip(plain.losses, other.losses, strict=True))
    return {
        "loss_distance": loss,
        "update_distance": distance,
        "largest_difference": largest,
        "wrong_tensors": len(wrong),
        "tensors": len(names),
        "equal_to_the_bit": largest == 0.0 and loss == 0.0,
        "ok": distance <= most and loss <= (MOST_LOSS if exact else 10 * MOST_LOSS),
    }


def sentence(system: str, check: dict[str, Any]) -> str:
    """For people."""
    if "failed" in check:
        return f"{system:15} did not run: {check['failed']}"
    if check["equal_to_the_bit"]:
        how = "every weight and loss equal to the bit"
    else:
        how = (
            f"losses within {check['loss_distance']:.1g}, update off by {check['update_distance']:.2%}, "
            f"{check['wrong_tensors']} of {check['tensors']} tensors too far"
        )
    return f"{system:15} {'ok' if check['ok'] else 'WRONG'}: {how}"


def _open(folder: Path, owned: ExitStack) -> dict[str, Callable[[], Any]]:
    """Every tensor of a folder by name, read when called: safetensors, or the file DeepSpeed writes."""
    import torch
    from safetensors import safe_open

    found: dict[str, Callable[[], Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = owned.enter_context(safe_open(path, framework="pt"))
        found |= {name: lambda file=file, name=name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for path in sorted(folder.glob("pytorch_model.bin")):
        saved = torch.load(path, weights_only=True, mmap=True)
        found |= {name: lambda value=value: value for name, value in saved.items()}
    return found
