"""Is a run what plain PyTorch is, to the bit? The comparison, and the settings that must not change a bit.

compare() trains the same model on the same batches twice, by the oracle and by a run, and compares every loss, norm and
skipped step, and at the end all wire weights, masters and moments as integers. A Case is one choice of every setting;
all_cases() is the full product, pairwise_cover() a small part of it that has every two values together.

The limit for clipping and the loss scale are taken from a first pass of the oracle, so that some steps clip and some do
not, and with an fp16 wire some overflow.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lohan.engine.devices import VirtualOptions
from lohan.engine.run import Run, open_run
from lohan.optim import LossScale
from lohan.plan.activations import Activations
from lohan.plan.fit import fit_plan
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.strategies import ENGINE_STRATEGIES, ONE_MICRO_BATCH
from lohan.store import Files
from lohan.testing import zoo
from lohan.testing.late_files import LateFiles, QuickFiles
from lohan.testing.oracle import MicroBatch, Oracle

VOCABULARY = 257
_FP16_MAX = 65504.0
_HOST_MEMORY = 112 << 20  # far more than a zoo model needs: what stays in memory is set by the case

_MAX_UNITS, _MAX_OPERATORS = 8, 32  # of a zoo model, and of one of its blocks: numbers beyond mean nothing
_TRANSIT_BYTES, _WAITING_BYTES = 256 << 10, 8 << 20

ChangePlan = Callable[[ModelSize, Plan], Plan]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where run and oracle part."""

    what: str
    expected: object
    actual: object

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, got {self.actual}"


# -- the comparison -----------------------------------------------------------------------------------


@contextmanager
def changed_plan(change: ChangePlan | None) -> Iterator[None]:
    """Runs opened inside have their plan changed: any plan must give the same bits, not only those that fit makes."""
    if change is None:
        yield
        return

    def fit(model: ModelSize, budget: Any, wishes: Any) -> Plan:
        return change(model, fit_plan(model, budget, wishes))

    with mock.patch("lohan.engine.planning.fit_plan", fit):
        yield


def batches(
    steps: int, num_micro_batches: int, *, ragged: bool = False, seed: int = 1
) -> list[list[dict[str, Tensor]]]:
    """The data of all steps."""
    return [
        zoo.random_batches(
            VOCABULARY, num_micro_batches=num_micro_batches, batch=2, seq=12, seed=seed, step=step, ragged=ragged
        )
        for step in range(1, steps + 1)
    ]


