"""From what a run left behind to the numbers that are drawn: curves, lanes, tiers, the activation curve. Pure.

Each function answers with data for a chart, or with a sentence that says why there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from lohan.estimate.costs import REFERENCE_ENDURANCE_BYTES
from lohan.report.gather import Gathered, number
from lohan.report.spans import KINDS

MAX_POINTS = 600
"""Of a curve. More steps are drawn as the mean of neighbours, with their least and greatest around it."""

NO_MACHINE = (
    "Nothing was predicted: the run had no machine profile. Measure one with `lohan profile --out machine.yaml` and "
    "set `machine: machine.yaml`."
)
NO_PLAN = "This run left no plan behind: it was trained by an earlier version, or its `report` folder was deleted."
NO_STEP = "No step has been recorded yet: that happens with the second step, and from then on every minute."

LANES = {
    "gpu": "computing",
    "cpu_update": "updating",
    "to_gpu": "to device",
    "to_host": "to RAM",
    "ssd_read": "SSD read",
    "ssd_write": "SSD write",
    "swap_in": "activations in",
    "swap_out": "activations out",
}
BUSY = {
    "gpu": "computing",
    "cpu_update": "updating on the CPU",
    "to_gpu": "copies to the device",
    "to_host": "copies to RAM",
    "ssd": "drives, reading or writing",
    "drives read": "of that: reading",
    "drives write": "of that: writing",
}
GROUPS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "update and norm": ("update", "norm", "clip"),
    "weights": ("read_weights", "to_gpu"),
    "optimizer state": ("read_state", "write", "commit"),
    "gradients": ("gradient", "spill", "read_gradient"),
    "activations": ("act_out", "act_write", "act_read", "act_in"),
    "other": ("other",),
}
"""Kinds of operations that share a colour. `write` takes weights and state back together."""

Chart = dict[str, Any]


def curves(run: Gathered) -> dict[str, Chart | str]:
    """Everything over steps."""
    if not run.steps:
        return dict.fromkeys(("loss", "rate", "norm", "learning_rate"), "No step has been taken yet.")
    loss = _series(run, "loss")
    held_out = [[line["step"], line["eval_loss"]] for line in run.evaluations]
    lines = [_line("training", loss, smooth=True)]
    if held_out:
        lines.append({"name": "held out", "points": held_out, "dots": True})
    norm = _series(run, "grad_norm")
    values = [y for _, y in norm]
    return {
        "loss": {"lines": lines} if loss or held_out else "No loss is on record.",
        "rate": _chart(run, "tokens_per_second", "tokens/s", smooth=True, zero=True),
        "norm": {"lines": [_line("gradient norm", norm)], "log": min(values) > 0 and max(values) > 30 * min(values)}
        if norm
        else "No gradient norm is on record.",
        "learning_rate": _chart(run, "learning_rate", "learning rate", zero=True),
    }


def _chart(run: Gathered, key: str, name: str, *, smooth: bool = False, zero: bool = False) -> Chart | str:
    points = _series(run, key)
    return {"lines": [_line(name, points, smooth=smooth)], "zero": zero} if points else f"No {name} is on record."


def _series(run: Gathered, key: str) -> list[list[float]]:
    return [[line["step"], value] for line in run.steps if (value := number(line.get(key))) is not None]


def _line(name: str, points: list[list[float]], *, smooth: bool = False) -> Chart:
    line: Chart = {"name": name, "points": points}
    if len(points) > MAX_POINTS:
        groups = [
            points[len(points) * i // MAX_POINTS : len(points) * (i + 1) // MAX_POINTS] for i in range(MAX_POINTS)
        ]
        middle = [(group[0][0] + group[-1][0]) / 2 for group in groups]
        line["points"] = [[x, sum(y for _, y in group) / len(group)] for x, group in zip(middle, groups, strict=True)]
        line["band"] = [
            [x, min(y for _, y in group), max(y for _, y in group)] for x, group in zip(middle, groups, strict=True)
        ]
    if smooth and len(points) >= 20:
        line["smooth"] = smoothed([y for _, y in line["points"]])
    return line


def smoothed(values: Sequence[float]) -> list[float]:
    """The median of the neighbours, a fortieth of the length to each side: one slow step does not bend it."""
    reach = max(2, len(values) // 40)
    return [median(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]


def predicted_step(run: Gathered) -> dict[str, Any] | None:
    """The prediction for the way of clipping that the recorded step used."""
    if run.plan is None or not run.plan.get("predicted"):
        return None
    steps: dict[str, dict[str, Any]] = run.plan["predicted"]["steps"]
    mode = (run.step or {}).get("clip")
    return steps[mode] if mode in steps else next(iter(steps.values()), None)


def recent(run: Gathered) -> list[dict[str, Any]]:
    """The steps of the last start but its first, which also loads libraries; all there are, if those are too few."""
    return since_start(run)[1:] or run.steps


def since_start(run: Gathered) -> list[dict[str, Any]]:
    """The steps of the last start; all there are, if it has not taken any."""
    after = 0 if run.plan is None else int(run.plan.get("after_step", 0))
    return [line for line in run.steps if line["step"] > after] or run.steps


def mean_of(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [value for line in lines if (value := number(line.get(key))) is not None]
    return sum(values) / len(values) if values else None


def median_of(lines: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [value for line in lines if (value := number(line.get(key))) is not None]
    return median(values) if values else None


def why_no_prediction(run: Gathered) -> str:
    return NO_PLAN if run.plan is None else NO_MACHINE


def timeline(run: Gathered) -> Chart | str:
    """Lanes of one step, predicted and measured, on one axis."""
    foretold = predicted_step(run)
    if run.step is None and foretold is None:
        return NO_STEP if run.plan is not None else NO_PLAN
    both = [one for one in (foretold, run.step) if one is not None]
    group = {kind: index for index, kinds in enumerate(GROUPS.values()) for kind in kinds}
    return {
        "seconds": max(one["seconds"] for one in both),
        "lanes": [[lane, name] for lane, name in LANES.items() if any(one["lanes"].get(lane) for one in both)],
        "kinds": list(KINDS),
        "group": [group[kind] for kind in KINDS],
        "groups": list(GROUPS),
        "shared_cores": run.plan is not None and not run.plan.get("separate_memory", True),
        "predicted": None if foretold is None else {"seconds": foretold["seconds"], "lanes": foretold["lanes"]},
        "measured": None
        if run.step is None
        else {"seconds": run.step["seconds"], "lanes": run.step["lanes"], "step": run.step["step"]},
    }


def lane_seconds(run: Gathered) -> Chart | str:
    """Seconds of a step that each lane works."""
    foretold, taken = predicted_step(run), measured_busy(run)
    if foretold is None and not taken:
        return NO_STEP if run.plan is not None else NO_PLAN
    before = {} if foretold is None else foretold["busy"]
    rows = [
        {"name": name, "predicted": before.get(lane), "measured": taken.get(lane)}
        for lane, name in BUSY.items()
        if before.get(lane) or taken.get(lane)
    ]
    whole = {
        "name": "the whole step",
        "predicted": None if foretold is None else foretold["seconds"],
        "measured": None if run.step is None else run.step["seconds"],
    }
    return {"rows": [whole, *rows], "unit": "s"}


def measured_busy(run: Gathered) -> dict[str, float]:
    """Of the recorded step. Computing and updating by their own clocks: on `cpu` a lane's span has waits in it."""
    if run.step is None:
        return {}
    busy: dict[str, float] = dict(run.step["busy"])
    line = next((line for line in run.steps if line["step"] == run.step["step"]), {})
    for lane, name in (("gpu", "compute"), ("cpu_update", "update")):
        seconds = number((line.get("busy_seconds") or {}).get(name))
        if seconds is not None:
            busy[lane] = min(seconds, run.step["seconds"])
    return busy


