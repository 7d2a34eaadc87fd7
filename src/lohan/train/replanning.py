"""Whether a training still runs on the machine it was planned for, asked after every step.

Rates are observed as the steps take them. One that has drifted for good is told, in a sentence; then the plan is made
again with what was observed, and taken between two steps if it is predicted to be clearly faster. The bits stay.
"""

from __future__ import annotations

from lohan.engine.run import Run, StepResult
from lohan.measure.drift import DriftWatch, corrected
from lohan.measure.run_rates import RunRates
from lohan.profiles import MachineProfile

LEAST_GAIN = 0.03
"""Of a step, what a new plan must promise. A change costs a drained step and the reading of what stays in memory."""


class Replanning:
    """Follows one run on one measured machine."""

    def __init__(self, run: Run, machine: MachineProfile):
        self._run, self.machine = run, machine
        self._watch, self._rates = DriftWatch(machine), RunRates(run, machine)

    def after_step(self, out: StepResult) -> list[str]:
        """What there is to say; almost always nothing."""
        drifts = self._watch.see(self._rates.after_step(out))
        if not drifts:
            return []
        self.machine = corrected(self.machine, drifts)
        self._watch.rebase(self.machine)
        said = [drift.sentence for drift in drifts]
        changed = self._run.plan_again(self.machine, least_gain=LEAST_GAIN)
        self._rates = RunRates(self._run, self.machine)
        if changed is not None:
            said.append(
                f"The plan is made again for that: {changed.after:.3g} s per step are predicted, and "
                f"{changed.before:.3g} s with the plan as it was."
            )
        return said
