"""One finding: what was looked at, what was found, how good that is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """From best to worst. Only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"
    """Works, and you may want to know."""

    WARNING = "warning"
    """Works, and probably not as you mean it to."""

    PROBLEM = "problem"
    """A run would fail, or would not be what it claims to be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """docs/doctor.md lists the names and the keys of `data`."""

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""
    path: str | None = None
    """The SSD path this is about; None for the machine itself."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """The same facts as plain numbers and words, in bytes and bytes per second."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "value": self.value,
            "verdict": self.verdict.value,
            "advice": self.advice,
            "data": dict(self.data),
        }


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on the whole: that of the worst finding."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.OK)