def oracle_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings as the oracle takes them."""
    own = {"momentum": 0.9, "learning_rate": 1e-5, "max_grad_norm": 1.0, **settings}
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    own["wire_dtype"] = names[own.get("wire_dtype", "bf16")]
    if own["wire_dtype"] == torch.float16:
        own.setdefault("loss_scale", "dynamic")
    own["state_format"] = own.get("state_format") or "fp32"
    return own


def compare(
    model: Path | str | nn.Module,
    data: Sequence[Sequence[MicroBatch]],
    *,
    directory: Path,
    run: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    num_drives: int = 1,
    plan: ChangePlan | None = None,
    first_scale: float | None = None,
    files: Files | None = None,
    watch: Callable[[Run], None] | None = None,
) -> Difference | None:
    """Train by the oracle and by a run in `directory` (a folder that has no run yet) and return the first difference.

    `run` are arguments of open_run, `settings` fields of Settings; `first_scale` is where a dynamic loss scale starts;
    `watch` is called with the run after every step.
    """
    chosen = {"learning_rate": 1e-3, **(settings or {})}
    oracle = Oracle(model, **oracle_settings(chosen))
    if first_scale is not None:
        oracle.scale = first_scale
    drives = [directory / f"drive{index}" for index in range(num_drives)]
    for drive in drives:
        drive.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {
        "model": model,
        "ssd": drives,
        "host_memory": _HOST_MEMORY,
        "device": "cpu",
        "weights": [1.0, 0.6, 0.3][:num_drives],
        "piece_elements": 4096,
        "store_files": files or QuickFiles(),
        **(run or {}),
    }
    with changed_plan(plan), open_run(**options, **chosen) as opened:
        if first_scale is not None:
            opened._scale = LossScale(scale=first_scale)
        for number, step in enumerate(data, 1):
            expected, actual = oracle.step(step), opened.step(step)
            for name in ("loss", "grad_norm", "skipped"):
                if getattr(expected, name) != getattr(actual, name):
                    return Difference(f"{name} of step {number}", getattr(expected, name), getattr(actual, name))
            if watch is not None:
                watch(opened)
        return compare_state(oracle, opened)


def compare_state(oracle: Oracle, run: Run) -> Difference | None:
    """Wire weights, masters and moments, as integers."""
    weights = dict(run.read_weights())
    expected_weights = oracle.weights()
    if weights.keys() != expected_weights.keys():
        return Difference("names of weights", sorted(expected_weights), sorted(weights))
    for name, expected in expected_weights.items():
        if (found := _different(expected, weights[name], f"wire weight {name}")) is not None:
            return found
    masters, moments = oracle.masters(), oracle.moments()
    seen = set()
    for name, master, own in run.read_state():
        seen.add(name)
        if (found := _different(masters[name], master, f"master {name}")) is not None:
            return found
        for key, value in own.items():
            # Plain PyTorch has no moments before the first update; ours are zero then.
            before = moments[name][key] if name in moments else torch.zeros_like(value)
            if (found := _different(before, value, f"{key} of {name}")) is not None:
                return found
    return None if seen == masters.keys() else Difference("names of masters", sorted(masters), sorted(seen))


def _different(expected: Tensor, actual: Tensor, what: str) -> Difference | None:
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return Difference(what, (expected.dtype, expected.shape), (actual.dtype, actual.shape))
    kind = torch.int32 if expected.dtype == torch.float32 else torch.int16
    wrong = (expected.contiguous().view(kind) != actual.contiguous().view(kind)).flatten().nonzero().flatten()
    if not wrong.numel():
        return None
    first = int(wrong[0])
    values = expected.flatten()[first].item(), actual.flatten()[first].item()
    return Difference(f"{what}[{first}] ({wrong.numel()} of {expected.numel()} differ)", *values)


# -- the settings -------------------------------------------------------------------------------------

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16 split": {"wire_dtype": "bf16", "state_format": "split"},
    "bf16 fp32": {"wire_dtype": "bf16", "state_format": "fp32"},
    "bf16 bf16-moments": {"wire_dtype": "bf16", "state_format": "bf16-moments"},
    "fp16 fp32": {"wire_dtype": "fp16", "state_format": "fp32"},
    "fp32 fp32": {"wire_dtype": "fp32", "state_format": "fp32"},
}
FROZEN = {"nothing": None, "a block": r"\.1\.", "embedding and norms": r"embed|wte|norm|ln_"}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "cosine": {"lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 6},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One choice of everything that must not change a bit."""

    model: str = "llama"
    micro_batches: int = 4
    clip: str = "off"
    precision: str = "bf16 split"
    drives: int = 1
    commit_every: int = 1
    device: str = "cpu"
    memory: str = "nothing"
    """What stays in memory: nothing, some units in whole and some in part, all."""

    gradients: str = "ram"
    """Where gradients wait that must be held."""

    left_units: int = 0
    strategy: str = "lohan"
    optimizer: str = "adamw"
    frozen: str = "nothing"
    schedule: str = "constant"
    ragged: bool = False
    activations: str = "recompute"
    """What happens to activations: all computed again from the blocks' inputs, all kept in host memory, all on SSD, or
    some of each and some on the device."""

    def __str__(self) -> str:
        default = Case()
        own = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return ", ".join(own) or "the default case"

    @property
    def holds_gradients(self) -> bool:
        return (
            self.clip != "off"
            or self.precision.startswith("fp16")
            or self.left_units > 0
            or self.strategy == "separate-stage"
        )

    @property
    def makes_sense(self) -> bool:
        as_one = self.strategy in ONE_MICRO_BATCH and self.micro_batches > 1
        return (self.gradients == "ram" or self.holds_gradients) and not as_one


