"""The rates of a run that is going on, step by step, in the terms drift.py compares.

rates, watch = RunRates(run, machine), DriftWatch(machine)
out = run.step(micro_batches)
for drift in watch.see(rates.after_step(out)):
    say(drift.sentence)
"""

from __future__ import annotations

import time
from dataclasses import replace

from lohan.engine.planning import Planned
from lohan.engine.run import Run, StepResult
from lohan.engine.trace import Span
from lohan.measure.drift import Request, StepWork, observed_step, step_work
from lohan.profiles import MachineProfile


class RunRates:
    """What a run has done since the step before. Asked once after every step, on the thread that steps."""

    def __init__(self, run: Run, machine: MachineProfile):
        self._run, self._machine = run, machine
        self._planned: Planned | None = None
        self._work = StepWork(flops=0.0, parameters=0, installed=0)
        self._busy: dict[str, float] = dict(run.busy_seconds)
        self._since = time.perf_counter()

    def after_step(self, result: StepResult) -> dict[str, float]:
        """This step's rates, by name; what it says nothing about is left out."""
        planned = self._run.planned
        if planned is not self._planned and planned is not None:
            self._planned = planned
            self._work = step_work(planned.size, planned.plan, planned.micro_batches)
        busy = self._run.busy_seconds
        # A new plan makes a new engine, whose clocks begin at 0.
        spent = {
            name: now - self._busy[name] if now >= self._busy.get(name, 1e99) else now for name, now in busy.items()
        }
        requests = [as_request(span) for span in self._run.drive_requests(self._since)]
        self._busy, self._since = busy, time.perf_counter()
        # A plan is made for the largest step; others have fewer tokens.
        share = 1.0 if planned is None else result.tokens / planned.tokens
        work = replace(
            self._work, flops=self._work.flops * share, parameters=0 if result.skipped else self._work.parameters
        )
        return observed_step(self._machine, work, spent, requests)


def as_request(span: Span) -> Request:
    """A drive's span of the trace ("drive 1 read") as what drift.py takes."""
    return Request(span.track.rpartition(" ")[2], int(span.args["bytes"]), span.start, span.end)