def tiers(run: Gathered) -> Chart | str:
    """Bytes by tier: what the plan takes, what was used, and what there is."""
    rows: list[Chart] = []
    plan = run.plan
    if plan is not None:
        ahead, parts = plan["preview"], plan["memory"]
        used = max((v for line in run.steps if (v := number(line.get("rss_bytes"))) is not None), default=None)
        base = number(plan.get("base_rss_bytes"))
        rows.append(
            {
                "name": "RAM",
                "parts": _parts(parts["host"]),
                "measured": None if used is None or base is None else max(0.0, used - base),
                "budget": ahead["host_bytes"],
            }
        )
        if parts["device"]:
            budget = (plan.get("device") or {}).get("memory_budget")
            peak = number((run.step or {}).get("device_peak_bytes"))
            rows.append(
                {"name": "device", "parts": _parts(parts["device"]), "measured": peak, "budget": number(budget)}
            )
        rows.append(
            {
                "name": "SSD space",
                "parts": [["weights and states", ahead["ssd_bytes"]]],
                "measured": None if run.store is None else run.store["data_bytes"],
                "budget": None,
            }
        )
    # The mean and not the median: a step's last writes are counted with the step they fall into, and only the sum of
    # all steps is what they moved.
    moved, written = mean_of(since_start(run), "ssd_bytes"), mean_of(since_start(run), "ssd_written_bytes")
    ahead = {} if plan is None else plan["preview"]
    if moved is not None and written is not None:
        for name, key, value in (
            ("read per step", "read_bytes_per_step", moved - written),
            ("written per step", "write_bytes_per_step", written),
        ):
            foretold = ahead.get(key)
            rows.append(
                {
                    "name": f"SSD {name}",
                    "parts": [] if foretold is None else [["predicted", foretold]],
                    "measured": value,
                    "budget": None,
                }
            )
    return {"rows": rows} if rows else NO_PLAN