FACTORS: dict[str, tuple[Any, ...]] = {
    "model": zoo.NAMES,
    "micro_batches": (1, 4),
    "clip": ("off", "deferred", "speculative"),
    "precision": tuple(PRECISIONS),
    "drives": (1, 3),
    "commit_every": (1, 3),
    "device": ("cpu", "virtual"),
    "memory": ("nothing", "some", "all"),
    "gradients": ("ram", "ssd"),
    "left_units": (0, 2),
    "strategy": ENGINE_STRATEGIES,
    "optimizer": ("adamw", "adam", "sgd"),
    "frozen": tuple(FROZEN),
    "schedule": tuple(SCHEDULES),
    "ragged": (False, True),
    "activations": ("recompute", "host", "ssd", "mixed"),
}
PROMISED = ("model", "micro_batches", "clip", "precision", "drives", "commit_every", "device")
"""The factors whose full product is promised; the others are chosen at random beside them."""

PROMISED_PRECISIONS = ("bf16 split", "bf16 fp32")


def all_cases(seed: int) -> list[Case]:
    """The full product of what is promised, in random order, every case with random values of the other factors."""
    rng = random.Random(seed)
    values = [PROMISED_PRECISIONS if name == "precision" else FACTORS[name] for name in PROMISED]
    cases = [_filled(dict(zip(PROMISED, chosen, strict=True)), rng) for chosen in itertools.product(*values)]
    rng.shuffle(cases)
    return cases


def random_case(rng: random.Random) -> Case:
    """Any values of any factors."""
    return _filled({}, rng)


def _filled(given: dict[str, Any], rng: random.Random) -> Case:
    while True:
        case = Case(**{name: given[name] if name in given else rng.choice(values) for name, values in FACTORS.items()})
        if case.makes_sense:
            return case


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs(case: Case) -> set[Pair]:
    """What a case has together. Models are paired with the factors that are promised for every model."""
    chosen = [(name, getattr(case, name)) for name in FACTORS]
    return {
        (one, other)
        for one, other in itertools.combinations(chosen, 2)
        if one[0] != "model" or (other[0] in PROMISED and other[1] in (*PROMISED_PRECISIONS, *_plain_values()))
    }


def _plain_values() -> tuple[Any, ...]:
    return tuple(v for name in PROMISED if name not in ("model", "precision") for v in FACTORS[name])


def pairwise_cover(seed: int = 0) -> list[Case]:
    """Few cases in which every two values of two factors that can meet, meet. Greedy; the same for the same seed."""
    rng = random.Random(seed)
    wanted: set[Pair] = set()
    for one, other in itertools.combinations(FACTORS, 2):
        for a, b in itertools.product(FACTORS[one], FACTORS[other]):
            try_these = [_filled({one: a, other: b}, random.Random(0))] if _can_meet({one: a, other: b}) else []
            for case in try_these:
                pair = ((one, a), (other, b))
                if pair in _pairs(case):
                    wanted.add(pair)
    cases: list[Case] = []
    while wanted:
        first = min(wanted, key=repr)
        candidates = [_filled(dict(first), rng) for _ in range(40)]
        best = max(candidates, key=lambda case: len(_pairs(case) & wanted))
        wanted -= _pairs(best)
        cases.append(best)
    return cases


def _can_meet(given: dict[str, Any]) -> bool:
    """With values of the others that forbid nothing, beside which a gradient is held."""
    others: dict[str, Any] = {"micro_batches": 1, "clip": "deferred", "precision": "fp16 fp32", "left_units": 2}
    if given.get("strategy") in ONE_MICRO_BATCH and given.get("micro_batches", 1) > 1:
        return False
    return Case(**{**others, **given}).makes_sense


# -- one case -----------------------------------------------------------------------------------------


