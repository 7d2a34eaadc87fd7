"""What `lohan train` leaves in output_dir/report for `lohan report`: plan.json when it begins, step.json as it goes on.

Two small files, each replaced as a whole, so that one which is there is whole. They are for people: a run that goes on
writes its own, and deleting them costs nothing but parts of the report.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lohan.estimate.estimate import plan_to_dict
from lohan.report.spans import lanes_of, measured_lanes

if TYPE_CHECKING:
    from lohan.engine.run import Run
    from lohan.profiles import MachineProfile
    from lohan.train.preview import Preview

FOLDER_NAME, PLAN_NAME, STEP_NAME = "report", "plan.json", "step.json"
EVERY_SECONDS = 60.0
"""Between two records of a step, so that a run which is killed has a late one. Writing one takes milliseconds."""

_PACKAGES = ("lohan", "torch", "transformers", "numpy", "safetensors", "tokenizers")


class RunRecord:
    """Writes both files for one opening of a run."""

    def __init__(self, output_dir: Path):
        self._folder = output_dir / FOLDER_NAME
        self._steps = 0
        self._written: float | None = None

    def begin(
        self,
        run: Run,
        ahead: Preview,
        *,
        machine: MachineProfile | None,
        shapes: Sequence[Mapping[str, Any]],
        total_steps: int,
    ) -> None:
        """The plan, and what is predicted of it; `shapes` are the largest micro-batches of the run."""
        from lohan.report import predicted

        planned, count = run.planned, len(shapes)
        assert planned is not None, "the run has been given its largest micro-batches"
        made: dict[str, Any] = {
            "time": time.time(),
            "after_step": run.step_number,
            "total_steps": total_steps,
            "versions": _versions(),
            "device": run.device.describe(),
            "separate_memory": run.device.separate_memory,
            "base_rss_bytes": run.base_bytes,
            "micro_batches": count,
            "preview": asdict(ahead),
            "plan": plan_to_dict(planned.plan),
            "units": [[unit.kind, unit.num_parameters] for unit in planned.size.units],
            "memory": predicted.memory_parts(planned, count),
            "machine": None if machine is None else asdict(machine),
            "predicted": None,
        }
        if machine is not None and ahead.seconds_per_step is not None:
            modes = [planned.plan.clip, *(["deferred"] if planned.plan.clip == "speculative" else [])]
            tokens = ahead.tokens_per_step
            rate = tokens / ahead.seconds_per_step
            made["predicted"] = {
                "steps": predicted.timelines(planned, machine, count, modes),
                "curve": predicted.activation_curve(planned, machine, count, run.device.memory_budget),
                "upgrades": predicted.upgrades(run.planning, machine, ahead.host_bytes, shapes, rate, tokens),
            }
        self._write(PLAN_NAME, made)

    def step(self, run: Run) -> None:
        """A step was taken; recorded if it is time to, and then the one before: nothing of that is still under way."""
        self._steps += 1
        now = time.monotonic()
        if self._steps == 2 or (self._written is not None and now > self._written + EVERY_SECONDS):
            self._record(run, back=1 if self._steps > 2 else 0)
            self._written = now

    def end(self, run: Run) -> None:
        """All is written down: the last step is recorded."""
        if self._steps:
            self._record(run, back=0)

    def _record(self, run: Run, *, back: int) -> None:
        taken = run.step_spans(back=back)
        if taken is None:
            return
        step, spans = taken
        units = {layout.spec.name: number for number, layout in enumerate(run.layouts)}
        self._write(
            STEP_NAME,
            {
                "time": time.time(),
                "step": step.number,
                "seconds": step.end - step.start,
                "clip": run.clip,
                "device_peak_bytes": run.device.peak_bytes if run.device.separate_memory else None,
                "busy": measured_lanes(spans, step.start, step.end),
                "lanes": lanes_of(spans, step.start, step.end, units),
            },
        )

    def _write(self, name: str, content: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f".{name}.new"
        new.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
        new.replace(self._folder / name)


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version(), "system": platform.platform(terse=True)}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"processors": str(os.cpu_count())}