def _parts(sizes: dict[str, int]) -> list[list[Any]]:
    return [[name, size] for name, size in sorted(sizes.items(), key=lambda part: -part[1]) if size > 0]


def wear(run: Gathered) -> tuple[float | None, float, str]:
    """Bytes written in all so far, their share of the drives' endurance, and whose endurance that is."""
    written = [number(line.get("ssd_written_bytes")) for line in run.steps]
    if not run.steps or any(value is None for value in written):
        return None, 0.0, ""
    total = sum(value for value in written if value is not None)
    drives = ((run.plan or {}).get("machine") or {}).get("drives") or []
    rated = [drive.get("endurance_bytes") for drive in drives]
    if drives and all(rated):
        # Striped by weight, as estimate/costs.py.
        weights = [1 / (1 / d["read_bytes_per_second"] + 1 / d["write_bytes_per_second"]) for d in drives]
        share = max(total * w / sum(weights) / life for w, life in zip(weights, rated, strict=True))
        return total, share, "what the drives are rated for"
    rating = f"what a drive rated for {REFERENCE_ENDURANCE_BYTES / 1e12:,.0f} TB may take"
    return total, total / REFERENCE_ENDURANCE_BYTES, rating


def activation_curve(run: Gathered) -> Chart | str:
    """Predicted seconds over bytes that are kept for backward instead of being computed again."""
    if run.plan is None or not run.plan.get("predicted"):
        return why_no_prediction(run)
    found = run.plan["predicted"].get("curve")
    if not found:
        return "The operators of this model's blocks are not known before they run, so there is no curve."
    # On a device with room for all of it nothing is sent away, whatever is kept.
    swapped = bool(found["swapped"]) and len({point["host"] + point["ssd"] for point in found["points"]}) > 1

    def place(point: dict[str, Any]) -> Chart:
        moved = point["host"] + point["ssd"] + (0 if swapped else point["device"])
        return {
            "x": moved,
            "y": point["forward"] + point["backward"],
            "simulated": point.get("simulated"),
            "operators": point["operators"],
            "tiers": {tier: point[tier] for tier in ("device", "host", "ssd")},
        }

    return {
        "x": "sent off the device" if swapped else "kept for backward",
        "points": [place(point) for point in found["points"]],
        "chosen": place(found["chosen"]),
    }
