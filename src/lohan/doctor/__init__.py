"""Is this machine fit for a run? Facts, a verdict on each, and what to do.

examine() gathers everything `lohan doctor` shows. Facts are collected in one place and judged in another: the
functions that judge take plain values, so every verdict can be tested without the machine that earns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lohan.doctor.drives import examine_drives
from lohan.doctor.findings import Finding, Verdict, worst
from lohan.doctor.machine import examine_machine

__all__ = ["Finding", "Verdict", "examine", "worst"]


def examine(paths: Sequence[str], say: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """All findings for this machine and these SSD paths; `say` is told what is being looked at."""
    say("Looking at Python, torch and memory")
    return [*examine_machine(), *examine_drives(paths, say)]