def plan_of(case: Case) -> ChangePlan:
    """The plan with what stays in memory, and where gradients wait, as the case says."""

    def change(model: ModelSize, plan: Plan) -> Plan:
        units = frozenset(range(len(model.units)))
        trained = sum(1 for unit in model.units if unit.trained_pieces)
        if case.memory == "all":
            plan = replace(plan, resident_weights=units, resident_state=units)
        elif case.memory == "some":
            whole, weights = {0, len(units) - 2}, {1, len(units) - 1}  # of a model with 3 blocks only one is streamed
            plan = replace(plan, resident_weights=frozenset(whole | weights), resident_state=frozenset(whole))
        if case.holds_gradients:
            on_ssd = case.gradients == "ssd"
            plan = replace(plan, gradients_on_ssd=on_ssd, gradient_slabs=3 if on_ssd else trained + 1)
        return plan

    return change


def activations_of(case: Case) -> Activations | None:
    """The choice the case names, for every unit and heavy operator that a zoo model has."""
    if case.activations == "recompute":
        return None
    units, operators, tiers = range(_MAX_UNITS), range(_MAX_OPERATORS), ("device", "host", "ssd")
    if case.activations != "mixed":
        tier = case.activations
        inputs, kept = tuple(tier for _ in units), tuple(tuple((op, tier) for op in operators) for _ in units)
    else:  # of every four operators one is computed again
        inputs = tuple(tiers[unit % 3] for unit in units)
        kept = tuple(tuple((op, tiers[(unit + op) % 4]) for op in operators if (unit + op) % 4 < 3) for unit in units)
    return Activations(inputs=inputs, kept=kept, transit_bytes=_TRANSIT_BYTES, host_bytes=_WAITING_BYTES)


def training_settings(case: Case) -> dict[str, Any]:
    return {
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "optimizer": case.optimizer,
        "frozen": FROZEN[case.frozen],
        "max_grad_norm": None,
        **PRECISIONS[case.precision],
        **SCHEDULES[case.schedule],
    }


def look_ahead(
    model: Path | nn.Module, data: Sequence[Sequence[MicroBatch]], settings: Mapping[str, Any]
) -> tuple[float, float]:
    """A limit that clips about half the steps, and a loss scale that overflows fp16 in the first two."""
    own = oracle_settings(settings)
    if own.get("loss_scale") is not None:
        own["loss_scale"] = 1024.0
    oracle = Oracle(model, **own)
    norms, largest = [], 0.0
    for step in data:
        norms.append(oracle.step(step).grad_norm or 0.0)
        largest = max(largest, *(float(g.abs().max()) for g in oracle.last_gradients.values()))
    scale = _FP16_MAX / (largest / (oracle.scale or 1.0))
    power = 2.0 ** int(torch.tensor(scale).log2().floor())
    return statistics.median(norms), 4 * power


def run_case(
    case: Case,
    models: Path,
    directory: Path,
    *,
    steps: int = 4,
    run: Mapping[str, Any] | None = None,
    files: Files | None = None,
) -> Difference | None:
    """Compare one case. `models` keeps the zoo's folders for the next, `directory` gets the store."""
    folder = models / case.model
    if not folder.exists():
        zoo.tiny_model_folder(case.model, folder)
    data = batches(steps, case.micro_batches, ragged=case.ragged)
    settings = training_settings(case)
    limit, scale = look_ahead(folder, data, settings)
    if case.clip != "off":
        settings["max_grad_norm"] = limit
    options = {
        "device": case.device,
        "commit_every": case.commit_every,
        "clip": "auto" if case.clip == "off" else case.clip,
        "versions": 3 if case.commit_every > 1 else 2,
        "strategy": case.strategy,
        "left_units": case.left_units,
        "activations": activations_of(case),
        "keep_nothing_in_memory": True,
        **(run or {}),
    }
    return compare(
        folder,
        data,
        directory=directory,
        run=options,
        settings=settings,
        num_drives=case.drives,
        plan=plan_of(case),
        first_scale=scale if case.precision.startswith("fp16") else None,
        files=files,
    )


def race_case(
    case: Case, models: Path, directory: Path, *, seed: int, steps: int = 4, max_delay_seconds: float = 0.004
) -> Difference | None:
    """Compare one case with random delays on every lane and in every read and write of the store."""
    files = LateFiles(seed, max_delay_seconds)
    virtual = VirtualOptions(delay_seed=seed, max_delay_seconds=max_delay_seconds)
    return run_case(case, models, directory, steps=steps, run={"virtual": virtual}, files=files)
